"""Parts as data: the published figures, what is unknown refused by name, what cannot be refused."""

from __future__ import annotations

from dataclasses import replace

import pytest
from omegaconf import OmegaConf

from moe.conf_files import conf_dir, options
from moe.config import compose
from moe.hardware import GB, GIB, MIB, HardwareConfig, UnknownHardware
from moe.settings import ConfigError


def part(name: str) -> HardwareConfig:
    values = OmegaConf.to_container(OmegaConf.load(conf_dir() / "hardware" / f"{name}.yaml"))
    lists = {key: tuple(value) for key, value in values.items() if isinstance(value, list)}
    return HardwareConfig(**(values | lists)).validate()


PUBLISHED = {  # GB, GB/s of memory, GB/s and size of the scale-up domain, GB/s of a card
    "h100_sxm": (80, 3350, 450, 8, 50),
    "h200_sxm": (141, 4800, 450, 8, 50),
    "b200_hgx": (180, 8000, 900, 8, 50),
    "b300_hgx": (288, 8000, 900, 8, 100),
    "gb200_nvl72": (186, 8000, 900, 72, 50),
    "gb300_nvl72": (288, 8000, 900, 72, 100),
    "mi355x": (288, 8000, None, 8, None),
    "ascend_910c": (128, 3200, 392, 384, 50),
}
FIELDS = (
    "memory_nominal_GB",
    "memory_bandwidth_GBps",
    "scale_up_GBps",
    "scale_up_domain",
    "scale_out_GBps",
)


def test_every_part_is_here():
    assert set(options("hardware")) == {*PUBLISHED, "custom"}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_figures(name):
    one = part(name)
    assert tuple(getattr(one, field) for field in FIELDS) == PUBLISHED[name]
    assert one.name == name and len(one.source) > 30
    assert one.nics_per_rank == one.oversubscription == 1


def test_the_makers_gb_is_not_one_unit():
    """GB200: 186 GB sold, 185.0 GiB = 198.7 GB reported; only the B300's are decimal."""
    gb200, b300 = part("gb200_nvl72"), part("b300_hgx")
    assert gb200.reported_bytes == 189_471 * MIB
    assert round(gb200.reported_bytes / GIB, 1) == 185.0
    assert round(gb200.reported_bytes / GB, 1) == 198.7
    assert gb200.nominal_bytes == 186e9
    assert round(b300.reported_bytes / GB, 1) == 288.4
    for name in ("h100_sxm", "h200_sxm", "b200_hgx", "gb200_nvl72", "mi355x"):
        one = part(name)  # nearer to GiB than to GB
        binary = one.memory_nominal_GB * GIB
        assert abs(one.reported_bytes - binary) < abs(one.reported_bytes - one.nominal_bytes)


def test_whole_machines():
    """64 of each: 9.02, 11.52, 18.43 TB; a rack of 72: 13.39 TB, and K3 fills 11.7 % of it."""
    terabytes = {name: 64 * part(name).nominal_bytes / 1e12 for name in PUBLISHED}
    names = ("h200_sxm", "b200_hgx", "b300_hgx")
    assert [round(terabytes[name], 2) for name in names] == [9.02, 11.52, 18.43]
    rack = 72 * part("gb200_nvl72").nominal_bytes
    assert round(rack / 1e12, 2) == 13.39
    assert round(100 * 1_560_860_324_864 / rack, 1) == 11.7


def test_what_is_unknown_is_refused_with_the_key_to_set():
    custom = part("custom")
    with pytest.raises(UnknownHardware) as caught:
        _ = custom.nominal_bytes
    assert str(caught.value) == (
        "hardware=custom: memory_nominal_GB is not known; set hardware.memory_nominal_GB=..."
    )
    with pytest.raises(UnknownHardware, match="set hardware.scale_out_GBps="):
        _ = custom.scale_out_rank_GBps
    assert custom.known("nics_per_rank") == 1
    by_hand = compose(["hardware=custom", "hardware.memory_nominal_GB=96"]).hardware
    assert by_hand.nominal_bytes == 96e9


def test_cards_are_shared_and_the_fabric_oversubscribed():
    """Eight accelerators with four cards of 50 GB/s in a 2:1 fabric: 12.5 GB/s each."""
    shared = replace(part("h100_sxm"), nics_per_rank=0.5, oversubscription=2.0)
    assert shared.scale_out_rank_GBps == 12.5


def test_the_measured_reach_is_that_of_the_next_larger_group():
    gb200 = part("gb200_nvl72")
    at_64 = gb200.reach("combine", 64)
    assert (at_64.ep_size, at_64.GBps, at_64.latency_us) == (64, 631.18, 32.6)
    assert [gb200.reach("dispatch", size).ep_size for size in (8, 17, 32)] == [8, 32, 32]
    assert gb200.reach("dispatch", 2).GBps == 753.28
    assert gb200.reach("dispatch", 72).latency_us == 27.8
    assert part("h100_sxm").reach("dispatch", 8) is None
    untimed = replace(gb200, latency_dispatch_us=())
    assert untimed.reach("dispatch", 8).latency_us is None


@pytest.mark.parametrize(
    "words, said",
    [
        ("hardware.scale_up_GBps=-3", "hardware.scale_up_GBps=-3.0: must be positive, or null"),
        ("hardware.nvme_GBps=nan", "hardware.nvme_GBps=nan: must be positive, or null"),
        (
            "hardware.scale_up_GBps=1e-320",
            "hardware.scale_up_GBps=1e-320: must be from 1e-09 to 1e+18; nearest: 1e-09",
        ),
        ("hardware.scale_up_GBps=x", "hardware.scale_up_GBps=x: must be a number or null"),
        (
            "hardware.measured_ep_sizes=[8]",
            "hardware.measured_dispatch_GBps=[753.28,684.1,628.54,588.34]: one value expected for"
            " each of hardware.measured_ep_sizes=[8]",
        ),
        (
            "hardware.latency_combine_us=[1]",
            "hardware.latency_combine_us=[1.0]: one value expected for each of"
            " hardware.measured_ep_sizes=[8,16,32,64]",
        ),
    ],
)
def test_values_that_cannot_be(words, said):
    with pytest.raises(ConfigError) as caught:
        compose([words])
    assert str(caught.value) == said


def test_every_option_is_a_machine_that_a_run_can_be_carried_to():
    for name in options("hardware"):
        assert compose([f"hardware={name}"]).hardware.name == name
