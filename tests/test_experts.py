"""Weights belong to the expert, not to its rank; each row meets its own expert."""

from __future__ import annotations

import math
import time

import pytest
import torch
import torch.nn.functional as F
from model_presets import preset, scale, small
from torch import Tensor

from moe.experts import (
    ACTIVATIONS,
    Experts,
    IdentityExperts,
    expert_weights,
    seeded_weight,
    situ_glu,
)
from moe.model import scaled
from moe.philox import Purpose

K3 = small("kimi_k3")


def rows_of(total: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(total, K3.payload_width, generator=generator)


def test_situ_glu_by_hand() -> None:
    """4 tanh(g / 4) sigmoid(g) * 25 tanh(u / 25): SwiGLU near zero, bounded by 4 x 25 far away."""
    for gate, up in [(0.3, -0.2), (-5.0, 7.0), (9.0, 60.0)]:
        wanted = 4 * math.tanh(gate / 4) / (1 + math.exp(-gate)) * 25 * math.tanh(up / 25)
        assert situ_glu(torch.tensor(gate), torch.tensor(up)).item() == pytest.approx(wanted)
    small_gate, small_up = torch.tensor([0.01]), torch.tensor([-0.02])
    assert torch.allclose(
        situ_glu(small_gate, small_up), ACTIVATIONS["swiglu"](small_gate, small_up), rtol=1e-4
    )
    assert situ_glu(torch.tensor(1e4), torch.tensor(1e4)).item() == pytest.approx(100.0)


@pytest.mark.parametrize("owned", [[0, 1, 2, 3, 4], [4, 2], [3], [1, 3, 0]])
def test_an_expert_is_the_same_wherever_it_lives(owned: list[int]) -> None:
    everywhere = Experts(K3, range(5), seed=7, layer=3)
    here = Experts(K3, owned, seed=7, layer=3)
    assert torch.equal(here.gate_up, everywhere.gate_up[owned])
    assert torch.equal(here.down, everywhere.down[owned])


def test_experts_layers_seeds_and_purposes_differ() -> None:
    # 7 + 2**32: a seed of which only the low half is read would repeat here
    keys = [(7, 3, 0), (7, 3, 1), (7, 4, 0), (8, 3, 0), (7 + 2**32, 3, 0)]
    weights = [expert_weights(K3, *key).down.flatten()[:64] for key in keys]
    for i, one in enumerate(weights):
        for other in weights[:i]:
            assert abs(torch.corrcoef(torch.stack([one, other]))[0, 1]) < 0.6
    router, bias = (
        seeded_weight(0, purpose, 0, 0, (64,), 1.0)
        for purpose in (Purpose.ROUTER, Purpose.EXPERT_BIAS)
    )
    assert not torch.equal(router, bias)


def test_weights_are_uniform_with_the_asked_deviation() -> None:
    weight = seeded_weight(0, Purpose.EXPERT, 0, 0, (301, 333), 0.5)
    assert weight.shape == (301, 333) and weight.dtype == torch.float32
    assert abs(weight.mean()) < 0.01 and weight.std().item() == pytest.approx(0.5, rel=0.01)
    assert weight.abs().max() <= 0.5 * 3**0.5
    assert weight.unique().numel() > 0.99 * weight.numel()


@pytest.mark.parametrize("name", ["kimi_k3", "mixtral_8x7b"])
def test_an_expert_keeps_the_size_of_its_input(name: str) -> None:
    shape = scaled(preset(name), scale("laptop"))
    experts = Experts(shape, [0], seed=0, layer=0)
    output = experts(torch.randn(2000, shape.payload_width), torch.tensor([2000]))
    assert output.std().item() == pytest.approx(1.0, rel=0.15)


@pytest.mark.parametrize("counts", [[3, 0, 2, 5], [0, 0, 0, 4], [0, 0, 0, 0], [1, 1, 1, 1]])
@pytest.mark.parametrize("activation", ["swiglu", "situ_glu"])
def test_each_row_meets_its_expert(counts: list[int], activation: str) -> None:
    shape = small("kimi_k3", activation=activation)
    owned = [11, 3, 895, 400]
    experts = Experts(shape, owned, seed=1, layer=2)
    rows = rows_of(sum(counts))
    output = experts(rows, torch.tensor(counts))
    assert output.shape == rows.shape
    owner = [expert for expert, count in zip(owned, counts, strict=True) for _ in range(count)]
    for row, expert, got in zip(rows, owner, output, strict=True):
        gate_up, down = expert_weights(shape, 1, 2, expert)
        gate, up = (gate_up @ row).chunk(2)
        assert torch.allclose(got, down @ ACTIVATIONS[activation](gate, up), atol=1e-5)


def test_a_rank_without_experts() -> None:
    """More ranks than experts: some own none and receive nothing, in both directions."""
    experts = Experts(K3, [], seed=0, layer=0)
    rows = rows_of(0).requires_grad_()
    output = experts(rows, torch.zeros(0, dtype=torch.int64))
    assert output.shape == (0, K3.payload_width)
    output.sum().backward()
    assert rows.grad is not None
    for weight in (experts.gate_up, experts.down):
        assert weight.grad is not None and weight.grad.shape == weight.shape


@pytest.mark.parametrize("count", [1, 2, 3, 5, 30])
def test_shards_are_slices_whose_outputs_sum_to_the_whole(count: int) -> None:
    """24 inner values: halves, thirds, 5 5 5 5 4, and six shards of nothing at 30."""
    owned, counts = [4, 0, 7], torch.tensor([3, 0, 4])
    whole = Experts(K3, owned, seed=7, layer=3)
    shards = [Experts(K3, owned, seed=7, layer=3, shard=(i, count)) for i in range(count)]
    inner = [shard.down.shape[2] for shard in shards]
    assert sum(inner) == 24 and max(inner) - min(inner) <= 1 and inner == sorted(inner)[::-1]
    assert torch.equal(torch.cat([shard.down for shard in shards], dim=2), whole.down)
    halves = [shard.gate_up.chunk(2, dim=1) for shard in shards]
    gate_up = torch.cat([gate for gate, _ in halves] + [up for _, up in halves], dim=1)
    assert torch.equal(gate_up, whole.gate_up)
    rows = rows_of(7)
    total = sum(shard(rows, counts) for shard in shards)
    assert torch.allclose(total, whole(rows, counts), atol=1e-5)


@pytest.mark.parametrize("shard", [(2, 2), (-1, 2), (0, 0)])
def test_a_shard_that_does_not_exist(shard: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match=f"shard {shard[0]} of {shard[1]}: must lie in 0"):
        Experts(K3, [0], seed=0, layer=0, shard=shard)


@pytest.mark.parametrize("counts", [[0, 0, 0], [0, 2, 0]])
def test_experts_without_rows_get_zero_gradients(counts: list[int]) -> None:
    experts = Experts(K3, [0, 1, 2], seed=0, layer=0)
    experts(rows_of(sum(counts)), torch.tensor(counts)).sum().backward()
    for weight in (experts.gate_up, experts.down):
        assert weight.grad is not None
        for expert, count in enumerate(counts):
            assert bool(weight.grad[expert].any()) == bool(count)


def test_dtype_is_rounded_from_fp32() -> None:
    experts = Experts(K3, [5], seed=0, layer=0, dtype=torch.bfloat16)
    gate_up, down = expert_weights(K3, 0, 0, 5)
    assert torch.equal(experts.gate_up[0], gate_up.bfloat16())
    assert torch.equal(experts.down[0], down.bfloat16())
    rows = rows_of(4).bfloat16()
    output = experts(rows, torch.tensor([4]))
    assert output.dtype == torch.bfloat16
    gate, up = F.linear(rows.float(), gate_up).chunk(2, dim=1)
    wanted = F.linear(situ_glu(gate, up), down)
    assert (output.float() - wanted).norm() / wanted.norm() < 0.03  # bf16 rounds to 2^-9


def test_inference_mode() -> None:
    experts = Experts(K3, [0, 1], seed=0, layer=0)
    rows, counts = rows_of(5), torch.tensor([2, 3])
    trained = experts(rows.clone(), counts)
    with torch.inference_mode():
        given = rows.clone()
        output = experts(given, counts)
        assert torch.equal(output, trained)
        assert output.data_ptr() == given.data_ptr()  # written over what came in


def test_identity_experts_give_back_what_they_got() -> None:
    rows = rows_of(3)
    assert IdentityExperts()(rows, torch.tensor([1, 2])) is rows


def test_a_layer_of_experts_is_made_quickly() -> None:
    """All 896 of the laptop scale, 33 million weights; 0.3 s on one idle core."""
    start = time.process_time()
    Experts(scaled(preset("kimi_k3"), scale("laptop")), range(896), seed=0, layer=0)
    assert time.process_time() - start < 3
