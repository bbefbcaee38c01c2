"""Ports of a Clos fabric, against a cable by cable count of a small one."""

from __future__ import annotations

import pytest

from comm.analytic.fabric import Clos, clos, ports_for


def test_512_ports_count_only_what_faces_the_cards():
    """1,024 accelerators at 400G on ports of 800G: 512 ports, three times as many in two tiers."""
    two_tier = clos(1024, 400, 800, tiers=2, radix=64)
    assert (two_tier.card_ports, two_tier.ports) == (512, 1536)
    assert two_tier.switches == (16, 8) and two_tier.installed_ports == 24 * 64
    fast = clos(1024, 800, 800, tiers=2, radix=64)
    assert (fast.card_ports, fast.ports) == (1024, 3072)
    assert clos(1024, 400, 800, tiers=3, radix=64).ports == 5 * 512


def cables(leaves: int, cards_a_leaf: int, spines: int) -> int:
    """Ports of two tiers, counted one cable at a time: each leaf to each spine, evenly."""
    ports = 0
    for _ in range(leaves):
        ports += cards_a_leaf
        for up in range(cards_a_leaf):
            assert 0 <= up % spines < spines
            ports += 2
    return ports


@pytest.mark.parametrize("radix, leaves", [(8, 2), (8, 8), (16, 10), (32, 3)])
def test_two_tiers_cable_by_cable(radix, leaves):
    down = radix // 2
    spines = -(-leaves * down // radix)
    found = clos(leaves * down, 100, 100, 2, radix)
    assert found == Clos(
        leaves * down, cables(leaves, down, spines), (leaves, spines), (leaves + spines) * radix
    )


def test_three_tiers_switch_by_switch():
    """Leaves and the middle give half their ports to what is above, the last tier gives none."""
    found = clos(1024, 400, 800, tiers=3, radix=64)
    assert found.switches == (512 // 32, 512 // 32, 512 // 64)
    assert found.installed_ports == 40 * 64
    assert clos(32, 100, 100, tiers=4, radix=8).switches == (8, 8, 8, 4)


def test_one_switch_may_be_full():
    assert clos(64, 400, 400, tiers=1, radix=64) == Clos(64, 64, (1,), 64)
    with pytest.raises(ValueError, match="tiers=1: 65 ports do not fit"):
        clos(65, 400, 400, tiers=1, radix=64)


def test_oversubscription_saves_ports_upwards():
    found = clos(96, 400, 400, 2, 64, oversubscription=3)  # 48 down, 16 up on each of two leaves
    assert found.switches == (2, 1) and found.ports == 96 + 2 * 32


def test_cards_and_ports_of_unlike_rates():
    assert ports_for(5, 400, 800) == 3  # two share a port, the last has one alone
    assert ports_for(5, 300, 800) == 3
    assert ports_for(5, 800, 400) == 10
    assert ports_for(5, 800, 300) == 15
    assert clos(8, 400, 400, 1, 64, nics_per_accelerator=0.5).ports == 4


def test_the_last_bit_of_a_quotient_takes_no_port():
    assert ports_for(3, 0.1, 0.3) == 1  # 0.3 / 0.1 is 2.9999...
    assert ports_for(1, 2.1, 0.3) == 7
    assert clos(50, 400, 400, 1, 64, nics_per_accelerator=1.1).card_ports == 55  # of 55.000...7
    found = clos(28, 400, 400, 2, 24, oversubscription=1.4)  # 14 down, 10 up on each of two leaves
    assert found == Clos(28, 28 + 2 * 20, (2, 1), 3 * 24)
    assert clos(21, 400, 400, 2, 24, oversubscription=1.4).ports == 21 + 2 * 15


@pytest.mark.parametrize(
    "arguments, said",
    [
        ((0, 400, 800, 2, 64), "accelerators=0: must be a positive number"),
        ((8, float("nan"), 800, 2, 64), "nic_Gbps=nan: must be"),
        ((8, 400, 800, 0, 64), "tiers=0: must be >= 1; nearest: 1"),
        ((8, 400, 800, 2, 2), "radix=2: must be >= 4"),
        ((8, 400, 800, 2, 64, 0.5), "oversubscription=0.5: must lie in 1 .. 63"),
        ((1024, 400, 800, 1, 64), "tiers=1: 512 ports do not fit on one switch of 64"),
        ((10_000, 400, 400, 2, 64), "switches of 64 ports join 64 leaves, 10,000 ports to cards"),
    ],
)
def test_fabrics_that_do_not_exist(arguments, said):
    with pytest.raises(ValueError, match=said.replace(".", r"\.")):
        clos(*arguments)


def test_the_advice_of_a_refusal_works():
    with pytest.raises(ValueError, match="nearest: tiers=3"):
        clos(10_000, 400, 400, 2, 64)
    assert clos(10_000, 400, 400, 3, 64).ports == 5 * 10_000
