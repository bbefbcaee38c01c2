"""assert_traffic and its messages; docs/testing.md: its example runs, and catches mistakes."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import numpy as np
import pytest
from test_pytest_plugin import run, write

from comm.analytic.traffic import Estimate
from comm.counting import Traffic
from comm.topology import Topology
from moe.testing import assert_traffic, expected_rows

DOC = (Path(__file__).parent.parent / "docs" / "testing.md").read_text()
LAYER, TESTS = re.findall(r"```python\n(.*?)```", DOC, re.S)[:2]
LAW_AND_PAIRS = TESTS[: TESTS.index("\n\ndef test_the_emulator")] + "\n"
MISTAKES = {
    "twice": [("(owner == rank).any(1).nonzero()", "(owner == rank).nonzero()")],
    "hidden": [
        ("self.down(tokens[picked])", "tokens[picked]"),
        ("split([self.down.out_features", "split([self.down.in_features"),
        ('"nl,elm,ne->nm", latent,', '"nl,elm,ne->nm", self.down(latent),'),
    ],
    "owner": [("ids // self.num_local", "ids % dist.get_world_size()")],
}


class Counted:
    """A measurement of three ranks, two of them on one node."""

    topology = Topology((0, 0, 1))

    def __init__(self, matrix):
        self._matrix = np.array(matrix)

    def matrix(self, tier=None, **where):
        chosen = self.topology.tiers() > 0 if tier == "network" else True
        return np.where(chosen, self._matrix, 0) * (2 if where.get("phase") == "both" else 1)


MATRIX = [[9, 100, 200], [1_000_000, 9, 0], [0, 300, 9]]
COUNTED = Counted(MATRIX)


def test_equal_traffic_passes():
    assert_traffic(COUNTED, expected=MATRIX)
    assert_traffic(COUNTED, expected=1_000_627)
    assert_traffic(COUNTED, expected=1_000_600, tier="network")
    assert_traffic(COUNTED, expected=COUNTED, phase="both")
    assert_traffic(COUNTED, expected=2 * np.array(MATRIX), phase="both", tier="network")


def test_the_bound_is_a_share_of_what_is_expected():
    assert_traffic(COUNTED, expected=2_000_000, tier="network", rel=0.5)
    with pytest.raises(AssertionError, match="allowed 980,000 B"):
        assert_traffic(COUNTED, expected=2_000_000, tier="network", rel=0.49)
    near = np.array(MATRIX) * 1.05
    assert_traffic(COUNTED, expected=near, rel=0.05)
    with pytest.raises(AssertionError, match="7 of 9 pairs differ, each by more than 4.00%"):
        assert_traffic(COUNTED, expected=near, rel=0.04)


def test_the_scatter_of_a_law_is_allowed_for():
    assert_traffic(COUNTED, expected=Estimate(1_000_000, 200), tier="network")
    with pytest.raises(AssertionError, match="allowed 500 B"):
        assert_traffic(COUNTED, expected=Estimate(1_000_000, 100), tier="network")
    assert_traffic(COUNTED, expected=Estimate(1_000_000, 0), tier="network", rel=0.001)


def test_a_sum_that_is_wrong_shows_what_was_counted():
    with pytest.raises(AssertionError) as failure:
        assert_traffic(COUNTED, expected=900_000, tier="network", phase="dispatch")
    first, *others = str(failure.value).splitlines()
    assert first == (
        "tier=network, phase=dispatch: counted 1,000,600 B (1.001 MB), expected 900,000 B"
        " (900.0 kB): 100,600 B more (+11.18%)"
    )
    assert others[1] == "    rank 1 -> rank 0: 1,000,000 B" and len(others) == 5


def test_pairs_that_cancel_are_both_named():
    wrong = np.array(MATRIX)
    wrong[0, 1] -= 40
    wrong[2, 1] += 40
    with pytest.raises(AssertionError) as failure:
        assert_traffic(COUNTED, expected=wrong)
    text = str(failure.value)
    assert "2 of 9 pairs differ" in text and ": 0 B less" in text
    assert "rank 0 -> rank 1: counted 100 B, expected 60 B, 40 B more" in text
    assert "rank 2 -> rank 1: counted 300 B, expected 340 B, 40 B less" in text


def test_what_is_expected_must_fit():
    with pytest.raises(ValueError, match=r"shape \(2, 2\), the traffic is of \(3, 3\)"):
        assert_traffic(COUNTED, expected=[[0, 1], [1, 0]])


def test_the_traffic_of_one_rank_is_not_all():
    with pytest.raises(ValueError, match="one rank only: hold traffic.gather"):
        assert_traffic(Traffic(2, rank=1), expected=0)
    assert_traffic(Traffic(2, rank=None), expected=0)


def test_rows_that_choices_make():
    ids = [[[0, 1], [0, 3]], [[2, 3]], [[-1, 3], [-1, -1]]]
    owner = [0, 0, 1, 2]
    assert expected_rows(ids, owner).tolist() == [[3, 0, 1], [0, 1, 1], [0, 0, 1]]
    once = expected_rows(ids, owner, deduplicate=True)
    assert once.tolist() == [[2, 0, 1], [0, 1, 1], [0, 0, 1]]
    assert expected_rows([np.zeros((0, 2), int)] * 3, owner).sum() == 0


# -- the document ----------------------------------------------------------------------------------

forks = pytest.mark.skipif(sys.platform != "linux", reason="forks")


@forks
def test_the_example_passes(tmp_path):
    write(tmp_path, LAYER, "my_moe.py")
    done = run(write(tmp_path, TESTS, "test_my_moe.py"))
    assert done.returncode == 0, done.stdout
    assert "test_my_moe.py ...." in done.stdout


def planted(name):
    """The layer with a mistake."""
    text = LAYER
    for right, wrong in MISTAKES[name]:
        assert right in text, right
        text = text.replace(right, wrong)
    assert name != "twice" or all(line[1:] in LAYER + text for line in _diff())
    return text


def _diff():
    return re.search(r"```diff\n(.*?)```", DOC, re.S)[1].splitlines()


@forks
def test_the_example_catches_mistakes(tmp_path):
    for name in MISTAKES:
        folder = tmp_path / name
        folder.mkdir()
        write(folder, planted(name), f"my_moe_{name}.py")
        write(folder, LAW_AND_PAIRS.replace("my_moe", f"my_moe_{name}"), f"test_{name}.py")
    done = run(tmp_path, "--tb=short")
    failed = set(re.findall(r"^FAILED \w+/test_(\w+).py::(\w+(?:\[\w+\])?)", done.stdout, re.M))
    pairs = {f"test_each_pair_of_ranks_to_the_byte[{n}ranks]" for n in (4, 8)}
    law = "test_as_much_as_the_law_says"
    assert failed == {(name, one) for name in MISTAKES for one in pairs} | {
        ("twice", law),
        ("hidden", law),  # where the owner is wrong, the sum is right
    }
    (shown,) = (text for text in re.findall(r"```text\n(.*?)```", DOC, re.S) if "failed" in text)
    assert masked(shown.removesuffix("...\n")) in masked(done.stdout)


def masked(text):
    """Without figures, which need not be the same on another processor, and names of files."""
    text = re.sub(r"\S*test_\w+\.py", "FILE", text)
    return re.sub(r"(more|less)\b", "~", re.sub(r"[-+]?\d[\d,.]*", "#", text))
