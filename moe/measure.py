"""One rank's part of a run: its layers, its steps, and the log that it hands to rank 0.

warm-up steps --> loads --> experts move, where the placement is to be balanced
measured steps: forward, and in training backward, and gradients synchronised
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from comm.interfaces import Seen, watch
from comm.kernel import KernelWitness
from comm.meter import KINDS, Position, TrafficMeter
from comm.placement import ExpertPlacement
from comm.reconcile import KernelLog
from comm.report.events import EventLog
from comm.world import World, own_node
from moe.assemble import Roads, build_layers, rebalance
from moe.faults import listener
from moe.layer import LayerOutput, MoELayer, pre_norm
from moe.plan import Plan
from moe.settings import Config
from moe.synthetic import token_hidden
from moe.training import LayerGradients, backward, local_gradients, synchronise


@dataclass(frozen=True)
class LayerSample:
    """One layer of one measured step, for the reference: this rank's tokens.

    x: [T, H] what went in; routed: [T, W] and hidden: [T, H] what came out; topk_weights: [T, K]
    grad_x, grad_hidden: [T, H] gradients of what went in and came out, in training
    """

    x: Tensor
    routed: Tensor
    hidden: Tensor
    topk_weights: Tensor
    grad_x: Tensor | None = None
    grad_hidden: Tensor | None = None


@dataclass(frozen=True)
class RankLog:
    """What a rank hands over at the end.

    topk_ids: int32 [steps, L, T, K]; topk_weights: fp32, same shape
    slots: int32, same shape, the slot that served each choice (-1 none) where experts have
        replicas, else None
    placements: those of the measured steps
    samples: by layer, where the reference is wanted, else empty
    gradients: by layer, of this rank's weights after they were synchronised, in training
    num_dropped: choices that found no room, all layers and steps
    seen: of the host's network interface
    kernel: what the kernel says was sent, of the steps that the meter counted
    """

    meter: TrafficMeter
    topk_ids: np.ndarray
    topk_weights: np.ndarray
    slots: np.ndarray | None
    placements: tuple[ExpertPlacement, ...]
    samples: dict[int, LayerSample]
    num_dropped: int
    experts_seconds: float
    step_seconds: float
    seen: Seen
    kernel: KernelLog = KernelLog(reason="nobody asked")


class Stopwatch:
    """Adds up the time spent inside some modules."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._started = 0.0

    def watch(self, module: nn.Module) -> None:
        module.register_forward_pre_hook(self._start)
        module.register_forward_hook(self._stop)

    def _start(self, *_: object) -> None:
        self._started = time.perf_counter()

    def _stop(self, *_: object) -> None:
        self.seconds += time.perf_counter() - self._started


class EventWriter:
    """Turns the meter's running sums into one event for each phase as it ends."""

    def __init__(self, log: EventLog, meter: TrafficMeter) -> None:
        self.step = 0
        self._log, self._meter = log, meter
        self._sent, self._rows = meter.sent.copy(), meter.rows.copy()

    def __call__(self, position: Position, seconds: float) -> None:
        place = self._meter.place(position)
        self._log.append(
            step=self.step,
            layer=position.layer,
            phase=position.phase,
            direction=position.direction,
            rows=self._meter.rows[place] - self._rows[place],
            sent=self._meter.sent[place] - self._sent[place],
            seconds=seconds,
        )
        self._sent[place], self._rows[place] = self._meter.sent[place], self._meter.rows[place]


def measure(
    plan: Plan, world: World, folder: Path, progress: Callable[[], None] = lambda: None
) -> tuple[RankLog, dict[int, LayerGradients]]:
    """Run warm-up and measured steps; a collective. `progress` is called after each layer.

    returns: the log for rank 0, and by layer the gradients that stay here until they are asked for
    """
    config, notebook = plan.config, world.notebook
    assert notebook is not None, "comm.world.join makes one"
    meter = TrafficMeter(plan.num_layers, world.world_size, plan.directions, plan.phases)
    roads = [Roads.build(plan, world, meter) for _ in range(config.chunks)]
    run = _Run(plan, world, roads, build_layers(plan, world, roads), progress)
    witness = KernelWitness(world, roads[0].groups, _why_unseen(plan, world))
    tiers = plan.topology.tiers()[world.rank]
    with EventLog(folder, world.rank, tiers, KINDS) as log:
        meter.on_begin = _begin(config, world, listener(config.fault, world.rank, notebook, log))
        meter.enabled, notebook.warmup = False, True
        for notebook.step in range(config.warmup):
            run.warm_up(config.steps + notebook.step)
        notebook.warmup, notebook.step = False, 0
        witness.begin()
        host = own_node(world, None, os.environ)
        alone = world.local_world_size == world.world_size  # then nothing leaves this host
        seen = watch(host, lambda: None if alone else world.all_digests(""))  # which is a barrier
        meter.enabled, meter.on_phase = True, (events := EventWriter(log, meter))
        if plan.rebalances:
            placements, layers = rebalance(plan, world, roads, run.layers, run.choices())
            run = _Run(plan.placed(placements), world, roads, layers, progress)
        run.start_measuring()
        for events.step in range(config.steps):
            notebook.step = events.step
            run.step(events.step)
        meter.on_phase = meter.on_begin = None
    notebook.rest()
    return replace(run.log(meter, seen()), kernel=witness.end()), run.gradients


def _begin(
    config: Config, world: World, listener: Callable[[Position], None]
) -> Callable[[Position], None]:
    """What happens when a phase begins. Between hosts the ranks begin it together, unless chunks
    are to overlap: it then takes the time of its own rows, not that of ranks which come late, nor
    of rows that quicker ranks already send in the next phase over the same link."""
    if not world.linked or config.chunks > 1:
        return listener

    def together(position: Position) -> None:
        listener(position)
        world.meet()

    return together


def _why_unseen(plan: Plan, world: World) -> str:
    """Why the kernel need not be asked what this run sent; "" where it must be."""
    if not plan.config.kernel:
        return "kernel=false: it was not asked"
    if world.world_size == 1:
        return "one rank: nothing leaves it"
    if world.backend != "gloo":
        return f"backend={world.backend}: rows do not travel over TCP sockets of the ranks' own"
    if plan.config.dispatcher.name == "one_sided":
        return "dispatcher=one_sided: rows lie in shared memory, and no collective moves them"
    return ""


class _Run:
    """The layers of a rank and what has been seen of them."""

    def __init__(
        self,
        plan: Plan,
        world: World,
        roads: Sequence[Roads],
        layers: list[MoELayer],
        progress: Callable[[], None],
    ) -> None:
        self.plan, self.world, self.roads, self.layers = plan, world, roads, layers
        self._progress = progress
        self.gradients: dict[int, LayerGradients] = {}
        self._experts = Stopwatch()
        for layer in layers:
            self._experts.watch(layer.experts)
        self._outputs: list[list[LayerOutput]] = []  # [step][layer], without their history
        self._samples: dict[int, LayerSample] = {}
        self._seconds = 0.0

    def warm_up(self, step: int) -> None:
        """A pass that leaves no trace but the choices, in `choices`."""
        if self.plan.training:
            _, outputs = self._train(step)
        else:
            with torch.inference_mode():
                _, outputs, _ = self._forward(step)
        self._outputs.append([_without_history(out) for out in outputs])

    def choices(self) -> np.ndarray:
        """topk_ids of the passes so far: int32 [steps, L, T, K]"""
        return self._stack(lambda out: out.topk_ids, np.int32)

    def start_measuring(self) -> None:
        """Forget the warm-up."""
        self._outputs, self._experts.seconds = [], 0.0

    def step(self, step: int) -> None:
        """A measured step."""
        started = time.perf_counter()
        if self.plan.training:
            inputs, outputs = self._train(step)
        else:
            with torch.inference_mode():
                inputs, outputs, _ = self._forward(step)
        self._seconds += time.perf_counter() - started
        self._outputs.append([_without_history(out) for out in outputs])
        for index, (x, out) in enumerate(zip(inputs, outputs, strict=True)):
            if self.plan.config.reference and sampled_step(index, self.plan.config.steps) == step:
                self._samples[index] = _sample(x, out)
                if self.plan.training:
                    self.gradients[index] = local_gradients(self.layers[index])

    def log(self, meter: TrafficMeter, seen: Seen) -> RankLog:
        """What rank 0 is told."""
        return RankLog(
            meter=meter,
            topk_ids=self.choices(),
            topk_weights=self._stack(lambda out: out.topk_weights, np.float32),
            slots=self._slots(),
            placements=self.plan.placements,
            samples=self._samples,
            num_dropped=sum(out.num_dropped for step in self._outputs for out in step),
            experts_seconds=self._experts.seconds,
            step_seconds=self._seconds,
            seen=seen,
        )

    def _forward(self, step: int) -> tuple[list[Tensor], list[LayerOutput], Tensor]:
        """One forward pass of this rank's tokens: every layer's input and output, and the end."""
        plan, rank = self.plan, self.world.rank
        first, tokens = int(plan.first_token[rank]), int(plan.tokens_per_rank[rank])
        x = token_hidden(plan.config.seed, step, first, tokens, plan.shape.hidden_size)
        x = torch.from_numpy(x).to(self.world.device, plan.dtype)
        x.requires_grad_(torch.is_grad_enabled())
        inputs, outputs = [], []
        for index, layer in enumerate(self.layers):
            ids, weights = self._chosen(step, index, first, tokens)
            inputs.append(pre_norm(x))
            outputs.append(layer(inputs[-1], ids, weights, self._number(step, first)))
            x = x + outputs[-1].hidden
            self._progress()
        return inputs, outputs, x

    def _number(self, step: int, first: int) -> int:
        """Of a step's first token, by which replicas are chosen: its global number, and where
        chance decides one that no other step has, so that steps choose independently."""
        if self.plan.config.placement.replica_choice == "random":
            return first + step * int(self.plan.tokens_per_rank.sum())
        return first

    def _chosen(
        self, step: int, layer: int, first: int, tokens: int
    ) -> tuple[Tensor | None, Tensor | None]:
        """What the run's routing says of these tokens; None is left to the layer's router."""
        choice = self.plan.routing.choose(step, layer, first, tokens)
        if choice is None:
            return None, None
        ids = torch.from_numpy(choice.topk_ids).to(self.world.device)
        if choice.topk_weights is None:
            return ids, None
        return ids, torch.from_numpy(choice.topk_weights).to(self.world.device)

    def _train(self, step: int) -> tuple[list[Tensor], list[LayerOutput]]:
        """A forward and a backward pass, gradients synchronised at the end."""
        inputs, outputs, end = self._forward(step)
        backward(self.plan, self.world, self.layers, inputs, outputs, end, step)
        synchronise(self.plan, self.world, self.roads[0], self.layers)
        return inputs, outputs

    def _slots(self) -> np.ndarray | None:
        """Recorded slots [steps, L, T, K]: -1 for no expert; None where no expert has replicas."""
        placements = self.plan.placements
        if not any(placement.num_redundant_experts for placement in placements):
            return None

        def slots(placement: ExpertPlacement, out: LayerOutput) -> np.ndarray:
            if out.slots is None:  # replicas in other layers only
                return np.append(placement.logical_to_physical, -1)[out.topk_ids.cpu().numpy()]
            chosen = out.slots.cpu().numpy()
            return np.where(chosen < placement.num_slots, chosen, -1)

        steps = [list(map(slots, placements, step)) for step in self._outputs]
        return np.array(steps, dtype=np.int32)

    def _stack(self, part: Callable[[LayerOutput], Tensor], dtype: type) -> np.ndarray:
        """[steps, L, T, K]"""
        steps = [[part(out).cpu().numpy() for out in step] for step in self._outputs]
        return np.array(steps, dtype=dtype)


def sampled_step(layer: int, num_steps: int) -> int:
    """Which measured step of a layer goes to the reference: no step and no layer goes unseen."""
    return layer % num_steps


def _sample(x: Tensor, out: LayerOutput) -> LayerSample:
    return LayerSample(
        *(part.detach().cpu() for part in (x, out.routed, out.hidden, out.topk_weights)),
        grad_x=None if x.grad is None else x.grad.cpu(),
        grad_hidden=None if out.hidden.grad is None else out.hidden.grad.cpu(),
    )


def _without_history(out: LayerOutput) -> LayerOutput:
    """Ids and weights only: what a step leaves behind must not keep its graph alive."""
    return replace(
        out,
        hidden=out.hidden.detach()[:0],
        routed=out.routed.detach()[:0],
        topk_weights=out.topk_weights.detach(),
    )
