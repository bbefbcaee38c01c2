"""Ports of a folded Clos fabric: what a number of accelerators needs of a scale-out network.

    tier 1   leaves: ports down to the network cards, ports up
    tier 2+  switches that join them, half their ports down and half up; the last tier all down

A leaf with oversubscription o has o times as much bandwidth down as up. A cable between switches
takes a port at both ends, so a non-blocking fabric of t tiers uses 1 + 2 (t - 1) ports for each one
that faces a card: three in two tiers, five in three.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

EPSILON = 1e-9  # 64 x 3 / 4 ports is 48, whatever the last bit of a quotient says


@dataclass(frozen=True)
class Clos:
    """What a fabric needs.

    card_ports: that face network cards; ports: all that carry a cable
    switches: for each tier, leaves first; installed_ports: of all these switches
    """

    card_ports: int
    ports: int
    switches: tuple[int, ...]
    installed_ports: int


def clos(
    accelerators: int,
    nic_Gbps: float,
    port_Gbps: float,
    tiers: int,
    radix: int,
    oversubscription: float = 1.0,
    nics_per_accelerator: float = 1.0,
) -> Clos:
    """The fabric that joins so many accelerators.

    nic_Gbps, port_Gbps: one direction, of a card and of a switch port; slow cards share a port
    radix: ports of a switch
    Raises ValueError for a fabric that does not exist, with the key, its value and the nearest.
    """
    _check(accelerators, nic_Gbps, port_Gbps, tiers, radix, oversubscription, nics_per_accelerator)
    cards = math.ceil(accelerators * nics_per_accelerator - EPSILON)
    card_ports = ports_for(cards, nic_Gbps, port_Gbps)
    if tiers == 1:
        if card_ports > radix:
            raise ValueError(f"tiers=1: {card_ports:,} ports do not fit on one switch of {radix}")
        return Clos(card_ports, card_ports, (1,), radix)
    down = max(1, math.floor(radix * oversubscription / (1 + oversubscription) + EPSILON))
    leaves = math.ceil(card_ports / down)
    most = radix * (radix // 2) ** (tiers - 2)
    if leaves > most:
        raise ValueError(
            f"tiers={tiers}: switches of {radix} ports join {most:,} leaves, {card_ports:,} ports"
            f" to cards need {leaves:,}; nearest: tiers={_tiers(leaves, radix)}"
        )
    up = math.ceil(card_ports / oversubscription - EPSILON)
    middle = (math.ceil(up / (radix // 2)),) * (tiers - 2)
    switches = (leaves, *middle, math.ceil(up / radix))
    return Clos(card_ports, card_ports + 2 * (tiers - 1) * up, switches, sum(switches) * radix)


def ports_for(cards: int, nic_Gbps: float, port_Gbps: float) -> int:
    """Switch ports that so many cards fill: several slow cards share one, a fast card takes more.

    >>> ports_for(1024, 400, 800), ports_for(1024, 800, 800)
    (512, 1024)
    """
    if nic_Gbps <= port_Gbps:
        return math.ceil(cards / math.floor(port_Gbps / nic_Gbps + EPSILON))
    return cards * math.ceil(nic_Gbps / port_Gbps - EPSILON)


def _tiers(leaves: int, radix: int) -> int:
    """The smallest number of tiers that joins so many leaves."""
    tiers = 2
    while radix * (radix // 2) ** (tiers - 2) < leaves:
        tiers += 1
    return tiers


def _check(
    accelerators: int,
    nic_Gbps: float,
    port_Gbps: float,
    tiers: int,
    radix: int,
    oversubscription: float,
    nics_per_accelerator: float,
) -> None:
    positive = {
        "accelerators": accelerators,
        "nic_Gbps": nic_Gbps,
        "port_Gbps": port_Gbps,
        "nics_per_accelerator": nics_per_accelerator,
    }
    for name, value in positive.items():
        if not 0 < value < math.inf:  # false for nan, too
            raise ValueError(f"{name}={value}: must be a positive number")
    if tiers < 1:
        raise ValueError(f"tiers={tiers}: must be >= 1; nearest: 1")
    if radix < 4:
        raise ValueError(f"radix={radix}: must be >= 4; nearest: 4")
    if not 1 <= oversubscription < radix:
        raise ValueError(
            f"oversubscription={oversubscription}: must lie in 1 .. {radix - 1}, 1 is non-blocking"
        )
