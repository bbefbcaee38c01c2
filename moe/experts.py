"""Weights made from the seed, and the experts of one rank.

A weight depends on (seed, layer, logical expert) and on its shape, not on ranks or placement: an
expert that moves to another rank takes its numbers along.

Where several ranks share each expert, shard i of n holds the i-th of n parts of the inner width,
as even as can be: those rows of gate and up, those columns of down. The parts' outputs sum to the
whole.

M rows, W payload width, I inner width of an expert (or of a shard), E_local experts of this rank.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moe.model import ModelShape
from moe.philox import Purpose, random_words

# A gated unit passes about 0.6 of the deviation of a standard normal input: 0.596 SwiGLU, 0.564
# SiTU-GLU. The matrix after it makes up for that, so that an expert neither shrinks nor blows up.
_AFTER_GATE = 1.7

SITU_GATE_BOUND = 4.0
SITU_UP_BOUND = 25.0


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(gate) * up


def situ_glu(gate: Tensor, up: Tensor) -> Tensor:
    """SwiGLU with both branches bent by a tanh to stay within +-4 and +-25; in fp32, as Kimi K3."""
    gate32, up32 = gate.float(), up.float()
    bounded_gate = SITU_GATE_BOUND * torch.tanh(gate32 / SITU_GATE_BOUND) * torch.sigmoid(gate32)
    bounded_up = SITU_UP_BOUND * torch.tanh(up32 / SITU_UP_BOUND)
    return (bounded_gate * bounded_up).to(gate.dtype)


ACTIVATIONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "swiglu": swiglu,
    "situ_glu": situ_glu,
}


class ExpertWeights(NamedTuple):
    """gate_up: [2 I, W], the gate's rows first; down: [W, I]"""

    gate_up: Tensor
    down: Tensor


def seeded_weight(
    seed: int, purpose: Purpose, layer: int, index: int, shape: Sequence[int], std: float
) -> Tensor:
    """fp32 weight on the CPU: uniform, mean 0, deviation std, made of 24 random bits a value.

    Uniform rather than normal: no logarithm or cosine whose last bit depends on the machine.
    """
    count = math.prod(shape)
    bits = random_words(seed, purpose, layer, index, -(-count // 2)).view(np.uint32)[:count]
    values = (bits >> np.uint32(8)).astype(np.float32)
    bound = math.sqrt(3) * std
    values *= np.float32(bound * 2**-23)
    values -= np.float32(bound)
    return torch.from_numpy(values.reshape(tuple(shape)))


def gated_mlp_weights(
    seed: int, purpose: Purpose, layer: int, index: int, width: int, inner: int
) -> ExpertWeights:
    """fp32 weights of width -> inner -> width; deviation of the output about that of the input."""
    count = 3 * width * inner
    unit = seeded_weight(seed, purpose, layer, index, (count,), 1.0)
    gate_up, down = unit.split([2 * width * inner, width * inner])
    return ExpertWeights(
        gate_up.view(2 * inner, width) / math.sqrt(width),
        down.view(width, inner) * (_AFTER_GATE / math.sqrt(inner)),
    )


def expert_weights(shape: ModelShape, seed: int, layer: int, expert: int) -> ExpertWeights:
    """fp32 weights of one routed expert, named by its logical id."""
    return gated_mlp_weights(
        seed, Purpose.EXPERT, layer, expert, shape.payload_width, shape.intermediate_size
    )


def shard_bounds(inner: int, shard: tuple[int, int]) -> tuple[int, int]:
    """First and last + 1 of the inner values of shard (index, count); the first shards are longer.

    Raises ValueError for a shard that does not exist.
    """
    index, count = shard
    if not 0 <= index < count:
        raise ValueError(f"shard {index} of {count}: must lie in 0 .. {count - 1}")
    base, longer = divmod(inner, count)
    start = index * base + min(index, longer)
    return start, start + base + (index < longer)


def shard_of(weights: ExpertWeights, shard: tuple[int, int]) -> ExpertWeights:
    """The part of an expert's weights (or of their gradients) that shard (index, count) holds.

    weights: [..., 2 I, W] and [..., W, I]
    """
    start, end = shard_bounds(weights.down.shape[-1], shard)
    gate, up = weights.gate_up.chunk(2, dim=-2)
    return ExpertWeights(
        torch.cat([gate[..., start:end, :], up[..., start:end, :]], dim=-2),
        weights.down[..., start:end],
    )


def router_weight(shape: ModelShape, seed: int, layer: int) -> Tensor:
    """fp32 [E, H]; logits of ordinary inputs have deviation 1."""
    size = (shape.num_experts, shape.hidden_size)
    return seeded_weight(seed, Purpose.ROUTER, layer, 0, size, shape.hidden_size**-0.5)


def shared_weights(shape: ModelShape, seed: int, layer: int) -> ExpertWeights:
    """fp32 weights of all shared experts, fused into one MLP of the full hidden width."""
    return gated_mlp_weights(
        seed, Purpose.SHARED, layer, 0, shape.hidden_size, shape.shared_intermediate_size
    )


def latent_weights(shape: ModelShape, seed: int, layer: int) -> tuple[Tensor, Tensor]:
    """fp32 W_down [W, H] and W_up [H, W]; each keeps the deviation of its input."""
    hidden, width = shape.hidden_size, shape.payload_width
    return (
        seeded_weight(seed, Purpose.LATENT_DOWN, layer, 0, (width, hidden), hidden**-0.5),
        seeded_weight(seed, Purpose.LATENT_UP, layer, 0, (hidden, width), width**-0.5),
    )


class Experts(nn.Module):
    """The experts of one rank, in slot order.

    experts: logical ids; may be empty (more ranks than experts)
    dtype: of weights and arithmetic; the weights are rounded to it from fp32
    shard: (index, count) where this rank holds a part of each expert and gives partial outputs
    """

    def __init__(
        self,
        shape: ModelShape,
        experts: Sequence[int],
        *,
        seed: int,
        layer: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        shard: tuple[int, int] = (0, 1),
    ) -> None:
        super().__init__()
        start, end = shard_bounds(shape.intermediate_size, shard)
        width, inner = shape.payload_width, end - start
        self.activation = ACTIVATIONS[shape.activation]
        self.gate_up = _empty(len(experts), 2 * inner, width, dtype, device)
        self.down = _empty(len(experts), width, inner, dtype, device)
        with torch.no_grad():
            for slot, expert in enumerate(experts):
                weights = shard_of(expert_weights(shape, seed, layer, int(expert)), shard)
                self.gate_up[slot] = weights.gate_up
                self.down[slot] = weights.down

    def forward(self, expert_input: Tensor, tokens_per_expert: Tensor) -> Tensor:
        """Apply each expert to its rows.

        expert_input: [M, W] expert-major, in slot order; overwritten with the result in inference
            mode, so that what comes back to the dispatcher lies where it has put the rows
        tokens_per_expert: int64 [E_local] on the CPU, sums to M
        returns: [M, W], same order
        """
        counts = tokens_per_expert.tolist()
        if not counts:
            # No experts here, hence no rows; the sums of nothing keep the weights in the graph.
            return expert_input + (self.gate_up.sum() + self.down.sum())
        # unbind: one backward for the whole stack, and zero gradients for experts without rows
        gate_up, down = self.gate_up.unbind(), self.down.unbind()
        busy = [expert for expert, count in enumerate(counts) if count]
        outputs = [
            F.linear(
                self.activation(*F.linear(rows, gate_up[expert]).chunk(2, dim=-1)), down[expert]
            )
            for expert, rows in zip(
                # one idle expert on no rows keeps the weights in the graph when nothing arrived
                busy or [0],
                expert_input.split([counts[expert] for expert in busy] or [0]),
                strict=True,
            )
        ]
        in_place = torch.is_inference_mode_enabled() and expert_input.dtype == self.down.dtype
        return torch.cat(outputs, out=expert_input if in_place else None)


class IdentityExperts(nn.Module):
    """Experts that cost nothing: what goes in comes out, so that only communication is timed."""

    def forward(self, expert_input: Tensor, tokens_per_expert: Tensor) -> Tensor:
        return expert_input


def _empty(
    count: int, rows: int, columns: int, dtype: torch.dtype, device: torch.device | str
) -> nn.Parameter:
    return nn.Parameter(torch.empty(count, rows, columns, dtype=dtype, device=device))
