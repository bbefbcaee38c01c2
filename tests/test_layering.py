"""Imports go one way only, late ones included: comm never sees moe, the analytic side stands alone.

Each rule: files that match -> modules they may import among the project's own and the heavy ones.
"""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
WATCHED = (
    "comm",
    "moe",
    "torch",
    "hydra",
    "omegaconf",
    "rich",
    "safetensors",
    "matplotlib",
    "tests",
)

PURE = {
    "comm.topology": (),
    "comm.placement": (),
    "comm.balance": ("comm.placement",),
    "comm.wire": ("torch",),
    "comm.permute": ("torch",),
    "comm.tcp": (),
}
# The first rule whose prefix matches holds.
RULES: dict[str, tuple[str, ...]] = PURE | {
    "comm.meter": ("torch",),
    "comm.notebook": ("comm.meter",),
    "comm.post_mortem": ("torch", "comm.notebook"),
    "comm.world": ("torch", "comm.notebook", "comm.post_mortem", "comm.tcp", "comm.topology"),
    "comm.barrier": (),
    "comm.header": ("comm.meter",),
    "comm.staging": ("torch",),
    "comm.exchange": ("torch",),
    "comm.memory": (),
    "comm.shm": ("torch", "comm.barrier", "comm.memory", "comm.wire", "comm.world"),
    "comm.transport": (
        *("torch", "comm.exchange", "comm.header", "comm.meter", "comm.shm", "comm.staging"),
        *("comm.wire", "comm.world"),
    ),
    "comm.spawn": ("torch", "comm.barrier", "comm.notebook", "comm.post_mortem", "comm.world"),
    "comm.rank_server": ("torch", "comm.notebook", "comm.spawn", "comm.world"),
    "comm.ranks": ("comm.notebook", "comm.rank_server", "comm.spawn"),
    "comm.counting.gloo": (),
    "comm.counting.ops": ("torch", "comm.counting.gloo"),
    "comm.counting.traffic": (
        *("torch.distributed", "comm.counting.gloo", "comm.topology", "comm.verdict"),
    ),
    "comm.counting": (
        *("torch", "comm.counting", "comm.kernel", "comm.reconcile", "comm.tcp", "comm.topology"),
        *("comm.verdict", "comm.world"),
    ),
    "comm.replicas": ("torch", "comm.permute", "comm.placement"),
    "comm.rebalance": ("torch", "comm.meter", "comm.placement", "comm.transport"),
    "comm.grad_sync": ("torch", "comm.meter", "comm.placement", "comm.transport", "comm.wire"),
    "comm.dispatch": (
        *("torch", "comm.dispatch", "comm.header", "comm.meter", "comm.transport", "comm.barrier"),
        "comm.staging",
        *("comm.topology", "comm.placement", "comm.wire", "comm.permute"),
    ),
    "comm.analytic": ("comm.analytic", "comm.topology"),
    "comm.verdict": ("comm.analytic",),
    # Claims are worked out from formulas alone; what a run has counted is handed to them.
    "comm.claims.form": ("comm.analytic",),
    "comm.claims.scope": ("comm.analytic", "comm.claims.form"),
    "comm.claims.judge": ("comm.analytic", "comm.claims.form", "comm.claims.scope"),
    "comm.claims.changes": (
        *("comm.analytic", "comm.claims.form", "comm.claims.scope", "comm.claims.judge"),
    ),
    "comm.claims.words": (
        *("comm.analytic", "comm.claims.changes", "comm.claims.form", "comm.claims.scope"),
        "comm.claims.judge",
    ),
    "comm.claims": (),
    # The witness and its judge know neither the meter nor a prediction.
    "comm.reconcile": ("comm.verdict",),
    "comm.kernel": ("torch", "comm.tcp", "comm.reconcile", "comm.world"),
    "comm.interfaces": ("comm.tcp", "comm.verdict"),
    # Nor rich: a page in HTML is no page of a terminal. Only `charts` and `curves` may draw.
    "comm.report.curves": ("matplotlib", "comm.report"),
    "comm.report.page.charts": ("matplotlib", "comm.report.page.html", "comm.report.units"),
    "comm.report.page": ("comm.report", "comm.topology"),
    "comm.report": ("rich", "comm.report", "comm.topology", "comm.analytic.rows"),
    "moe.version": (),
    # The plugin is read by every pytest of the environment, so nothing heavy is named in it.
    "moe.pytest_plugin": ("moe.api", "moe.ranked", "comm.report.reading"),
    "moe.ranked": ("moe.rank_report", "comm.ranks", "comm.rank_server", "comm.world"),
    "moe.rank_report": ("comm.spawn",),
    "moe.testing": ("comm.counting", "comm.analytic.traffic", "comm.report.units", "comm.topology"),
    "moe.philox": (),
    "moe.attention": (),
    "moe.model": ("moe.attention",),
    "moe.parameters": ("moe.attention", "moe.model"),
    "moe.hardware": (),
    "moe.hf_attention": ("moe.attention",),
    "moe.hf_config": ("moe.hf_attention", "moe.model"),
    "moe.synthetic": ("moe.philox", "moe.routing.draws"),
    "moe.experts": ("torch", "moe.model", "moe.philox"),
    "moe.router": ("torch", "moe.model", "moe.philox", "moe.experts"),
    "moe.overlap": ("torch", "comm.dispatch.base"),
    "moe.layer": (
        *("torch", "moe.model", "moe.philox", "moe.experts", "moe.router", "moe.overlap"),
        *("comm.dispatch.base", "comm.replicas"),
    ),
    "moe.reference": ("torch", "moe.model", "moe.experts"),
    "moe.traces": ("moe.traces", "torch", "safetensors"),
    "moe.placement_files": ("moe.traces",),
    "moe.routing.options": ("moe.model",),  # the table of keys, read before anything heavy
    "moe.routing": (
        *("moe.routing", "moe.model", "moe.philox", "moe.synthetic", "moe.traces"),
        "comm.analytic.law",
    ),
    "moe.keys": (),
    "moe.memory_options": ("moe.keys",),
    "moe.settings": (
        *("moe.hardware", "moe.keys", "moe.memory_options", "moe.model", "moe.routing.options"),
    ),
    "moe.netns": (),
    "moe.nodes": ("moe.netns", "moe.settings"),  # nor torch: it only starts those who need it
    "moe.machines": ("moe.settings",),
    "moe.combinations": ("moe.settings", "moe.routing.options"),
    # What the predictions are told must not come from what they judge.
    "moe.facts": ("moe.plan", "comm.analytic", "comm.placement"),
    "moe.placed": ("moe.routings", "comm.analytic"),
    "moe.fitness": (
        *("torch", "moe.settings", "moe.model", "moe.conf_files"),
        *("comm.memory", "comm.placement", "comm.dispatch"),
    ),
    "moe.diagnosis": ("moe.fitness",),  # looks at nothing by itself
    "moe.probes": ("torch", "moe.diagnosis", "moe.netns", "comm.barrier", "comm.tcp"),
    "moe.jobs.doctor": (
        *("torch", "moe.diagnosis", "moe.fitness", "moe.probes", "moe.settings", "moe.version"),
        *("comm.memory", "comm.report"),
    ),
    "moe.pools": (
        *("moe.attention", "moe.hardware", "moe.model", "moe.parameters", "moe.settings"),
        "comm.analytic",
    ),
    "moe.jobs.pools": (
        *("moe.attention", "moe.hardware", "moe.pools", "moe.settings", "moe.version"),
        *("comm.analytic", "comm.report"),
    ),
    "moe.jobs.request": (
        *("moe.attention", "moe.pools", "moe.settings", "moe.version"),
        *("comm.analytic", "comm.report"),
    ),
    "moe.jobs.fabric": (
        *("moe.hardware", "moe.settings", "moe.version", "comm.analytic", "comm.report"),
    ),
    "moe.words": (),
    "moe.sweep": ("moe.config", "moe.fitness", "moe.settings"),
    "moe.jobs.sweep": (
        *("moe.sweep", "moe.settings", "moe.version", "moe.jobs.emulate", "moe.prediction"),
        *("comm.report", "comm.spawn"),
    ),
    "moe.jobs.compare": ("moe.settings", "comm.report"),
    "moe.jobs.export": ("moe.settings", "comm.report"),
    # Nothing that runs ranks, and no torch.
    "moe.prediction": (
        *("moe.settings", "moe.hardware", "moe.plan", "moe.facts", "moe.predict_figures"),
        *("comm.analytic", "comm.balance", "comm.placement", "comm.topology"),
    ),
    "moe.predict_figures": ("moe.prediction", "moe.predict_crossovers", "comm.analytic"),
    "moe.predict_crossovers": ("moe.prediction", "comm.analytic"),
    "moe.jobs.predict": (
        *("moe.settings", "moe.version", "moe.prediction", "comm.analytic", "comm.report"),
    ),
    "moe.claim_files": (
        *("moe.attention", "moe.conf_files", "moe.model", "moe.parameters", "moe.pools"),
        "comm.claims.form",
    ),
    "moe.jobs.claims": (
        *("moe.claim_files", "moe.conf_files", "moe.jobs.claim_runs", "moe.settings"),
        *("moe.version", "comm.analytic", "comm.claims.changes", "comm.claims.form"),
        *("comm.claims.scope", "comm.claims.words", "comm.claims.judge", "comm.report"),
    ),
    "moe.jobs.report": ("moe.settings", "comm.report"),
}
ENTRIES = {"moe.__main__", "moe.api"}  # who may start a job
HYDRA_ALLOWED = {"moe.config", "moe.conf_files", "moe.__main__"}


def modules():
    for package in ("comm", "moe"):
        for path in sorted((ROOT / package).rglob("*.py")):
            name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
            yield name.removesuffix(".__init__"), path


def imported(path):
    """Every module named in an import statement, at any depth of the file."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            assert node.level == 0, f"{path}: relative import"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return {name for name in names if name.split(".")[0] in WATCHED}


def matches(name, prefix):
    return name == prefix or name.startswith(prefix + ".")


MODULES = dict(modules())


@pytest.mark.parametrize("name", MODULES)
def test_imports_only_what_its_layer_may(name):
    names = imported(MODULES[name])
    rule = next((RULES[prefix] for prefix in RULES if matches(name, prefix)), None)
    if rule is not None:
        wrong = {one for one in names if not any(matches(one, allowed) for allowed in rule)}
        assert not wrong, f"{name} may import {rule}"
    if name.startswith("comm"):
        assert not any(matches(one, "moe") for one in names)
        assert rule is not None or name == "comm", f"{name} has no rule in this test"
    if name not in HYDRA_ALLOWED:
        assert not any(matches(one, "hydra") or matches(one, "omegaconf") for one in names)
    if not name.startswith("moe.jobs") and name not in ENTRIES:
        assert not any(matches(one, "moe.jobs") for one in names)


def test_there_is_something_to_check():
    assert len(MODULES) > 30
    assert "torch" in imported(ROOT / "comm" / "spawn.py")  # a late import is seen
    for prefix in RULES:
        assert any(matches(name, prefix) for name in MODULES), f"no module for the rule of {prefix}"
