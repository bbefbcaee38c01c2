"""Scaling curves of a sweep as one SVG: counted points on the band of what the law expects.

The only user of matplotlib for sweeps; it is imported when a figure is drawn.
"""

from __future__ import annotations

import io
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

DEVIATIONS = 2  # half the width of the band, in standard deviations
MARKERS = "osD^vP*X"
STYLE = {"svg.fonttype": "none", "font.size": 10, "svg.hashsalt": "wideep"}


def axis_of(record: Mapping[str, Any]) -> str | None:
    """The key that the curves run along: the first with numbers, else the first; None: none."""
    axes = record["axes"]
    return next((name for name in axes if numeric(record, name)), next(iter(axes), None))


def numeric(record: Mapping[str, Any], axis: str) -> bool:
    """Whether all values of an axis are numbers; the others stand side by side."""
    return all(_number(value) is not None for value in record["axes"][axis])


def series(record: Mapping[str, Any]) -> dict[str, list[tuple[float, Mapping[str, Any]]]]:
    """By the other axes in words: (place along the axis, figures of the run), in order."""
    axis, found = axis_of(record), {}
    for run in record["runs"]:
        if axis is None or run["figures"].get("network_bytes") is None:
            continue
        value, values = run["values"][axis], list(record["axes"][axis])
        place = float(value) if numeric(record, axis) else float(values.index(value))
        others = ", ".join(v for name, v in run["values"].items() if name != axis)
        found.setdefault(others or "all", []).append((place, run["figures"]))
    return {name: sorted(points, key=lambda one: one[0]) for name, points in found.items()}


def draw(record: Mapping[str, Any]) -> str:
    """The figure as SVG text: MB of one token over the axis, a line for each other choice.

    Raises ImportError without matplotlib, ValueError where there is nothing to draw.
    """
    lines = series(record)
    if not lines:
        raise ValueError("one combination, or none with figures: there is no curve")
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(8, 4.5), layout="constrained")
        plot = figure.subplots()
        for (name, points), marker in zip(lines.items(), itertools.cycle(MARKERS)):
            _draw_series(plot, name, points, marker, numeric(record, str(axis_of(record))))
        _label(plot, record, sorted({x for points in lines.values() for x, _ in points}))
        plot.set_ylabel("MB of one token, forward pass")
        plot.grid(alpha=0.3)
        if len(lines) > 1:
            plot.legend(frameon=False)
        text = io.StringIO()
        figure.savefig(text, format="svg", metadata={"Date": None})
    svg = text.getvalue()
    return svg[svg.index("<svg") :]


def _label(plot: Any, record: Mapping[str, Any], places: Sequence[float]) -> None:
    """The axis along which the runs lie: a mark for each of its values."""
    axis = str(axis_of(record))
    if numeric(record, axis):
        if places[0] > 0 and places[-1] >= 8 * places[0]:
            plot.set_xscale("log", base=2)
        names = [f"{place:g}" for place in places]
    else:
        names = [record["axes"][axis][int(place)] for place in places]
        plot.margins(x=0.2)
    plot.set_xticks(places, names)
    plot.minorticks_off()
    plot.set_ylim(bottom=0)
    plot.set_xlabel(axis)


def _draw_series(
    plot: Any,
    name: str,
    points: Sequence[tuple[float, Mapping[str, Any]]],
    marker: str,
    joined: bool,
) -> None:
    """joined: places are numbers, between which the law may be drawn through."""
    places = [place for place, _ in points]
    counted = [figures["network_bytes"] / 1e6 for _, figures in points]
    (drawn,) = plot.plot(places, counted, marker, label=name, markersize=5)
    lawful = [(place, f) for place, f in points if f.get("expected_bytes") is not None]
    if not lawful:
        return
    color, places = drawn.get_color(), [place for place, _ in lawful]
    mean = [figures["expected_bytes"] / 1e6 for _, figures in lawful]
    half = [DEVIATIONS * (figures["expected_std"] or 0) / 1e6 for _, figures in lawful]
    if not joined:
        plot.errorbar(places, mean, half, fmt="_", color=color, capsize=4, markersize=14)
        return
    low, high = ([m + sign * h for m, h in zip(mean, half, strict=True)] for sign in (-1, 1))
    plot.plot(places, mean, color=color, linewidth=1)
    plot.fill_between(places, low, high, color=color, alpha=0.2, linewidth=0)


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None
