"""The layer around a dispatcher equals the dense reference, for every preset's shape."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from model_presets import PRESETS, preset, small
from torch import Tensor, nn

from comm.dispatch.base import DispatchResult, Pending
from comm.placement import placement_from_slots
from comm.replicas import ReplicaChooser
from moe.experts import Experts, IdentityExperts
from moe.layer import MoELayer, pre_norm
from moe.model import ModelShape, ScaleConfig, scaled
from moe.reference import reference_layer, relative_error
from moe.synthetic import token_hidden, topk_ids

# fp32, sums in another order and matrices of other heights
FP32_BOUND = 1e-5


@dataclass(frozen=True)
class LocalDispatcher:
    """The contract of a dispatcher on a single rank, which holds the experts of `slot_order`.

    calls: what was asked of it, in order, noted when a phase begins and when it is waited for
    num_dropped: what it claims to have dropped
    """

    slot_order: list[int]
    name: str = ""
    calls: list[str] = field(default_factory=list)
    num_dropped: int = 0

    def dispatch_async(
        self,
        hidden: Tensor,
        topk_ids: Tensor,
        topk_weights: Tensor,
        slots: Tensor | None = None,
    ) -> Pending[DispatchResult]:
        assert slots is None, "the layer has no replicas"
        return self._noted("dispatch", lambda: self._dispatch(hidden, topk_ids, topk_weights))

    def combine_async(self, expert_output: Tensor, handle: Any) -> Pending[Tensor]:
        return self._noted("combine", lambda: self._combine(expert_output, handle))

    def _noted(self, phase: str, finish: Callable[[], Any]) -> Pending[Any]:
        self.calls.append(f"{phase} {self.name}")

        def wait() -> Any:
            self.calls.append(f"wait for {phase} {self.name}")
            return finish()

        return Pending(wait)

    def _dispatch(self, hidden: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> DispatchResult:
        slot_of = torch.full((max(self.slot_order) + 2,), -1)  # the last one is that of id -1
        slot_of[torch.tensor(self.slot_order)] = torch.arange(len(self.slot_order))
        slots = slot_of[topk_ids]
        token, k = (slots >= 0).nonzero(as_tuple=True)
        order = slots[token, k].argsort(stable=True)
        token, k = token[order], k[order]
        counts = torch.bincount(slots[token, k], minlength=len(self.slot_order))
        handle = (token, topk_weights[token, k], hidden)
        return DispatchResult(hidden[token], counts, handle, self.num_dropped)

    def _combine(self, expert_output: Tensor, handle: Any) -> Tensor:
        token, weights, hidden = handle
        total = torch.zeros_like(hidden, dtype=torch.float32)
        weighted = weights[:, None] * expert_output.float()
        return total.index_add(0, token, weighted).to(hidden.dtype)


def build(shape: ModelShape, dtype: torch.dtype = torch.float32, **parts: Any) -> MoELayer:
    order = parts.get("order") or list(range(shape.num_experts))
    experts = parts.get("experts") or Experts(shape, order, seed=5, layer=2, dtype=dtype)
    dispatchers = parts.get("dispatchers") or [LocalDispatcher(order)]
    return MoELayer(shape, experts, dispatchers, seed=5, layer=2, dtype=dtype)


def inputs(shape: ModelShape, num_tokens: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.from_numpy(token_hidden(1, 0, 0, num_tokens, shape.hidden_size)).to(dtype)


def uniform(shape: ModelShape, num_tokens: int) -> Tensor:
    return torch.from_numpy(topk_ids(1, 0, 2, 0, num_tokens, shape.num_experts, shape.top_k))


def errors(shape: ModelShape, layer: MoELayer, x: Tensor, ids: Tensor | None) -> list[float]:
    """[of y, of u] against the reference fed with what the layer recorded."""
    with torch.inference_mode():
        output = layer(x, ids)
        reference = reference_layer(shape, 5, 2, x, output.topk_ids, output.topk_weights, x.dtype)
    assert output.hidden.dtype == output.routed.dtype == x.dtype
    assert output.topk_weights.dtype == torch.float32
    return [
        relative_error(output.hidden, reference.hidden),
        relative_error(output.routed, reference.routed),
    ]


@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize("router", ["learned", "uniform"])
def test_equals_the_reference(name: str, router: str) -> None:
    shape = small(name)
    ids = uniform(shape, 19) if router == "uniform" else None
    assert max(errors(shape, build(shape), inputs(shape, 19), ids)) < FP32_BOUND


@pytest.mark.parametrize("name", ["kimi_k3", "deepseek_v3"])
def test_equals_the_reference_in_bf16(name: str) -> None:
    shape = small(name)
    x = inputs(shape, 19, torch.bfloat16)
    found = errors(shape, build(shape, torch.bfloat16), x, uniform(shape, 19))
    assert (
        max(found) < 0.02
    )  # both round to bf16 (2^-9) at the same places, in matrices summed apart


def test_placement_does_not_matter() -> None:
    shape = small("deepseek_v2_lite")
    order = torch.randperm(shape.num_experts, generator=torch.Generator().manual_seed(0)).tolist()
    x, ids = inputs(shape, 12), uniform(shape, 12)
    with torch.inference_mode():
        one, other = build(shape)(x, ids), build(shape, order=order)(x, ids)
    assert relative_error(other.routed, one.routed) < FP32_BOUND


def test_masked_tokens_keep_their_shared_part_only() -> None:
    shape = small("kimi_k3")
    layer, x, ids = build(shape), inputs(shape, 6), uniform(shape, 6)
    ids[0], ids[1, 3:] = -1, -1
    assert max(errors(shape, layer, x, ids)) < FP32_BOUND
    output = layer(x, ids)
    assert not output.routed[0].any() and not output.topk_weights[0].any()
    assert torch.allclose(output.hidden[0], layer.shared(x)[0], atol=1e-6)


def test_no_tokens() -> None:
    shape = small("kimi_k3")
    for ids in (None, uniform(shape, 0)):
        output = build(shape)(inputs(shape, 0), ids)
        assert output.hidden.shape == (0, 32) and output.routed.shape == (0, 16)
        assert output.topk_ids.shape == output.topk_weights.shape == (0, 16)


def test_identity_experts_return_the_latent() -> None:
    """Renormalised weights sum to 1: u = z shows weights applied twice, or in the wrong place."""
    shape = small("kimi_k3")
    layer, x = build(shape, experts=IdentityExperts()), inputs(shape, 9)
    output = layer(x)
    assert torch.allclose(output.routed, layer.latent.into(x), atol=1e-5)


def test_dispatch_carries_the_latent_and_combine_comes_before_the_norm() -> None:
    shape = small("kimi_k3")
    seen: list[Tensor] = []

    class Spy(nn.Module):
        def forward(self, expert_input: Tensor, tokens_per_expert: Tensor) -> Tensor:
            seen.append(expert_input)
            return 3 * expert_input

    layer, x = build(shape, experts=Spy()), inputs(shape, 9)
    output = layer(x)
    assert seen[0].shape == (9 * shape.top_k, shape.latent_size)
    # the factor 3 is on u and gone from y: RMSNorm follows combine
    plain = build(shape, experts=IdentityExperts())(x)
    assert torch.allclose(output.routed, 3 * plain.routed, atol=1e-5)
    assert torch.allclose(output.hidden, plain.hidden, atol=1e-3)


def test_models_without_latent_or_shared_have_no_such_weights() -> None:
    names = dict(build(small("qwen3_235b_a22b")).named_parameters())
    assert set(names) == {"router.weight", "experts.gate_up", "experts.down"}
    k3 = {name.split(".")[0] for name, _ in build(small("kimi_k3")).named_parameters()}
    assert k3 == {"router", "experts", "latent", "shared"}


def test_gradients_flow_through_the_layer() -> None:
    shape = small("kimi_k3")
    layer, x = build(shape), inputs(shape, 4).requires_grad_()
    ids = uniform(shape, 4)
    (layer(x, ids).hidden * inputs(shape, 4)).sum().backward()
    assert x.grad.isfinite().all() and x.grad.any()
    for name, weight in layer.named_parameters():
        assert weight.grad is not None and weight.grad.isfinite().all(), name
    hit = layer.experts.down.grad.flatten(1).any(1).nonzero().flatten().tolist()
    assert set(hit) == set(ids.flatten().tolist())


class Noting(nn.Module):
    """Experts that note when they work, in the list that the dispatchers write to, too."""

    def __init__(self, experts: nn.Module, calls: list[str]) -> None:
        super().__init__()
        self.experts, self.calls = experts, calls

    def forward(self, expert_input: Tensor, tokens_per_expert: Tensor) -> Tensor:
        self.calls.append(f"experts on {len(expert_input)} rows")
        return self.experts(expert_input, tokens_per_expert)


def in_chunks(shape: ModelShape, count: int, num_dropped: int = 0) -> tuple[MoELayer, list[str]]:
    """A layer of so many chunks, and the list that tells what happens in it."""
    order, calls = list(range(shape.num_experts)), []
    experts = Noting(Experts(shape, order, seed=5, layer=2), calls)
    chunks = [LocalDispatcher(order, str(i), calls, num_dropped + i) for i in range(count)]
    return build(shape, experts=experts, dispatchers=chunks), calls


@pytest.mark.parametrize("count", [2, 3, 7, 30])
def test_chunks_change_nothing_but_the_order_of_work(count: int) -> None:
    """Also with fewer tokens than chunks, so that some are empty."""
    shape = small("kimi_k3")
    x, ids = inputs(shape, 19), uniform(shape, 19)
    with torch.inference_mode():
        whole, parts = build(shape)(x, ids), in_chunks(shape, count)[0](x, ids)
    assert relative_error(parts.routed, whole.routed) < FP32_BOUND
    assert relative_error(parts.hidden, whole.hidden) < FP32_BOUND
    assert torch.equal(parts.topk_ids, whole.topk_ids)


def test_a_chunk_travels_while_the_experts_work_on_the_one_before() -> None:
    shape = small("mixtral_8x7b")
    layer, calls = in_chunks(shape, 3)
    layer(inputs(shape, 7), uniform(shape, 7))
    assert calls == [
        "dispatch 0",
        "wait for dispatch 0",
        "dispatch 1",
        "experts on 4 rows",  # tokens 0 and 1 of 7, two experts each
        "combine 0",
        "wait for dispatch 1",
        "dispatch 2",
        "experts on 4 rows",  # tokens 2 and 3
        "combine 1",
        "wait for dispatch 2",
        "experts on 6 rows",  # tokens 4, 5 and 6
        "combine 2",
        *(f"wait for combine {chunk}" for chunk in range(3)),
    ]


def test_gradients_flow_through_chunks() -> None:
    shape = small("kimi_k3")
    ids, one = uniform(shape, 9), inputs(shape, 9)
    found = []
    for layer in (build(shape), in_chunks(shape, 4)[0]):
        x = one.clone().requires_grad_()
        (layer(x, ids).hidden * one).sum().backward()
        found.append(x.grad)
    assert relative_error(found[1], found[0]) < FP32_BOUND


def test_choices_that_found_no_room_are_added_up() -> None:
    shape = small("mixtral_8x7b")
    layer, _ = in_chunks(shape, 3, num_dropped=5)
    assert layer(inputs(shape, 7), uniform(shape, 7)).num_dropped == 5 + 6 + 7
    assert build(shape)(inputs(shape, 7)).num_dropped == 0


def test_weights_that_come_with_the_choices_are_taken() -> None:
    shape = small("kimi_k3")
    ids = uniform(shape, 6)
    given = torch.linspace(0, 1, ids.numel()).view(ids.shape)
    layer, x = build(shape), inputs(shape, 6)
    output = layer(x, ids, given)
    assert output.topk_weights is given
    assert relative_error(output.routed, layer(x, ids).routed) > 0.1
    doubled = layer(x, ids, 2 * given)
    assert torch.allclose(doubled.routed, 2 * output.routed, atol=1e-5)


def test_slots_come_from_the_replicas_and_the_number_of_the_token() -> None:
    """Two ranks, each with both experts: consecutive tokens take turns."""
    shape = small("mixtral_8x7b")
    everywhere = list(range(shape.num_experts))
    count = shape.num_experts
    placement = placement_from_slots("file", count, 2 * everywhere, [0, count, 2 * count])
    seen: list[Tensor] = []

    class Slots(LocalDispatcher):
        def dispatch_async(self, hidden: Tensor, *args: Tensor) -> Pending[DispatchResult]:
            seen.append(args[2])
            return super().dispatch_async(hidden, *args[:2])

    replicas = ReplicaChooser(
        placement, "round_robin", seed=0, layer=0, rank=0, node_of_rank=(0, 0), device="cpu"
    )
    experts = Experts(shape, everywhere, seed=5, layer=2)
    layer = MoELayer(shape, experts, [Slots(everywhere)], seed=5, layer=2, replicas=replicas)
    ids = torch.zeros(4, 2, dtype=torch.int64)
    ids[:, 1] = 1
    for first in (0, 1):
        slots = layer(inputs(shape, 4), ids, first_token=first).slots
        assert slots is not None and torch.equal(seen[-1], slots)
        assert torch.equal(slots % count, ids)
        assert [len(set(slots[:, k].tolist())) for k in (0, 1)] == [2, 2]
    assert torch.equal(seen[0][1:], seen[1][:-1])  # by the global number of the token
    assert build(shape)(inputs(shape, 4), ids).slots is None


def residual_stream(shape: ModelShape, num_layers: int, num_tokens: int) -> list[float]:
    """Deviation of the stream after each of num_layers layers."""
    x, ids = inputs(shape, num_tokens), uniform(shape, num_tokens)
    chosen = ids.unique().tolist()
    deviations = []
    for index in range(num_layers):
        experts = Experts(shape, chosen, seed=0, layer=index)
        layer = MoELayer(shape, experts, [LocalDispatcher(chosen)], seed=0, layer=index)
        x = x + layer(pre_norm(x), ids).hidden
        deviations.append(x.std().item())
    return deviations


@pytest.mark.parametrize("name", ["kimi_k3", "deepseek_v3", "deepseek_v2_lite", "mixtral_8x7b"])
def test_activations_survive_92_layers(name: str) -> None:
    """Each layer adds something of order one: the stream grows like a square root, as pre-norm
    networks do, and neither stands still nor runs away."""
    shape = scaled(preset(name), ScaleConfig("deep", 32, 24))
    with torch.inference_mode():
        deviations = residual_stream(shape, 92, 8)
    assert 1.05 < deviations[-1] < 30
    assert deviations[-1] / deviations[len(deviations) // 2] < 2
