"""Counted bytes against the kernel's own, on real sockets; and systems that cannot be asked."""

from __future__ import annotations

import os
import socket
import struct
import sys
from dataclasses import replace

import kernel_bodies
import numpy as np
import pytest
from emulate_runs import Runs
from kernel_bodies import kernel_runs

from comm import kernel, tcp
from comm.reconcile import GroupLog, KernelLog, Law, calibration, reconcile
from comm.spawn import run_ranks

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="TCP_INFO is Linux's")

RUNS = kernel_runs()
UNSEEN = {"one_sided": "shared memory", "not asked": "kernel=false", "alone": "one rank"}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    return Runs(tmp_path_factory.mktemp("runs"), RUNS)


def verdict_of(run):
    return next(one for one in run.record["verdicts"] if one["name"] == "kernel")


# -- whole runs ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [name for name in RUNS if name not in UNSEEN])
def test_every_pair_agrees(runs, name):
    run = runs[name]
    verdict, summary = verdict_of(run), run.record["kernel"]
    assert verdict["state"] == "EXACT" and run.status == 0, verdict
    away = ~np.eye(RUNS[name].ranks, dtype=bool)
    counted = run.traffic["bytes"].sum(axis=(0, 1, 2, 3))[away].sum()
    assert sum(group["payload_bytes"] for group in summary["groups"]) == counted
    overhead = summary["message_bytes"] + summary["answer_bytes"]
    messages = sum(group["messages"] for group in summary["groups"])
    assert verdict["measured"] == run.traffic["acked"].sum() == counted + overhead * messages


def test_each_group_has_connections_of_its_own(runs):
    def groups(name):
        return [group["ranks"] for group in runs[name].record["kernel"]["groups"]]

    assert groups("two_hop") == [[*range(8)], [0, 2, 4, 6], [1, 3, 5, 7]]
    assert groups("rank_dedup") == [[*range(8)]]
    assert [0, 1, 2, 3] in groups("groups in training")
    assert {2, 4} <= {len(ranks) for ranks in groups("shared experts")}
    used = [group["messages"] for group in runs["two_hop"].record["kernel"]["groups"]]
    assert all(used)


def test_one_message_along_each_pair_and_collective(runs):
    """Nothing is left out because it is empty: rank 2 has no tokens."""
    record = runs["all_to_all"].record
    assert RUNS["all_to_all"].tokens[2] == 0
    (group,) = record["kernel"]["groups"]
    assert group["messages"] == 8 * 7 * record["collectives"]


@pytest.mark.parametrize("name", UNSEEN)
def test_what_cannot_be_seen_is_said_and_neutral(runs, name):
    run = runs[name]
    verdict = verdict_of(run)
    assert verdict["state"] == "NOT_AVAILABLE" and UNSEEN[name] in verdict["reason"]
    assert run.status == 0 and run.record["kernel"] is None and "acked" not in run.traffic


def test_the_page_names_the_verdict(runs):
    lines = runs["rank_dedup"].page.splitlines()
    assert any(line.startswith("  kernel       EXACT") for line in lines)


def test_gloo_that_connects_late():
    """TORCH_GLOO_LAZY_INIT: two ranks are connected when the first message is sent."""
    logs = run_ranks(kernel_bodies.lazily, 3)
    carried = [{1: np.zeros((2, 3), np.int64)}] * 3
    assert reconcile(logs, carried, np.zeros((3, 3), np.int64)).verdict.state == "EXACT"


# -- what goes wrong on the wire -------------------------------------------------------------------


def test_a_connection_is_read_when_it_is_settled():
    """A peer that does not read: bytes stay unsent, and no number is made of them."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        near = socket.create_connection(server.getsockname())
        far, _ = server.accept()
        with near, far:
            start = tcp.read_info(near.fileno()).acked
            near.sendall(b"x" * 1000)
            assert kernel.read_settled([near.fileno()]) == {near.fileno(): start + 1000}
            near.setblocking(False)
            with pytest.raises(BlockingIOError):
                while True:
                    near.send(b"x" * 1_000_000)
            with pytest.raises(TimeoutError, match="B unsent and .* segments unacknowledged"):
                kernel.read_settled([near.fileno()], within_s=0.1)
            assert tcp.addresses(near.fileno()) == tcp.addresses(far.fileno())[::-1]


def test_own_sockets_are_found_and_stay_open():
    before = tcp.own_sockets()
    with socket.create_server(("127.0.0.1", 0)) as server, open(os.devnull) as file:
        assert {fd for fd, _ in tcp.own_sockets() - before} == {server.fileno()}
        assert tcp.addresses(server.fileno()) is None  # it listens
        assert tcp.addresses(file.fileno()) is None
        assert server.getsockname()[1] > 0


@pytest.mark.parametrize("fail", ["short", "hidden", "elsewhere"])
def test_ranks_that_cannot_be_asked(fail):
    """Where one rank has no counters, none is read on any, and nobody waits."""
    logs = run_ranks(kernel_bodies.witness, 3, fail)
    words = {
        "short": "counters end at 1000 B",
        "hidden": "was found to lead to",
        "elsewhere": "darwin",
    }
    assert {log.reason for log in logs} == {logs[0].reason} and words[fail] in logs[0].reason
    assert reconcile(logs, [{}] * 3, np.zeros((3, 3), np.int64)).verdict.state == "NOT_AVAILABLE"


def test_a_rank_whose_reading_fails_holds_up_nobody():
    logs = run_ranks(kernel_bodies.witness, 3, "stuck")
    assert [bool(log.reason) for log in logs] == [False, True, False]
    verdict = reconcile(logs, [{}] * 3, np.zeros((3, 3), np.int64)).verdict
    assert verdict.state == "NOT_AVAILABLE" and "rank 1: 7 B unsent" in verdict.reason


# -- tcp_info --------------------------------------------------------------------------------------


def test_fields_of_tcp_info_lie_where_linux_has_them():
    raw = bytearray(232)
    for offset, form, value in [(24, "I", 3), (120, "Q", 1 << 40), (128, "Q", 5), (144, "I", 7)]:
        struct.pack_into(form, raw, offset, value)
    info = tcp.parse_info(bytes(raw))
    assert (info.acked, info.received, info.unacked, info.unsent) == (1 << 40, 5, 3, 7)
    assert not info.settled and replace(info, unacked=0, unsent=0).settled
    assert not replace(info, unacked=0).settled and not replace(info, unsent=0).settled
    assert tcp.parse_info(bytes(raw[:148])) == info
    struct.pack_into("Q", raw, 208, 9)
    assert tcp.parse_info(bytes(raw)) == replace(info, resent=9)
    assert tcp.parse_info(bytes(raw[:215])) == info  # before Linux 4.19
    with pytest.raises(ValueError, match="has 147 B, and the counters end at 148 B"):
        tcp.parse_info(bytes(raw[:147]))


def test_what_is_sent_once_more_to_other_hosts(monkeypatch):
    ends = {3: ("a 1", "b 1"), 4: ("a 1", "a 2"), 5: None, 6: ("a 3", "c 1"), 7: ("a 4", "b 2")}

    def read(fd):
        if fd == 6:
            raise OSError("closed meanwhile")
        return tcp.TcpInfo(0, 0, 0, 0, resent=10**fd)

    monkeypatch.setattr(tcp, "own_sockets", lambda: {(fd, "") for fd in ends})
    monkeypatch.setattr(tcp, "addresses", ends.get)
    monkeypatch.setattr(tcp, "read_info", read)
    assert tcp.resent_bytes() == 10**3 + 10**7


def test_acknowledgements_that_are_held_back_are_let_go():
    """A reading would wait for them, 40 ms each."""
    with socket.create_server(("127.0.0.1", 0)) as server, socket.socket() as near:
        near.connect(server.getsockname())
        held = socket.IPPROTO_TCP, socket.TCP_QUICKACK
        for read, lets_go in [(tcp.read_info, 0), (lambda fd: kernel.read_settled([fd]), 1)]:
            near.setsockopt(*held, 0)
            read(near.fileno())
            assert near.getsockopt(*held) == lets_go


def test_other_systems_are_named(monkeypatch):
    monkeypatch.setattr(tcp.sys, "platform", "darwin")
    assert tcp.why_unsupported() == "darwin has no TCP_INFO as Linux has it"


# -- the law ---------------------------------------------------------------------------------------

LAW = Law(100, 40)  # not what gloo has: nothing is written into the code


def world_of(size, law=LAW):
    """Logs and carried bytes of ranks that all are in one group and sent what they booked."""
    payload = 10 * np.arange(size * size).reshape(size, size)
    np.fill_diagonal(payload, 0)
    messages = np.full((size, size), 3) - 3 * np.eye(size, dtype=int)
    known = calibration(size)
    acked = payload + law.per_message * messages + law.per_answer * messages.T
    calibrated = law.acked(known)
    ranks = tuple(range(size))
    logs = [
        KernelLog((GroupLog(0, ranks, calibrated[rank].copy(), acked[rank].copy()),))
        for rank in ranks
    ]
    carried = [{0: np.stack([payload[rank], messages[rank]])} for rank in ranks]
    return logs, carried, payload


@pytest.mark.parametrize("size", [2, 5])
def test_constants_are_found_by_calibration(size):
    for law in (LAW, Law(96, 48), Law(0, 0)):
        found = reconcile(*world_of(size, law))
        assert found.verdict.state == "EXACT"
        constants = (found.summary["message_bytes"], found.summary["answer_bytes"])
        assert constants == (law.per_message, law.per_answer)


def test_the_worst_pair_is_named():
    logs, carried, counted = world_of(4)
    logs[1].groups[0].acked[2] += 1
    logs[3].groups[0].acked[0] -= 9
    verdict = reconcile(logs, carried, counted).verdict
    assert verdict.state == "OUTSIDE" and verdict.reason.startswith("rank 3 -> rank 0, ")
    assert verdict.reason.endswith("2 of 12 pairs differ")
    assert verdict.predicted - verdict.measured == 9


def test_a_byte_less_on_one_pair_and_one_more_on_another_do_not_cancel():
    logs, carried, counted = world_of(3)
    logs[0].groups[0].acked[1] += 1
    logs[0].groups[0].acked[2] -= 1
    assert reconcile(logs, carried, counted).verdict.state == "OUTSIDE"


@pytest.mark.parametrize("pair", [(0, 1), (1, 0), (2, 1), (0, 2)])
def test_constants_must_fit_every_pair(pair):
    logs, carried, counted = world_of(3)
    logs[pair[0]].groups[0].calibration[pair[1]] += 1
    verdict = reconcile(logs, carried, counted).verdict
    assert verdict.state == "OUTSIDE" and "do not fit rank" in verdict.reason


def test_what_is_reported_must_have_been_carried():
    logs, carried, counted = world_of(3)
    counted = counted.copy()
    counted[1, 0] += 8
    verdict = reconcile(logs, carried, counted).verdict
    assert verdict.state == "OUTSIDE" and verdict.reason.startswith("rank 1 -> rank 0: the run")
    counted[1, 0] -= 8
    counted[1, 1] += 5  # stays on its rank, and crosses no socket
    assert reconcile(logs, carried, counted).verdict.state == "EXACT"


def test_a_kernel_that_counts_nothing_gives_no_verdict():
    logs, carried, counted = world_of(3)
    for log in logs:
        log.groups[0].calibration[:] = 0
    verdict = reconcile(logs, carried, counted).verdict
    assert verdict.state == "NOT_AVAILABLE" and "leaves tcpi_bytes_acked at 0" in verdict.reason
