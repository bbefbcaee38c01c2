"""Attention, embeddings and weight format from a released `config.json`.

What a file leaves unsaid and a family's own code fixes is data (UNSAID). Attention whose cache or
parameters are not known here (state spaces, sparse indexers, chunks) stays unknown, never guessed:
such a model can still be emulated, and a question of memory says which key is missing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from moe.attention import AttentionShape, ReleasedWeights

# keys of attention that AttentionShape has no words for
STRANGE = (
    *("index_n_heads", "index_topk", "attention_chunk_size", "hybrid_override_pattern"),
    *("layers_block_type", "attn_layer_period", "mamba_num_heads", "mamba_d_state"),
    *("full_attention_interval", "compress_ratios"),
)
UNSAID: dict[str, dict[str, dict[str, Any]]] = {
    "qwen3_moe": {"attention": {"qk_norm": True}, "weights": {}},
    "gpt_oss": {"attention": {"sinks": True}, "weights": {"expert_bias_terms": True}},
}
# The published total is no key of a config; known releases are told by their names and sizes.
RELEASES: dict[tuple[str, int, int], dict[str, dict[str, Any]]] = {
    ("kimi_linear", 93, 896): {
        "attention": {"decay_rates": 128},
        "weights": {"other_parameters": 447_358_976, "total_parameters": 2_779_931_837_184},
    },
    ("kimi_k2", 61, 384): {"weights": {"total_parameters": 1_026_408_232_448}},
    ("deepseek_v3", 61, 256): {"weights": {"total_parameters": 671_026_419_200}},
    ("deepseek_v2", 27, 64): {"weights": {"total_parameters": 15_706_484_224}},
    ("qwen3_moe", 94, 128): {"weights": {"total_parameters": 235_093_634_560}},
    ("gpt_oss", 36, 128): {"weights": {"total_parameters": 116_829_156_672}},
    ("mixtral", 32, 8): {"weights": {"total_parameters": 46_702_792_704}},
}
_MXFP4 = {"expert_bits": 4, "expert_scale_bits": 8, "expert_block": 32}


def read_attention(config: Mapping[str, Any], num_layers: int, num_experts: int) -> AttentionShape:
    """The attention of a language model's config; unknown where it is not of a known sort."""
    family = str(config.get("model_type", "unknown"))
    heads = _integer(config, "num_attention_heads")
    if heads is None or any(config.get(key) for key in STRANGE):
        return AttentionShape()
    layers = _layers(config, num_layers)
    if layers is None:
        return AttentionShape()
    fields: dict[str, Any] = {"num_heads": heads, **layers}
    if config.get("kv_lora_rank") is not None:
        names = ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim")
        fields |= {name: _integer(config, name) for name in (*names, "v_head_dim")}
        fields |= {"kind": "mla", "output_gate": bool(config.get("mla_use_output_gate"))}
    else:
        hidden = _integer(config, "hidden_size") or 0
        fields |= {
            "kind": "gqa",
            "num_kv_heads": _integer(config, "num_key_value_heads") or heads,
            "head_dim": _integer(config, "head_dim") or hidden // heads,
            "bias": bool(config.get("attention_bias")),
        }
    fields |= _linear(config) | {"residual_attention": bool(config.get("attn_res_block_size"))}
    for known in (UNSAID.get(family, {}), RELEASES.get((family, num_layers, num_experts), {})):
        fields |= known.get("attention", {})
    return AttentionShape(**fields)


def read_weights(
    config: Mapping[str, Any], num_layers: int, num_experts: int, num_dense_layers: int
) -> ReleasedWeights:
    """Embeddings, dense layers and the format of the checkpoint."""
    family = str(config.get("model_type", "unknown"))
    fields: dict[str, Any] = {
        "vocab_size": _integer(config, "vocab_size"),
        "tied_embeddings": bool(config.get("tie_word_embeddings")),
    }
    if num_dense_layers:
        fields["dense_intermediate_size"] = _integer(config, "intermediate_size")
    fields |= _format(config.get("quantization_config") or {})
    for known in (UNSAID.get(family, {}), RELEASES.get((family, num_layers, num_experts), {})):
        fields |= known.get("weights", {})
    return ReleasedWeights(**fields)


def _layers(config: Mapping[str, Any], num_layers: int) -> dict[str, Any] | None:
    """How many layers cache everything, a window or a state; None for a sort unknown here."""
    linear = config.get("linear_attn_config") or {}
    if linear:
        number = len(linear.get("kda_layers") or ())
        full = len(linear.get("full_attn_layers") or ())
        known = number + full == num_layers
        return {"full_layers": full, "linear_layers": number} if known else None
    window = _integer(config, "sliding_window")
    if config.get("use_sliding_window") is False:
        window = None
    kinds = list(config.get("layer_types") or ())[:num_layers]
    if set(kinds) - {"full_attention", "sliding_attention"}:
        return None
    windowed = kinds.count("sliding_attention") if kinds else num_layers * bool(window)
    if not windowed:
        return {"full_layers": num_layers}
    return {"full_layers": num_layers - windowed, "window_layers": windowed, "window": window}


def _linear(config: Mapping[str, Any]) -> dict[str, Any]:
    """The heads of linear layers, if there are any."""
    linear = config.get("linear_attn_config") or {}
    if not linear.get("kda_layers"):
        return {}
    return {
        "linear_heads": _integer(linear, "num_heads"),
        "linear_head_dim": _integer(linear, "head_dim"),
        "conv_size": _integer(linear, "short_conv_kernel_size"),
        "full_rank_gate": bool(linear.get("use_full_rank_gate")),
    }


def _format(quantization: Mapping[str, Any]) -> dict[str, Any]:
    """Bits of the weights; None where the method is not known here."""
    method, block = quantization.get("quant_method"), quantization.get("weight_block_size")
    if not quantization:
        return {}
    if method == "mxfp4":
        return dict(_MXFP4)
    if method == "fp8" and block:
        rows, columns = block
        return _alike({"bits": 8, "scale_bits": 32, "block": rows * columns})
    groups = quantization.get("config_groups") or {}
    weights = next((group.get("weights") or {} for group in groups.values()), {})
    if method == "compressed-tensors" and weights.get("group_size"):
        packed = str(quantization.get("format"))
        scale_bits = 8 if "mxfp4" in packed or "nvfp4" in packed else 16
        found = {
            "bits": weights["num_bits"],
            "scale_bits": scale_bits,
            "block": weights["group_size"],
        }
        ignored = " ".join(quantization.get("ignore") or ())
        experts = {f"expert_{name}": value for name, value in found.items()}
        return experts if "attn" in ignored else _alike(found)
    return {"expert_bits": None, "linear_bits": None}


def _alike(found: Mapping[str, Any]) -> dict[str, Any]:
    """Experts and other matrices in one format."""
    return {f"{part}_{name}": found[name] for part in ("expert", "linear") for name in found}


def _integer(config: Mapping[str, Any], key: str) -> int | None:
    value = config.get(key)
    if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
        raise ValueError(f"{key} = {value!r} must be an integer")
    return value
