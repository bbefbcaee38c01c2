"""Routing that was recorded: token by token (Replay), or as counts of each expert (CountDriven).

Legend: L layers of the run, K = top_k, E experts. Layer l of a run takes layer l % (layers of the
trace). Tokens of a run, step after step, take the tokens of the trace in order, and from the start
again where it ends; which rank holds a token does not matter, so a recorded run replays equally on
any number of ranks. What was found in the file and what was made of it is in `notes`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from comm.analytic.law import NoLaw
from moe.routing.base import Choice, IntArray, RoutingContext, RoutingSource
from moe.routing.product import ProductSource
from moe.routing.weighted import FloatArray, inclusion, rounded
from moe.traces import CountTrace, RouterTrace, read_trace
from moe.traces.rules import numbers

FIT_TOLERANCE = 1e-9
FIT_ROUNDS = 2000
CERTAIN = 1 - 1e-6  # a chance of 1 would need an infinite weight


class Replay(RoutingSource):
    """The choices of a trace, with its weights where it has them."""

    def __init__(self, context: RoutingContext, trace: RouterTrace | None = None) -> None:
        """trace: instead of the file router.path. ValueError where file and run do not fit."""
        super().__init__(context)
        if trace is None:
            read = _read(context, "replay")
            if isinstance(read, CountTrace):
                raise ValueError(
                    f"router=replay: {read.source} has counts, not the experts of each token;"
                    " use router=counts"
                )
            trace = read
        _check_size("replay", context, trace.source, trace.num_experts, trace.top_k)
        if trace.num_experts is None and trace.topk_ids.max() >= context.num_experts:
            raise ValueError(
                f"router=replay: {trace.source} has id {trace.topk_ids.max()}, the model"
                f" num_experts={context.num_experts}; take a trace of this model"
            )
        self.trace = trace
        self.notes = (*trace.notes, *_layer_notes(context, trace.layer_numbers), self._supply())

    def choose(self, step: int, layer: int, first_token: int, num_tokens: int) -> Choice:
        """Token g of a step takes token (step * tokens of a step + g) % tokens of the trace."""
        trace = self.trace
        first = step * self.context.num_tokens + first_token
        rows = np.arange(first, first + num_tokens) % trace.num_tokens
        source = layer % trace.num_layers
        weights = trace.topk_weights
        return Choice(
            trace.topk_ids[source, rows], None if weights is None else weights[source, rows]
        )

    @property
    def law(self) -> NoLaw:
        return NoLaw("replayed routing follows no law")

    def active_tokens(self, step: int, layer: int) -> IntArray:
        active = (self.choose(step, layer, 0, self.context.num_tokens).topk_ids >= 0).any(axis=1)
        before = np.concatenate([[0], np.cumsum(active)])
        ends = np.cumsum(self.context.tokens_per_rank)
        return before[ends] - before[ends - self.context.tokens_per_rank]

    def _supply(self) -> str:
        """How the tokens of the trace serve those of the run."""
        needed, there = self.context.num_steps * self.context.num_tokens, self.trace.num_tokens
        if needed > there:
            return (
                f"the trace has {there} tokens, the run needs {needed}: it starts over, a token"
                f" serves up to {-(-needed // there)} times"
            )
        return f"the first {needed} of the trace's {there} tokens are replayed"


class CountDriven(ProductSource):
    """Random choices in which each expert has the share that it has in recorded counts.

    Sets of K experts are as likely as the product of their weights, and the weights are those that
    give every expert the chance K * count / sum of counts to be in a token's set.
    """

    def __init__(self, context: RoutingContext, trace: CountTrace | None = None) -> None:
        """trace: instead of the file router.path. ValueError where file and run do not fit."""
        super().__init__(context)
        notes = []
        if trace is None:
            read = _read(context, "counts")
            if isinstance(read, RouterTrace):
                counts, source = _counted(read, context.num_experts), read.source
                notes += [*read.notes, "choices of each token counted, their order is not kept"]
            else:
                counts, source = read.counts, read.source
                notes += read.notes
            layer_numbers: Sequence[int] = read.layer_numbers
        else:
            counts, source, layer_numbers = trace.counts, trace.source, trace.layer_numbers
            notes += trace.notes
        _check_size("counts", context, source, counts.shape[1], None)
        used = min(context.num_layers, len(counts))
        rows = []
        for layer in range(used):
            chances, found = target_chances(counts[layer], context.top_k)
            rows.append(rounded(fit_weights(chances, context.top_k)))
            notes += [f"layer {layer_numbers[layer]}: {note}" for note in found]
        self._weights = np.stack(rows)
        self.notes = (*notes, *_layer_notes(context, layer_numbers))

    def weights(self, step: int, layer: int) -> FloatArray:
        return self._weights[layer % len(self._weights)]


def target_chances(counts: IntArray, top_k: int) -> tuple[FloatArray, list[str]]:
    """[E] chances of an expert to be in a token's set, sum K, none above CERTAIN, from counts [E].

    A chance above 1 cannot be: what is over goes to the other experts in proportion. Where fewer
    than K experts were ever chosen, the rest is spread evenly over those that were not.
    returns: the chances, and a note for each thing that had to be bent
    """
    positive = int((counts > 0).sum())
    if top_k == len(counts):
        return np.ones(top_k), [f"K is the number of experts, {top_k}: all certain"]
    if not positive:
        return np.full(len(counts), top_k / len(counts)), ["no counts: all experts alike"]
    chances = counts * (top_k / counts.sum())
    if positive == top_k:
        return (counts > 0).astype(np.float64), [
            f"only K = {top_k} experts have counts: all certain"
        ]
    over = chances > CERTAIN
    if not over.any():
        return chances, []
    notes = [
        f"{over.sum()} experts were chosen by every token or more (most: {chances.max():.4f} of"
        f" 1): held at {CERTAIN}, the rest shared out"
    ]
    if positive < top_k:
        notes = [
            f"only {positive} experts have counts, fewer than K = {top_k}: others share the rest"
        ]
    while over.any():
        chances[over] = CERTAIN
        free = chances < CERTAIN
        missing = top_k - CERTAIN * (~free).sum()
        share = chances[free] if chances[free].any() else np.ones(free.sum())
        chances[free] = share * (missing / share.sum())
        over = chances > CERTAIN
    return chances, notes


def fit_weights(chances: FloatArray, top_k: int) -> FloatArray:
    """Weights [E] under which an expert is in a set of K with the given chance, to FIT_TOLERANCE.

    A weight is an expert's odds, but for the condition that K are chosen; each round corrects the
    odds by the factor that they are off. The largest weight is 1.
    """
    positive = chances > 0
    weights = np.zeros(len(chances))
    if positive.sum() == top_k:
        weights[positive] = 1.0
        return weights
    wanted = chances[positive]
    odds = wanted / (1 - wanted)
    fitted, power, error = odds / odds.max(), 1.0, np.inf
    for _ in range(FIT_ROUNDS):
        reached = inclusion(fitted, top_k)
        before, error = error, float(np.abs(reached - wanted).max())
        if error < FIT_TOLERANCE:
            break
        if error > before / 2:  # few experts: the condition makes full corrections overshoot
            power = 0.5
        fitted = fitted * (odds * (1 - reached) / reached) ** power
        fitted = fitted / fitted.max()
    else:
        raise ValueError(
            f"router=counts: no weights found that give these counts with top_k={top_k} (off by"
            f" {error:.1e}); take counts of more tokens"
        )
    weights[positive] = fitted
    return weights


def _read(context: RoutingContext, router: str) -> RouterTrace | CountTrace:
    options = context.options
    if not options.path:
        raise ValueError(f"router.path={options.path}: router={router} needs a file to read")
    return read_trace(
        options.path,
        options.format,
        num_experts=context.num_experts,
        top_k=context.top_k,
        skip_rows=options.skip_rows,
    )


def _check_size(
    router: str, context: RoutingContext, source: str, num_experts: int | None, top_k: int | None
) -> None:
    for name, found in (("num_experts", num_experts), ("top_k", top_k)):
        wanted = getattr(context, name)
        if found is not None and found != wanted:
            raise ValueError(
                f"router={router}: {source} has {name}={found}, the model {name}={wanted}; take a"
                f" trace of this model, or a model with {name}={found}"
            )


def _layer_notes(context: RoutingContext, layer_numbers: Sequence[int]) -> tuple[str, ...]:
    there, wanted = len(layer_numbers), context.num_layers
    if there == wanted:
        return ()
    if there > wanted:
        return (f"layers {numbers(layer_numbers[:wanted])} of the trace's {there} are used",)
    return (f"the trace has {there} layers, the run {wanted}: layer l takes layer l % {there}",)


def _counted(trace: RouterTrace, num_experts: int) -> IntArray:
    """int64 [L, E]"""
    return np.stack([np.bincount(ids[ids >= 0], minlength=num_experts) for ids in trace.topk_ids])
