"""One rank's part of a run: its layers, its steps, and the log that it hands to rank 0."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from comm.dispatch import build_dispatcher
from comm.dispatch.base import DispatchSetup
from comm.meter import KINDS, Position, TrafficMeter
from comm.report.events import EventLog
from comm.transport import Transport
from comm.wire import WIRE_FORMATS
from comm.world import World
from moe.experts import Experts
from moe.layer import LayerOutput, MoELayer, pre_norm
from moe.plan import Plan
from moe.synthetic import ROUTERS, token_hidden


@dataclass(frozen=True)
class LayerSample:
    """One layer of one measured step, for the reference: this rank's tokens.

    x: [T, H] what went in; routed: [T, W] and hidden: [T, H] what came out; topk_weights: [T, K]
    """

    x: Tensor
    routed: Tensor
    hidden: Tensor
    topk_weights: Tensor


@dataclass(frozen=True)
class RankLog:
    """What a rank hands over at the end.

    topk_ids: int32 [steps, L, T, K]; topk_weights: fp32, same shape
    samples: by layer, where the reference is wanted, else empty
    """

    meter: TrafficMeter
    topk_ids: np.ndarray
    topk_weights: np.ndarray
    samples: dict[int, LayerSample]
    experts_seconds: float
    step_seconds: float


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


def build_layers(plan: Plan, world: World, transport: Transport) -> list[MoELayer]:
    """This rank's share of every layer."""
    config, seed = plan.config, plan.config.seed
    layers = []
    for index in range(plan.num_layers):
        setup = DispatchSetup(
            transport=transport,
            placement=plan.placement,
            wire_dispatch=WIRE_FORMATS[config.wire.dispatch],
            wire_combine=WIRE_FORMATS[config.wire.combine],
            layer=index,
            width=plan.shape.payload_width,
            top_k=plan.shape.top_k,
            dtype=plan.dtype,
        )
        made = {"seed": seed, "layer": index, "dtype": plan.dtype, "device": world.device}
        experts = Experts(plan.shape, plan.placement.local_experts(world.rank).tolist(), **made)
        dispatcher = build_dispatcher(config.dispatcher.name, setup)
        layers.append(MoELayer(plan.shape, experts, dispatcher, **made))
    return layers


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
) -> RankLog:
    """Run warm-up and measured steps; a collective. `progress` is called after each layer."""
    config = plan.config
    meter = TrafficMeter(plan.num_layers, world.world_size)
    layers = build_layers(plan, world, Transport(world, meter))
    experts = Stopwatch()
    for layer in layers:
        experts.watch(layer.experts)

    tiers = plan.topology.tiers()[world.rank]
    topk_ids, topk_weights = [], []
    samples: dict[int, LayerSample] = {}
    step_seconds = 0.0
    with EventLog(folder, world.rank, tiers, KINDS) as log, torch.inference_mode():
        meter.enabled = False
        for step in range(config.warmup):
            _forward(plan, world, layers, config.steps + step, progress)
        meter.enabled, meter.on_phase = True, (events := EventWriter(log, meter))
        experts.seconds = 0.0
        for events.step in range(config.steps):
            started = time.perf_counter()
            inputs, outputs = _forward(plan, world, layers, events.step, progress)
            step_seconds += time.perf_counter() - started
            topk_ids.append(_stack([out.topk_ids for out in outputs], np.int32))
            topk_weights.append(_stack([out.topk_weights for out in outputs], np.float32))
            for layer, (x, out) in enumerate(zip(inputs, outputs, strict=True)):
                if config.reference and sampled_step(layer, config.steps) == events.step:
                    samples[layer] = _sample(x, out)
        meter.on_phase = None
    return RankLog(
        meter=meter,
        topk_ids=np.stack(topk_ids),
        topk_weights=np.stack(topk_weights),
        samples=samples,
        experts_seconds=experts.seconds,
        step_seconds=step_seconds,
    )


def _forward(
    plan: Plan,
    world: World,
    layers: list[MoELayer],
    step: int,
    progress: Callable[[], None],
) -> tuple[list[Tensor], list[LayerOutput]]:
    """One forward pass of this rank's tokens: every layer's input and output."""
    seed, shape = plan.config.seed, plan.shape
    first, tokens = int(plan.first_token[world.rank]), int(plan.tokens_per_rank[world.rank])
    choose = ROUTERS[plan.config.router.name].choose
    x = torch.from_numpy(token_hidden(seed, step, first, tokens, shape.hidden_size))
    x = x.to(world.device, plan.dtype)
    inputs, outputs = [], []
    for index, layer in enumerate(layers):
        ids = None
        if choose is not None:
            chosen = choose(seed, step, index, first, tokens, shape.num_experts, shape.top_k)
            ids = torch.from_numpy(chosen).to(world.device)
        inputs.append(pre_norm(x))
        outputs.append(layer(inputs[-1], ids))
        x = x + outputs[-1].hidden
        progress()
    return inputs, outputs


def sampled_step(layer: int, num_steps: int) -> int:
    """Which measured step of a layer goes to the reference: no step and no layer goes unseen."""
    return layer % num_steps


def _sample(x: Tensor, out: LayerOutput) -> LayerSample:
    return LayerSample(x.cpu(), out.routed.cpu(), out.hidden.cpu(), out.topk_weights.cpu())


def _stack(tensors: list[Tensor], dtype: type) -> np.ndarray:
    """[L] tensors [T, K] -> [L, T, K]"""
    return np.stack([tensor.cpu().numpy().astype(dtype) for tensor in tensors])
