"""wideep claims: the table, one claim in full, exit statuses, files that are wrong, runs."""

import json
import os
import re
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest
import yaml
from claim_samples import FOLDER, all_claims, entry, outcome, write
from command_line import ROOT, wideep

from comm.analytic.formulas import FORMULAS
from comm.claims.form import FIELDS
from comm.claims.judge import with_run
from comm.claims.words import outcome_words
from moe.__main__ import main
from moe.jobs.claim_runs import figures_of

DOC = (ROOT / "docs" / "claims.md").read_text()


@pytest.fixture(autouse=True)
def alone(monkeypatch, tmp_path):
    """No torchrun around the tests, and a folder of their own."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "WIDEEP_STATUS_FILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def say(capsys):
    """Run a command line; its status, its page and its error."""

    def run(*words):
        status = main(["claims", *words])
        told = capsys.readouterr()
        return status, told.out, told.err

    return run


def own_claims(folder: Path, *claims: dict) -> str:
    """A folder with claims of one's own, as a word of the command line."""
    folder.mkdir(exist_ok=True)
    write(folder, "mine.yaml", *claims)
    return f"claims.path={folder}"


def test_one_table_has_every_claim(say):
    status, page, _ = say()
    assert status == 0 and page.isascii()
    assert max(map(len, page.splitlines())) <= 100
    names = [match[1] + match[2] for match in re.finditer(r"^  (\d+[a-z]?) (\S+)", page, re.M)]
    assert len(names) == len(all_claims())
    rows = [int(re.match(r"\d+", name)[0]) for name in names]
    assert rows == sorted(rows) and set(rows) == set(range(1, 51))
    counts = re.search(r"(\d+) claims: (\d+) holds, (\d+) fails, (\d+) depends, (\d+) not", page)
    total, *parts = map(int, counts.groups())
    assert total == sum(parts) == len(all_claims()) and "(status 0)" in page


@pytest.mark.parametrize("name", ["rounds_240", "cache_saved_75", "decode_6x", "uccl_dispatch"])
def test_one_claim_in_full(say, name):
    status, page, _ = say(f"id={name}")
    words = outcome_words(outcome(name), {})
    flat = " ".join(page.split())
    assert status == 0 and max(map(len, page.splitlines())) <= 100
    for text in (words["claim"], words["source"], words["why"], words["said"], words["verdict"]):
        assert text in flat
    for case in words["cases"]:
        assert case["test"] in flat
    assert "wideep" not in page.partition("\n")[2]


def test_the_steps_of_240_rounds(say):
    _, page, _ = say("id=rounds_240")
    lines = [line.strip() for line in page.splitlines()]
    at = lines.index("figure = expert_parallel * rounds_a_layer() * model.num_moe_layers")
    assert lines[at + 1 : at + 6] == [
        "rounds_a_layer = dispatch, combine; forward = 2 rounds",
        "= 1 * 2 rounds * 92",
        "= 184 rounds",
        "found 184 rounds, said 240 rounds, tolerance 0: fails",
        "would hold   with model.num_moe_layers 120 instead of 92",
    ]


def test_a_row_shows_all_its_claims(say):
    _, page, _ = say("id=18")
    assert "rounds_240, row 18a" in page and "two_rounds_a_layer, row 18b" in page
    assert "CLAIM  cache_saved_75, row 1\n" in say("id=1")[1]
    assert say("id=1")[1].count("CLAIM  ") == 1


@pytest.mark.parametrize(
    "word", ["model.num_moe_layers=120", "claims.set=[kimi_k3.num_moe_layers:120]"]
)
def test_another_verdict_than_recorded_is_status_3(say, word):
    status, page, _ = say("id=rounds_240", word)
    assert status == 3
    assert re.search(r"^VERDICT +depends \(recorded: fails\)$", page, re.M)


def test_the_table_marks_what_differs(say):
    status, page, _ = say("model.num_moe_layers=120")
    assert status == 3 and "! depends," in page
    assert re.search(
        r"another verdict than recorded \(status 3\): .*rounds_240", " ".join(page.split())
    )


def test_a_stranger_adds_a_claim_without_code(say, tmp_path):
    word = own_claims(tmp_path / "own", entry(id="racks_504"), entry(id="racks_500", says=500))
    status, page, _ = say(word)
    assert status == 3  # racks_500 is recorded to hold
    assert page.index("racks_504") > page.index("50b")
    assert re.search(r"racks_500 +500 +504 accelerators +! fails", page)
    status, page, _ = say(word, "id=racks_500", "claims.set=[in_a_rack:71.4285714285714]")
    assert status == 0 and "found 500" in page


def test_a_copied_file_with_another_input_has_another_verdict(say, tmp_path):
    """Judging: layers, width, context, GB to GiB changed in a copy of our own files."""
    copies = []
    for path in sorted(FOLDER.glob("*.yaml")):
        shared = yaml.safe_load(path.read_text())
        for claim in shared.pop("claims"):
            copies.append({**shared, **claim, "id": f"{claim['id']}_copy"})
    by_name = {claim["id"]: claim for claim in copies}
    by_name["fp4_experts_348_GiB_copy"]["inputs"]["expert"] = "24 MB"
    by_name["insights_pair_us_copy"]["settings"] = {"a": {}, "b": {"experts": 9}}
    by_name["weights_mxfp4_copy"]["inputs"]["scales"] = "0 GB"
    by_name["rounds_240_copy"]["settings"] = {"deeper": {"model.num_moe_layers": 120}}
    word = own_claims(tmp_path / "own", *copies)
    status, page, _ = say(word)
    flat = " ".join(page.split())
    (wrong,) = re.findall(r"another verdict than recorded \(status 3\): (.*)$", flat)
    assert status == 3 and set(wrong.split(", ")) == {
        *("fp4_experts_348_GiB_copy", "insights_pair_us_copy"),
        *("weights_mxfp4_copy", "rounds_240_copy"),
    }


def test_the_example_of_the_document_is_a_claim(say, tmp_path):
    (example,) = re.findall(r"```yaml\n(.*?)```", DOC, re.S)
    (tmp_path / "my_claims").mkdir()
    (tmp_path / "my_claims" / "slide.yaml").write_text(example)
    status, page, _ = say("claims.path=my_claims", "id=slide_16_ranks")
    assert status == 0 and "VERDICT        fails (recorded: fails)" in page
    # 1,024 tokens x 10.3541 ranks / 2 x 3,696 B, and with all 16 experts
    assert "found 19.59 MB" in page and "found 30.28 MB" in page
    assert say("claims.path=my_claims", "id=slide_16_ranks", "claims.set=[tokens:2090]")[0] == 3


def test_the_tables_of_the_document_are_complete():
    for name in all_claims():
        words = outcome_words(outcome(name), {})
        assert f"| {words['row']} | `{name}` | {words['said']} | {words['verdict']} |" in DOC
    assert DOC.count("| `") > len(all_claims())
    for name, formula in FORMULAS.items():
        parameters = ", ".join(f"`{one}`" for one in formula.parameters)
        assert f"| `{name}` | {formula.gives} | {parameters} |" in DOC
    fields = DOC.partition("| field | meaning |")[2].partition("\n\n")[0]
    documented = set(re.findall(r"`(\w+)`", fields))
    assert set(FIELDS) <= documented | {"expression", "steps"}


WRONG = [
    ("id: x\nclaims: [1", r"mine.yaml: line \d: "),
    ("claims: []", "mine.yaml: claims: must be a list of claims"),
    ("- 1", "mine.yaml: must be a claim, or have a list claims"),
    ("", "mine.yaml: must be a claim"),
    ("id: x\nid: y", "id stands twice"),
    ("!!python/object/apply:os.system ['true']", "could not determine a constructor"),
    (entry(id="rounds_240"), "rounds_240: the id is taken by a claim of .*rounds.yaml"),
    (entry(formula="cube"), "sample: formula=cube: no such formula"),
    (entry(inputs={"racks": 7}), "sample: in_a_rack: no such input"),
    (entry(says="504 GB"), "sample: says=504 GB: the formula gives a plain number"),
    (entry(verdict="true"), "sample: verdict=true: choose holds, fails"),
    (entry(id="a b"), "id=a b: must be a word"),
    ("id: x\nsays: 2026-13-45", "mine.yaml: has a value that YAML cannot read: month"),
    ("id: !!bool maybe", "mine.yaml: has a value that YAML cannot read"),
    ("id: " + "9" * 5000, "mine.yaml: has a value that YAML cannot read"),
    (  # a billion of entries in a few lines
        "a: &a [x]\n"
        + "".join(f"{b}: &{b} [{', '.join([f'*{a}'] * 9)}]\n" for a, b in pairwise("abcdefghi"))
        + "claims: *i",
        "a claim is a list of fields, id first",
    ),
]


@pytest.mark.parametrize(("content", "message"), WRONG)
def test_a_wrong_file_is_one_line_and_status_2(say, tmp_path, content, message):
    (tmp_path / "own").mkdir()
    text = content if isinstance(content, str) else yaml.safe_dump(content)
    (tmp_path / "own" / "mine.yaml").write_text(text)
    status, page, error = say(f"claims.path={tmp_path / 'own'}")
    assert (status, page) == (2, "")
    assert error.count("\n") == 1 and re.match(rf"wideep: .*{message}", error), error


@pytest.mark.parametrize("what", ["folder", "pipe", "loop", "link to nowhere"])
def test_what_is_no_file_is_one_line_and_status_2(say, tmp_path, what):
    (tmp_path / "own").mkdir()
    path = tmp_path / "own" / "mine.yaml"
    make = {
        "folder": path.mkdir,
        "pipe": lambda: os.mkfifo(path),
        "loop": lambda: path.symlink_to(path),
        "link to nowhere": lambda: path.symlink_to("nowhere"),
    }
    make[what]()
    status, page, error = say(f"claims.path={tmp_path / 'own'}")
    assert (status, page) == (2, "")
    assert error == f"wideep: {path}: is no file that can be read\n"


def test_two_claims_of_one_name_are_refused(say, tmp_path):
    word = own_claims(tmp_path / "own", entry(), entry())
    status, _, error = say(word)
    assert status == 2 and "sample: the id is taken by a claim of" in error


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["id=rounds_24"], r"id=rounds_24: no such claim \(did you mean rounds_240\?\)"),
        (["id=51"], "id=51: no such claim"),
        (["claims.path=nowhere"], "claims.path=nowhere: is no folder"),
        (["claims.path=."], ": has no file with a claim"),
        (["claims.set=[contxt:8192]"], r"no claim here has an input contxt \(did you mean context"),
        (["claims.set=[context]"], "claims.set=context: write name:value"),
        (["claims.set=[context:8GBB]"], "claims.set=context=8GBB: GBB: no such unit"),
        (["id=1", "claims.set=[context:8GB]"], "cache_saved_75: tokens=8 GB: bytes where tokens"),
        (["id=1", "run=true"], "run=true: none of these claims"),
        (["ranks=4"], "ranks=4: job=claims does not use it"),
    ],
)
def test_a_wrong_word_is_one_line_and_status_2(say, words, message):
    status, page, error = say(*words)
    assert (status, page) == (2, "") and error.count("\n") == 1
    assert re.search(message, error), error


def test_the_keys_belong_to_this_job(capsys):
    for word in ("id=1", "run=true", "claims.path=x"):
        assert main(["predict", word]) == 2
        assert capsys.readouterr().err == f"wideep: {word}: belongs to job=claims\n"


def test_no_torch_is_imported():
    look = (
        "import sys; from moe.__main__ import main; main(['claims']);"
        "sys.exit('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", look], cwd=ROOT, capture_output=True, timeout=120)
    assert done.returncode == 0 and b"no_weights_" in done.stdout


DECIDED = [claim for claim in all_claims().values() if claim.run is not None]


@pytest.fixture(scope="module")
def figures():
    """What the runs of all claims count, each run once."""
    return figures_of(words for claim in DECIDED for words in claim.run.commands.values())


def test_claims_that_a_run_can_decide_have_one():
    assert {claim.id for claim in DECIDED} >= {
        *("no_weights_on_the_network", "two_rounds_a_layer", "headline_is_a_bound"),
        *("k3_equals_k2_a_layer", "dispatch_broadcasts", "at_most_16_ranks"),
    }


@pytest.mark.parametrize("claim", DECIDED, ids=lambda claim: claim.id)
def test_a_run_decides_as_recorded(claim, figures):
    """Weights at home, two rounds, the bound, the identity with K2, at most min(16, R) ranks."""
    counted = {name: figures[words] for name, words in claim.run.commands.items()}
    *worked_out, run = with_run(outcome(claim.id), counted).cases
    assert run.setting == "counted by a run" and worked_out
    assert run.holds == (claim.verdict == "holds")
    # Counts by hand: a run that sent weights, a third round or too much would be against it.
    wrong = {
        name: one | {"expert_weight_bytes": 8, "rounds": 99, "network_dispatch_bytes": 10**9}
        for name, one in counted.items()
    }
    if claim.id in ("no_weights_on_the_network", "two_rounds_a_layer", "headline_is_a_bound"):
        assert with_run(outcome(claim.id), wrong).verdict == "depends"


def test_what_runs_count(figures):
    for words, counted in figures.items():
        told = dict(word.split("=") for word in words)
        ranks, layers = int(told["ranks"]), int(told["layers"])
        tokens = ranks * int(told["tokens"])
        top_k, width = (8, 256) if told.get("model") == "kimi_k2" else (16, 128)
        assert (counted["ranks"], counted["tokens"], counted["steps"]) == (ranks, tokens, 1)
        assert (counted["moe_layers"], counted["rounds"]) == (layers, 2 * layers)
        assert counted["top_k"] == top_k and counted["expert_weight_bytes"] == 0
        assert counted["headline_bytes"] == top_k * tokens * layers * 256 * 2
        rows = counted["dispatched_rows"]
        assert counted["payload_bytes"] == 2 * rows * width * 2  # there and back, bf16
        assert 0 < counted["network_payload_bytes"] < counted["payload_bytes"]
        assert counted["network_payload_bytes"] == 2 * counted["network_dispatch_bytes"]
        copies = top_k * tokens * layers
        assert rows == copies if "dispatcher" in told else rows < copies
        assert rows / tokens / layers <= counted["most_ranks_of_a_token"] <= ranks or (
            "dispatcher" in told
        )


def test_the_table_shows_what_a_run_counted(say, figures, monkeypatch):
    monkeypatch.setattr("moe.jobs.claim_runs.figures_of", lambda commands: figures)
    status, page, _ = say("run=true")
    assert status == 0 and f"{len(DECIDED)} decided by runs, too" in page
    assert page.count(" run: ") == len(DECIDED)
    assert max(map(len, page.splitlines())) <= 100


def test_a_run_is_started_and_leaves_nothing_behind(tmp_path):
    done = wideep(tmp_path, "claims", "id=18b", "run=true")
    assert done.returncode == 0, done.stderr
    assert "STEPS  counted by a run" in done.stdout and "= 4 / (2 * 1)" in done.stdout
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("rankz=4", "rankz=4: no such key"),
        ("ranks=4 job=predict", "must be an emulation"),
        ("ranks=512", "at most 64 ranks"),
    ],
)
def test_a_run_that_cannot_be_is_refused(say, tmp_path, words, message):
    run = {"commands": {"one": words}, "counted": "one.rounds"}
    word = own_claims(tmp_path / "own", entry(run=run))
    status, page, error = say(word, "id=sample", "run=true")
    assert (status, page) == (2, "") and re.search(message, error), error
    assert json.dumps(error).count("\\n") == 1
