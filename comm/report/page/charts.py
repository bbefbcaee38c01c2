"""The drawn charts: matplotlib's SVG, made part of the page.

matplotlib is loaded when the first chart is drawn, without pyplot and any window. What it draws in
one of `COLOURS` is given the page's own colour of that name, so that a chart is dark on a dark page
and black on paper; letters stay letters, in the page's own type.
"""

from __future__ import annotations

import html
import importlib.util
import io
import logging
import re
from collections.abc import Callable, Sequence
from typing import Any

from comm.report.page.html import Markup
from comm.report.units import format_bytes, format_seconds

WIDTH = 5.4  # inches: narrow, so that the letters are large enough on a phone
NAMES = ("ink", "soft", "c1", "c2", "c3", "c4", "c5", "c6", "c7", "c8")
COLOURS = {name: f"#0000{number:02x}" for number, name in enumerate(NAMES, 1)}
INK, SOFT, *SERIES = COLOURS.values()
NARROW, BROAD = 0.15, 0.24  # room for the words at the left, in widths of the picture
SETTINGS = {
    "svg.fonttype": "none",
    "font.size": 9,
    "axes.linewidth": 0.6,
    "axes.edgecolor": SOFT,
    "axes.labelcolor": INK,
    "axes.titlesize": 9,
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.grid.axis": "y",
    "grid.color": SOFT,
    "grid.linewidth": 0.4,
    "text.color": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "legend.frameon": False,
    "legend.fontsize": 8,
}


def library_is_there() -> bool:
    """Whether charts can be drawn here; looks only, loads nothing."""
    return importlib.util.find_spec("matplotlib") is not None


def chart(
    name: str,
    alt: str,
    height: float,
    paint: Callable[..., None],
    heights: Sequence[float] = (1,),
    left: float = NARROW,
    sharex: bool = False,
    titled: bool = True,
) -> Markup:
    """One picture. `paint` is given the axes, one below the other.

    name: unique on the page; alt: the picture in words; height: inches; heights: of the axes
    left: room for words at the left; sharex: axes have the same x; titled: or named by x
    """
    # What it has to say of its cache and of fonts is nothing that a run should print.
    logging.getLogger("matplotlib").setLevel(logging.ERROR)
    import matplotlib
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    with matplotlib.rc_context():
        matplotlib.rcdefaults()  # whatever a matplotlibrc of the user says
        matplotlib.rcParams.update({**SETTINGS, "svg.hashsalt": name})
        drawn = Figure(figsize=(WIDTH, height))
        FigureCanvasSVG(drawn)
        below, above = (0.5, 0.28) if titled else (0.3, 0.06)  # inches for titles and labels
        margins = {"left": left, "right": 0.97, "bottom": below / height, "top": 1 - above / height}
        axes = drawn.subplots(
            len(heights),
            sharex=sharex,
            gridspec_kw={"height_ratios": heights, **margins, "hspace": 0.3 if sharex else 0.55},
        )
        paint(*(axes if len(heights) > 1 else [axes]))
        buffer = io.StringIO()
        drawn.savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
    return _inline(name, alt, buffer.getvalue())


def _inline(name: str, alt: str, svg: str) -> Markup:
    """matplotlib's file as an element of the page: its ids made unique, its colours the page's."""
    view = re.search(r'viewBox="[^"]*"', svg)
    assert view is not None
    body = re.sub(
        r"<metadata>.*?</metadata>", "", svg[svg.index(">", view.end()) + 1 :], flags=re.S
    )
    body = re.sub(r"<style.*?</style>", "", body, count=1, flags=re.S)
    body = re.sub(r'\bid="', f'id="{name}-', body)
    body = re.sub(r'(href="|url\()#', rf"\1#{name}-", body).replace("xlink:href", "href")
    body = re.sub(r"font: ([\d.]+px) [^;\"]*", r"font-size: \1", body)
    body = re.sub(r"(font-size: [\d.]+px); font-family: [^;\"]*", r"\1", body)
    for colour, value in COLOURS.items():
        body = body.replace(value, f"var(--{colour})")
    head = f'<svg class=chart {view[0]} role="img" aria-label="{html.escape(alt)}">'
    # Joins and caps as matplotlib's own style sheet has them, which was for a page of its own.
    return Markup(head + '<g stroke-linejoin="round" stroke-linecap="butt">' + _closed(body))


def _closed(body: str) -> str:
    return body.rstrip().removesuffix("</svg>") + "</g></svg>"


def bytes_axis(axis: Any) -> None:
    """Ticks in words: 1.2 MB."""
    axis.set_major_locator(_few_ticks())
    axis.set_major_formatter(lambda value, _: format_bytes(value, 3))


def seconds_axis(axis: Any) -> None:
    axis.set_major_locator(_few_ticks())
    axis.set_major_formatter(lambda value, _: format_seconds(value) if value else "0")


def whole_axis(axis: Any) -> None:
    """Ticks at whole numbers only: layers, ranks."""
    from matplotlib.ticker import MaxNLocator

    axis.set_major_locator(MaxNLocator(10, integer=True))


def _few_ticks() -> Any:
    from matplotlib.ticker import MaxNLocator

    return MaxNLocator(5)


def legend(axes: Any, columns: int = 4) -> None:
    """Names of the series, above the axes to the right."""
    axes.legend(
        loc="lower right", bbox_to_anchor=(1, 0.98), ncols=columns, borderpad=0, columnspacing=1.2
    )
