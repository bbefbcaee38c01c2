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
    """The key that the curves run along: the first with several numbers; None without one."""
    for name, values in record["axes"].items():
        if all(_number(value) is not None for value in values):
            return name
    return None


def series(record: Mapping[str, Any]) -> dict[str, list[tuple[float, Mapping[str, Any]]]]:
    """By the other axes in words: (place along the axis, figures of the run), in order."""
    axis, found = axis_of(record), {}
    for run in record["runs"]:
        if axis is None or run["figures"].get("network_bytes") is None:
            continue
        others = ", ".join(v for name, v in run["values"].items() if name != axis)
        point = (float(run["values"][axis]), run["figures"])
        found.setdefault(others or "all", []).append(point)
    return {name: sorted(points, key=lambda one: one[0]) for name, points in found.items()}


def draw(record: Mapping[str, Any]) -> str:
    """The figure as SVG text: MB of one token over the axis, a line for each other choice.

    Raises ImportError without matplotlib, ValueError where there is nothing to draw.
    """
    lines = series(record)
    if not lines:
        raise ValueError("no axis of numbers with a run that has figures")
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(8, 4.5), layout="constrained")
        plot = figure.subplots()
        for (name, points), marker in zip(lines.items(), itertools.cycle(MARKERS)):
            _draw_series(plot, name, points, marker)
        places = sorted({place for points in lines.values() for place, _ in points})
        if places[0] > 0 and places[-1] >= 8 * places[0]:
            plot.set_xscale("log", base=2)
        plot.set_xticks(places, [f"{place:g}" for place in places])
        plot.minorticks_off()
        plot.set_ylim(bottom=0)
        plot.set_xlabel(axis_of(record))
        plot.set_ylabel("MB of one token, forward pass")
        plot.grid(alpha=0.3)
        if len(lines) > 1:
            plot.legend(frameon=False)
        text = io.StringIO()
        figure.savefig(text, format="svg", metadata={"Date": None})
    svg = text.getvalue()
    return svg[svg.index("<svg") :]


def _draw_series(
    plot: Any, name: str, points: Sequence[tuple[float, Mapping[str, Any]]], marker: str
) -> None:
    places = [place for place, _ in points]
    counted = [figures["network_bytes"] / 1e6 for _, figures in points]
    (drawn,) = plot.plot(places, counted, marker, label=name, markersize=5)
    lawful = [(place, f) for place, f in points if f.get("expected_bytes") is not None]
    if not lawful:
        return
    places = [place for place, _ in lawful]
    mean = [figures["expected_bytes"] / 1e6 for _, figures in lawful]
    half = [DEVIATIONS * (figures["expected_std"] or 0) / 1e6 for _, figures in lawful]
    low, high = ([m + sign * h for m, h in zip(mean, half, strict=True)] for sign in (-1, 1))
    plot.plot(places, mean, color=drawn.get_color(), linewidth=1)
    plot.fill_between(places, low, high, color=drawn.get_color(), alpha=0.2, linewidth=0)


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None
