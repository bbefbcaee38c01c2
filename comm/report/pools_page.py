"""The page of memory: what is stored, what a rank holds, how many it takes, what outgrows what.

GB = 1e9 B and GiB = 2^30 B stand side by side, since a machine's memory is sold in a unit that is
neither; the page says which figure it uses.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from comm.report.answer import labelled_facts
from comm.report.layout import Line, table, title
from comm.report.units import GIB, format_bytes, format_count, format_seconds, format_significant

GROWS_WITH = {
    "routed experts": "1 / ranks",
    "everything else": "1 / ranks that share it",
    "buffers": "tokens of a step",
    "activations": "tokens of a step",
    "reserve": "memory",
    "caches": "tokens of all sequences",
    "states": "sequences",
}
VERDICTS = {
    "option": "not needed: everything that was asked for fits, {free} a rank stay free",
    "host": "needed: {missing} a rank do not fit; the host's memory takes them",
    "nvme": "needed: {missing} a rank do not fit, nor in the host's memory; NVMe takes the rest",
    "impossible": "{missing} a rank do not fit, and no lower tier that is known takes them",
}


def pools_page(facts: Mapping[str, Any], width: int) -> list[Line]:
    """facts: what moe.jobs.pools puts together; bytes everywhere."""
    lines = _stored(facts, width) + _pools(facts, width) + _arrangements(facts, width)
    lines += _numbers(facts, width)
    return lines + _sequences(facts, width) + _reads(facts, width) + _buffer(facts, width)


def _gb(num_bytes: float) -> str:
    return f"{num_bytes / 1e9:,.1f}"


def _gib(num_bytes: float) -> str:
    return f"{num_bytes / GIB:,.1f}"


def _both(num_bytes: float) -> str:
    return f"{_gib(num_bytes)} GiB = {_gb(num_bytes)} GB"


def _tokens(number: float) -> str:
    """A length at which something is outgrown; 0: states alone do it, inf: nothing does."""
    if math.isinf(number):
        return "no length"
    return f"{number:,.0f} tokens" if number else "any length"


def _stored(facts: Mapping[str, Any], width: int) -> list[Line]:
    stored = facts["stored"]
    rows = [
        (
            name,
            f"{part['parameters'] / 1e9:,.2f}" if part["parameters"] else "-",
            f"{part['bits']:.4g}",
            _gb(part["bytes"]),
        )
        for name, part in stored["parts"].items()
    ]
    total = sum(part["bytes"] for part in stored["parts"].values())
    count = stored["parameters"]
    rows.append(("one copy", f"{count / 1e9:,.2f}", f"{8 * total / count:.4g}", _gb(total)))
    lines = title("WEIGHTS", "one copy, as released; model.weights.* change the format", width)
    lines += table(("part", "parameters, 1e9", "bits", "GB"), rows, bold_last=True)
    floors = {
        "floors": f"all parameters in 4 bits {format_bytes(count / 2)}, in 16 bits"
        f" {format_bytes(2 * count)}"
    }
    if stored["published"] not in (None, count):
        floors["published"] = f"{stored['published']:,} parameters; the formulas give {count:,}"
    return lines + labelled_facts(floors, width)


def _pools(facts: Mapping[str, Any], width: int) -> list[Line]:
    rank, memory = facts["rank"], facts["memory_bytes"]
    rows = [
        (
            name,
            _gib(num_bytes),
            _gb(num_bytes),
            f"{100 * num_bytes / memory:.1f} %",
            GROWS_WITH[name],
        )
        for name, num_bytes in rank.items()
        if num_bytes
    ]
    used = sum(rank.values())
    rows.append(("free" if used <= memory else "missing", _gib(abs(memory - used))))
    rows[-1] += (_gb(abs(memory - used)), f"{100 * abs(memory - used) / memory:.1f} %", "")
    grown = max(len(row[-1]) for row in rows)
    rows = [(*row[:-1], row[-1].ljust(grown)) for row in rows]
    shared = facts["tensor_parallel"]
    remark = (
        f"the fullest of {facts['ranks']:,}: {facts['slots']} of {facts['num_experts']} experts a"
        f" layer, {'a copy' if shared == 1 else f'1/{shared} of a copy'} of everything else;"
        f" memory {_both(memory)} ({facts['reading']})"
    )
    header = ("pool", "GiB", "GB", "share", "grows with".ljust(grown))
    return title("ONE RANK", remark, width) + table(header, rows, bold_last=True)


def _arrangements(facts: Mapping[str, Any], width: int) -> list[Line]:
    """Nothing where there is nothing to arrange."""
    ways = facts["arrangements"]
    if len(ways) < 2:
        return []
    rows = [
        (
            f"{way['tensor_parallel']}",
            f"{way['data_parallel']}",
            f"{facts['ranks']}",
            f"{way['experts']}",
            _gb(way["weights"]),
            _gb(way["left"]),
            f"{way['sequences']:,}",
        )
        for way in ways
    ]
    remark = (
        "ranks that share attention (TP), groups with sequences of their own (DP), and experts over"
        f" all (EP); sequences of {facts['context']:,} tokens on all ranks"
    )
    header = ("TP", "DP", "EP", "experts a layer", "weights GB", "left GB", "sequences")
    return title("ARRANGEMENTS", remark, width) + table(header, rows)


def _numbers(facts: Mapping[str, Any], width: int) -> list[Line]:
    rows = [
        (name, _gib(one["bytes"]), _gb(one["bytes"]), f"{one['weights']:,}", one["all"] or "none")
        for name, one in facts["smallest"].items()
    ]
    rows = [(*row[:-1], f"{row[-1]:,}" if isinstance(row[-1], int) else row[-1]) for row in rows]
    remark = "the smallest number: of memories that hold one copy of the weights, and of ranks that"
    lines = title("ACCELERATORS", f"{remark} hold all but sequences", width)
    return lines + table(("memory read as", "GiB", "GB", "weights", "all pools"), rows)


def _sequences(facts: Mapping[str, Any], width: int) -> list[Line]:
    one, tokens = facts["sequence"], facts["context"]
    growth = f"{one['token_bytes']:,.0f} B a token"
    if one["constant_bytes"]:
        growth += f", {format_bytes(one['constant_bytes'])} whatever its length"
    said = {"one": f"{growth}; {format_bytes(one['bytes'])} at {tokens:,} tokens"}
    if not math.isinf(one["break_even"]):
        saved = one["saved"]
        said["hybrid"] = (
            f"that is {100 * abs(saved):.1f} % {'less' if saved > 0 else 'more'} than if every"
            f" layer cached; break-even at {math.floor(one['break_even']):,} tokens"
        )
    said["fit"] = (
        f"{facts['capacity']:,} of {tokens:,} tokens on all ranks; this page has"
        f" {facts['sequences']:,} of them"
    )
    for name, label in (("weights", "outgrow"), ("left", "")):
        out = facts["outgrows"][name]
        if out is None:
            continue
        what = "one copy of the weights" if name == "weights" else "the memory that is left"
        said[label] = (
            f"{what}: at {format_count(out['sequences'], 'sequence')} of {tokens:,} tokens, or"
            f" {format_count(out['of'], 'sequence')} of {_tokens(out['context'])}"
        )
    said["offload"] = _offload(facts["offload"])
    said["lower tiers"] = "; ".join(map(_tier, facts["tiers"])) or "none is known of this machine"
    lines = title("SEQUENCES", "caches that grow, states that do not", width)
    return lines + labelled_facts(said, width)


def _tier(tier: Mapping[str, Any]) -> str:
    words = f"{tier['name']}, {_gb(tier['bytes'])} GB a rank, would hold {tier['sequences']:,} more"
    if tier["seconds"] is None:
        return words + ", at a rate that is not known"
    return words + f", each {format_seconds(tier['seconds'])} away"


def _offload(verdict: Mapping[str, Any]) -> str:
    words = VERDICTS[verdict["verdict"]].format(
        missing=_both(verdict["missing"]), free=_both(verdict["free"])
    )
    if verdict["seconds"]:
        words += f", {format_seconds(verdict['seconds'])} to bring them back once"
    if verdict["verdict"] != "option" and verdict["enough"]:
        words += f"; {verdict['enough']:,} accelerators hold all but sequences without it"
    return words


def _reads(facts: Mapping[str, Any], width: int) -> list[Line]:
    rows = [
        (
            f"{one['tokens']:,}",
            format_significant(one["touched"]),
            format_bytes(one["bytes"]),
            format_seconds(one["seconds"]) if one["seconds"] else "-",
        )
        for one in facts["reads"]
    ]
    remark = "weights, all ranks together, without the input table; expected under uniform routing"
    lines = title("READ IN A STEP", remark, width)
    lines += table(("tokens", "experts a layer", "bytes", "at full rate"), rows)
    return lines


def _buffer(facts: Mapping[str, Any], width: int) -> list[Line]:
    one = facts["buffer"]
    text = (
        f"{one['bytes'] / GIB:.2f} GiB at {one['tokens']:,} tokens a rank; within"
        f" {one['budget_GiB']:g} GiB at most {one['most']:,} tokens fit"
    )
    return title("LOW-LATENCY BUFFERS", text, width)
