"""The top of the page, what ran and what came of it, and its end, where the files are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from comm.report.layout import Line, labelled, line, title
from comm.report.units import format_bytes, format_count, format_seconds

Record = Mapping[str, Any]

LABEL = 15  # width of the labels' column, indent included
MARK = "! "  # stands before a verdict that fails, in the place of the indent
STATE_STYLES = {
    "EXACT": "bold green",
    "WITHIN": "bold green",
    "OUTSIDE": "bold red",
    "NOT_AVAILABLE": "yellow",
}
STATUS_WORDS = {
    0: "everything that was checked agrees",
    3: "COUNTED BYTES DIFFER from a prediction",
    4: "OUTPUTS DIFFER from the reference",
    5: "THE KERNEL'S COUNTERS do not reconcile with the counted bytes",
}
REPORT_WORDS = {
    "written": "report.html: this page in pictures, for a browser",
    "no library": "no report.html, which needs matplotlib: pip install 'wideep[plots]'",
}
MUCH_METADATA = 1.1  # bytes for each byte of payload from which the headline line mentions it
COMPARISONS = {
    "exact": "bytes counted against bytes computed from the recorded routing",
    "conserved": "bytes and rows sent against those received and returned",
    "expected": "bytes counted against the law that the router follows",
    "correctness": "outputs against a dense network in one process",
    "gradients": "gradients against the dense network's own",
    "kernel": "bytes counted against bytes that TCP acknowledged",
    "interfaces": "bytes counted between hosts against those that their interfaces sent",
}


def manifest(record: Record, width: int) -> list[Line]:
    """What ran."""
    about, shape = record["manifest"], record["manifest"]["shape"]
    latent = f", latent {shape['latent_size']}" if shape["latent_size"] else ""
    wire = about["wire"]
    facts = {
        "model": f"{about['model']} at scale {about['scale']}:"
        f" {format_count(shape['num_moe_layers'], 'MoE layer')},"
        f" {shape['num_experts']} experts, top-{shape['top_k']},"
        f" hidden {shape['hidden_size']}{latent}",
        "ranks": f"{_ranks(about)}{_groups(about)}; experts placed {about['placement']}",
        "traffic": f"dispatcher {_dispatcher(about)}, router {about['router']},"
        f" {_tokens(about['tokens_per_rank'])},"
        f" {format_count(about['steps'], 'step')} after {about['warmup']} to warm up"
        + _mode(about["config"]),
        "wire": f"dispatch {wire['dispatch']}, combine {wire['combine']},{_backward(about)}"
        f" compute {about['dtype']}; seed {about['seed']}",
        "software": f"torch {about['torch']}, backend {about['backend']} on {about['device']},"
        f" python {about['python']}, {format_count(len(about['hosts']), 'host')}",
    }
    if about["router_notes"]:
        facts["routing"] = "; ".join(about["router_notes"])
    return first_line(about, "", width) + labelled_facts(facts, width)


def first_line(about: Mapping[str, Any], job: str, width: int) -> list[Line]:
    """Program and version, and when it ran from which commit."""
    name = f"WideEP {about['version']}{job}"
    commit = f"commit {about['commit'][:12]}, " if about["commit"] else ""
    when = f"started {about['started']}, {format_seconds(about['seconds'])}"
    return labelled(name, commit + when, width, max(LABEL, len(name) + 3), "bold")


def labelled_facts(facts: Mapping[str, str], width: int) -> list[Line]:
    """A label and its text, for each; indented."""
    return [
        part for label, text in facts.items() for part in labelled(f"  {label}", text, width, LABEL)
    ]


def answer(record: Record, width: int) -> list[Line]:
    """The verdicts, and whether the headline formula tells the truth."""
    lines = title("ANSWER", f"{_status_words(record)} (status {record['status']})", width)
    lines += _verdicts(record["verdicts"], width)
    lines += labelled("  HEADLINE", _headline(record), width, LABEL, "bold")
    if record["full_scale"]:
        lines += labelled("  FULL SIZE", _full_size(record["full_scale"]), width, LABEL, "bold")
    return lines


def _verdicts(verdicts: Sequence[Mapping[str, Any]], width: int) -> list[Line]:
    """Name, state and reason of each; one that fails has a mark before it."""
    states = [verdict["state"].replace("_", " ") for verdict in verdicts]
    column = LABEL + max(map(len, [*states, "OUTSIDE"])) + 2
    lines = []
    for verdict, state in zip(verdicts, states, strict=True):
        name, style = verdict["name"], STATE_STYLES.get(verdict["state"], "")
        mark = MARK if state == "OUTSIDE" else "  "
        text = f"{COMPARISONS.get(name, name)}: {verdict['reason']}"
        lines += labelled(f"{mark + name:<{LABEL}}{state}", text, width, column, style)
    return lines


def results(record: Record, width: int) -> list[Line]:
    """Where everything is, and the answer once more: a terminal shows the end of a page first."""
    files = "run.json: every figure of this page; traffic.npz: every pair of ranks"
    report = REPORT_WORDS.get(record.get("report_html", "off"))
    return [
        line(),
        *labelled("RESULTS", record["result_dir"], width, LABEL, "bold"),
        *labelled("", files, width, LABEL),
        *(labelled("", report, width, LABEL) if report else []),
        *labelled(f"  status {record['status']}", _status_words(record), width, LABEL, "bold"),
    ]


def truth(figures: Mapping[str, Any]) -> str:
    """What the ratio measured / headline says about the formula."""
    ratio = figures["ratio"]
    if ratio is None:
        return "no tokens to judge it by"
    if ratio == 0:
        return "nothing left a rank"
    if abs(ratio - 1) < 0.005:
        return "the formula is right to 0.5 %"
    if ratio < 1:
        return f"the formula overstates it {1 / ratio:.2f} times"
    return f"the formula understates it {ratio:.2f} times"


def _status_words(record: Record) -> str:
    return STATUS_WORDS.get(record["status"], "the run did not end well")


def _headline(record: Record) -> str:
    figures, about = record["headline"], record["manifest"]
    return (
        f"{figures['formula']} = {format_bytes(figures['headline_bytes'])} for"
        f" {format_count(about['shape']['num_moe_layers'], 'layer')} and"
        f" {format_count(about['steps'], 'step')}, one way; dispatch put"
        f" {format_bytes(figures['measured_bytes'])} on the network: {truth(figures)}"
        + _reduced_width(record)
    )


def _reduced_width(record: Record) -> str:
    """A warning where metadata counts for more than it would beside rows of full width."""
    about = record["manifest"]
    run, full = (
        shape["latent_size"] or shape["hidden_size"]
        for shape in (about["shape"], about["full_shape"])
    )
    factors = {factor["name"]: factor["value"] for factor in record["headline"]["factors"]}
    if run >= full or factors.get("metadata", 1) < MUCH_METADATA:
        return ""
    return "; metadata (ids, weights, counts) weighs more at this reduced width than at full size"


def _full_size(full: Mapping[str, Any]) -> str:
    network = full["forward_pass"]["network_bytes"]
    formula = there_and_back(full)
    ratio = f", {formula / network:.2f} times as much" if network else ""
    return (
        f"so routed, one token of {full['model']} puts"
        f" {format_bytes(network)} on the network in a forward"
        f" pass ({full['num_moe_layers']} MoE layers, {full['rounds']} rounds); the formula"
        f" says {format_bytes(formula)} there and back{ratio}"
    )


def there_and_back(full: Mapping[str, Any]) -> int:
    """What the formula says of a forward pass at full size: once for each way, in every layer."""
    return 2 * full["num_moe_layers"] * full["headline_bytes"]


def _ranks(about: Mapping[str, Any]) -> str:
    nodes = about["node_of_rank"]
    sizes = sorted({nodes.count(node) for node in set(nodes)})
    each = f"{sizes[0]}" if len(sizes) == 1 else f"{sizes[0]} to {sizes[-1]}"
    grouped = about["config"]["ep_size"] not in (None, about["world_size"])
    return (
        f"{'' if grouped else 'EP '}{about['world_size']}"
        f" = {format_count(about['num_nodes'], 'node')} x {each}"
        f" rank{'s' if sizes[-1] != 1 else ''}"
    )


def _groups(about: Mapping[str, Any]) -> str:
    """Groups side by side and shared experts, where there are any."""
    config, ranks = about["config"], about["world_size"]
    size = config["ep_size"] or ranks
    text = f", in {ranks // size} groups of EP {size}" if size < ranks else ""
    if config["expert_tp"] > 1:
        text += f"; {config['expert_tp']} ranks share each expert ({config['expert_tp_mode']})"
    return text


def _dispatcher(about: Mapping[str, Any]) -> str:
    """Its name, and the option that decides how many rows it sends, where it has one."""
    name, options = about["dispatcher"], about["config"]["dispatcher"]
    if name == "padded":
        kept = ", weights renormalised" if options["renormalize"] else ""
        return f"padded (capacity factor {options['capacity_factor']:g}{kept})"
    return f"{name} (deduplicated)" if options["deduplicate"] else name


def _mode(config: Mapping[str, Any]) -> str:
    text = "; training" if config["mode"] == "training" else ""
    return text + (f"; {config['chunks']} chunks a layer" if config["chunks"] > 1 else "")


def _backward(about: Mapping[str, Any]) -> str:
    return (
        f" backward {about['wire']['backward']}," if about["config"]["mode"] == "training" else ""
    )


def _tokens(tokens: Sequence[int]) -> str:
    if len(set(tokens)) == 1:
        return f"{tokens[0]:,} tokens a rank"
    return f"{min(tokens):,} to {max(tokens):,} tokens a rank ({sum(tokens):,} in all)"
