"""job=predict: the page of a run that nobody starts, and what it refuses."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from moe.__main__ import main
from moe.cli import WIDTH

ROOT = Path(__file__).parent.parent
REFERENCE = (
    *("model=deepseek_v3", "ep_size=16", "topology.ranks_per_node=8", "tokens=4096"),
    "wire.dispatch=fp8_block128",
)
# traffic_model.md: T = 4096, K = 8, E = 256, R = 16, N = 2, rows of 7,392 B: copies of a token and
# MB of a rank, in the order of the page
TABLE = {
    "copies, self included": (8.0, 242.2),
    "min(ranks, top_k)": (8.0, 242.2),
    "copies, remote": (7.5, 227.1),
    "distinct ranks, self included": (6.5233, 197.5),
    "distinct ranks, remote": (6.1156, 185.2),
    "two hops, inside the node": (5.7079, 172.8),
    "copies, between nodes": (4.0, 121.1),
    "distinct ranks, between nodes": (3.2616, 98.8),
    "distinct nodes, own node included": (1.9930, 60.3),
    "distinct nodes, remote": (0.9965, 30.2),
    "all-gather, remote": (15.0, 454.2),
    "all-gather, between nodes": (8.0, 242.2),
}


@pytest.fixture(autouse=True)
def alone(monkeypatch):
    """No torchrun around the tests."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "WIDEEP_STATUS_FILE"):
        monkeypatch.delenv(name, raising=False)


def predicted(capsys, *words: str) -> str:
    assert main(["predict", *words]) == 0
    shown = capsys.readouterr()
    assert shown.err == ""
    return shown.out


def figures(page: str) -> dict[str, tuple[float, float]]:
    """Numerator -> rows of a token and MB of a rank."""
    pattern = r"  (\S.*?) +(\d+\.\d{4}) +([\d.,]+) (B|kB|MB|GB)(?= )"
    scale = {"B": 1e-6, "kB": 1e-3, "MB": 1.0, "GB": 1e3}
    return {
        name: (float(rows), float(size.replace(",", "")) * scale[unit])
        for name, rows, size, unit in re.findall(pattern, page)
    }


def test_the_reference_table(capsys):
    page = predicted(capsys, *REFERENCE)
    found = figures(page)
    assert list(found) == list(TABLE)
    for name, (rows, megabytes) in TABLE.items():
        assert found[name][0] == pytest.approx(rows, abs=6e-5), name
        assert found[name][1] == pytest.approx(megabytes, abs=0.06), name
    assert "wire         dispatch fp8_block128, combine bf16" in page
    assert "ranks        EP 16 = 2 nodes x 8 ranks; 4,096 tokens a rank" in page
    assert "expected under uniform routing" in page
    assert max(map(len, page.splitlines())) <= WIDTH


def test_the_default_is_the_default_run_at_full_size(capsys):
    """K3 on eight ranks: 6.1894 ranks of a token, 7,168 B a row, one node."""
    page = predicted(capsys)
    found = figures(page)
    assert found["distinct ranks, remote"][0] == 6.1894
    assert found["distinct ranks, remote"][1] == pytest.approx(64 * 6.1894 * 7168e-6, rel=1e-3)
    assert "between nodes 0 B" in page and "distinct nodes, remote" not in found  # one node
    assert "kimi_k3 at scale full: 92 MoE layers" in page and "7,168" in page


def test_ranks_are_the_group_and_a_remainder_of_experts_is_shared_out(capsys):
    """72 ranks: 32 of 13 experts and 40 of 12, 14.5442 distinct ranks of a token."""
    for words in (["ep_size=72"], ["ranks=72"], ["ranks=72", "ep_size=72"]):
        found = figures(predicted(capsys, *words))
        assert found["distinct ranks, self included"][0] == 14.5442
        assert found["copies, self included"][0] == 16.0


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["ep_size=0"], "must be >= 1"),
        (["ep_size=x"], "ep_size=x: must be an integer or null"),
        (
            ["ep_size=16", "topology.ranks_per_node=5"],
            "topology.ranks_per_node=5 must be a positive divisor of the number of ranks (16);"
            " nearest: 4 or 8",
        ),
        (["ep_size=16", "tokens=[1,2]"], "tokens=[1,2]: lists 2 ranks, ranks=16"),
        (["ranks=16", "ep_size=5"], "ep_size=5: must divide the 16 ranks; nearest: 4"),
        (["ep_size=5000"], "ep_size=5000: must be <= 4096; nearest: 4096"),
        (["wire.backward=fp32"], "wire.backward=fp32: mode=inference does not use it"),
        (["tokens=-1"], "tokens=-1: must be >= 0"),
        (["warmup=2"], "warmup=2: job=predict does not use it"),
        (["output_dir=x"], "output_dir=x: job=predict does not use it"),
        (["router=replay"], "router=replay: needs router.path=FILE"),
        (["hardware=gb200"], "no such hardware; choose ascend_910c"),
        (["wire.dispatch=fp8"], "wire.dispatch=fp8: no such wire format; choose bf16"),
    ],
)
def test_bad_input_is_refused_in_one_line(capsys, words, said):
    assert main(["predict", *words]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.startswith("wideep: ") and shown.err.count("\n") == 1
    assert said in shown.err


def test_no_tokens(capsys):
    found = figures(predicted(capsys, "tokens=0"))
    assert found["copies, self included"] == (16.0, 0.0)


@pytest.mark.parametrize(("rank", "speaks"), [("0", True), ("1", False)])
def test_under_torchrun_the_first_rank_alone_prints(capsys, monkeypatch, rank, speaks):
    for name, value in (("RANK", rank), ("LOCAL_RANK", rank), ("WORLD_SIZE", "2")):
        monkeypatch.setenv(name, value)
    page = predicted(capsys, "tokens=4")
    assert page.startswith("WideEP ") if speaks else page == ""
    if speaks:  # the ranks that were started are those that are imagined
        assert "EP 2 = 1 node x 2 ranks; 4 tokens a rank" in page


def test_nothing_is_written_and_torch_is_not_imported(tmp_path):
    look = (
        "import sys, moe.__main__ as entry; status = entry.main(['predict', *sys.argv[1:]]);"
        "sys.exit(status or sorted({'torch'} & set(sys.modules)) or 0)"
    )
    clean = {
        name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")
    }
    done = subprocess.run(
        [sys.executable, "-c", look, *REFERENCE],
        cwd=tmp_path,
        env=clean | {"PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "two hops, inside the node                5.7079  172.8 MB" in done.stdout
    assert list(tmp_path.iterdir()) == []


JUDGED = ("ep_size=64", "tokens=128", "wire.dispatch=mxfp8")


def flat(page: str) -> str:
    return " ".join(page.split())


def test_the_page_says_which_of_latency_and_bandwidth_binds(capsys):
    """Kimi K3 on a rack: latency; with nodes of eight and a card of 50 GB/s: bytes."""
    page = predicted(capsys, *JUDGED)
    said = flat(page)
    assert "puts 1.809 GB of payload on the network in a forward pass of 92 MoE layers and" in said
    assert "and 184 rounds; with ids, weights, counts and padding 1.830 GB" in said
    assert "at least 60.4 us on gb200_nvl72: latency binds, not bandwidth. The bytes" in said
    assert "take 7.4 + 14.4 us at the nominal 900 GB/s of scale-up, 11.4 + 20.6 us at" in said
    assert "less than the latency floor of 27.8 + 32.6 us" in said
    assert max(map(len, page.splitlines())) <= WIDTH
    boxes = flat(predicted(capsys, *JUDGED, "hardware=h100_sxm"))
    assert "the bytes bind, 118.9 + 230.6 us on the scale-out links at 50.0 GB/s" in boxes
    assert "no latency floor is known for this machine" in boxes
    rack = flat(predicted(capsys, *JUDGED, "topology.ranks_per_node=8"))
    assert "bandwidth binds, not latency. The bytes take 118.9 + 230.6 us at the nominal" in rack
    assert "50.0 GB/s of scale-out, more than the latency floor of 18.9 + 31 us" in rack


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["ep_size=1"], "nothing leaves a rank, so nothing takes time"),
        (["ep_size=64", "tokens=270"], "dispatch by bandwidth, combine by latency"),
        (["hardware=mi355x"], "mi355x has no rate for scale-up: set hardware.scale_up_GBps"),
        (["hardware=custom", "hardware.scale_up_GBps=10"], "EP 8 = 1 node x 8 ranks"),
        (["router=learned"], "router=learned: a learned router follows no law that is known"),
        (["ep_size=16", "ranks=32"], "32 in 2 groups of EP 16 = 1 node x 32 ranks"),
        (["ep_size=128"], "EP 128 = 2 nodes x 56 to 72 ranks"),
        (["mode=training", "wire.backward=mxfp8"], "forward and backward"),
        (["expert_tp=2", "dispatcher=padded"], "2 ranks share each expert"),
        (["ep_size=72", "placement=balance"], "13 on each; 936 slots, 40 redundant"),
        (["tokens=[9,0,0,0,0,0,0,1]", "chunks=2"], "1.250 tokens a rank on average, 9 at most"),
        (["router=zipf", "layers=1"], "times the mean"),
        (
            [
                "ep_size=1024",
                "tokens=10000000",
                "topology.ranks_per_node=8",
                "mode=training",
                "wire.dispatch=mxfp8",
                "wire.backward=mxfp8",
                "dispatcher=two_hop",
            ],
            "TRAFFIC GB of the mean rank",
        ),
        (["topology.node_of_rank=[0,1,0,1,0,1,0,1]"], "EP 8 = 2 nodes x 4 ranks"),
    ],
)
def test_pages_of_other_runs(capsys, words, said):
    page = predicted(capsys, *words)
    assert said in flat(page)
    assert max(map(len, page.splitlines())) <= WIDTH
    assert page.isascii() and "nan" not in page.split() and "None" not in page


def test_memory_for_ranks_that_nobody_starts_is_not_asked_for(capsys):
    """The same number of tokens would need terabytes to run."""
    assert figures(predicted(capsys, "ep_size=1024", "tokens=1000000"))


def test_the_document_shows_the_page(capsys):
    """Every line that docs/predict.md shows of it, and its Python example."""
    text = (ROOT / "docs" / "predict.md").read_text()
    page = predicted(capsys, *JUDGED).splitlines()
    shown = re.search(r"```text\n(ANSWER.*?)```", text, re.S)[1].splitlines()
    lines = [line for line in shown if line != "..."]
    assert len(lines) > 15 and [line for line in lines if line not in page] == []
    exec(re.search(r"```python\n(.*?)```", text, re.S)[1], {})
