"""Rank x rank: who sent how much to whom, for each phase and layer, counted and predicted.

Every picture is a PNG of one pixel a pair in an SVG that adds ranks and the borders of nodes. Where
nothing differs the prediction looks like the count, and so is the same picture, shown again.

Without a script all panels are there, folded; with it (page.js) two lists choose the one shown.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from comm.report.page.html import Markup, element, folded, join, paragraph, table, text
from comm.report.page.png import RAMP, SIGNED, data_uri, palette, shades
from comm.report.page.result import Result
from comm.report.units import format_bytes

ALL = "all layers"
WHOLE = "whole run"
MAX_CELLS = 16  # ranks up to which a table has every pair; then sums by rank
SIDE = 100.0  # of a picture, in units of its own; its margins are outside
TICKS = 12  # numbered ranks along an edge, at most


def pairs_section(result: Result) -> Markup:
    """The lists to choose from, and all panels."""
    panels = [_kernel_panel(result), *_panels(result)]
    there = [panel for panel in panels if panel is not None]
    phases = list(dict.fromkeys(panel[0] for panel in there))
    layers = list(dict.fromkeys(panel[1] for panel in there))
    chosen = (result.phases[0].label, ALL)
    lists = [
        element("label", what, " ", _list(name, options, first))
        for what, name, options, first in (
            ("Phase", "phase", phases, chosen[0]),
            ("Layer", "layer", layers, chosen[1]),
        )
    ]
    shown = [
        element(
            "details",
            element("summary", f"{phase}, {layer}: {format_bytes(total)} counted"),
            body,
            class_="panel",
            data_phase=phase,
            data_layer=layer,
            open="" if (phase, layer) == chosen else None,
        )
        for phase, layer, total, body in there
    ]
    form = element("form", *lists, class_="choose", hidden="")
    return join([frames(result.node_of_rank), form, *shown])


def _list(name: str, options: Sequence[str], chosen: str) -> Markup:
    entries = (
        element("option", option, value=option, selected="" if option == chosen else None)
        for option in options
    )
    return element("select", *entries, name=name)


def _panels(result: Result):
    """(phase, layer, bytes, body) of all layers together and of each, for each phase."""
    differs = result.difference
    for phase in result.phases:
        counted = result.counted[(slice(None), *phase.place)]  # [L, R, R]
        wrong = None if differs is None else differs[(slice(None), *phase.place)]
        for i, layer in enumerate([ALL, *map(str, result.layers)]):
            cells = counted.sum(axis=0) if i == 0 else counted[i - 1]
            apart = None if wrong is None else wrong.sum(axis=0) if i == 0 else wrong[i - 1]
            key = f"{'-'.join(phase.label.split())}-{layer.replace(' ', '-')}"
            name = layer if i == 0 else f"layer {layer}"
            body = panel(result, key, cells, apart, f"{phase.label}, {name}")
            yield phase.label, layer, int(cells.sum()), body


def panel(
    result: Result, key: str, counted: np.ndarray, apart: np.ndarray | None, what: str
) -> Markup:
    """Counted, predicted and difference of one phase: int64 [R, R] each, and by node."""
    nodes = result.node_of_rank
    most = int(counted.max())
    pictures = [heat_map(counted, f"c-{key}", f"Counted: {what}", most)]
    if apart is not None:
        exact = counted - apart
        most = max(most, int(exact.max()))
        pictures = [
            heat_map(counted, f"c-{key}", f"Counted: {what}", most),
            heat_map(exact, f"p-{key}", f"Predicted: {what}", most,
                     again=None if apart.any() else f"c-{key}"),
            difference_map(apart, f"d-{key}", what),
        ]  # fmt: skip
    if nodes.max() > 0:
        by_node = between_nodes(counted, nodes)
        away = int(by_node.sum() - by_node.trace())
        title = f"Node x node: {what}"
        pictures.append(
            heat_map(by_node, f"n-{key}", title, int(by_node.max()),
                     ends="node", note=f"{format_bytes(away)} between nodes")
        )  # fmt: skip
    tables = [folded("Table of these numbers", _pair_table(counted, apart))]
    if nodes.max() > 0:
        tables.append(folded("Table of nodes", _matrix(between_nodes(counted, nodes), "node")))
    return element("div", *pictures, class_="maps") + join(tables)


def _kernel_panel(result: Result):
    """What TCP acknowledged beside what it must have, all phases and layers; None without it."""
    acked, must = (result.arrays.get(name) for name in ("acked", "acked_expected"))
    if acked is None:
        return None
    counted = result.counted.sum(axis=(0, 1, 2))
    away = counted * (1 - np.eye(len(counted), dtype=np.int64))
    most = int(max(acked.max(), away.max()))
    pictures = [
        heat_map(away, "c-whole", "Counted, what left its rank: whole run", most),
        heat_map(acked, "k-whole", "Kernel, acknowledged by TCP: whole run", most),
    ]
    header, rows = ["from -> to", "counted", "acknowledged", "more than counted"], None
    if must is not None:
        pictures.append(difference_map(acked - must, "e-whole", "kernel less counted with"
                                       " what gloo adds"))  # fmt: skip
        header = [*header, "what gloo adds", "left over"]
    rows = [
        (
            f"{src} -> {dst}",
            *(f"{number:,}" for number in (away[src, dst], acked[src, dst])),
            f"{acked[src, dst] - away[src, dst]:,}",
            *(
                ()
                if must is None
                else (
                    f"{must[src, dst] - away[src, dst]:,}",
                    f"{acked[src, dst] - must[src, dst]:,}",
                )
            ),
        )
        for src, dst in _shown_pairs(acked, must)
    ]
    less = "" if len(acked) <= MAX_CELLS else " (the pairs that differ; traffic.npz has all)"
    words = paragraph(
        "The kernel's counters know neither phases nor layers: bytes of all measured steps, "
        "headers of gloo included."
    )
    numbers = folded(f"Table of these numbers{less}", table(header, rows))
    body = words + element("div", *pictures, class_="maps") + numbers
    return WHOLE, ALL, int(counted.sum()), body


def _shown_pairs(acked: np.ndarray, must: np.ndarray | None) -> list[list[int]]:
    size = len(acked)
    if size <= MAX_CELLS:
        return [[src, dst] for src in range(size) for dst in range(size) if src != dst]
    return [] if must is None else np.argwhere(acked != must).tolist()


def between_nodes(cells: np.ndarray, nodes: np.ndarray) -> np.ndarray:
    """[R, R] -> [N, N]"""
    member = (nodes == np.arange(nodes.max() + 1)[:, None]).astype(np.int64)
    return member @ cells @ member.T


def heat_map(
    cells: np.ndarray,
    name: str,
    title: str,
    most: int,
    again: str | None = None,
    ends: str = "rank",
    note: str = "",
) -> Markup:
    """A picture of bytes [src, dst], its scale from nothing to `most`.

    again: the name of a picture that looks the same; ends: what rows and columns are
    """
    alt = f"{title}. {_in_words(cells, ends)}"
    if again is not None:
        image = Markup(f'<use href="#{again}"/>')
    else:
        image = _image(name, shades(cells, 0, most), palette(RAMP))
    bar = f"<span class=ramp></span> {text(format_bytes(most, 3))}"
    legend = Markup(f"0 {bar}" if most else "nothing was sent")
    return _framed(image, len(cells), alt, ends, title, legend, note)


def difference_map(cells: np.ndarray, name: str, what: str) -> Markup:
    """Counted less predicted: blue for too few, red for too many, empty where they agree."""
    most = int(np.abs(cells).max())
    pairs = int(np.count_nonzero(cells))
    note = f"{pairs:,} of {cells.size:,} pairs differ" if pairs else "no pair differs"
    title = f"Difference: {what}"
    image = _image(name, shades(cells, -most, most), palette(SIGNED)) if most else Markup("")
    bar = f"{format_bytes(most, 3)} too few <span class='ramp signed'></span> too many"
    legend = Markup(bar if most else "")
    return _framed(image, len(cells), f"{title}: {note}.", "rank", title, legend, note)


def _in_words(cells: np.ndarray, ends: str) -> str:
    """What a reader who does not see the picture should know."""
    if not cells.any():
        return "Nothing was sent."
    sent, received = cells.sum(axis=1), cells.sum(axis=0)
    src, dst = divmod(int(cells.argmax()), len(cells))
    return (
        f"{format_bytes(int(cells.sum()))} in all; most from {ends} {src} to {ends} {dst},"
        f" {format_bytes(int(cells.max()))}; {ends} {sent.argmax()} sent most,"
        f" {ends} {received.argmax()} received most."
    )


def _image(name: str, indices: np.ndarray, colours: np.ndarray) -> Markup:
    return Markup(
        f'<image id="{name}" href="{data_uri(indices, colours)}" width="{SIDE:g}"'
        f' height="{SIDE:g}" preserveAspectRatio="none" class=pixels />'
    )


def _framed(
    image: Markup, size: int, alt: str, ends: str, title: str, legend: Markup, note: str
) -> Markup:
    """The picture in its frame, and what its colours mean."""
    svg = Markup(
        f'<svg class=map viewBox="-11 -11 112 112" role="img" aria-label="{text(alt)}">{image}'
        f'<use href="#frame-{ends}-{size}"/></svg>'
    )
    parts = [part for part in (legend, note) if part]
    caption = element("figcaption", element("b", title), Markup("<br>"), join(parts, "<br>"))
    return element("figure", svg, caption, class_="heat")


def frames(nodes: np.ndarray) -> Markup:
    """What all pictures have in common, drawn once: the numbers of ranks, the borders of nodes."""
    borders = np.flatnonzero(np.diff(nodes)) + 1
    number = int(nodes.max()) + 1
    both = _frame("rank", len(nodes), borders.tolist()) + _frame("node", number, [])
    return Markup(
        f'<svg width="0" height="0" aria-hidden="true" class=defs><defs>{both}</defs></svg>'
    )


def _frame(ends: str, size: int, borders: Sequence[int]) -> Markup:
    cell = SIDE / size
    lines = "".join(f"M{b * cell:.2f} 0V{SIDE:g}M0 {b * cell:.2f}H{SIDE:g}" for b in borders)
    marks = "".join(
        f'<text x="{(i + 0.5) * cell:.2f}" y="-1.5">{i}</text>'
        f'<text x="-1.5" y="{(i + 0.5) * cell + 1.3:.2f}" class=left>{i}</text>'
        for i in range(0, size, -(-size // TICKS))
    )
    square = f"M0 0H{SIDE:g}V{SIDE:g}H0Z"
    return Markup(
        f'<g id="frame-{ends}-{size}" class=ticks><path d="{square}" class=frame />'
        f'<path d="{lines}" class=border />{marks}<text x="50" y="-6.5">to {ends}</text>'
        f'<text x="-8" y="50" transform="rotate(-90 -8 50)">from {ends}</text></g>'
    )


def _pair_table(counted: np.ndarray, apart: np.ndarray | None) -> Markup:
    """Every pair of few ranks; of many, what each rank sent and received."""
    size = len(counted)
    if size <= MAX_CELLS:
        tables = [paragraph("Counted bytes; a row for each sender."), _matrix(counted, "rank")]
        if apart is not None:
            same = paragraph("Predicted from the recorded routing: the same for every pair.")
            other = paragraph("Predicted from the recorded routing, in bytes.")
            tables += [other, _matrix(counted - apart, "rank")] if apart.any() else [same]
        return join(tables)
    columns = [counted.sum(axis=1), counted.sum(axis=0), counted.diagonal()]
    header = ["rank", "sent, bytes", "received", "of it to itself"]
    if apart is not None:
        columns += [np.abs(apart).sum(axis=1)]
        header += ["pairs' differences"]
    rows = [(rank, *(f"{column[rank]:,}" for column in columns)) for rank in range(size)]
    return table(header, rows) + paragraph("traffic.npz has every pair.")


def _matrix(cells: np.ndarray, ends: str) -> Markup:
    header = [f"from {ends} / to", *range(len(cells))]
    rows = ([src, *(f"{number:,}" for number in row)] for src, row in enumerate(cells.tolist()))
    return table(header, rows)
