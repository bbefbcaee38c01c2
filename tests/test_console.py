"""The printed page: it fits, its numbers add up, and an error in the counts shows in it."""

from __future__ import annotations

import copy
import io
import json
import math
import re
from dataclasses import replace
from typing import Any

import pytest
from page_text import ONLY_BESIDE, joined, number, table_rows, text_of
from report_samples import SAMPLES, sample, sample_inputs, sample_record, with_extra_bytes

from comm.report.console import page, render
from comm.report.full_scale import full_scale
from comm.report.layout import wrap
from comm.report.record import build_record
from comm.report.table_rows import folded_layers, format_z
from comm.report.units import (
    format_bytes,
    format_fixed,
    format_memory,
    format_seconds,
    format_significant,
)


@pytest.mark.parametrize("name", SAMPLES)
def test_every_page_fits_and_is_ascii(name: str) -> None:
    lines = text_of(sample(name))
    assert max(len(text) for text in lines) <= 100
    assert all(text.isascii() and "\0" not in text for text in lines)
    heads = [text.split("  ")[0] for text in lines if text and text[0] != " "]
    sections = [
        *("WideEP 0.1.0", "ANSWER", "BY LAYER", "HEADLINE", "FULL SIZE", "CONVENTIONS"),
        *("TIME", "RESULTS"),
    ]
    if "no tokens" in name or "nothing to do" in name:
        sections = [title for title in sections if title not in ("FULL SIZE", "CONVENTIONS")]
    assert heads == sections


@pytest.mark.parametrize("name", ["default", "training", "padded training", "balanced, training"])
@pytest.mark.parametrize("factor", [10**3, 10**7, 10**11])
def test_a_huge_run_fits(name: str, factor: int) -> None:
    record = scaled(sample(name), factor)
    record["layers"][0]["differing_bytes"] = factor
    assert max(len(text) for text in text_of(record)) <= 100


def scaled(value: Any, factor: int, key: str = "") -> Any:
    """The record with every byte and row of its layers and totals multiplied."""
    if isinstance(value, dict):
        return {
            k: scaled(v, factor, k if k != "rows" else "rows_bytes")
            if k not in ("self", "scale_up", "scale_out") or not isinstance(v, int)
            else v * factor
            for k, v in value.items()
        }
    if isinstance(value, list):
        return [scaled(item, factor, key) for item in value]
    return value * factor if key.endswith("_bytes") and isinstance(value, int) else value


LABELS = ("total", "beside")  # of the table's last rows, as layers' numbers are of the first


@pytest.mark.parametrize(
    "name",
    [
        *("default", "ragged, no law", "92 layers", "one rank", "72 ranks", "training", "padded"),
        *("padded training", "shared experts", "shared experts, all", "balanced, training"),
    ],
)
def test_numbers_parse_back_and_sum_to_the_total(name: str) -> None:
    record = sample(name)
    _, rows = table_rows(record)
    rows = [row if row[0][0].isdigit() or row[0] in LABELS else ["", *row] for row in rows]
    rows = [[row[0], f"back {row[2]}", *row[3:]] if row[1] == "back" else row for row in rows]
    cut = next(i for i, row in enumerate(rows) if row[0] == "total")
    body, end = rows[:cut], {row[1]: row for row in rows[cut:]}
    assert len(end) == len(rows) - cut  # each phase once
    whole = end.pop("both", None) or end.pop("all")
    assert ("both" in {row[1] for row in rows}) == (len(end) == 2)
    assert set(end) == {row[1] for row in body}
    inside = [row for phase, row in end.items() if phase not in ONLY_BESIDE]
    figures = [cell for cell in whole[2:] if re.fullmatch(r"-|<?[\d,.]+", cell)]  # all but z
    for column in range(2, 2 + len(figures)):
        decimals = max(len(row[column].partition(".")[2]) for row in rows)
        half = 0.5 * 10**-decimals * (len(body) + len(end))
        for phase, total in end.items():
            parts = sum(number(row[column]) for row in body if row[1] == phase)
            assert parts == pytest.approx(number(total[column]), abs=half)
        sums = sum(number(row[column]) for row in inside)
        assert sums == pytest.approx(number(whole[column]), abs=half)
    assert number(whole[2]) == sum(
        sum(e["rows"].values()) for e in record["layers"] if e["phase"] not in ONLY_BESIDE
    )


def test_the_table_shows_the_bytes_of_the_record() -> None:
    """A run so small that the table is in bytes: every cell is exact."""
    record = sample_record(ranks=4, ranks_per_node=2, tokens=1, layers=1, top_k=4)
    header, rows = table_rows(record)
    assert header == [
        "layer",
        "phase",
        "rows",
        "hidden",
        "scales",
        "weights",
        "counts",
        "self",
        "node",
        "nodes",
        "B",
        "B",
        "z",
    ]
    cells = [c for c in record["layers"][0]["cells"]]
    kinds = {
        k: sum(c["measured_bytes"] for c in cells if c["kind"] == k)
        for k in ("hidden", "ids", "weights", "counts")
    }
    tiers = [
        sum(c["measured_bytes"] for c in cells if c["tier"] == t)
        for t in ("self", "scale_up", "scale_out")
    ]
    shown = [number(cell) for cell in rows[0][2:-1]]
    assert shown == [
        sum(record["layers"][0]["rows"].values()),
        kinds["hidden"],
        0,
        kinds["ids"] + kinds["weights"],
        kinds["counts"],
        *tiers,
        sum(tiers),
        0,
    ]


@pytest.mark.parametrize(
    ("measured_bytes", "unit"),
    [
        (9_999, "B"),
        (10_000, "kB"),
        (999_999, "kB"),
        (9_999_999, "kB"),
        (10_000_000, "MB"),
        (9_999_999_999, "MB"),
        (10**10, "GB"),
        (10**16, "PB"),
    ],
)
def test_the_unit_is_chosen_by_what_a_layer_moves(measured_bytes: int, unit: str) -> None:
    record = copy.deepcopy(sample("one layer"))
    for entry in (*record["layers"], *record["totals"]["phases"]):
        for cell in entry.get("cells", ()):
            cell["measured_bytes"] = 0
    for cell in record["totals"]["cells"]:
        cell["measured_bytes"] = 0
    for cells in (record["layers"][0]["cells"], record["totals"]["cells"]):
        cells[0]["measured_bytes"] = measured_bytes
    header, _ = table_rows(record)
    assert header[-3:] == [unit, "B", "z"]


def test_bytes_are_shown_only_where_every_figure_is_small() -> None:
    """Three layers of 4 kB each are below the limit one by one, and above it in all."""
    few = {"ranks": 4, "ranks_per_node": 2, "tokens": 1, "top_k": 2}
    one, three = sample_record(**few, layers=1), sample_record(**few, layers=3)
    assert one["totals"]["measured_bytes"] < 10_000 < three["totals"]["measured_bytes"]
    assert [table_rows(record)[0][-3] for record in (one, three)] == ["B", "kB"]


def test_dispatchers_share_the_unit() -> None:
    """Pages of one configuration line up: all three move between 1 and 10 MB a layer."""
    pages = [
        sample_record(tokens=64, layers=2, dispatcher=name)
        for name in ("all_to_all", "rank_dedup", "allgather")
    ]
    assert {table_rows(record)[0][-3] for record in pages} == {"kB"}


@pytest.mark.parametrize("tokens", [1, 64, 2000])
@pytest.mark.parametrize("fault", ["backward", "padding"])
def test_a_run_that_books_its_bytes_wrongly_still_gets_its_page(fault: str, tokens: int) -> None:
    inputs = sample_inputs(tokens=tokens, training=fault == "backward")
    counted, rows = inputs.traffic.bytes.copy(), inputs.traffic.rows
    if fault == "backward":
        counted, rows = counted[:, ::-1], rows[:, ::-1]
    else:
        padding = inputs.traffic.kinds.index("padding")
        counted[..., padding, :, :] = counted[..., 0, :, :]
        counted[..., 0, :, :] = 0
    traffic = replace(inputs.traffic, bytes=counted, rows=rows)
    lines = text_of(build_record(replace(inputs, traffic=traffic)))
    assert max(map(len, lines)) <= 100
    assert any(("back dispatch" if fault == "backward" else " padding ") in text for text in lines)
    assert any(re.search(r"\+-?\d", text) for text in lines)  # a difference is shown


def test_a_deep_model_is_folded_and_says_so() -> None:
    record = sample("92 layers")
    assert folded_layers(record) == list(range(2, 90))
    _, rows = table_rows(record)
    assert [row[0] for row in rows if row[0][0].isdigit()] == ["0", "1", "2-89", "90", "91"]
    (note,) = (text for text in text_of(record) if text.startswith("  folded"))
    assert "rows 2-89 are sums over 88 layers, z from" in note


def test_a_layer_that_differs_is_never_folded() -> None:
    inputs = sample_inputs(**SAMPLES["92 layers"])
    record = build_record(with_extra_bytes(inputs, (40, 0, 1, 0, 0, 3), -256))
    _, rows = table_rows(record)
    assert [row[0] for row in rows if row[0][0].isdigit()] == ["0", "1", "2-89", "40", "90", "91"]
    combine = rows[[row[0] for row in rows].index("40") + 1]
    assert "-256" in combine
    assert any("87 layers (without 40)" in text for text in text_of(record))


def test_a_wrong_cell_changes_the_answer_and_the_difference() -> None:
    inputs = sample_inputs()
    good, bad = (
        build_record(inputs),
        build_record(with_extra_bytes(inputs, (1, 0, 0, 0, 2, 5), 256)),
    )
    good_page, bad_page = "\n".join(text_of(good)), "\n".join(text_of(bad))
    assert "ANSWER  everything that was checked agrees (status 0)" in good_page
    assert "ANSWER  COUNTED BYTES DIFFER from a prediction (status 3)" in bad_page
    assert "OUTSIDE" in bad_page and "OUTSIDE" not in good_page
    assert "\n  exact        EXACT    bytes counted" in good_page
    assert "\n! exact        OUTSIDE  bytes counted" in bad_page
    assert bad_page.count("\n! ") == 1 and "\n! " not in good_page
    place = "layer 1, dispatch, hidden, rank 2 -> rank 5"
    assert place in " ".join(bad_page.split())
    differing = [row for row in table_rows(bad)[1] if "+256" in row]
    assert len(differing) == 3  # the layer, the phase's total, the total
    assert not any("+256" in row for row in table_rows(good)[1])


def test_errors_that_cancel_are_shown() -> None:
    inputs = with_extra_bytes(sample_inputs(), (0, 0, 0, 0, 2, 5), 256)
    record = build_record(with_extra_bytes(inputs, (0, 0, 0, 0, 2, 6), -256))
    assert "+-512" in table_rows(record)[1][0]


def test_the_answer_comes_before_every_table() -> None:
    lines = text_of(sample_record())
    assert [text for text in lines if text[:1] not in ("", " ")][1].startswith("ANSWER")
    assert lines.index(next(t for t in lines if t.startswith("ANSWER"))) < 9


def verdict_lines(record: dict[str, Any]) -> list[tuple[str, ...]]:
    """Mark, name and state of each verdict."""
    lines = text_of(record)
    answer = lines[: next(i for i, text in enumerate(lines) if text.startswith("BY LAYER"))]
    pattern = r"([ !]) ([a-z]+) +([A-Z]+(?: [A-Z]+)?) {2,}\S"
    return [found.groups() for text in answer if (found := re.match(pattern, text))]


@pytest.mark.parametrize("name", SAMPLES)
def test_every_verdict_carries_its_name_and_its_state(name: str) -> None:
    record = sample(name)
    assert verdict_lines(record) == [
        (" ", verdict["name"], verdict["state"].replace("_", " ")) for verdict in record["verdicts"]
    ]
    assert len(record["verdicts"]) == 4 + (record["manifest"]["config"]["mode"] == "training")


def test_every_failed_verdict_is_marked_and_the_text_lines_up() -> None:
    record = copy.deepcopy(sample("ragged, no law"))  # has a long NOT AVAILABLE
    for verdict in (record["verdicts"][0], record["verdicts"][3]):
        verdict["state"] = "OUTSIDE"
    marks = [mark for mark, *_ in verdict_lines(record)]
    assert marks == ["!", " ", " ", "!"]
    texts = [text for text in text_of(record) if re.match(r"[ !] [a-z]+ +[A-Z]{3,}", text)]
    starts = {len(text) - len(re.sub(r"^.{15}[A-Z ]+  ", "", text)) for text in texts}
    assert len(texts) == 4 and starts == {len("  correctness  NOT AVAILABLE  ")}


def test_the_full_size_line_gives_the_ratio() -> None:
    record = sample("default")
    full = record["full_scale"]
    formula = full["rounds"] * full["headline_bytes"]
    ratio = formula / full["forward_pass"]["network_bytes"]
    said = f"the formula says {format_bytes(formula)} there and back, {ratio:.2f} times as much"
    assert ratio > 4 and said in joined(record)
    alone = joined(sample("one rank"))
    assert "there and back BY LAYER" in alone  # nothing on the network: no ratio


def test_the_headline_says_where_the_reduced_width_inflates_it() -> None:
    warning = "weighs more at this reduced width"
    record = copy.deepcopy(sample("default"))
    assert warning in joined(record) and "1 step, one way; dispatch put" in joined(record)
    for change in ("wide rows", "little metadata"):
        other = copy.deepcopy(record)
        if change == "wide rows":
            other["manifest"]["shape"]["latent_size"] = 3584
        else:
            (factor,) = [f for f in other["headline"]["factors"] if f["name"] == "metadata"]
            factor["value"] = 1.09
        assert warning not in joined(other), change


@pytest.mark.parametrize("name", SAMPLES)
def test_the_page_has_one_word_for_one_thing(name: str) -> None:
    lines = text_of(sample(name))
    field = [i for i, text in enumerate(lines) if text.startswith(("CONVENTIONS", "TIME"))]
    text = " ".join(lines[: field[0]] + lines[field[-1] :])  # the field has words of its own
    for word in ("scale_up", "scale_out", "scale up", "remote", "backward dispatch"):
        assert word not in text
    for word in ("network", "self"):
        assert word in text


def test_backward_phases_have_rows_and_times_of_their_own() -> None:
    lines = text_of(sample("shared experts, training"))
    for phase in ("combine", "tp_reduce", "tp_gather", "dispatch"):
        in_table = [text for text in lines if f" back {phase} " in text]
        assert len(in_table) == 2 + 1 + 1  # two layers, the total, the time
    assert sum(text.startswith("  grad_sync ") for text in lines) == 1  # its time
    assert any(text.startswith("BY LAYER  forward and backward;") for text in lines)
    assert not any("back " in text for text in text_of(sample("default")))


def test_columns_are_merged_only_where_the_page_is_too_narrow() -> None:
    assert "hidden" in table_rows(sample("training"))[0]
    header, rows = table_rows(sample("balanced, training"))
    assert "payload" in header and not {"hidden", "scales"} & set(header)
    record = scaled(sample("balanced, training"), 10**7)
    for entry in record["layers"]:
        entry["differing_bytes"] = 10**9
    header, _ = table_rows(record)
    assert {"payload", "metadata", "beside"} < set(header) and "counts" not in header


def test_full_size_compares_the_formula_with_a_pass_there_and_back() -> None:
    """Phases inside a node are no ways of their own to the formula."""
    lines = text_of(sample("shared experts"))
    table = [text.split() for text in lines if text.endswith("229.4 kB") or "pass, 368" in text]
    assert [row[0] for row in table] == ["dispatch,", "combine,", "pass,"]
    assert table[-1][-2:] == ["42.21", "MB"]  # 2 x 92 x 229,376 B
    assert "the formula says 42.21 MB there and back" in joined(sample("shared experts"))


def test_the_headline_is_walked_down_to_the_count() -> None:
    record = sample_record(tokens=64, layers=4)
    lines = text_of(record)
    start = next(i for i, text in enumerate(lines) if text.startswith("HEADLINE"))
    factors = re.findall(r" x (\d+\.\d{4}) ", "\n".join(lines[start : start + 12]))
    assert len(factors) == 7
    product = math.prod(map(float, factors))
    assert product == pytest.approx(record["headline"]["ratio"], abs=2e-4)
    overstated = 1 / record["headline"]["ratio"]
    assert sum(f"the formula overstates it {overstated:.2f} times" in text for text in lines) == 2


def test_k3_at_full_size_on_eight_ranks() -> None:
    """traffic_model: 6.1894 rows a token leave the rank, 44,366 B of BF16 payload; 184 rounds."""
    record = sample_record(tokens=1, layers=1)
    rows = {"self": 7.0736 - 6.1894, "scale_up": 2.6526, "scale_out": 6.1894 - 2.6526}
    record["full_scale"] = full_scale(
        {"dispatch": rows, "combine": rows},
        record["manifest"]["full_shape"],
        "rank_dedup",
        {"dispatch": "bf16", "combine": "bf16"},
    )
    lines = text_of(record)
    dispatch = next(text.split() for text in lines if text.startswith("  dispatch, a layer"))
    assert dispatch[3] == "6.189"
    assert dispatch[8:10] == ["44.37", "kB"] and dispatch[-2:] == ["229.4", "kB"]
    assert any("pass, 184 rounds" in text for text in lines)
    assert any("3584 values really sent 114.7 kB" in text for text in lines)


def test_a_saved_record_prints_the_same() -> None:
    record = sample_record()
    assert text_of(json.loads(json.dumps(record))) == text_of(record)


def test_printing_changes_nothing() -> None:
    record = sample("92 layers")
    before = copy.deepcopy(record)
    text_of(record)
    assert record == before


def test_a_pipe_gets_plain_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FORCE_COLOR", raising=False)
    record, out = sample_record(), io.StringIO()
    render(record, file=out)
    assert out.getvalue().splitlines() == text_of(record)


def test_colour_only_adds_escapes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    record, out = sample_record(), io.StringIO()
    render(record, color=True, file=out)
    assert "\x1b[1;32m  exact        EXACT  " in out.getvalue()
    stripped = re.sub(r"\x1b\[[0-9;]*m", "", out.getvalue())
    assert [text.rstrip() for text in stripped.splitlines()] == text_of(record)


def test_a_failed_verdict_is_red(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    bad = with_extra_bytes(sample_inputs(), (1, 0, 0, 0, 2, 5), 256)
    record, out = build_record(bad), io.StringIO()
    render(record, color=True, file=out)
    assert "\x1b[1;31m! exact        OUTSIDE  " in out.getvalue()


def test_no_colour_where_it_is_not_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    out = io.StringIO()
    render(sample_record(), color=False, file=out)
    assert "\x1b" not in out.getvalue()


def test_a_path_that_the_terminal_cannot_spell_is_escaped() -> None:
    raw = io.BytesIO()
    out = io.TextIOWrapper(raw, encoding="ascii")
    record = {**sample_record(), "result_dir": "/home/j\u00f6rg/[red]x" + "y" * 120}
    render(record, file=out)
    out.flush()
    lines = raw.getvalue().decode("ascii").splitlines()
    assert any("/home/j\\xf6rg/[red]x" in text for text in lines)
    assert max(map(len, lines)) <= 103  # an escaped letter takes four columns


def test_a_page_too_narrow_for_the_table_is_refused() -> None:
    with pytest.raises(ValueError, match="width=40 is too narrow"):
        page(sample_record(), 40)


def test_z_says_when_the_law_leaves_no_spread() -> None:
    figure = {"measured_bytes": 7, "expected_bytes": 7.0, "z": None}
    assert format_z(figure) == "="
    assert format_z({**figure, "measured_bytes": 8}) == "!="
    assert format_z({**figure, "expected_bytes": None}) == ""
    assert format_z({**figure, "z": -1.234}) == "-1.23"
    shown = [format_z({**figure, "z": z}) for z in (12.34, -123.4, 1234.5, 12345.6, -3e15)]
    assert shown == ["+12.3", "-123", "+1234", "+1e4", "-3e15"]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (896.5, "896.5 B"),
        (1000, "1.000 kB"),
        (44_366, "44.37 kB"),
        (999_949, "999.9 kB"),
        (999_950, "1.000 MB"),
        (229_376, "229.4 kB"),
        (8.163e6, "8.163 MB"),
        (1.561e12, "1.561 TB"),
        (3e21, "3,000 EB"),
        (-4096, "-4.096 kB"),
    ],
)
def test_format_bytes(value: float, text: str) -> None:
    assert format_bytes(value) == text


def test_other_formats() -> None:
    assert format_significant(0.029129) == "0.02913"
    assert format_significant(99_999.6) == "100,000"
    assert format_memory(141 * 2**30) == "141.0 GiB"
    assert [format_seconds(s) for s in (12.3456, 0.0123456, 1.5e-7, 0.0)] == [
        "12.35 s",
        "12.35 ms",
        "0.1500 us",
        "0 us",
    ]
    assert [format_fixed(n, 1, 1) for n in (0, 40, 1_234_567)] == ["-", "<0.1", "1,234.6"]


def test_a_number_keeps_its_unit_when_a_line_ends() -> None:
    assert wrap("it was 41,000 B in 3.2 ms, 7 bytes", 13) == [
        "it was",
        "41,000 B in",
        "3.2 ms, 7",
        "bytes",
    ]
