"""The formulas and numbers of docs/traffic_model.md are those of the code."""

import doctest
from pathlib import Path

import pytest

DOCUMENT = Path(__file__).parent.parent / "docs" / "traffic_model.md"


def test_every_example_of_the_traffic_model_runs(capsys: pytest.CaptureFixture[str]) -> None:
    result = doctest.testfile(str(DOCUMENT), module_relative=False)
    assert result.failed == 0, capsys.readouterr().out
    assert result.attempted > 30
