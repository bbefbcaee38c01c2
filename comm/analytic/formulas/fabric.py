"""Ports of a scale-out fabric."""

from __future__ import annotations

from collections.abc import Iterator

from comm.analytic.fabric import clos
from comm.analytic.formulas.base import Parameter, Step, formula

GBIT_A_SECOND = 0.125e9


@formula(
    "ports",
    accelerators=Parameter("accelerators", "that have a card each"),
    nic=Parameter("Gbit/s", "rate of a card, one direction"),
    port=Parameter("Gbit/s", "rate of a switch port"),
    tiers=Parameter("tiers", "of the fabric; 1: a single switch", default=2),
    radix=Parameter("ports", "of a switch", default=64),
)
def clos_ports(
    accelerators: int, nic: float, port: float, tiers: int, radix: int
) -> Iterator[Step]:
    """Switch ports of a non-blocking Clos fabric that carry a cable, both ends counted."""
    rates = (nic / GBIT_A_SECOND, port / GBIT_A_SECOND)
    fabric = clos(accelerators, *rates, tiers=tiers, radix=radix)
    yield Step("ports to cards", f"{accelerators} cards", fabric.card_ports, "ports")
    how = f"{fabric.card_ports} (1 + 2 ({tiers} - 1))"
    yield Step("clos_ports", how, fabric.ports, "ports")
