"""What test_one_sided.py runs on ranks about memory that is lent to experts."""

from __future__ import annotations

import torch
from one_sided_bodies import setup_of, transport_of
from rank_bodies import batch

from comm.dispatch import build_dispatcher
from moe.overlap import routed


class Lending:
    """A dispatcher that combines to the tokens it was given, when the experts change nothing."""

    def __init__(self, world, num_experts, wires=("fp32",) * 3):
        self.world, self.num_experts = world, num_experts
        setup = setup_of(world, transport_of(world), wires, 2, 8, num_experts, False)
        self.dispatcher, self.window = build_dispatcher("one_sided", setup), setup.transport.window

    def batch(self, tokens):
        hidden, ids, weights = batch(self.world, tokens, 2, 8, self.num_experts)
        return hidden + tokens, ids, torch.full_like(weights, 0.5)  # another batch, other values

    def arrive(self, tokens):
        """What a dispatch gives, and what its combine should."""
        mine = self.batch(tokens)
        return self.dispatcher.dispatch(*mine), mine[0]

    def back(self, rows, arrived, wanted):
        return torch.equal(self.dispatcher.combine(rows, arrived.handle), wanted)

    def refuses(self, rows, arrived):
        try:
            self.dispatcher.combine(rows, arrived.handle)
        except RuntimeError as error:
            return "lent to an earlier dispatch" in str(error)
        return not rows.numel() or "taken"

    def lent(self, rows):
        whole = self.window._bytes
        behind = rows.data_ptr() - whole.data_ptr()
        return not rows.numel() or 0 <= behind < whole.numel()


def lent_memory(world, num_experts):
    """What may be done with lent memory: does it go right, by name?"""
    lending, right = Lending(world, num_experts), {}
    with torch.inference_mode():
        for tokens in (5, 400, 3, 2000, 0, 1):  # grows, and is ragged
            arrived, wanted = lending.arrive(tokens + world.rank)
            rows = arrived.expert_input
            right[f"lent {tokens}"] = lending.lent(rows) and lending.back(rows, arrived, wanted)
            arrived, wanted = lending.arrive(tokens + world.rank)
            rows = 2 * arrived.expert_input
            arrived.expert_input.fill_(torch.nan)
            right[f"copied {tokens}"] = lending.back(rows, arrived, 2 * wanted)
            arrived, wanted = lending.arrive(tokens + world.rank)
            rows = arrived.expert_input.mul_(4)
            right[f"in place {tokens}"] = lending.back(rows, arrived, 4 * wanted)
            answers = lending.window.table("answers", 32)[
                world.rank * lending.window.stride("answers", 32) :
            ]
            right[f"not moved {tokens}"] = not len(rows) or rows.data_ptr() == answers.data_ptr()
    return right


def outdated_memory(world, num_experts):
    """What was lent before another round began is refused; a copy of it is not. By name."""
    lending, right = Lending(world, num_experts), {}
    with torch.inference_mode():
        first, wanted = lending.arrive(6)
        copy = first.expert_input.clone()
        second, wanted_second = lending.arrive(9)
        copy_of_second = second.expert_input.clone()
        right["first after second"] = lending.refuses(first.expert_input, first)
        right["first's for second"] = lending.refuses(first.expert_input, second)
        right["second's for first"] = lending.refuses(second.expert_input, first)
        right["copy of first"] = lending.back(copy, first, wanted)
        right["second after a combine"] = lending.refuses(second.expert_input, second)
        right["copy of second"] = lending.back(copy_of_second, second, wanted_second)
        first, _ = lending.arrive(6)
        lending.arrive(7)
        third, wanted = lending.arrive(6)  # where the first was
        right["first after third"] = lending.refuses(first.expert_input, first)
        right["third"] = lending.back(third.expert_input, third, wanted)
        right["twice"] = lending.refuses(third.expert_input, third)
        right["kept by nobody"] = lending.back(*_again(lending))
    return right


def _again(lending):
    arrived, wanted = lending.arrive(4)
    return arrived.expert_input, arrived, wanted


def not_lent(world):
    """Where nothing may be lent: does anything lie in the window? By name."""
    found = {}
    for name in ("no grad", "training", "converted forth", "converted back"):
        forth = "bf16" if name == "converted forth" else "fp32"
        back = "bf16" if name == "converted back" else "fp32"
        lending = Lending(world, 12, (forth, back, "fp32"))
        hidden, ids, weights = lending.batch(9)
        with torch.inference_mode(name.startswith("converted")):
            hidden = hidden.clone().requires_grad_(name == "training")
            arrived = lending.dispatcher.dispatch(hidden, ids, weights)
            later = lending.dispatcher.dispatch(hidden, ids, weights)
            kept = arrived.expert_input.clone()
            lending.dispatcher.combine(arrived.expert_input, arrived.handle)
            lending.dispatcher.combine(later.expert_input, later.handle)
            same = torch.equal(kept, arrived.expert_input)
            found[name] = lending.lent(arrived.expert_input) or not same
    return found


def lent_to_chunks(world, chunks):
    """Chunks in flight together, each on its own window, through experts that write in place."""
    lending = [Lending(world, 3 * world.world_size) for _ in range(chunks)]
    parts = [one.batch(3 + number + world.rank) for number, one in enumerate(lending)]
    z, ids, weights = (torch.cat(part) for part in zip(*parts, strict=True))
    with torch.inference_mode():
        output, _ = routed(
            [one.dispatcher for one in lending], lambda rows, counts: rows.mul_(2), z, ids, weights
        )
    return torch.equal(output, 2 * z)
