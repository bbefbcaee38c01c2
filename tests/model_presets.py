"""The presets of conf/ as the dataclasses they fill, without hydra's composing."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from omegaconf import OmegaConf

from moe.attention import AttentionShape, ReleasedWeights
from moe.model import ModelShape, ScaleConfig, scaled

CONF = Path(__file__).parent.parent / "conf"
PRESETS = sorted(path.stem for path in (CONF / "model").glob("*.yaml") if path.stem != "hf")


def preset(name: str) -> ModelShape:
    values = OmegaConf.to_container(OmegaConf.load(CONF / "model" / f"{name}.yaml"))
    values["attention"] = AttentionShape(**values["attention"])
    values["weights"] = ReleasedWeights(**values["weights"])
    return ModelShape(**values)


def scale(name: str) -> ScaleConfig:
    return ScaleConfig(**OmegaConf.load(CONF / "scale" / f"{name}.yaml"))


def small(name: str, **changes: object) -> ModelShape:
    """A preset narrow enough for a test, with E, K, groups and scoring as published."""
    return replace(scaled(preset(name), ScaleConfig("test", 32, 24, 2)), **changes)
