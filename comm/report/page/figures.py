"""The parts of the page that are charts: layers, load, fan-out, time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from comm.report.page.charts import (
    INK,
    SERIES,
    SOFT,
    bytes_axis,
    chart,
    legend,
    seconds_axis,
    whole_axis,
)
from comm.report.page.html import Markup, figure, join, paragraph, table
from comm.report.page.result import Phase, Result
from comm.report.table_rows import OUTSIDE, format_z, phase_label
from comm.report.units import format_bytes, format_seconds

HOTTEST = 16  # experts in the table
ERROR_BARS = 24  # layers up to which each deviation is drawn as a bar


def layers(result: Result) -> Markup:
    """Network bytes of each layer: counted, exact, expected with its deviation, headline."""
    entries = result.record["layers"]
    phases = [phase for phase in result.phases if phase.name not in OUTSIDE]
    series = [_of_phase(entries, phase) for phase in phases]
    line = result.record["headline"]["headline_bytes"] / max(1, len(result.layers))
    lawful = any(one["z"].any() for one in series)

    def paint(*axes: Any) -> None:
        for axis, phase, one in zip(axes, phases, series, strict=False):
            _paint_layers(axis, result.layers, one, line if _is_dispatch(phase) else None)
            axis.set_title(phase.label)
        legend(axes[0])
        if lawful:
            _paint_z(axes[-1], result, phases, series)
        axes[-1].set_xlabel("layer")

    heights = [1.0] * len(phases) + [0.8] * lawful
    sums = (
        f"{phase.label}: counted {format_bytes(int(one['measured'].sum()))}, exact"
        f" {format_bytes(int(one['exact'].sum()))}"
        for phase, one in zip(phases, series, strict=True)
    )
    alt = f"Bars of the network bytes of {len(result.layers)} layers. {'; '.join(sums)}."
    picture = chart("layers", alt, 1.2 * sum(heights) + 0.8, paint, heights, sharex=True)
    caption = (
        "Bytes that left their rank. Bars: counted; ticks: exact, from the recorded routing;"
        " points: what the router's law lets one expect, with one standard deviation; dashes: the"
        " headline formula for one layer, one way."
        + (" Below: how many deviations the count lies from the expectation." * lawful)
    )
    return figure(picture, caption, _layer_table(result, line))


def _is_dispatch(phase: Phase) -> bool:
    return (phase.direction, phase.name) == ("forward", "dispatch")


def _of_phase(entries: Sequence[Mapping[str, Any]], phase: Phase) -> dict[str, np.ndarray]:
    """Figures of the layers in one phase, each [L]; NaN where there is no law."""
    found = [
        entry["network"]
        for entry in entries
        if (entry["direction"], entry["phase"]) == (phase.direction, phase.name)
    ]
    names = {
        "measured": "measured_bytes",
        "exact": "exact_bytes",
        "expected": "expected_bytes",
        "std": "expected_std",
    }
    series = {
        short: np.array([np.nan if one[name] is None else one[name] for one in found], float)
        for short, name in names.items()
    }
    return series | {"z": np.array([one["z"] or 0.0 for one in found])}


def _paint_layers(
    axis: Any, numbers: Sequence[int], one: Mapping[str, np.ndarray], headline: float | None
) -> None:
    axis.bar(numbers, one["measured"], width=0.8, color=SERIES[0], label="counted")
    axis.scatter(numbers, one["exact"], s=160 / max(1, len(numbers)) ** 0.5, marker="_", color=INK,
                 linewidths=0.9, label="exact", zorder=3)  # fmt: skip
    if np.isfinite(one["expected"]).any():
        few = len(numbers) <= ERROR_BARS
        axis.errorbar(numbers, one["expected"], yerr=one["std"] if few else None, fmt="o",
                      markersize=2.5, color=SERIES[2], linewidth=1, capsize=2.5,
                      label="expected", zorder=4)  # fmt: skip
    if headline is not None:
        axis.axhline(headline, color=SERIES[3], linestyle="--", linewidth=1, label="headline")
    axis.grid(True)
    bytes_axis(axis.yaxis)
    whole_axis(axis.xaxis)


def _paint_z(axis: Any, result: Result, phases: Sequence[Phase], series: Sequence[Any]) -> None:
    bound = next(v["bound"] for v in result.record["verdicts"] if v["name"] == "expected")
    phase, one = next((p, s) for p, s in zip(phases, series, strict=True) if s["z"].any())
    axis.axhline(0, color=SOFT, linewidth=0.6)
    axis.vlines(result.layers, 0, one["z"], color=SERIES[2], linewidth=1)
    axis.scatter(result.layers, one["z"], s=8, color=SERIES[2])
    largest = float(np.abs(one["z"]).max())
    if bound:
        for side in (-bound, bound):
            axis.axhline(side, color=SERIES[3], linestyle="--", linewidth=0.8)
        largest = max(largest, bound)
    axis.set_ylim(-1.15 * largest, 1.15 * largest)
    axis.set_title(f"z of {phase.label}" + (", dashed: the bound" if bound else ""))
    whole_axis(axis.xaxis)


def _layer_table(result: Result, line: float) -> Markup:
    rows = []
    for entry in result.record["layers"]:
        one = entry["network"]
        expected = "-"
        if one["expected_bytes"] is not None:
            expected = f"{one['expected_bytes']:,.0f} +- {one['expected_std']:,.0f}"
        forward = (entry["direction"], entry["phase"]) == ("forward", "dispatch")
        rows.append(
            (
                entry["layer"],
                phase_label(entry["direction"], entry["phase"]),
                f"{one['measured_bytes']:,}",
                "-" if one["exact_bytes"] is None else f"{one['exact_bytes']:,}",
                "-" if entry["differing_bytes"] is None else f"{entry['differing_bytes']:,}",
                expected,
                format_z(one) or "-",
                f"{line:,.0f}" if forward else "",
            )
        )
    header = ("layer", "phase", "counted, bytes", "exact", "pairs' differences", "expected", "z",
              "headline")  # fmt: skip
    return table(header, rows, words=2)


def load(result: Result) -> Markup:
    """How evenly: rows that ranks received, choices that experts got, and the worst by layer."""
    forward = next(phase for phase in result.phases if _is_dispatch(phase))
    received = result.arrays["rows"][(slice(None), *forward.place)].sum(axis=(0, 1))  # [R]
    choices = result.arrays.get("expert_choices")  # [L, E]
    by_layer = [
        (f"busiest {owner}", [entry[key] or np.nan for entry in result.record["balance"]["layers"]])
        for owner, key in (
            ("rank", "by_rank_max_over_mean"),
            ("expert", "by_expert_max_over_mean"),
        )
    ]

    def paint(*axes: Any) -> None:
        axes[0].bar(range(len(received)), received, color=SERIES[0], width=0.8)
        axes[0].axhline(received.mean(), color=INK, linewidth=0.8, linestyle="--")
        axes[0].set_title("rows received by each rank, dashed: the mean")
        whole_axis(axes[0].xaxis)
        for (name, values), color in zip(by_layer, SERIES[:3:2], strict=True):
            axes[1].plot(result.layers, values, marker="o", markersize=2.5, color=color, label=name)
        axes[1].set_title("x the mean, by layer")
        axes[1].axhline(1, color=SOFT, linewidth=0.6)
        legend(axes[1])
        whole_axis(axes[1].xaxis)
        if choices is not None:
            for row in choices:
                axes[2].plot(np.sort(row)[::-1], color=SERIES[2], linewidth=0.6, alpha=0.7)
            axes[2].set_title("choices of each expert, a line a layer")
            axes[2].set_xlabel("experts, the most chosen first")

    count = 2 if choices is None else 3
    alt = (
        f"Rows received by each rank: {received.min():,} to {received.max():,}, mean"
        f" {received.mean():,.0f}; {_hottest_in_words(choices)}"
    )
    picture = chart("load", alt, 1.3 * count + 0.8, paint, [1] * count)
    return figure(picture, "Load of ranks and of experts.", _load_tables(result, received, choices))


def _hottest_in_words(choices: np.ndarray | None) -> str:
    if choices is None or not choices.any():
        return "no choices by expert were kept."
    layer, expert = divmod(int(choices.argmax()), choices.shape[1])
    return (
        f"the most chosen expert is {expert} in layer {layer} with {choices.max():,} choices, mean"
        f" {choices.mean():,.1f}."
    )


def _load_tables(result: Result, received: np.ndarray, choices: np.ndarray | None) -> Markup:
    mean = received.mean() or 1
    parts = [
        table(
            ("rank", "rows received", "x the mean"),
            [(r, f"{n:,}", f"{n / mean:.3f}") for r, n in enumerate(received.tolist())],
        )
    ]
    if choices is not None and choices.any():
        hottest = np.argsort(-choices, axis=None, kind="stable")[:HOTTEST]
        means = choices.mean(axis=1)
        rows = [
            (
                f"{expert}",
                f"{result.layers[layer]}",
                f"{choices[layer, expert]:,}",
                f"{choices[layer, expert] / (means[layer] or 1):.2f}",
            )
            for layer, expert in zip(*np.unravel_index(hottest, choices.shape), strict=True)
        ]
        parts.append(paragraph("The hottest experts:"))
        parts.append(table(("expert", "layer", "choices", "x the layer's mean"), rows))
    return join(parts)


def fan_out(result: Result) -> Markup:
    """How many ranks a token reaches, beside the closed form."""
    figures = result.record.get("fan_out")
    if not figures or not sum(figures["tokens"]):
        return paragraph("Not in this record.")
    tokens, law = np.array(figures["tokens"]), figures["expected"]
    used = np.flatnonzero(tokens if law is None else tokens + (np.array(law) >= 0.5))
    shown = range(int(used.min()), int(used.max()) + 1)
    total = int(tokens.sum())
    mean = float(tokens @ np.arange(len(tokens))) / total

    def paint(axes: Any) -> None:
        axes.bar(shown, tokens[shown.start : shown.stop], color=SERIES[0], label="counted")
        if law is not None:
            axes.plot(shown, law[shown.start : shown.stop], "o", color=SERIES[2], markersize=4,
                      label="closed form")  # fmt: skip
        axes.set_title("tokens")
        axes.set_xlabel("ranks that a token reaches, its own included")
        axes.grid(True)
        whole_axis(axes.xaxis)
        legend(axes)

    alt = f"Histogram of the ranks that {total:,} tokens reach: {mean:.4f} on average."
    caption = f"A token reaches {mean:.4f} ranks on average, in one layer of one step"
    if law is None:
        caption += f". No closed form: {figures['reason']}."
    else:
        expected = float(np.array(law) @ np.arange(len(law))) / sum(law)
        alt += f" The closed form: {expected:.4f}."
        caption += f"; the closed form says {expected:.4f}."
    rows = [
        (d, f"{tokens[d]:,}", "-" if law is None else f"{law[d]:,.2f}") for d in range(len(tokens))
    ]
    numbers = table(("ranks", "tokens, counted", "closed form"), rows)
    return figure(chart("fanout", alt, 2.6, paint), caption, numbers)


def time(result: Result) -> Markup:
    """Seconds that each rank spent in each phase."""
    seconds = result.arrays.get("seconds")  # [R, L, D, P]
    spent = result.record["timing"]
    rates = _rates(spent)
    if seconds is None:
        return rates
    of_rank = seconds.sum(axis=1)  # [R, D, P]
    columns = {phase.label: of_rank[(slice(None), *phase.place)] for phase in result.phases}

    def paint(axes: Any) -> None:
        bottom = np.zeros(len(of_rank))
        for (name, values), color in zip(columns.items(), SERIES * 2, strict=False):
            axes.bar(range(len(values)), values, bottom=bottom, color=color, width=0.8, label=name)
            bottom = bottom + values
        axes.set_xlabel("rank")
        seconds_axis(axes.yaxis)
        whole_axis(axes.xaxis)
        legend(axes)

    alt = "Stacked bars of the time of each rank in each phase. Slowest: " + "; ".join(
        f"{name} rank {values.argmax()}, {format_seconds(values.max())}"
        for name, values in columns.items()
    )
    rows = [
        (rank, *(format_seconds(values[rank]) for values in columns.values()))
        for rank in range(len(of_rank))
    ]
    caption = (
        "Time inside each phase, waiting for others included, over all layers and measured steps."
        " All ranks share this machine: it says how this run went, and forecasts nothing."
    )
    numbers = table(("rank", *columns), rows)
    return figure(chart("time", alt + ".", 2.6, paint), caption, numbers) + rates


def _rates(spent: Mapping[str, Any]) -> Markup:
    def rate(value: float | None) -> str:
        return "-" if value is None else f"{format_bytes(value * 1e9)}/s"

    rows = [
        (
            name,
            format_seconds(figures["seconds"]),
            *(rate(figures[f"{which}_GBps"]) for which in ("algbw", "busbw", "wirebw")),
        )
        for name, figures in spent.items()
        if isinstance(figures, Mapping)
    ]
    rows += [
        (name.removesuffix("_seconds"), format_seconds(value), "", "", "")
        for name, value in spent.items()
        if name.endswith("_seconds")
    ]
    return table(("slowest rank", "time", "algbw", "busbw", "wirebw"), rows)
