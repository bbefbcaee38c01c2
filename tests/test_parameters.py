"""Parameters from the shape equal the published counts, of every preset and to the last one."""

from __future__ import annotations

from dataclasses import replace

import pytest
from model_presets import PRESETS, preset

from moe.attention import AttentionShape, UnknownShape
from moe.parameters import active, count, expert

# Published: the sums of the elements in the headers of the released files.
TOTALS = {
    "kimi_k3": 2_779_931_837_184,
    "kimi_k2": 1_026_408_232_448,
    "deepseek_v3": 671_026_419_200,
    "deepseek_v2_lite": 15_706_484_224,
    "qwen3_235b_a22b": 235_093_634_560,
    "gpt_oss_120b": 116_829_156_672,
    "mixtral_8x7b": 46_702_792_704,
}


@pytest.mark.parametrize("name", PRESETS)
def test_the_formulas_reach_the_published_total(name):
    shape = preset(name)
    assert count(shape).total == TOTALS[name] == shape.weights.total_parameters


def test_kimi_k3_part_by_part():
    """Against the breakdown of the published headers, added up there tensor by tensor."""
    parts = count(preset("kimi_k3"))
    assert expert(preset("kimi_k3")) == 33_030_144
    assert parts.routed == 92 * 896 * 33_030_144 == 2_722_740_830_208
    assert parts.embedding == parts.head == 1_174_405_120
    assert parts.shared == 12_155_092_992
    assert parts.attention == 18_462_995_712 + 1_344_847_872 + 2 * 8_191_475_712
    assert parts.latent == 4_726_980_608 + 329_728
    assert parts.router == 590_872_576 + 82_432
    assert parts.dense == 726_663_168
    assert parts.norms == 4_021_248
    assert parts.other == 401_214_464 + 46_144_512
    assert parts.single_precision == 11_122_432
    assert parts.unrouted == 57_191_006_976


def test_active_parameters_as_published():
    """K3: 104.2 billion; DeepSeek-V3: 37; Qwen3: 22; gpt-oss: 5.1; Mixtral: 12.9."""
    assert active(preset("kimi_k3")) == 104_189_532_416 + 82_432
    assert round(active(preset("deepseek_v3")) / 1e9, 1) == 36.6
    assert round(active(preset("qwen3_235b_a22b")) / 1e9, 1) == 21.6
    assert round(active(preset("gpt_oss_120b")) / 1e9, 1) == 5.1
    mixtral = preset("mixtral_8x7b")
    assert round((active(mixtral) + 32_000 * 4096) / 1e9, 1) == 12.9


def test_shards_of_the_formulas():
    """Low-rank gates, tied tables and models without linear layers."""
    k3 = preset("kimi_k3")
    thin = replace(k3, attention=replace(k3.attention, full_rank_gate=False))
    saved = count(k3).attention - count(thin).attention
    assert saved == 69 * (7168 * 12288 - (7168 + 12288) * 128)
    tied = replace(k3, weights=replace(k3.weights, tied_embeddings=True))
    assert count(k3).total - count(tied).total == 163_840 * 7168
    assert active(tied) == active(k3)  # the one table gives the output


def test_what_is_unknown_is_refused_with_the_key_to_set():
    bare = replace(preset("kimi_k3"), attention=AttentionShape())
    with pytest.raises(UnknownShape, match="set model.attention.full_layers="):
        count(bare)
    k3 = preset("kimi_k3")
    short = replace(k3, attention=replace(k3.attention, full_layers=23))
    with pytest.raises(UnknownShape, match="92 layers of attention, but the model has 93"):
        count(short)
    blank = replace(k3, weights=replace(k3.weights, vocab_size=None))
    with pytest.raises(UnknownShape, match="set model.weights.vocab_size="):
        count(blank)


@pytest.mark.parametrize(
    "part, change, said",
    [
        ("attention", {"num_heads": -1}, "attention.num_heads=-1 must be at least 0"),
        ("attention", {"kind": "mqa"}, "attention.kind='mqa' is not one of mla, gqa"),
        ("weights", {"expert_block": 0}, "weights.expert_block=0 must be at least 1"),
        ("weights", {"expert_bits": float("nan")}, "weights.expert_bits=nan must be at least 1"),
    ],
)
def test_values_that_cannot_be(part, change, said):
    shape = preset("kimi_k3")
    with pytest.raises(ValueError, match=said.replace(".", r"\.")):
        replace(shape, **{part: replace(getattr(shape, part), **change)}).validate()
