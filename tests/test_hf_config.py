"""Released configs of each family read as the presets that describe the same models."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from model_presets import preset

from moe.hf_config import read_hf_config
from moe.model import ModelShape

# What the released files say of the MoE layers, with some of the noise around it.
KIMI_K3 = {
    "model_type": "kimi_k3",
    "vision_config": {"hidden_size": 1024, "intermediate_size": 4096},
    "text_config": {
        "model_type": "kimi_linear",
        "hidden_act": "situ",
        "hidden_size": 7168,
        "intermediate_size": 33792,
        "first_k_dense_replace": 1,
        "moe_intermediate_size": 3072,
        "moe_layer_freq": 1,
        "moe_renormalize": True,
        "moe_router_activation_func": "sigmoid",
        "num_expert_group": 1,
        "num_experts": 896,
        "num_experts_per_token": 16,
        "num_hidden_layers": 93,
        "num_shared_experts": 2,
        "routed_expert_hidden_size": 3584,
        "routed_scaling_factor": 1.0,
        "top_k": 50,  # of text generation
        "topk_group": 1,
        "topk_method": "noaux_tc",
        "attn_res_block_size": 12,
        "kv_lora_rank": 512,
        "linear_attn_config": {
            "full_attn_layers": [*range(4, 93, 4), 93],
            "head_dim": 128,
            "kda_layers": [layer for layer in range(1, 92) if layer % 4],
            "num_heads": 96,
            "short_conv_kernel_size": 4,
            "use_full_rank_gate": True,
        },
        "mla_use_output_gate": True,
        "num_attention_heads": 96,
        "num_key_value_heads": 96,
        "q_lora_rank": 1536,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "quantization_config": {
            "config_groups": {"group_0": {"weights": {"group_size": 32, "num_bits": 4}}},
            "format": "mxfp4-pack-quantized",
            "ignore": ["re:.*self_attn.*", "re:.*shared_experts.*", "re:.*lm_head.*"],
            "quant_method": "compressed-tensors",
        },
        "tie_word_embeddings": False,
        "v_head_dim": 128,
        "vocab_size": 163840,
    },
}
FP8 = {"activation_scheme": "dynamic", "quant_method": "fp8", "weight_block_size": [128, 128]}
DEEPSEEK_V3 = {
    "model_type": "deepseek_v3",
    "hidden_act": "silu",
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "first_k_dense_replace": 3,
    "moe_intermediate_size": 2048,
    "moe_layer_freq": 1,
    "n_group": 8,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 61,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "topk_group": 4,
    "topk_method": "noaux_tc",
    "kv_lora_rank": 512,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "quantization_config": FP8,
    "tie_word_embeddings": False,
    "v_head_dim": 128,
    "vocab_size": 129280,
}
KIMI_K2 = DEEPSEEK_V3 | {
    "model_type": "kimi_k2",
    "first_k_dense_replace": 1,
    "n_group": 1,
    "n_routed_experts": 384,
    "num_attention_heads": 64,
    "num_key_value_heads": 64,
    "routed_scaling_factor": 2.827,
    "topk_group": 1,
    "vocab_size": 163840,
}
DEEPSEEK_V2_LITE = DEEPSEEK_V3 | {
    "model_type": "deepseek_v2",
    "hidden_size": 2048,
    "intermediate_size": 10944,
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 1408,
    "n_group": 1,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "norm_topk_prob": False,
    "num_experts_per_tok": 6,
    "num_hidden_layers": 27,
    "routed_scaling_factor": 1.0,
    "scoring_func": "softmax",
    "topk_group": 1,
    "topk_method": "greedy",
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "q_lora_rank": None,
    "quantization_config": None,
    "vocab_size": 102400,
}
QWEN3 = {
    "model_type": "qwen3_moe",
    "decoder_sparse_step": 1,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "mlp_only_layers": [],
    "moe_intermediate_size": 1536,
    "norm_topk_prob": True,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 94,
    "attention_bias": False,
    "head_dim": 128,
    "num_attention_heads": 64,
    "num_key_value_heads": 4,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
GPT_OSS = {
    "model_type": "gpt_oss",
    "experts_per_token": 4,
    "hidden_act": "silu",
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 36,
    "num_local_experts": 128,
    "swiglu_limit": 7.0,
    "attention_bias": True,
    "head_dim": 64,
    "layer_types": ["sliding_attention", "full_attention"] * 18,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "quantization_config": {"quant_method": "mxfp4"},
    "sliding_window": 128,
    "tie_word_embeddings": False,
    "vocab_size": 201088,
}
MIXTRAL = {
    "model_type": "mixtral",
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 32,
    "num_local_experts": 8,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "vocab_size": 32000,
}


def read(folder: Path, config: Any) -> dict[str, Any]:
    (folder / "config.json").write_text(json.dumps(config))
    return read_hf_config(folder)


@pytest.mark.parametrize(
    "name, config",
    [
        ("kimi_k3", KIMI_K3),
        ("kimi_k2", KIMI_K2),
        ("deepseek_v3", DEEPSEEK_V3),
        ("deepseek_v2_lite", DEEPSEEK_V2_LITE),
        ("qwen3_235b_a22b", QWEN3),
        ("gpt_oss_120b", GPT_OSS),
        ("mixtral_8x7b", MIXTRAL),
    ],
)
def test_released_configs_equal_the_presets(
    tmp_path: Path, name: str, config: dict[str, Any]
) -> None:
    read_shape = ModelShape(**read(tmp_path, config))
    for field in fields(ModelShape):
        if field.name not in ("name", "source", "path"):
            value = getattr(read_shape, field.name)
            assert value == getattr(preset(name), field.name), field.name
    assert ("stands in" in read_shape.source) == (name == "gpt_oss_120b")


def test_attention_of_unknown_sorts_stays_unknown(tmp_path: Path) -> None:
    """Such a model is emulated as before; only a question of memory is refused."""
    unlike = (
        {"layer_types": ["linear_attention"] * 94},
        {"index_topk": 2048},
        {"num_attention_heads": None},
        {"linear_attn_config": {"kda_layers": [1], "full_attn_layers": [2]}},
    )
    for change in unlike:
        assert read(tmp_path, QWEN3 | change)["attention"].kind is None, change
    with pytest.raises(ValueError, match="num_attention_heads = '64' must be an integer"):
        read(tmp_path, QWEN3 | {"num_attention_heads": "64"})


def test_windows_and_heads_that_are_implied(tmp_path: Path) -> None:
    windowed = read(tmp_path, MIXTRAL | {"sliding_window": 4096})["attention"]
    assert (windowed.full_layers, windowed.window_layers, windowed.window) == (0, 32, 4096)
    assert windowed.head_dim == 128  # hidden / heads
    off = read(tmp_path, QWEN3 | {"sliding_window": 4096})["attention"]
    assert (off.full_layers, off.window_layers) == (94, 0)


# (experts: bits, scale bits, block; other matrices: the same)
@pytest.mark.parametrize(
    "quantization, bits",
    [
        (None, (16, 0, 1, 16, 0, 1)),
        (FP8, (8, 32, 16384, 8, 32, 16384)),
        ({"quant_method": "mxfp4"}, (4, 8, 32, 16, 0, 1)),
        ({"quant_method": "awq", "bits": 4}, (None, 0, 1, None, 0, 1)),
        (
            {
                "quant_method": "compressed-tensors",
                "format": "pack-quantized",
                "config_groups": {"group_0": {"weights": {"group_size": 32, "num_bits": 4}}},
            },
            (4, 16, 32, 4, 16, 32),
        ),
    ],
)
def test_formats_of_released_weights(tmp_path: Path, quantization: Any, bits: Any) -> None:
    weights = read(tmp_path, QWEN3 | {"quantization_config": quantization})["weights"]
    parts = [
        getattr(weights, f"{part}_{name}")
        for part in ("expert", "linear")
        for name in ("bits", "scale_bits", "block")
    ]
    assert tuple(parts) == bits


def test_the_file_itself_may_be_named(tmp_path: Path) -> None:
    from_folder = read(tmp_path, MIXTRAL)
    from_file = read_hf_config(tmp_path / "config.json")
    assert from_file | {"path": from_folder["path"]} == from_folder


def test_shared_width_of_its_own(tmp_path: Path) -> None:
    qwen2 = QWEN3 | {"model_type": "qwen2_moe", "shared_expert_intermediate_size": 5632}
    shape = read(tmp_path, qwen2)
    assert (shape["num_shared_experts"], shape["shared_intermediate_size"]) == (1, 5632)


def test_group_score_of_deepseek_v2(tmp_path: Path) -> None:
    v2 = DEEPSEEK_V2_LITE | {"topk_method": "group_limited_greedy", "n_group": 8, "topk_group": 3}
    shape = read(tmp_path, v2)
    assert shape["group_score"] == "max" and not shape["expert_bias"]
    assert (shape["num_expert_groups"], shape["num_limited_groups"]) == (8, 3)


def test_groups_that_the_method_ignores(tmp_path: Path) -> None:
    shape = read(tmp_path, DEEPSEEK_V2_LITE | {"n_group": 8, "topk_group": 3})
    assert (shape["num_expert_groups"], shape["num_limited_groups"]) == (1, 1)


@pytest.mark.parametrize("family", ["deepseek_v3", "glm4_moe"])
def test_what_a_family_leaves_unsaid(tmp_path: Path, family: str) -> None:
    unsaid = ("scoring_func", "topk_method", "norm_topk_prob")
    config = {key: value for key, value in DEEPSEEK_V3.items() if key not in unsaid}
    shape = read(tmp_path, config | {"model_type": family})
    assert shape["score_func"] == "sigmoid" and shape["expert_bias"] and shape["norm_topk"]


# (MoE layers, dense layers) of 12
@pytest.mark.parametrize(
    "rule, layers",
    [
        ({}, (12, 0)),
        ({"decoder_sparse_step": 2}, (6, 6)),
        ({"decoder_sparse_step": 2, "mlp_only_layers": [0, 1, 3]}, (4, 8)),
        ({"first_k_dense_replace": 3, "moe_layer_freq": 2}, (4, 8)),
        ({"moe_layer_freq": [0] + [1] * 11}, (11, 1)),
        ({"mlp_layer_types": ["dense"] * 2 + ["sparse"] * 10}, (10, 2)),
        ({"hybrid_override_pattern": "MEM*EM-EM*ME"}, (4, 1)),
        ({"expert_layer_period": 3, "expert_layer_offset": 1}, (4, 8)),
        ({"decoder_sparse_step": None, "interleave_moe_layer_step": 3}, (4, 8)),
    ],
)
def test_which_layers_have_experts(
    tmp_path: Path, rule: dict[str, Any], layers: tuple[int, int]
) -> None:
    shape = read(tmp_path, QWEN3 | {"num_hidden_layers": 12} | rule)
    assert (shape["num_moe_layers"], shape["num_dense_layers"]) == layers


@pytest.mark.parametrize("nest", [("text_config",), ("thinker_config", "text_config")])
def test_nested_configs(tmp_path: Path, nest: tuple[str, ...]) -> None:
    config: dict[str, Any] = QWEN3
    for key in reversed(nest):
        config = {"model_type": "outer", "hidden_size": 1, key: config}
    assert read(tmp_path, config)["hidden_size"] == 4096


def test_an_activation_without_an_equal_is_named(tmp_path: Path) -> None:
    shape = read(tmp_path, MIXTRAL | {"hidden_act": "relu2"})
    assert shape["activation"] == "swiglu" and "swiglu stands in" in shape["source"]


@pytest.mark.parametrize(
    "missing, tried",
    [
        ("num_experts_per_tok", "num_experts_per_tok / num_experts_per_token"),
        ("hidden_size", "hidden_size / d_model"),
        ("num_hidden_layers", "num_hidden_layers / num_layers"),
    ],
)
def test_a_missing_key_is_named_with_its_spellings(
    tmp_path: Path, missing: str, tried: str
) -> None:
    with pytest.raises(ValueError, match=f"lacks .* tried {tried}"):
        read(tmp_path, {key: value for key, value in QWEN3.items() if key != missing})


def test_no_expert_width_at_all(tmp_path: Path) -> None:
    config = {key: value for key, value in QWEN3.items() if "intermediate" not in key}
    with pytest.raises(ValueError, match="lacks intermediate_size: tried moe_intermediate_size"):
        read(tmp_path, config)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"num_experts": 0}, "is not a mixture-of-experts model"),
        ({"num_experts": None}, "none of n_routed_experts, num_experts"),
        ({"num_experts_per_tok": "8"}, "= '8' must be an integer"),
        ({"num_experts_per_tok": [8, 8]}, "must be an integer"),
        ({"num_experts_per_tok": 129}, "top_k=129 exceeds num_experts=128"),
        ({"scoring_func": "argmax"}, "score_func='argmax' is not one of"),
        ({"decoder_sparse_step": 0}, "decoder_sparse_step=0 must be an integer of at least 1"),
        ({"first_k_dense_replace": 94}, "num_moe_layers=0 must be at least 1"),
    ],
)
def test_foreign_configs_are_refused(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message) as raised:
        read(tmp_path, QWEN3 | change)
    assert "model.path=" in str(raised.value) and "\n" not in str(raised.value)


def test_files_that_are_no_config(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="config.json cannot be read: No such file"):
        read_hf_config(tmp_path)
    with pytest.raises(ValueError, match="model.path=/dev/zero cannot be read: Not a regular"):
        read_hf_config(Path("/dev/zero"))
    file = tmp_path / "weights.bin"
    for content, message in [(b"\x80\xff", "is not JSON"), (b"{", "is not JSON"), (b"[]", "list")]:
        file.write_bytes(content)
        with pytest.raises(ValueError, match=message):
            read_hf_config(file)


def test_the_family_may_stand_on_the_outer_level_only(tmp_path) -> None:
    inner = {
        "hidden_size": 64,
        "moe_intermediate_size": 32,
        "num_hidden_layers": 3,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
    }
    file = tmp_path / "config.json"
    file.write_text(json.dumps({"model_type": "foreign_moe", "text_config": inner}))
    assert read_hf_config(file)["name"] == "foreign_moe"
