"""The parts of the page that need no picture, or one of a few bars: verdicts, headline, full size,
conventions, manifest. Their words are those of the printed page."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Mapping
from typing import Any

from comm.report import answer
from comm.report.conventions_page import REMOTE
from comm.report.figures import FACTOR_NAMES, FACTOR_WORDS
from comm.report.layout import Line
from comm.report.page.charts import BROAD, SERIES, SOFT, bytes_axis, chart
from comm.report.page.html import (
    Markup,
    element,
    facts,
    figure,
    folded,
    join,
    paragraph,
    table,
)
from comm.report.table_rows import TIER_WORDS, shown_tiers
from comm.report.units import format_bytes, format_significant

Record = Mapping[str, Any]
WIDE = 1 << 20  # columns: what the printed page says, in lines that do not break


def said(lines: list[Line]) -> dict[str, str]:
    """Labels and texts of the printed page."""
    return {spans[0][0].strip(): spans[1][0] for spans in lines if len(spans) == 2}


def title_of(record: Record) -> str:
    about = record["manifest"]
    return f"{about['model']}, {about['dispatcher']}, {about['world_size']} ranks"


def heading(record: Record) -> Markup:
    """What ran, and what came of it in one line."""
    bad = "bad" if record["status"] else "good"
    words = said(answer.results(record, WIDE))
    label = f"status {record['status']}"
    verdict = element("p", f"{words[label]} ({label})", class_=f"answer {bad}")
    about = said(answer.manifest(record, WIDE))
    return join([element("h1", title_of(record)), verdict, facts(about)])


def verdicts(record: Record) -> Markup:
    """Each check: its name, its state, what is compared and the worst case found."""
    cards = []
    for verdict in record["verdicts"]:
        state = verdict["state"].replace("_", " ")
        compares = answer.COMPARISONS.get(verdict["name"], "")
        cards.append(
            element(
                "li",
                element("b", verdict["name"]),
                " ",
                element("span", state, class_=f"state {verdict['state'].lower()}"),
                Markup("<br>"),
                element("i", compares),
                Markup("<br>"),
                verdict["reason"],
            )
        )
    words = said(answer.answer(record, WIDE))
    lines = {
        name: words[label]
        for name, label in (("headline", "HEADLINE"), ("full size", "FULL SIZE"))
        if label in words
    }
    return element("ul", *cards, class_="verdicts") + facts(lines)


def headline(record: Record) -> Markup:
    """From the formula to the count, factor by factor, as a waterfall."""
    figures = record["headline"]
    if figures["ratio"] is None:
        return paragraph("No tokens: nothing to compare.")
    steps = list(_steps(figures))
    names, values = [step[0] for step in steps], [step[2] for step in steps]

    def paint(axes: Any) -> None:
        before = [0.0, *values[:-2], 0.0]  # the first and the last stand on the ground
        for i, (start, end) in enumerate(zip(before, values, strict=True)):
            whole = i in (0, len(values) - 1)
            color = SERIES[0] if whole else SERIES[1] if end <= start else SERIES[2]
            axes.barh(i, end - start, left=start, color=color, height=0.7)
            if not whole:
                axes.plot([start, start], [i - 1, i + 0.35], color=SOFT, linewidth=0.6)
        axes.set_yticks(range(len(names)), names)
        axes.invert_yaxis()
        axes.set_xlim(0, max(values) * 1.05 or 1)
        bytes_axis(axes.xaxis)

    alt = (
        f"Waterfall of bytes: {'; '.join(f'{step[0]} {format_bytes(step[2])}' for step in steps)}."
    )
    picture = chart("waterfall", alt, 0.28 * len(steps) + 0.4, paint, left=BROAD, titled=False)
    rows = [(name, factor, format_bytes(round(left)), words) for name, factor, left, words in steps]
    caption = (
        f"{figures['formula']}, one way, and what each factor leaves of it until the bytes that"
        f" dispatch put on the network remain; {answer.truth(figures)}."
    )
    return figure(picture, caption, _with_words(rows))


def _with_words(rows: list[tuple[str, ...]]) -> Markup:
    cells = [(name, words, factor, left) for name, factor, left, words in rows]
    return table(("factor", "what it is", "", "leaves"), cells, words=2)


def _steps(figures: Mapping[str, Any]) -> Iterator[tuple[str, str, float, str]]:
    """(name, factor, bytes that are left, words) of each step of the waterfall."""
    yield "headline", "", figures["headline_bytes"], "what the formula says"
    products = itertools.accumulate(
        (factor["value"] for factor in figures["factors"]), lambda a, b: a * b
    )
    for factor, product in zip(figures["factors"], products, strict=True):
        name = FACTOR_NAMES.get(factor["name"], factor["name"].replace("_", " "))
        left = product * figures["headline_bytes"]
        yield name, f"x {factor['value']:.4f}", left, FACTOR_WORDS.get(factor["name"], "")
    yield "counted", f"= {figures['ratio']:.4f}", figures["measured_bytes"], answer.truth(figures)


def full_scale(record: Record) -> Markup:
    """One token on the unscaled model: the formula beside what this routing comes to."""
    full = record["full_scale"]
    if full is None:
        return paragraph("No tokens: nothing to carry to the full model.")
    whole, passes = full["forward_pass"], 2 * full["num_moe_layers"]
    bars = {
        "formula, there and back": (answer.there_and_back(full), 0),
        "formula, width really sent": (full["headline_at_payload_width_bytes"] * passes, 0),
        "this routing": (whole["payload_bytes"], whole["metadata_bytes"]),
    }

    def paint(axes: Any) -> None:
        for i, (payload, metadata) in enumerate(bars.values()):
            axes.barh(i, payload, color=SERIES[0] if i == 2 else SERIES[3], height=0.6)
            axes.barh(i, metadata, left=payload, color=SERIES[2], height=0.6)
        axes.set_yticks(range(3), ["formula", "formula,\nwidth sent", "this\nrouting"])
        axes.invert_yaxis()
        bytes_axis(axes.xaxis)

    alt = "Bars: " + "; ".join(f"{name} {format_bytes(sum(parts))}" for name, parts in bars.items())
    caption = (
        f"Network bytes of one token of {full['model']} in a forward pass of"
        f" {full['num_moe_layers']} MoE layers, {full['rounds']} rounds. The end of the last bar is"
        " metadata."
    )
    notes = paragraph("Not scaled: " + "; ".join(full["assumptions"]) + ".")
    picture = chart("full", f"{alt}.", 1.4, paint, titled=False)
    return figure(picture, caption, _full_table(record, full)) + notes


def _full_table(record: Record, full: Mapping[str, Any]) -> Markup:
    tiers = [tier for tier in shown_tiers(record) if tier != "self"]
    parts = (*tiers, "payload", "metadata", "network")
    rows = [
        (
            f"{name}, a layer",
            format_significant(figures["rows"]["scale_up"] + figures["rows"]["scale_out"]),
            *(format_bytes(figures[f"{part}_bytes"]) for part in parts),
        )
        for name, figures in full["phases"].items()
    ]
    sums = (format_bytes(full["forward_pass"][f"{part}_bytes"]) for part in parts)
    rows.append((f"pass, {full['rounds']} rounds", "", *sums))
    return table(("", "rows", *(TIER_WORDS.get(part, part) for part in parts)), rows)


def conventions(record: Record) -> Markup:
    """What other programs would call the bytes of this routing."""
    rows = [
        (
            entry["name"],
            entry["printed_by"] or "-",
            f"{entry['rows_per_token']:.4f}",
            format_bytes(round(entry["num_bytes"])),
        )
        for entry in record.get("conventions", ())
        if entry["rows_per_token"]
    ]
    words = (
        "Rows that a numerator credits to one token in one layer, and their payload on the mean"
        f" rank in one layer and step, one way. Remote: {REMOTE}."
    )
    header = ("numerator", "printed by", "rows a token", "bytes of a rank")
    return paragraph(words) + table(header, rows, words=2)


def manifest(record: Record) -> Markup:
    """What ran, every value of it."""
    about = record["manifest"]
    plain = {name: _shown(value) for name, value in about.items() if not _is_nested(value)}
    nested = [
        folded(name.replace("_", " "), _flat(value))
        for name, value in about.items()
        if _is_nested(value)
    ]
    where = paragraph("This result is in ", element("code", record["result_dir"]), ".")
    return join([where, table(("", "value"), plain.items(), words=2), *nested])


def _is_nested(value: object) -> bool:
    return isinstance(value, Mapping) and bool(value)


def _flat(values: Mapping[str, Any], prefix: str = "") -> Markup:
    return table(("key", "value"), list(_entries(values, prefix)), words=2)


def _entries(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _entries(value, f"{prefix}{name}.")
        else:
            yield prefix + name, _shown(value)


def _shown(value: Any) -> str:
    """As JSON has it, but texts without quotes; equal entries of a long list once."""
    if isinstance(value, str):
        return value
    if isinstance(value, list) and len(value) > 8 and len(set(map(str, value))) == 1:
        return f"{len(value)} times {_shown(value[0])}"
    return json.dumps(value)
