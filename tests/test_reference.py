"""The oracle against one token at a time, and its power to see errors."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from model_presets import PRESETS, small
from torch import Tensor

from moe.experts import (
    ACTIVATIONS,
    expert_weights,
    latent_weights,
    router_weight,
    shared_weights,
)
from moe.model import ModelShape
from moe.reference import (
    gradient_bound,
    gradient_errors,
    reference_gradients,
    reference_layer,
    reference_routed,
    reference_router_weights,
    relative_error,
)
from moe.router import Router
from moe.synthetic import topk_ids as uniform_ids


def routing(shape: ModelShape, num_tokens: int) -> tuple[Tensor, Tensor]:
    ids = uniform_ids(0, 0, 0, 0, num_tokens, shape.num_experts, shape.top_k)
    generator = torch.Generator().manual_seed(3)
    return torch.from_numpy(ids), torch.rand(num_tokens, shape.top_k, generator=generator)


def inputs(shape: ModelShape, num_tokens: int) -> Tensor:
    return torch.randn(num_tokens, shape.hidden_size, generator=torch.Generator().manual_seed(4))


def one_token(
    shape: ModelShape, x: Tensor, ids: list[int], weights: list[float]
) -> tuple[Tensor, Tensor]:
    """(y, u) of x [H] in double precision, as the equations are printed."""

    def mlp(gate_up: Tensor, down: Tensor, row: Tensor) -> Tensor:
        gate, up = (gate_up.double() @ row).chunk(2)
        # Kimi K3's activation calls .float(), so it is written out here
        if shape.activation == "situ_glu":
            return down.double() @ (4 * (gate / 4).tanh() * gate.sigmoid() * 25 * (up / 25).tanh())
        return down.double() @ ACTIVATIONS["swiglu"](gate, up)

    x = x.double()
    down, up = (weight.double() for weight in latent_weights(shape, 5, 6))
    z = down @ x if shape.latent_size else x
    u = torch.zeros_like(z)
    for expert, weight in zip(ids, weights, strict=True):
        if expert >= 0:
            u = u + weight * mlp(*expert_weights(shape, 5, 6, expert), z)
    y = up @ (u / (u.square().mean() + 1e-5).sqrt()) if shape.latent_size else u
    if shape.num_shared_experts:
        y = y + mlp(*shared_weights(shape, 5, 6), x)
    return y, u


@pytest.mark.parametrize("name", PRESETS)
def test_equals_the_equations(name: str) -> None:
    shape = small(name)
    x, (ids, weights) = inputs(shape, 5), routing(shape, 5)
    ids[0], ids[1, 0] = -1, -1
    output = reference_layer(shape, 5, 6, x, ids, weights, torch.float32)
    for token in range(5):
        y, u = one_token(shape, x[token], ids[token].tolist(), weights[token].tolist())
        assert torch.allclose(output.routed[token].double(), u, atol=1e-5)
        assert torch.allclose(output.hidden[token].double(), y, atol=1e-4)


def test_bf16_stays_near_fp32() -> None:
    shape = small("kimi_k3")
    x, (ids, weights) = inputs(shape, 16), routing(shape, 16)
    exact = reference_layer(shape, 0, 0, x, ids, weights, torch.float32)
    rounded = reference_layer(shape, 0, 0, x, ids, weights, torch.bfloat16)
    assert rounded.hidden.dtype == rounded.routed.dtype == torch.bfloat16
    for name in ("hidden", "routed"):
        error = relative_error(getattr(rounded, name), getattr(exact, name))
        assert 1e-4 < error < 0.05, name  # bf16 rounds to 2^-9, some five times in a row


def test_identity_experts_return_the_input() -> None:
    """Weights that sum to 1 and experts that do nothing: applied twice, or never, they show."""
    z = torch.randn(9, 8)
    ids = torch.from_numpy(uniform_ids(0, 0, 0, 0, 9, 12, 4))
    weights = torch.full((9, 4), 0.25)
    assert torch.equal(reference_routed(z, ids, weights, lambda expert, rows: rows), z)
    scaled = reference_routed(z, ids, weights, lambda expert, rows: rows * expert)
    assert torch.allclose(scaled, z * ids.float().mean(1, keepdim=True), atol=1e-5)


def test_sums_run_in_ascending_k_in_fp32() -> None:
    """(1e8 + 1) - 1e8 in fp32 is 0, and 1 in any other order."""
    ids, weights = torch.tensor([[2, 0, 1]]), torch.tensor([[1e8, 1.0, -1e8]])
    one = torch.ones(1, 1)
    assert reference_routed(one, ids, weights, lambda expert, rows: rows).item() == 0.0
    assert reference_routed(one, ids[:, [0, 2, 1]], weights[:, [0, 2, 1]], lambda e, r: r) == 1.0


def test_each_chosen_expert_is_made_once_and_no_other() -> None:
    calls: list[tuple[int, int]] = []

    def expert(expert_id: int, rows: Tensor) -> Tensor:
        calls.append((expert_id, len(rows)))
        return rows

    ids = torch.tensor([[5, 2], [2, -1], [895, 5]])
    reference_routed(torch.randn(3, 4), ids, torch.ones(3, 2), expert)
    assert calls == [(2, 2), (5, 2), (895, 1)]


def test_no_tokens_and_no_experts() -> None:
    shape = small("kimi_k3")
    empty = torch.zeros(0, shape.top_k, dtype=torch.int64)
    output = reference_layer(shape, 0, 0, inputs(shape, 0), empty, empty.float(), torch.float32)
    assert output.hidden.shape == (0, 32) and output.routed.shape == (0, 16)
    nobody = torch.full((2, shape.top_k), -1)
    x = inputs(shape, 2)
    output = reference_layer(shape, 0, 0, x, nobody, torch.ones(2, 16), torch.float32)
    assert not output.routed.any()
    gate, up = F.linear(x, shared_weights(shape, 0, 0).gate_up).chunk(2, dim=1)
    shared = F.linear(ACTIVATIONS[shape.activation](gate, up), shared_weights(shape, 0, 0).down)
    assert torch.allclose(output.hidden, shared, atol=1e-6)


def test_routed_shows_what_the_norm_hides() -> None:
    """A combine that doubles everything vanishes in y behind RMSNorm, and doubles u."""
    shape = small("kimi_k3")
    x, (ids, weights) = inputs(shape, 8), routing(shape, 8)
    right = reference_layer(shape, 0, 0, x, ids, weights, torch.float32)
    doubled = reference_layer(shape, 0, 0, x, ids, 2 * weights, torch.float32)
    assert relative_error(doubled.hidden, right.hidden) < 1e-3
    assert relative_error(doubled.routed, right.routed) == pytest.approx(1.0)


def test_relative_error_is_the_worst_token() -> None:
    reference = torch.tensor([[3.0, 4.0], [0.0, 10.0]])
    measured = torch.tensor([[3.0, 4.5], [0.1, 10.0]])
    rms = math.sqrt((5**2 + 10**2) / 2)  # larger than the first token's own norm
    assert relative_error(measured, reference) == pytest.approx(0.5 / rms)
    assert relative_error(reference, reference) == 0.0
    assert relative_error(reference[:0], reference[:0]) == 0.0
    with pytest.raises(ValueError, match=r"measured \(1, 2\), reference \(2, 2\)"):
        relative_error(measured[:1], reference)


def test_relative_error_of_a_token_without_experts() -> None:
    reference = torch.tensor([[0.0, 0.0], [0.0, 10.0]])
    assert relative_error(reference, reference) == 0.0
    leaked = reference + torch.tensor([[10.0, 0.0], [0.0, 0.0]])
    assert relative_error(leaked, reference) == pytest.approx(1)  # over the one row that is there
    assert relative_error(leaked, torch.zeros(2, 2)) == pytest.approx(10)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_relative_error_of_what_is_not_a_number(bad: float) -> None:
    reference = torch.ones(2, 2)
    measured = reference.clone()
    measured[1, 0] = bad
    assert relative_error(measured, reference) == math.inf


def test_dropped_choices_are_as_if_they_had_not_been_made() -> None:
    shape = small("kimi_k3")
    x, (ids, weights) = inputs(shape, 4), routing(shape, 4)
    ids[3, 0] = -1
    kept = torch.rand(ids.shape, generator=torch.Generator().manual_seed(0)) < 0.6
    kept[2] = False
    given = (shape, 5, 6, x, ids, weights, torch.float32)
    left = reference_layer(*given, kept=kept)
    masked = reference_layer(*given[:4], torch.where(kept, ids, -1), *given[5:])
    assert torch.equal(left.hidden, masked.hidden) and torch.equal(left.routed, masked.routed)
    assert not left.routed[2].any() and left.routed[0].any()
    scaled = reference_layer(*given, kept=kept, renormalize=True)
    assert not scaled.routed[2].any()
    for token in (0, 1, 3):  # what is left weighs as much as all that was chosen
        present = ids[token] >= 0
        factor = weights[token][present].sum() / weights[token][present & kept[token]].sum()
        assert torch.allclose(scaled.routed[token], factor * left.routed[token], atol=1e-5)
    everything = reference_layer(*given, kept=torch.ones_like(kept), renormalize=True)
    assert relative_error(everything.routed, reference_layer(*given).routed) < 1e-6


@pytest.mark.parametrize("name", PRESETS)
def test_router_weights_are_those_of_the_router(name: str) -> None:
    """Two derivations of the same formulas, from the same matrix."""
    shape = small(name)
    x, (ids, _) = 3 * inputs(shape, 9), routing(shape, 9)
    ids[0], ids[1, 0] = -1, -1
    mine = reference_router_weights(shape, x, router_weight(shape, 5, 6), ids)
    theirs = Router(shape, seed=5, layer=6).weights_for(x, ids)
    assert torch.allclose(mine, theirs, rtol=1e-5, atol=1e-7)
    assert not mine[0].any() and mine[2].all()


def finite_difference(function: object, at: Tensor, index: tuple[int, ...]) -> float:
    """Slope of function(at) along one of its values."""
    step, values = 1e-2, []
    for sign in (1, -1):
        moved = at.clone()
        moved[index] += sign * step
        values.append(function(moved))
    return (values[0] - values[1]) / (2 * step)


@pytest.mark.parametrize("name", PRESETS)
def test_gradient_of_x_is_the_slope_of_the_output(name: str) -> None:
    """Along single values of x; the router's part is in it, its choices held fast."""
    shape = small(name)
    x, (ids, _) = inputs(shape, 5), routing(shape, 5)
    ids[0], ids[1, 0] = -1, -1
    grad = torch.randn(5, shape.hidden_size, generator=torch.Generator().manual_seed(8))
    router = Router(shape, seed=5, layer=6)

    def loss(moved: Tensor) -> float:
        weights = router.weights_for(moved, ids)
        output = reference_layer(shape, 5, 6, moved, ids, weights, torch.float32)
        return (output.hidden.double() * grad.double()).sum().item()

    with torch.no_grad():
        found = reference_gradients(shape, 5, 6, x, ids, grad, torch.float32).x
        scale = found.norm(dim=1).mean().item() / shape.hidden_size**0.5
        for index in [(0, 3), (1, 0), (2, 7), (4, 31)]:
            slope = finite_difference(loss, x, index)
            assert found[index].item() == pytest.approx(slope, rel=0.02, abs=0.02 * scale)


def test_gradients_of_weights_add_up_over_tokens() -> None:
    shape = small("kimi_k3")
    x, (ids, _) = inputs(shape, 6), routing(shape, 6)
    grad = torch.randn(6, shape.hidden_size, generator=torch.Generator().manual_seed(8))

    def of(part: slice) -> dict[str, Tensor]:
        found = reference_gradients(shape, 5, 6, x[part], ids[part], grad[part], torch.float32)
        experts = found.stacked(range(shape.num_experts))
        return {"up": experts.gate_up, "down": experts.down, **found.replicated}

    whole, first, second = of(slice(0, 6)), of(slice(0, 2)), of(slice(2, 6))
    assert set(whole) == {"up", "down", "router.weight", "latent.down", "latent.up"} | {
        *("latent.gain", "shared.gate_up", "shared.down")
    }
    for name in whole:
        assert torch.allclose(whole[name], first[name] + second[name], atol=2e-4), name
        assert whole[name].any(), name
    busy = whole["down"].flatten(1).any(1).nonzero().flatten()
    assert busy.tolist() == ids.unique().tolist()  # zeros, not NaN, for all others


def test_gradients_leave_the_caller_s_tensors_alone() -> None:
    shape = small("qwen3_235b_a22b")
    with torch.inference_mode():
        x, (ids, weights) = inputs(shape, 3), routing(shape, 3)
        grad = torch.ones_like(x)
    found = reference_gradients(
        shape, 5, 6, x, ids, grad, torch.float32, topk_weights=weights, renormalize=True
    )
    assert not x.requires_grad and found.x.any()
    assert not found.router_weight.any()  # the weights were given


def test_dropped_choices_have_no_gradients() -> None:
    shape = small("qwen3_235b_a22b")
    x, (ids, _) = inputs(shape, 3), routing(shape, 3)
    kept = torch.ones_like(ids, dtype=torch.bool)
    kept[1], kept[2, 0] = False, False
    for renormalize in (False, True):
        found = reference_gradients(
            shape, 5, 6, x, ids, torch.ones_like(x), torch.float32, kept, renormalize
        )
        masked = torch.where(kept, ids, -1)
        assert sorted(found.experts) == masked[masked >= 0].unique().tolist()
        assert not found.x[1].any() and found.x[0].any() and found.x.isfinite().all()


def test_a_shard_of_the_stacked_gradients() -> None:
    shape = small("mixtral_8x7b")
    x, (ids, _) = inputs(shape, 3), routing(shape, 3)
    found = reference_gradients(shape, 5, 6, x, ids, torch.ones_like(x), torch.float32)
    experts = [3, 0, 7]
    whole, parts = found.stacked(experts), [found.stacked(experts, (i, 2)) for i in range(2)]
    assert torch.equal(torch.cat([part.down for part in parts], dim=2), whole.down)
    halves = [part.gate_up.chunk(2, dim=1) for part in parts]
    gate_up = torch.cat([gate for gate, _ in halves] + [up for _, up in halves], dim=1)
    assert torch.equal(gate_up, whole.gate_up)


def test_gradient_errors_name_the_worst_first() -> None:
    reference = {name: torch.ones(4, 3) for name in ("x", "experts.down", "latent.up")}
    measured = {name: tensor.clone() for name, tensor in reference.items()}
    measured["experts.down"][2] *= 1.5
    measured["latent.up"][2] *= 1.5  # seen against all of the matrix
    errors = gradient_errors(measured, reference)
    assert list(errors) == ["experts.down", "latent.up", "x"]
    assert errors["experts.down"] == pytest.approx(0.5) and errors["x"] == 0
    assert errors["latent.up"] == pytest.approx(0.25)
    with pytest.raises(ValueError, match="gradients of .'x'., reference of"):
        gradient_errors({"x": measured["x"]}, reference)
    with pytest.raises(ValueError, match=r"x is \(2, 3\), reference \(4, 3\)"):
        gradient_errors({**measured, "x": measured["x"][:2]}, reference)
    measured["x"][0, 0] = math.nan
    assert list(gradient_errors(measured, reference))[0] == "x"


def test_the_router_s_gradient_may_vanish() -> None:
    """One choice whose weight is divided by itself: noise, which a floor keeps from the verdict."""
    shape = small("kimi_k3", top_k=1)
    x, (ids, _) = inputs(shape, 6), routing(shape, 6)
    found = reference_gradients(shape, 5, 6, x, ids, torch.ones_like(x), torch.float32)
    assert found.router_weight.norm() < 1e-4 * found.router_floor
    noise = {"router.weight": found.router_weight + 1e-5 * found.router_floor}
    reference = {"router.weight": found.router_weight}
    assert gradient_errors(noise, reference)["router.weight"] > 0.1
    floors = {"router.weight": found.router_floor}
    assert gradient_errors(noise, reference, floors)["router.weight"] < 1e-3


def test_the_floor_is_about_the_size_of_an_ordinary_gradient() -> None:
    shape = small("deepseek_v3")
    x, (ids, _) = inputs(shape, 64), routing(shape, 64)
    found = reference_gradients(shape, 5, 6, x, ids, torch.randn(x.shape), torch.float32)
    rms = found.router_weight.norm() / shape.num_experts**0.5
    assert 0.3 * rms < found.router_floor < 3 * rms


@pytest.mark.parametrize("wires", [(2**-4, 2**-8, 2**-8), (0.0, 0.0, 0.0)])
def test_the_bound_admits_rounding_and_no_lost_gradient(wires: tuple[float, ...]) -> None:
    assert sum(wires) < gradient_bound(wires, 2**-8) < 0.5
    assert gradient_bound(wires, 2**-24) < gradient_bound(wires, 2**-8)
    assert gradient_bound([2 * wire for wire in wires], 2**-8) >= gradient_bound(wires, 2**-8)
