"""WideEP in Python: what it takes, returns and raises, and that it stays quiet and light."""

import json
import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser

import moe
from moe import ConfigError, RankFailure, emulate, load, predict
from moe.config import compose
from moe.words import text_of, words

ROOT = Path(__file__).parent.parent
SMALL = {"ranks": 3, "layers": 1, "model": {"num_experts": 12, "top_k": 3}, "warmup": 0}


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A run of three ranks and what the caller's terminal saw of it."""
    folder = tmp_path_factory.mktemp("api") / "it's, a run"
    return emulate("wire.dispatch=mxfp8", SMALL, tokens=(5, 0, 4), output_dir=folder), folder


def test_a_run_returns_what_is_in_its_folder(finished):
    result, folder = finished
    assert result.folder == folder and result.status == 0
    assert (
        result.to_dict() == json.loads((folder / "run.json").read_text()) == load(folder).to_dict()
    )
    with np.load(folder / "traffic.npz") as saved:
        assert np.array_equal(result.matrix(), saved["bytes"].sum(axis=(0, 1, 2, 3)))
    about = result.manifest
    assert (about["world_size"], about["tokens_per_rank"]) == (3, [5, 0, 4])
    assert about["wire"]["dispatch"] == "mxfp8" and about["shape"]["num_experts"] == 12
    assert result.verdicts["exact"].state == "EXACT"


def test_the_same_run_by_its_words_sends_the_same(finished, tmp_path, capfd):
    given = words({**SMALL, "tokens": [5, 0, 4], "wire": {"dispatch": "mxfp8"}})
    again = emulate(*given, output_dir=tmp_path / "again")
    assert np.array_equal(again.matrix(kind="hidden"), finished[0].matrix(kind="hidden"))
    assert capfd.readouterr() == ("", "")


def test_mistakes_are_raised_before_a_rank_starts(tmp_path, capfd):
    for given, said in (
        ({"dispatcher": "al_to_all"}, "did you mean all_to_all"),
        ({"rank": 8}, "no such key"),
        ({"job": "bench"}, "leave job out"),
        ({"wire": {"dispatch": "fp7"}}, "no such wire format"),
        ({"output_dir": tmp_path}, "exists"),
    ):
        with pytest.raises(ValueError, match=said) as caught:
            emulate(**given)
        assert type(caught.value) is ConfigError
    with pytest.raises(TypeError, match="expected a word"):
        emulate(8)
    with pytest.raises(ValueError, match="must be a folder with a run.json"):
        load(tmp_path)
    assert capfd.readouterr() == ("", "")


def test_a_rank_that_fails_is_raised(tmp_path, capfd):
    fault = {"kind": "raise", "rank": 1, "phase": "combine"}
    with pytest.raises(RankFailure, match=r"^rank 1, .*combine") as caught:
        emulate(SMALL, fault=fault, output_dir=tmp_path / "kept")
    assert caught.value.guilty.rank == 1 and capfd.readouterr().out == ""
    assert list((tmp_path / "kept").glob("events.rank*.jsonl"))


def test_a_script_needs_no_guard_and_may_print_the_page(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "print('once')\nfrom moe import emulate\n"
        "small = {'num_experts': 12, 'top_k': 3}\n"
        "result = emulate(ranks=2, layers=1, tokens=4, model=small, show=True)\n"
        "print(result)\n"
    )
    done = subprocess.run(
        [sys.executable, script.name],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0 and done.stderr == "", done.stderr
    lines = done.stdout.splitlines()
    assert lines.count("once") == 1 and any(line.startswith("ANSWER  ") for line in lines)
    assert lines[-1].startswith("<result of kimi_k3, rank_dedup, 2 ranks: status 0, in results/")


def test_the_examples_of_the_docs_run(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    text = (ROOT / "docs" / "python.md").read_text()
    examples = re.findall(r"```python\n(.*?)```", text, re.S)
    assert len(examples) == 4
    for example in examples:
        folder = next(iter(sorted(tmp_path.glob("results/*"))), tmp_path)
        monkeypatch.setattr("sys.argv", ["example.py", str(folder)])
        exec(compile(example, "python.md", "exec"), {})
    lines = capsys.readouterr().out.splitlines()
    sent = [load(folder).bytes(phase=phase, tier="scale_out") for phase in ("dispatch", "combine")]
    for phase, num_bytes in zip(("dispatch", "combine"), sent, strict=True):
        assert f"{phase} {num_bytes} B between nodes" in lines
    assert lines[-1].startswith("rank_dedup ") and lines[-1].endswith(" B a token")


def test_importing_is_light_and_no_module_hides_a_function():
    look = "import sys, moe; dir(moe); moe.ConfigError; print(sorted(sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", look], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert "'moe.settings'" in done.stdout
    for heavy in ("torch", "hydra", "omegaconf", "numpy", "moe.api"):
        assert f"'{heavy}'" not in done.stdout, heavy
    for name in moe.__all__:
        assert name in dir(moe) and callable(getattr(moe, name))
        assert not (ROOT / "moe" / f"{name}.py").exists(), "importing it would hide the function"
    with pytest.raises(AttributeError, match="has no attribute 'emulat'"):
        moe.emulat  # noqa: B018


@pytest.mark.parametrize(
    "value",
    [
        *(None, True, False, 3, -1, 0.5, 1e-6, 1e30, "all_to_all", "", " ", "a b", "null", "True"),
        *(
            "it's",
            'a "word"',
            "a,b",
            "[a,b]",
            "back\\",
            "back\\'s",
            "\\\\'",
            "x=y",
            "/a/b c/d.json",
        ),
        *([1, 2], ["a", "b c"], [], (4,)),
    ],
)
def test_values_survive_the_command_line(value):
    override = OverridesParser.create().parse_override(f"key={text_of(value)}")
    back = override.value()
    assert not override.is_sweep_override()
    assert back == (list(value) if isinstance(value, tuple) else value)
    assert type(back) is type(list(value) if isinstance(value, tuple) else value)


def test_a_prediction_expects_what_a_run_counts(finished):
    result, _ = finished
    given = {"tokens": [5, 0, 4], "scale": "laptop", "wire.dispatch": "mxfp8"}
    expected = predict({key: value for key, value in SMALL.items() if key != "warmup"}, given)
    entry = next(one for one in result.to_dict()["totals"]["phases"] if one["phase"] == "combine")
    law = expected.of("remote", ("combine",))
    assert law.mean == pytest.approx(entry["network"]["expected_bytes"])
    assert law.std == pytest.approx(entry["network"]["expected_std"])
    assert expected.as_dict()["ranks"] == 3
    with pytest.raises(ConfigError, match="job=predict does not use it"):
        predict(warmup=2)


def test_parts_and_options_of_a_group():
    given = {"router": {"name": "skew", "max_over_mean": 2}, "tokens": np.int64(7)}
    assert words(given) == ["router=skew", "router.max_over_mean=2", "tokens=7"]
    config = compose(words(given))
    assert (config.router.name, config.router.max_over_mean, config.tokens) == ("skew", 2.0, 7)
    with pytest.raises(TypeError, match="a setting is a number"):
        words({"tokens": {1, 2}})
    with pytest.raises(TypeError, match="1: the name of a setting is a text"):
        words({1: 2})


def test_threads_may_ask_at_once():
    with ThreadPoolExecutor(4) as pool:
        sizes = list(pool.map(lambda size: predict(ep_size=size).config.ep_size, (2, 4, 8, 16)))
    assert sizes == [2, 4, 8, 16]


@pytest.mark.parametrize("first", ["ours", "Jupyter's"])
def test_jupyter_may_have_a_package_of_the_same_name(first, tmp_path):
    """`comm` of PyPI, which ipykernel needs: both packages work, whichever is found first."""
    (tmp_path / "comm").mkdir()
    (tmp_path / "comm" / "__init__.py").write_text(
        "from .base_comm import BaseComm\ncreate_comm = BaseComm\n"
    )
    (tmp_path / "comm" / "base_comm.py").write_text("class BaseComm: pass\n")
    script = (
        "import moe, comm, comm.base_comm, comm.report.units as units\n"
        "from comm import topology\n"
        "assert comm.create_comm is comm.base_comm.BaseComm and units.GIB == 2**30\n"
        "assert topology.TIER_NAMES and not hasattr(comm, 'nothing')\n"
        "print(moe.load)\n"
    )
    folders = [str(ROOT), str(tmp_path)] if first == "ours" else [str(tmp_path), str(ROOT)]
    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=tmp_path / "comm",
        env=os.environ | {"PYTHONPATH": ":".join(folders)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0 and "function load" in done.stdout, done.stderr
