"""docs/questions.md and docs/first_walk.md: every command is run and prints the lines below it."""

import contextlib
import io
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from command_line import wideep

from moe.__main__ import main
from moe.cli import read_words
from moe.settings import RANKLESS

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAIR = re.compile(r"```(sh|python)\n(.*?)```(?:\n\n```text\n(.*?)```)?", re.S)


def pairs() -> list:
    """(language, code, lines that it prints) of both documents."""
    found = []
    for name in ("questions.md", "first_walk.md"):
        for number, (language, code, shown) in enumerate(PAIR.findall((DOCS / name).read_text())):
            lines = [line for line in shown.splitlines() if line and line != "..."]
            found.append(pytest.param(language, code, lines, id=f"{name}-{number}"))
    return found


def printed(command: str, folder: Path) -> str:
    """What a command line prints; jobs without ranks run here, the others as a program."""
    head, *words = shlex.split(command)
    if head in ("./launch.sh", "source", "pytest"):  # tests/test_launch.py, test_testing.py
        return ""
    assert head == "wideep", f"{command}: no test knows this command"
    job = next((one for one in read_words(words).overrides if one.startswith("job=")), "")
    if job.removeprefix("job=") not in RANKLESS:
        done = wideep(folder, *words, timeout=120)
        assert done.returncode == 0, done.stderr
        return done.stdout
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        assert main(words) == 0
    return out.getvalue()


@pytest.mark.parametrize(("language", "code", "lines"), pairs())
def test_a_command_prints_what_is_shown(language, code, lines, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "WIDEEP_STATUS_FILE"):
        monkeypatch.delenv(name, raising=False)
    if "@pytest.mark.ranks" in code:
        (tmp_path / "test_traffic.py").write_text(code)
        words = ["-m", "pytest", "-p", "moe.pytest_plugin", "-p", "no:cacheprovider", "-q"]
        done = subprocess.run(
            [sys.executable, *words], env=os.environ | {"PYTHONPATH": str(ROOT)}, timeout=120
        )
        assert done.returncode == 0
        text = ""
    elif language == "python":
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            exec(compile(code, "questions.md", "exec"), {})
        text = out.getvalue()
    else:
        text = "".join(printed(line, tmp_path) for line in code.strip().splitlines())
    page = text.splitlines()
    for line in lines:
        assert line in page, f"not printed: {line!r}"


def test_every_question_is_there():
    """As many as were asked; each has a command or a program."""
    sections = (DOCS / "questions.md").read_text().split("\n## ")[1:]
    assert len(sections) == 18
    assert all(PAIR.search(section) for section in sections)
