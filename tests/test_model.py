"""Presets are consistent, bad shapes are refused with a reason, scaling shrinks widths only."""

from __future__ import annotations

from dataclasses import asdict, replace

import pytest
from model_presets import CONF, PRESETS, preset, scale
from omegaconf import OmegaConf

from moe.model import ScaleConfig, scaled


@pytest.mark.parametrize("name", PRESETS)
def test_presets_are_valid_at_every_scale(name: str) -> None:
    shape = preset(name)
    assert shape.name == name and shape.validate() is shape and shape.source
    for path in (CONF / "scale").glob("*.yaml"):
        small = scaled(shape, scale(path.stem)).validate()
        kept = ("num_experts", "top_k", "num_expert_groups", "num_limited_groups", "score_func")
        assert all(getattr(small, field) == getattr(shape, field) for field in kept)
    assert scaled(shape, scale("full")) == shape


# (hidden, latent, expert width, shared width, MoE layers)
@pytest.mark.parametrize(
    "name, widths",
    [
        ("full", (7168, 3584, 3072, 6144, 92)),
        ("laptop", (256, 128, 96, 192, 4)),
        ("full_depth", (64, 32, 48, 96, 92)),
    ],
)
def test_kimi_k3_at_each_scale(name: str, widths: tuple[int, ...]) -> None:
    shape = scaled(preset("kimi_k3"), scale(name))
    assert shape.payload_width == shape.latent_size
    assert widths == (
        shape.hidden_size,
        shape.latent_size,
        shape.intermediate_size,
        shape.shared_intermediate_size,
        shape.num_moe_layers,
    )


def test_kimi_k3_parameters_and_traffic() -> None:
    """The published expert size and bytes per token; shared experts are not among the 896."""
    shape = preset("kimi_k3")
    expert = 3 * shape.payload_width * shape.intermediate_size
    assert expert == 33_030_144
    assert shape.num_moe_layers * shape.num_experts * expert == pytest.approx(2.72274e12, rel=1e-5)
    assert shape.top_k * shape.payload_width * 2 == 114_688
    for other in ("kimi_k2", "deepseek_v3"):
        assert preset(other).top_k * preset(other).payload_width * 2 == 114_688


def test_payload_without_a_latent_is_the_hidden_width() -> None:
    assert preset("mixtral_8x7b").payload_width == 4096


def test_scaling_never_grows_a_model() -> None:
    tiny = replace(preset("mixtral_8x7b"), hidden_size=32, intermediate_size=16, num_moe_layers=2)
    assert scaled(tiny, scale("laptop")) == tiny


@pytest.mark.parametrize(
    "change, message",
    [
        ({"top_k": 897}, "top_k=897 exceeds num_experts=896"),
        ({"top_k": 0}, "top_k=0 must be at least 1"),
        ({"num_experts": 0}, "num_experts=0 must be at least 1"),
        ({"hidden_size": -1}, "hidden_size=-1"),
        ({"latent_size": 0}, "latent_size=0"),
        ({"num_moe_layers": 0}, "num_moe_layers=0"),
        ({"num_shared_experts": 0}, "must both be 0"),
        ({"score_func": "sigmod"}, "score_func='sigmod' .* did you mean 'sigmoid'"),
        ({"activation": "gelu"}, "activation='gelu' is not one of swiglu, situ_glu"),
        ({"num_expert_groups": 9}, "num_expert_groups=9 does not divide num_experts=896"),
        ({"num_limited_groups": 2}, "num_limited_groups=2 must lie in 1 .. 1"),
        ({"num_expert_groups": 128, "num_limited_groups": 2}, "top_k=16 exceeds the 14 experts"),
        (
            {"num_expert_groups": 896, "num_limited_groups": 16},
            "top2_sum needs at least 2 experts",
        ),
    ],
)
def test_wrong_shapes_are_refused(change: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(preset("kimi_k3"), **change).validate()


def test_wrong_scales_are_refused() -> None:
    with pytest.raises(ValueError, match="scale.layers=0 must be at least 1"):
        scaled(preset("kimi_k3"), ScaleConfig("none", layers=0))


def test_hf_preset_has_every_field() -> None:
    assert set(OmegaConf.load(CONF / "model" / "hf.yaml")) == set(asdict(preset("kimi_k3")))
