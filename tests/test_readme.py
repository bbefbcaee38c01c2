"""The documents tell the truth: commands work, figures are those of a run, sums add up, links lead.

A line of an `sh` block is a command. A line of a `text` block of the README or of reading_a_run.md
is one of the default run's page, "..." apart. An inline `2 x 3 = 6` is worked out again.
"""

from __future__ import annotations

import inspect
import json
import re
import shlex
from dataclasses import asdict
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from command_line import wideep

from comm.analytic.oracle import exact_traffic
from comm.dispatch import DISPATCHERS
from comm.report.figures import FACTOR_NAMES
from comm.report.full_scale import full_scale
from comm.report.units import format_bytes
from comm.topology import TIER_NAMES, Topology
from comm.wire import WIRE_FORMATS
from moe.__main__ import main
from moe.cli import STATUSES
from moe.conf_files import options
from moe.config import compose
from moe.facts import run_shape
from moe.nodes import read_layout
from moe.plan import plan_on
from moe.routing import SOURCES
from moe.settings import REPLICA_CHOICES, keys

ROOT = Path(__file__).parent.parent
TEXTS = {
    str(path.relative_to(ROOT)): path.read_text()
    for path in sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])
}
README, READING = TEXTS["README.md"], TEXTS["docs/reading_a_run.md"]
REALLY_RUN = {  # quick ones, and the end of the FULL SIZE line; the rest is composed only
    "wideep ranks=8 tokens=128 layers=2 dispatcher=all_to_all": ["18.42 MB"],
    "wideep ranks=8 tokens=128 layers=2 dispatcher=rank_dedup": ["8.239 MB"],
    "wideep wire.dispatch=mxfp8": ["6.182 MB", "72.84 kB", "6.255 MB"],
    "wideep topology.ranks_per_node=4": ["3.521 MB", "4.709 MB", "8.158 MB"],
    "wideep model=hf model.path=path/to/config.json": [],
    "wideep router=skew router.max_over_mean=2"
    " placement=balance placement.num_redundant_experts=64": [],
}
RECORD = "wideep record_routing=true output_dir=recorded"
REPLAY = "wideep router=replay router.path=recorded dispatcher=two_hop topology.ranks_per_node=4"
RELEASED = """{"model_type": "mixtral", "hidden_size": 64, "moe_intermediate_size": 16,
 "num_hidden_layers": 2, "num_experts": 8, "num_experts_per_tok": 2}"""
LISTED = {  # document -> the options that it must explain
    "dispatchers": DISPATCHERS,
    "routers": SOURCES,
    "placement": (*options("placement"), *REPLICA_CHOICES),
}
NO_JOB = {
    "pip": ["install -e ."],
    "source": [".venv/bin/activate"],
    "pytest": ["test_traffic.py"],
    ".venv/bin/ruff": ["check .", "format ."],
}
NO_KEY = {"law", "nodes", "rate"}  # an argument in Python, and words of launch.sh


def blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", text, re.S)


def spans(text: str) -> list[str]:
    """Inline code."""
    return re.findall(r"`([^`\n]+)`", re.sub(r"```.*?```", "", text, flags=re.S))


def worked_out(arithmetic: str) -> float:
    assert re.fullmatch(r"[\d,. x+/()-]+", arithmetic)
    return eval(arithmetic.replace(",", "").replace("x", "*"), {"__builtins__": {}})


SCRIPTS = [block for text in TEXTS.values() for block in blocks(text, "sh")]
COMMANDS = list(dict.fromkeys(line for block in SCRIPTS for line in block.strip().split("\n")))


def words_of(command: str) -> tuple[list[str], str | None] | None:
    """The words that reach WideEP, and the ranks of torchrun; None for a command without a job."""
    words = shlex.split(command)
    while re.match(r"[A-Z_]+=", words[0]):
        assert words.pop(0).partition("=")[0] in (ROOT / "launch.sh").read_text()
    head, rest = words[0], words[1:]
    if head == "torchrun":
        flag, ranks, dash_m, module, *rest = rest
        assert (flag, dash_m, module) == ("--nproc-per-node", "-m", "moe")
        return rest, ranks
    if head == "./launch.sh" and rest[:1] in (["setup"], ["test"]):
        assert all((ROOT / word).exists() for word in rest if word.endswith(".py"))
        return None
    if head in NO_JOB:
        assert " ".join(rest) in NO_JOB[head]
        return None
    assert head in ("./launch.sh", "wideep"), f"{command}: no test knows this command"
    if head == "./launch.sh" and any(word.startswith("nodes=") for word in rest):
        layout = read_layout(rest)
        return list(layout.words), str(layout.world_size)
    return rest, None


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """An empty folder to be in, but for the config.json that the examples name."""
    (tmp_path / "path" / "to").mkdir(parents=True)
    (tmp_path / "path" / "to" / "config.json").write_text(RELEASED)
    monkeypatch.chdir(tmp_path)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "WIDEEP_STATUS_FILE"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def record_routing(folder: Path) -> None:
    """What an earlier command of the README has left: two tokens of the default model."""
    folder.mkdir()
    ids = np.arange(32, dtype=np.int32).reshape(1, 1, 2, 16)
    header = json.dumps({"num_experts": 896, "top_k": 16})
    np.savez(folder / "routing.npz", topk_ids=ids, header=header)


def run(command: str, folder: Path) -> list[str]:
    """The lines that a command prints."""
    words, _ = words_of(command)
    done = wideep(folder, *words, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.fixture(scope="module")
def default_run(tmp_path_factory):
    """The default run: its page and its record."""
    folder = tmp_path_factory.mktemp("default")
    page = run("wideep emulate ranks=8", folder)
    (record,) = folder.glob("results/*/run.json")
    return page, json.loads(record.read_text())


@cache
def carried(*words: str) -> dict:
    """FULL SIZE of a run, worked out from its seed without running it."""
    config = compose(words)
    ranks, tokens = config.world_size, sum(config.tokens_per_rank)
    topology = Topology.blocks(ranks, config.topology.ranks_per_node or ranks)
    plan = plan_on(config, topology)
    chosen = [plan.routing.choose(0, layer, 0, tokens).topk_ids for layer in range(plan.num_layers)]
    exact = exact_traffic(run_shape(plan, plan.placements), np.stack(chosen)[None])
    rows = exact.rows[:, exact.directions.index("forward")].sum(axis=0)  # [phase, src, dst]
    a_token = {
        phase: {
            name: int(rows[p][topology.tiers() == tier].sum()) / (tokens * plan.num_layers)
            for tier, name in enumerate(TIER_NAMES)
        }
        for p, phase in enumerate(exact.phases)
    }
    dispatcher = config.dispatcher
    return full_scale(
        a_token, asdict(config.model), dispatcher.name, asdict(config.wire), dispatcher.deduplicate
    )


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_composes(command, folder, monkeypatch, capsys):
    known = words_of(command)
    if known is None:
        return
    words, ranks = known
    if "router.path=recorded" in words:
        record_routing(folder / "recorded")
    if ranks:
        monkeypatch.setenv("RANK", "0")
        monkeypatch.setenv("WORLD_SIZE", ranks)
    assert main(["--check", *words]) == 0, capsys.readouterr().err


@pytest.mark.parametrize("command", REALLY_RUN, ids=lambda command: command.split(" ", 1)[1])
def test_quick_commands_do_what_is_written(command, folder):
    assert command in COMMANDS
    page = run(command, folder)
    (record,) = folder.glob("results/*/run.json")
    states = {one["name"]: one["state"] for one in json.loads(record.read_text())["verdicts"]}
    assert states["exact"] == states["conserved"] == "EXACT"
    assert (states["expected"] == "NOT_AVAILABLE") == ("router=learned" in command)
    (total,) = [line for line in page if re.match(r"  pass, \d+ rounds", line)]
    for figure in REALLY_RUN[command]:
        assert re.search(rf" {re.escape(figure)} ", total), total


def test_a_recorded_run_is_replayed(folder):
    assert RECORD in COMMANDS and REPLAY in COMMANDS
    run(RECORD, folder)
    run(REPLAY, folder)
    (replayed,) = folder.glob("results/*/run.json")
    records = [json.loads(path.read_text()) for path in (folder / "recorded/run.json", replayed)]
    assert len({record["manifest"]["routing_sha256"] for record in records}) == 1


def test_a_prediction_needs_no_ranks(folder):
    pattern = "wideep predict ep_size=64 .*tokens=4096"
    (command,) = [line for line in COMMANDS if re.match(pattern, line)]
    page = run(command, folder)
    for convention in ("distinct ranks", "two hops", "all-gather"):
        assert any(convention in line for line in page), convention
    assert [path.name for path in folder.iterdir()] == ["path"]


def test_the_small_benchmark_runs(folder):
    (command,) = [line for line in COMMANDS if "bench.iterations=5" in line]
    page = run(command, folder)
    (file,) = folder.glob("results/*/bench.json")
    record, text = json.loads(file.read_text()), TEXTS["docs/benchmark.md"]
    named = {one["name"] for one in record["cases"][0]["methods"]}
    assert named <= set(spans(text.partition("## How a ratio")[0]))
    assert page[0].startswith(f"WideEP {record['manifest']['version']} bench   ")
    assert page[-2] == f"RESULTS        {record['result_dir']}"
    assert any("Cost of metering" in line for line in page)
    fields = spans(text.partition("## bench.json")[2].partition("## Figures")[0])
    for owner in (record, record["manifest"], *record["cases"], *record["cases"][0]["methods"]):
        assert set(owner) <= set(fields)


@pytest.mark.parametrize("text", [README, READING], ids=["README", "reading_a_run"])
def test_quoted_pages_are_the_default_run(text, default_run):
    page, _ = default_run
    quoted = blocks(text, "text")
    assert len(quoted) >= 2
    for block in quoted:
        at = 0
        for line in block.rstrip("\n").split("\n"):
            if line != "...":
                assert line in page[at:], f"not printed, or not in this order: {line}"
                at = page.index(line, at) + 1


def test_the_first_row_is_explained_with_its_own_figures(default_run):
    _, record = default_run
    entry = record["layers"][0]
    kinds, tiers = {}, {}
    for cell in entry["cells"]:
        for sums, name in ((kinds, cell["kind"]), (tiers, cell["tier"])):
            sums[name] = sums.get(name, 0) + cell["measured_bytes"]
    network = entry["network"]
    figures = [
        *(sum(entry["rows"].values()), entry["rows"]["self"], entry["rows"]["scale_up"]),
        *(kinds["hidden"], kinds["ids"] + kinds["weights"], kinds["counts"]),
        *(tiers["self"], tiers["scale_up"], sum(cell["exact_bytes"] for cell in entry["cells"])),
        *(round(network["expected_bytes"]), round(network["expected_std"])),
    ]
    section = README.partition("### The first row")[2].partition("\n### ")[0]
    for figure in figures:
        assert re.search(rf"(?<![\d,]){figure:,}(?![\d,])", section), f"{figure:,} is not explained"
    assert f"{entry['rows']['self']} rows" in section


def test_the_figures_of_the_headline_and_the_full_size(default_run):
    _, record = default_run
    headline, full = record["headline"], record["full_scale"]
    for figure in (headline["headline_bytes"], headline["measured_bytes"]):
        assert f"{figure:,}" in READING
    for name, value in ((factor["name"], factor["value"]) for factor in headline["factors"]):
        printed = FACTOR_NAMES.get(name, name.replace("_", " "))
        row = re.search(rf"^\| {printed} \|.*$", READING, re.M)
        assert row and f"{value:.4f}" in row[0], f"{name} is {value:.4f}"
        assert worked_out(spans(row[0])[0].partition(" = ")[0]) == pytest.approx(value, rel=1e-12)
    for figure in (
        full["phases"]["dispatch"]["network_bytes"],
        full["phases"]["combine"]["network_bytes"],
        full["forward_pass"]["network_bytes"],
        full["rounds"] * full["headline_bytes"],
    ):
        assert f"{figure:,}" in READING


def test_carrying_by_arithmetic_is_what_the_run_prints(default_run):
    _, record = default_run
    assert carried() == record["full_scale"]


def test_the_table_of_dispatchers_and_ranks():
    names = re.search(r"^\| ranks \|(.*)\|$", README, re.M)[1].replace("`", "").split("|")
    rows = re.findall(r"^\| (\d+) \|(.* MB) \|$", README, re.M)
    assert [int(ranks) for ranks, _ in rows] == [8, 16, 32, 64]
    for ranks, cells in rows:
        for name, cell in zip(names, cells.split("|"), strict=True):
            words = f"ranks={ranks} tokens={1024 // int(ranks)} layers=2 dispatcher={name.strip()}"
            total = carried(*words.split())["forward_pass"]["network_bytes"]
            assert cell.strip() == format_bytes(total), words


def test_the_table_of_dispatchers_and_tiers():
    section = README.partition("| 64 ranks on 8 nodes |")[2].partition("\n\n")[0]
    rows = re.findall(r"^\| `(\w+)` \| (.* MB) \| (.* MB) \|$", section, re.M)
    assert [name for name, *_ in rows] == ["all_to_all", "rank_dedup", "two_hop"]
    for name, between, inside in rows:
        words = f"ranks=64 tokens=16 layers=2 topology.ranks_per_node=8 dispatcher={name}"
        assert f"wideep {words}" in COMMANDS
        total = carried(*words.split())["forward_pass"]
        assert between == format_bytes(total["scale_out_bytes"]), words
        assert inside == format_bytes(total["scale_up_bytes"]), words


def test_the_other_answers():
    assert format_bytes(carried()["forward_pass"]["payload_bytes"]) == "8.158 MB"
    for word, part, figure in (
        ("wire.dispatch=mxfp8", "payload", "6.182 MB"),
        ("wire.dispatch=mxfp8", "network", "6.255 MB"),
        ("topology.ranks_per_node=4", "scale_out", "4.709 MB"),
        ("model=deepseek_v3", "network", "7.717 MB"),
    ):
        assert f"wideep {word}" in COMMANDS and figure in README
        assert format_bytes(carried(word)["forward_pass"][f"{part}_bytes"]) == figure


def test_every_sum_adds_up():
    checked = 0
    for name, text in TEXTS.items():
        for span in spans(text):
            left, equals, right = span.partition(" = ")
            if not equals or not re.fullmatch(r"[\d,. x+/()-]+", left + right):
                continue
            value, shown = worked_out(left), right.replace(",", "")
            half = 0.5 * 10.0 ** -len(shown.partition(".")[2])
            assert abs(value - float(shown)) <= half * (1 + 1e-9), f"{name}: {span} is {value}"
            checked += 1
    assert checked > 30


def test_every_key_exists():
    known, mentioned = keys(), set()
    parts = {name.partition(".")[0] for name in known if "." in name}
    for text in TEXTS.values():
        for span in spans(text):
            mentioned |= set(re.findall(r"(?<![\w.<>/-])([a-z_]+(?:\.[a-z_]+)*)=\S", span))
            if re.fullmatch(rf"({'|'.join(parts)})\.(?!(?:json|csv|html)$)[a-z_]+", span):
                mentioned.add(span)
    assert len(mentioned) > 8 and mentioned - NO_KEY <= set(known)


def test_every_link_leads_somewhere():
    for name, text in TEXTS.items():
        for link in re.findall(r"\]\(([^)]+)\)", text):
            if not link.startswith("https://"):
                assert (ROOT / name).parent.joinpath(link.partition("#")[0]).exists(), (name, link)


def test_every_file_and_module_exists():
    seen = 0
    for name, text in TEXTS.items():
        for span in spans(text):
            if re.fullmatch(r"(comm|moe|conf|docs|tests|\.ci)/[\w./]*", span):
                assert (ROOT / span).exists(), f"{name}: {span}"
            elif re.fullmatch(r"(comm|moe)(\.[a-z_]+)+", span):
                parts = span.split(".")
                module = Path(ROOT, *parts)
                if not module.is_dir() and not module.with_suffix(".py").exists():
                    module = Path(ROOT, *parts[:-1]).with_suffix(".py")  # a name inside it
                    assert module.exists() and parts[-1] in module.read_text(), f"{name}: {span}"
            else:
                continue
            seen += 1
    assert seen > 30


def test_every_place_to_edit_holds_its_name():
    rows = re.findall(r"^\| `([\w./]+\.py)` \| `(\w+)` \|", TEXTS["docs/extending.md"], re.M)
    assert len(rows) > 10
    for path, name in rows:
        assert re.search(rf"\b{name}\b", (ROOT / path).read_text()), f"{path} has no {name}"


def test_the_example_dispatcher_sends_what_its_law_says():
    made: dict = {}
    for block in blocks(TEXTS["docs/extending.md"], "python"):
        exec(block, made)
    assert not inspect.isabstract(made["Broadcast"]) and made["Broadcast"].carries
    ranks, num_slots = 6, 24
    rng = np.random.default_rng(0)
    slots = np.array([rng.permutation(num_slots)[:4] for _ in range(200)])
    slots[rng.random(slots.shape) < 0.3] = num_slots  # no expert
    slot_rank = np.append(np.repeat(np.arange(ranks), num_slots // ranks), ranks)
    itself = SimpleNamespace(
        setup=SimpleNamespace(world_size=ranks), _slot_rank=torch.from_numpy(slot_rank)
    )
    sent = made["Broadcast"]._destinations(itself, torch.from_numpy(slots)).sum(1).numpy()
    owner = np.where(slots < num_slots, slot_rank[slots], -1)
    law = made["broadcast_rows"](np.zeros(len(slots), int), owner, ranks)
    assert np.array_equal(law[0], sent) and sent.min() > 0 and not law[1:].any()


def test_lists_are_complete():
    statuses = re.findall(r"^\| (\d+) \| ([a-z].*) \|$", README, re.M)
    assert statuses == [(str(status), text) for status, text in STATUSES.items()]
    for model in set(options("model")) - {"hf"}:
        assert f"`{model}`" in README
    for name in (*DISPATCHERS, *WIRE_FORMATS):
        assert f"`{name}`" in READING
    for folder, names in LISTED.items():
        for name in names:
            assert f"`{name}`" in TEXTS[f"docs/{folder}.md"], f"docs/{folder}.md: {name}"
