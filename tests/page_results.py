"""Results for report.html that no run has made: records of samples, and the arrays beside them."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from html.parser import HTMLParser

import numpy as np
from report_samples import SAMPLES, sample_inputs, with_extra_bytes

from comm.report.page.document import page
from comm.report.page.result import Result
from comm.report.record import build_record, differing

VOID = {"meta", "link", "br", "path", "use", "image", "stop"}
EXTRA = 40_007
DEFAULT = {"tokens": 64, "layers": 4}


def result_of(inputs, kernel=False) -> Result:
    """What a run with these inputs would have left."""
    traffic = inputs.traffic
    arrays = {
        "bytes": traffic.bytes,
        "rows": traffic.rows,
        "layers": np.array(traffic.layers),
        "directions": np.array(traffic.directions),
        "phases": np.array(traffic.phases),
        "kinds": np.array(traffic.kinds),
        "differing": differing(traffic, inputs.exact),
        "seconds": traffic.seconds,
        "expert_choices": inputs.expert_rows,
    }
    if kernel:
        away = traffic.bytes.sum(axis=(0, 1, 2, 3)) * (1 - np.eye(len(inputs.tiers), dtype=int))
        arrays["acked"] = arrays["acked_expected"] = away + 144 * (away > 0)
    return Result(build_record(inputs), arrays)


@cache
def sample_page(name: str) -> str:
    return page(result_of(sample_inputs(**SAMPLES[name]), kernel=name == "default"))


@cache
def faulty() -> Result:
    """EXTRA bytes too many from rank 1 to rank 6, in layer 2, dispatch, kind 0."""
    inputs = sample_inputs(**DEFAULT)
    return result_of(with_extra_bytes(inputs, (2, 0, 0, 0, 1, 6), EXTRA))


def large(ranks=72, layers=92) -> Result:
    """As many ranks and layers as the largest runs have, in arrays that nobody counted."""
    rng = np.random.default_rng(0)
    inputs = sample_inputs(ranks=ranks, ranks_per_node=8, tokens=2, layers=1)
    record = build_record(inputs)
    record["layers"] = [{**one, "layer": i} for i in range(layers) for one in record["layers"]]
    record["balance"]["layers"] = [
        {**record["balance"]["layers"][0], "layer": i} for i in range(layers)
    ]
    rows = rng.integers(0, 60, (layers, 1, 2, ranks, ranks))
    sent = np.zeros((layers, 1, 2, len(inputs.traffic.kinds), ranks, ranks), np.int64)
    sent[:, :, :, 0] = rows * 7168
    small = result_of(inputs).arrays
    arrays = {
        **small,
        "bytes": sent,
        "rows": rows,
        "layers": np.arange(layers),
        "seconds": rng.random((ranks, layers, 1, 2)),
        "expert_choices": rng.integers(0, 40, (layers, 896)),
    }
    return Result(record, arrays)


def renamed(inputs, name: str):
    """The same inputs with a name that a user gave, wherever a name can stand."""
    about = {**inputs.manifest, "model": name, "command": name, "router_notes": [name]}
    about["shape"] = {**about["shape"], "name": name}
    about["full_shape"] = {**about["full_shape"], "name": name}
    about["hosts"], about["environment"] = [name], {name: name}
    return replace(inputs, manifest=about, result_dir=name)


class Outline(HTMLParser):
    """The elements of a page, checked to be closed in turn.

    elements: (name, attributes, text directly inside); problems: what is not well-formed
    """

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None], list[str]]] = []
        self.problems: list[str] = []
        self._open: list[int] = []
        self.feed(text)
        self.close()
        self.problems += [f"<{self.elements[i][0]}> is not closed" for i in self._open]

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs), []))
        if len(dict(attrs)) < len(attrs):
            self.problems.append(f"<{tag}> has an attribute twice")
        if tag not in VOID:
            self._open.append(len(self.elements) - 1)

    def handle_startendtag(self, tag, attrs):
        self.elements.append((tag, dict(attrs), []))

    def handle_endtag(self, tag):
        if tag in VOID:
            return
        if not self._open or self.elements[self._open[-1]][0] != tag:
            self.problems.append(f"</{tag}> at {self.getpos()} closes nothing")
            return
        self._open.pop()

    def handle_data(self, data):
        if self._open:
            self.elements[self._open[-1]][2].append(data)

    def all(self, *names):
        return [one for one in self.elements if one[0] in names]
