"""Rows between hosts: every receive is asked for before the first row is sent."""

from datetime import timedelta
from types import SimpleNamespace

import exchange_bodies
import numpy as np
import pytest
import torch

from comm.exchange import receive_first
from comm.reconcile import reconcile
from comm.spawn import run_ranks
from moe.measure import _begin


class Listing:
    """A process group that takes down what is asked of it."""

    def __init__(self, size, rank):
        self.size, self.rank = lambda: size, lambda: rank
        self.calls = []

    def recv(self, tensors, place, tag):
        self.calls.append(("recv", place, tensors[0].shape[0]))

    def send(self, tensors, place, tag):
        self.calls.append(("send", place, tensors[0].shape[0]))


def test_no_row_is_sent_before_all_are_asked_for():
    """Else the note behind the rows keeps the other end waiting: half the speed of a link."""
    group, message = Listing(4, 1), torch.arange(10, dtype=torch.uint8).view(-1, 1)
    received = torch.zeros((8, 1), dtype=torch.uint8)
    receive_first(received, message, [1, 2, 0, 5], [3, 2, 4, 1], group, timedelta(seconds=1))
    assert sorted(group.calls[:3]) == [("recv", 0, 1), ("recv", 2, 0), ("recv", 3, 5)]
    assert sorted(group.calls[3:]) == [("send", 0, 3), ("send", 2, 4), ("send", 3, 1)]
    assert received[1:3, 0].tolist() == [3, 4]  # what stays is there at once


def test_the_same_rows_arrive():
    assert run_ranks(exchange_bodies.both_ways, 3, 6) == [[True] * 6] * 3


@pytest.mark.parametrize("linked", [True, False])
def test_the_kernel_sees_the_same_messages(linked):
    logs, carried, sent = zip(*run_ranks(exchange_bodies.metered, 3, linked), strict=True)
    counted = np.stack(sent).sum(axis=tuple(range(1, sent[0].ndim)))
    verdict = reconcile(logs, carried, counted).verdict
    assert verdict.state.name == "EXACT" and "18 messages x (96 + 48) B" in verdict.reason


def test_a_rank_that_never_comes_is_given_up_in_time():
    (seconds, said), _ = run_ranks(exchange_bodies.nobody_answers, 2)
    assert 0.3 < seconds < 1.5 and "Timed out" in said


@pytest.mark.parametrize(
    ("linked", "chunks", "met"), [(True, 1, True), (True, 2, False), (False, 1, False)]
)
def test_phases_begin_together_between_hosts(linked, chunks, met):
    said = []
    world = SimpleNamespace(linked=linked, meet=lambda: said.append("met"))
    _begin(SimpleNamespace(chunks=chunks), world, said.append)("dispatch")
    assert said == ["dispatch", "met"][: 1 + met]
