"""Interface counters: read from the kernel's own table, and held against what was counted."""

import dataclasses

import numpy as np
import pytest

from comm import interfaces
from comm.interfaces import FEW_BYTES, MESSAGE_BYTES, Seen, between_hosts, interfaces_verdict
from comm.verdict import State, exit_status

TABLE = """Inter-|   Receive                                                |  Transmit
 face |bytes    packets errs drop fifo frame compressed multicast|bytes    packets errs drop
    lo:    1000      10    0    0    0     0          0         0     2000      10    0    0
  eth0: 3000000     300    0    0    0     0          0         0  4000000     400    0    0
"""
MB = 1_000_000
SEEN = [Seen(f"host {rank % 2}", f"boot {rank % 2}", "eth0", True, 4 * MB) for rank in range(4)]
SENT = np.full((4, 4), MB)  # ranks 0, 2 on one host, 1, 3 on the other: 4 MB leave each


def judged(*sent, **changes):
    """The verdict on hosts whose interfaces sent so much; ranks are placed cyclically."""
    seen = [
        dataclasses.replace(one, sent_bytes=sent[rank % 2], **changes)
        for rank, one in enumerate(SEEN)
    ]
    return interfaces_verdict(between_hosts(seen, SENT, collectives=1))


def test_counters_are_the_kernels(tmp_path):
    (tmp_path / "dev").write_text(TABLE)
    assert interfaces.read_counters("eth0", tmp_path / "dev") == (4_000_000, 3_000_000)
    assert interfaces.read_counters("eth1", tmp_path / "dev") is None
    assert interfaces.read_counters("eth0", tmp_path / "none") is None


def test_the_interface_is_the_one_that_gloo_was_given(monkeypatch):
    monkeypatch.setattr(interfaces, "read_counters", {"eth0": (1, 2)}.get)
    assert interfaces.chosen_interface({"GLOO_SOCKET_IFNAME": "eth0"}) == "eth0"
    assert interfaces.chosen_interface({"GLOO_SOCKET_IFNAME": "eth0,eth1"}) == ""
    assert interfaces.chosen_interface({}) == ""


def test_only_what_passes_between_two_barriers_is_seen(monkeypatch):
    log, counters = [], iter([(0, 0), (10, 20), (100, 200)])
    monkeypatch.setattr(interfaces, "read_counters", lambda name: next(counters))
    resent = iter([5, 12])
    monkeypatch.setattr(interfaces, "resent_bytes", lambda: next(resent))
    environ = {"GLOO_SOCKET_IFNAME": "eth0", "WIDEEP_OWN_LINK": "1"}
    seen = interfaces.watch("host 1", lambda: log.append("met"), environ)
    assert len(log) == 2
    found = seen()
    assert len(log) == 4 and (found.sent_bytes, found.received_bytes) == (90, 180)
    assert (found.host, found.interface, found.own) == ("host 1", "eth0", True)
    assert found.resent_bytes == 7


def test_each_host_is_charged_with_what_leaves_it():
    sent = SENT.copy()
    sent[1, 2] += 5  # from host 1 to host 0
    sent[0, 2] += 7  # inside host 0
    hosts = between_hosts(SEEN, sent, collectives=3)
    assert [host["counted_bytes"] for host in hosts] == [4 * MB, 4 * MB + 5]
    assert hosts[0]["bound_bytes"] == 280_000 + 3 * 4 * MESSAGE_BYTES + FEW_BYTES
    assert between_hosts(SEEN[:1], SENT[:1, :1], 1) == []


@pytest.mark.parametrize(
    ("sent", "state"),
    [
        ((4 * MB, 4 * MB), State.WITHIN),
        ((4 * MB + 280_000, 4 * MB), State.WITHIN),
        ((4 * MB - 1, 4 * MB + 12_000), State.OUTSIDE),  # a lack is no framing
        ((4 * MB, 4 * MB + 400_000), State.OUTSIDE),
    ],
)
def test_the_bracket(sent, state):
    verdict = judged(*sent)
    assert verdict.state is state
    assert exit_status([verdict]) == (5 if state is State.OUTSIDE else 0)
    if state is State.OUTSIDE:
        assert "host " in verdict.reason and "4,000,000 B were counted" in verdict.reason


def test_what_was_sent_twice_is_no_framing():
    """Ranks 0 and 2 live on the first host."""
    seen = [dataclasses.replace(one, resent_bytes=10**rank) for rank, one in enumerate(SEEN)]
    hosts = between_hosts(seen, SENT, collectives=1)
    assert [host["resent_bytes"] for host in hosts] == [101, 1010]
    assert hosts[0]["bound_bytes"] == 280_000 + 4 * MESSAGE_BYTES + FEW_BYTES + 101
    verdict = interfaces_verdict([host | {"sent_bytes": 4 * MB + 41_111} for host in hosts])
    assert verdict.reason == (
        "2 hosts sent 8,082,222 B for 8,000,000 B counted and 1,111 B once more, +1.01 % for"
        " framing"
    )


def test_a_shared_interface_has_no_upper_end():
    assert judged(9 * MB, 9 * MB, own=False).state is State.WITHIN
    assert judged(9 * MB, 3 * MB, own=False).state is State.OUTSIDE


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"interface": ""}, "host 0: no interface with counters; set GLOO_SOCKET_IFNAME"),
        ({"machine": "boot"}, "several of the nodes are one machine"),
    ],
)
def test_what_cannot_be_judged(changes, reason):
    verdict = judged(0, 0, **changes)
    assert verdict.state is State.NOT_AVAILABLE and reason in verdict.reason
    hosts = between_hosts(SEEN, SENT, 1)
    assert "backend=nccl" in interfaces_verdict(hosts, "nccl").reason
