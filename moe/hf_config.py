"""Read the shape of a model from the `config.json` it was released with.

Families spell the same quantity in different ways and leave some unsaid. Both are data here:
SPELLINGS lists the keys of each quantity in the order they are tried, UNSAID what a family's own
code fixes without a key. A quantity that is neither written nor implied is an error that names the
keys; nothing that decides traffic (E, K, widths, layers) is ever guessed.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from moe.hf_attention import read_attention, read_weights
from moe.model import ModelShape

SPELLINGS: dict[str, tuple[str, ...]] = {
    "num_layers": ("num_hidden_layers", "num_layers", "n_layers"),
    "hidden_size": ("hidden_size", "d_model", "n_embd"),
    "latent_size": ("routed_expert_hidden_size", "moe_latent_size"),
    "num_experts": ("n_routed_experts", "num_experts", "num_local_experts", "moe_num_experts"),
    # not "top_k": configs carry it as a sampling parameter of text generation
    "top_k": (
        "num_experts_per_tok",
        "num_experts_per_token",
        "experts_per_token",
        "moe_top_k",
        "moe_topk",
        "moe_k",
        "top_k_experts",
    ),
    # a plain intermediate_size is the expert's in models without dense layers, so it comes last
    "intermediate_size": (
        "moe_intermediate_size",
        "expert_ffn_hidden_size",
        "expert_intermediate_size",
        "intermediate_size",
    ),
    "num_shared_experts": (
        "n_shared_experts",
        "num_shared_experts",
        "num_shared_expert",
        "moe_num_shared_experts",
    ),
    # total inner width of the shared part, where it is not num_shared_experts x the expert's
    "shared_total": ("shared_expert_intermediate_size", "shared_intermediate_size"),
    "shared_each": ("moe_shared_expert_intermediate_size",),
    "score_func": ("scoring_func", "moe_router_activation_func", "router_score_func"),
    "expert_bias": ("use_routing_bias", "moe_gate_bias"),
    "norm_topk": ("norm_topk_prob", "moe_renormalize", "route_norm"),
    "route_scale": ("routed_scaling_factor", "router_scaling_factor", "moe_router_scaling_factor"),
    "num_expert_groups": ("n_group", "num_expert_group"),
    "num_limited_groups": ("topk_group",),
    "activation": ("hidden_act", "hidden_activation", "mlp_hidden_act"),
}

_SIGMOID_WITH_BIAS = {"score_func": "sigmoid", "expert_bias": True, "norm_topk": True}
_SOFTMAX_OF_CHOSEN = {"score_func": "softmax_topk", "norm_topk": True}
_SOFTMAX_NORMALISED = {"score_func": "softmax", "norm_topk": True}
UNSAID: dict[str, dict[str, Any]] = {
    "mixtral": _SOFTMAX_OF_CHOSEN,
    "gpt_oss": _SOFTMAX_OF_CHOSEN,
    "granitemoe": _SOFTMAX_OF_CHOSEN,
    "granitemoehybrid": _SOFTMAX_OF_CHOSEN,
    "deepseek_v3": _SIGMOID_WITH_BIAS,
    "kimi_k2": _SIGMOID_WITH_BIAS,
    "kimi_linear": _SIGMOID_WITH_BIAS,
    "glm4_moe": _SIGMOID_WITH_BIAS,
    "glm_moe_dsa": _SIGMOID_WITH_BIAS,
    "nemotron_h": _SIGMOID_WITH_BIAS,
    "llama4_text": {"score_func": "sigmoid", "norm_topk": False, "num_shared_experts": 1},
    "qwen3_next": _SOFTMAX_NORMALISED,
    "qwen3_vl_moe_text": _SOFTMAX_NORMALISED,
    "qwen3_5_moe_text": _SOFTMAX_NORMALISED,
}
_SCORE_FUNC_NAMES = {"sqrtsoftplus": "sqrt_softplus"}
_ACTIVATION_NAMES = {"silu": "swiglu", "swish": "swiglu", "swiglu": "swiglu", "situ": "situ_glu"}
_SAID_OUTSIDE = ("model_type", "quantization_config")  # unless the inner part says it, too
_NESTED = ("text_config", "llm_config", "language_config", "thinker_config")


LARGEST = 10_000_000  # no width or count of a real model comes near


def read_hf_config(path: str | Path) -> dict[str, Any]:
    """Read every field of ModelShape from a released config.json.

    path: the file, or a folder that contains it
    Raises ValueError, in one line, for a file that is missing, is no JSON or describes no
    mixture-of-experts model, and for a key that is needed and absent under all its spellings.
    """
    file = Path(path).expanduser()
    file = file / "config.json" if file.is_dir() else file
    config = _text_config(_load(file), file)
    family = str(config.get("model_type", "unknown"))
    reader = _Reader(config, UNSAID.get(family, {}), file)
    fields = _sizes(reader) | _routing(reader)
    activation = reader.get("activation", "silu")
    # what computes the same bytes but not the same values is said in the record
    fields["activation"] = _ACTIVATION_NAMES.get(activation, "swiglu")
    fields["source"] = f"{file.name} of model type {family}"
    if family == "gpt_oss" or activation not in _ACTIVATION_NAMES:
        fields["source"] += f"; swiglu stands in for its own activation ({activation})"
    fields |= {"name": family, "path": str(path)}
    try:
        fields |= _around(config, fields)
        return vars(ModelShape(**fields).validate()).copy()
    except ValueError as error:
        raise ValueError(f"model.path={file}: {error}") from error


def _around(config: dict[str, Any], sizes: dict[str, Any]) -> dict[str, Any]:
    """What stands around the MoE layers."""
    dense = sizes["num_dense_layers"]
    layers, experts = sizes["num_moe_layers"] + dense, sizes["num_experts"]
    return {
        "attention": read_attention(config, layers, experts),
        "weights": read_weights(config, layers, experts, dense),
    }


def _load(file: Path) -> dict[str, Any]:
    if file.exists() and not file.is_file():  # /dev/zero never ends
        raise ValueError(f"model.path={file} cannot be read: Not a regular file")
    try:
        config = json.loads(file.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise ValueError(f"model.path={file} cannot be read: {error.strerror}") from error
    except ValueError as error:  # not JSON, or not even text
        raise ValueError(f"model.path={file} is not JSON: {error}") from error
    if not isinstance(config, dict):
        raise ValueError(f"model.path={file} holds a {type(config).__name__}, not a JSON object")
    return config


def _text_config(config: dict[str, Any], file: Path) -> dict[str, Any]:
    """The part that describes the language model: the first, going inwards, that has experts."""
    level = config
    while True:
        if any(level.get(key) for key in SPELLINGS["num_experts"]):
            return level
        inner = next((level[key] for key in _NESTED if isinstance(level.get(key), dict)), None)
        if inner is None:
            raise ValueError(
                f"model.path={file} is not a mixture-of-experts model: none of "
                f"{', '.join(SPELLINGS['num_experts'])} is set (also not in {', '.join(_NESTED)})"
            )
        outer = {key: level[key] for key in _SAID_OUTSIDE if key in level}
        level = {"model_type": "unknown", **outer, **inner}


class _Reader:
    """Looks a quantity up under each of its spellings, then in what its family leaves unsaid."""

    def __init__(self, config: dict[str, Any], unsaid: dict[str, Any], file: Path) -> None:
        self.config, self.unsaid, self.file = config, unsaid, file

    def get(self, quantity: str, default: Any) -> Any:
        for key in SPELLINGS[quantity]:
            if self.config.get(key) is not None:
                return self.config[key]
        return self.unsaid.get(quantity, default)

    def integer(self, quantity: str, default: int | None = None) -> int:
        value = self.get(quantity, default)
        keys = " / ".join(SPELLINGS[quantity])
        if value is None:
            raise ValueError(f"model.path={self.file} lacks {quantity}: tried {keys}")
        if isinstance(value, bool) or not isinstance(value, int):
            raise ValueError(f"model.path={self.file}: {keys} = {value!r} must be an integer")
        if not 0 <= value <= LARGEST:
            raise ValueError(f"model.path={self.file}: {keys} = {value} must be 0 .. {LARGEST:,}")
        return value


def _sizes(reader: _Reader) -> dict[str, Any]:
    """Widths, numbers of experts and layers."""
    expert_width = reader.integer("intermediate_size")
    shared_total = reader.integer("shared_total", 0)
    num_shared = reader.integer("num_shared_experts", 1 if shared_total else 0)
    shared_each = reader.integer("shared_each", expert_width)
    num_moe_layers, num_dense_layers = _count_layers(reader)
    return {
        "hidden_size": reader.integer("hidden_size"),
        "latent_size": reader.integer("latent_size", 0) or None,
        "intermediate_size": expert_width,
        "num_experts": reader.integer("num_experts"),
        "top_k": reader.integer("top_k"),
        "num_moe_layers": num_moe_layers,
        "num_dense_layers": num_dense_layers,
        "num_shared_experts": num_shared,
        "shared_intermediate_size": (shared_total or num_shared * shared_each) if num_shared else 0,
    }


def _routing(reader: _Reader) -> dict[str, Any]:
    """How a token's experts are chosen and weighted."""
    method = reader.config.get("topk_method")
    score_func = reader.get("score_func", "softmax")
    # DeepSeek-V2 writes its groups even where topk_method says that they are not used
    grouped = method != "greedy"
    num_groups = reader.integer("num_expert_groups", 1) if grouped else 1
    return {
        "score_func": _SCORE_FUNC_NAMES.get(score_func, score_func),
        "expert_bias": method == "noaux_tc" or bool(reader.get("expert_bias", False)),
        "norm_topk": bool(reader.get("norm_topk", score_func == "sigmoid")),
        "route_scale": float(reader.get("route_scale", 1.0)),
        "num_expert_groups": num_groups,
        "num_limited_groups": reader.integer("num_limited_groups", num_groups) if grouped else 1,
        "group_score": "max" if method == "group_limited_greedy" else "top2_sum",
    }


def _count_layers(reader: _Reader) -> tuple[int, int]:
    """Count the layers with experts and those with a dense MLP, by whichever rule is written."""
    config, total = reader.config, reader.integer("num_layers")
    # one word, or one letter, for each layer; hybrids have layers without any MLP, too
    for key, sparse, dense in (
        ("mlp_layer_types", "sparse", "dense"),
        ("layers_block_type", "moe", "mlp"),
        ("hybrid_override_pattern", "E", "-"),
    ):
        if config.get(key) is not None:
            kinds = list(config[key])
            return kinds.count(sparse), kinds.count(dense)
    flags = config.get("moe_layer_freq")
    if isinstance(flags, list):
        num_moe_layers = sum(map(bool, flags[:total]))
    else:
        num_moe_layers = sum(map(_sparse_rule(reader), range(total)))
    return num_moe_layers, total - num_moe_layers


def _sparse_rule(reader: _Reader) -> Callable[[int], bool]:
    """Tells whether a layer has experts, for families that write a first layer and a period."""

    def number(*keys: str, default: int, least: int = 0) -> int:
        key = next((key for key in keys if reader.config.get(key) is not None), None)
        value = default if key is None else reader.config[key]
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise ValueError(
                f"model.path={reader.file}: {key}={value!r} must be an integer of at least {least}"
            )
        return value

    first = number("first_k_dense_replace", "moe_layer_start_index", default=0)
    period = number("moe_layer_freq", "expert_layer_period", default=1, least=1)
    offset = number("expert_layer_offset", default=0)
    # these count from layer 1 where the others count from 0
    step = number(
        "decoder_sparse_step",
        "interleave_moe_layer_step",
        "moe_layer_interval",
        default=1,
        least=1,
    )
    dense = set(reader.config.get("mlp_only_layers") or ())
    return lambda layer: (
        layer >= first
        and layer % period == offset
        and (layer + 1) % step == 0
        and layer not in dense
    )
