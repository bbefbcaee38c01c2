"""The table of the field's numerators: every entry of the record, wrapped, in the width."""

from __future__ import annotations

import pytest
from page_text import text_of
from report_samples import SAMPLES, sample

from comm.report.conventions_page import PRINTED_BY_WIDTH, conventions
from comm.report.layout import plain_text
from comm.report.units import format_bytes

ENTRY = {"name": "copies", "rows_per_token": 7.5, "num_bytes": 1234.6, "printed_by": ""}


def lines_of(*entries: dict, **more: str) -> list[str]:
    return [plain_text(spans) for spans in conventions(entries, "bf16", 100, **more)]


def test_nothing_where_there_are_none() -> None:
    assert lines_of() == lines_of(ENTRY | {"rows_per_token": 0.0, "num_bytes": 0.0}) == []


def test_numerators_that_count_no_row_are_left_out_and_that_is_said() -> None:
    none = ENTRY | {"name": "between nodes", "rows_per_token": 0.0, "num_bytes": 0.0}
    text = "\n".join(lines_of(ENTRY, none))
    assert "between nodes" not in text and "left out     numerators that count no row here" in text
    assert "left out" not in "\n".join(lines_of(ENTRY))


def test_an_entry_is_one_row_of_figures_and_as_many_lines_of_words_as_it_needs() -> None:
    words = "one program, another program, and a third with a long name"
    lines = lines_of(ENTRY, ENTRY | {"name": "nodes", "printed_by": words})
    start = next(i for i, text in enumerate(lines) if set(text.strip()) == {"-"}) + 1
    rows = lines[start : start + 3]
    assert rows[0].split() == ["copies", "7.5000", "1.235", "kB", "-"]
    assert rows[1].split()[:4] == ["nodes", "7.5000", "1.235", "kB"]
    column = rows[1].index("one program")
    assert set(rows[2][:column]) == {" "}
    assert " ".join([rows[1][column:], rows[2][column:]]) == words
    assert max(len(row[column:]) for row in rows) <= PRINTED_BY_WIDTH


def test_every_figure_says_what_it_counts() -> None:
    text = "\n".join(lines_of(ENTRY, of="; between ranks with the same shard"))
    assert "bytes of one dispatch of this routing" in text
    assert "payload of bf16 rows in one layer and step, one way, of the mean rank; between" in text
    assert "remote       without what stays on the token's own rank" in text


def test_the_remark_can_be_another() -> None:
    assert lines_of(ENTRY, remark="expected")[1] == "CONVENTIONS  expected"


@pytest.mark.parametrize("name", SAMPLES)
def test_a_page_has_every_convention_of_its_record(name: str) -> None:
    record = sample(name)
    lines = text_of(record)
    assert len(record["conventions"]) == 12
    counted = [entry for entry in record["conventions"] if entry["rows_per_token"]]
    starts = [i for i, text in enumerate(lines) if text.startswith("CONVENTIONS")]
    assert len(starts) == bool(counted)
    if not counted:
        return
    end = next(i for i, text in enumerate(lines) if text.startswith("TIME"))
    section = [" ".join(text.split()) for text in lines[starts[0] : end]]
    for entry in counted:
        figures = f"{entry['rows_per_token']:.4f} {format_bytes(round(entry['num_bytes']))}"
        rows = [text for text in section if text.startswith(f"{entry['name']} {figures}")]
        assert len(rows) == 1, entry
    shared = SAMPLES[name].get("expert_tp", 1) > 1
    assert ("between ranks with the same shard" in " ".join(section)) == shared


def test_conventions_of_the_default_sample_follow_from_its_own_rows() -> None:
    """The dispatch of rank_dedup, counted once more, from its rows."""
    record = sample("default")
    by_name = {entry["name"]: entry for entry in record["conventions"]}
    rows = [e["rows"] for e in record["layers"] if e["phase"] == "dispatch"]
    tokens = 8 * 64 * 4
    remote = sum(row["scale_up"] + row["scale_out"] for row in rows)
    assert by_name["distinct ranks, remote"]["rows_per_token"] == pytest.approx(remote / tokens)
    own = remote + sum(row["self"] for row in rows)
    included = by_name["distinct ranks, self included"]
    assert included["rows_per_token"] == pytest.approx(own / tokens)
    assert included["num_bytes"] == pytest.approx(own / 4 / 8 * 256)
