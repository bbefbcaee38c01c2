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
    "comm.interfaces": (),
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
    "comm.memory": (),
    "comm.shm": ("torch", "comm.barrier", "comm.memory", "comm.wire", "comm.world"),
    "comm.transport": (
        *("torch", "comm.header", "comm.meter", "comm.shm", "comm.staging", "comm.wire"),
        "comm.world",
    ),
    "comm.spawn": ("torch", "comm.barrier", "comm.notebook", "comm.post_mortem", "comm.world"),
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
    # The witness and its judge know neither the meter nor a prediction.
    "comm.reconcile": ("comm.verdict",),
    "comm.kernel": ("torch", "comm.tcp", "comm.reconcile", "comm.world"),
    "comm.interfaces": ("comm.verdict",),
    # Nor rich: a page in HTML is no page of a terminal. Only `charts` may draw.
    "comm.report.page.charts": ("matplotlib", "comm.report.page.html", "comm.report.units"),
    "comm.report.page": ("comm.report", "comm.topology"),
    "comm.report": ("rich", "comm.report", "comm.topology", "comm.analytic.rows"),
    "moe.version": (),
    "moe.philox": (),
    "moe.model": (),
    "moe.hf_config": ("moe.model",),
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
    "moe.settings": ("moe.model", "moe.routing.options"),
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
    "moe.probes": ("torch", "moe.diagnosis", "comm.barrier", "comm.tcp"),
    "moe.jobs.doctor": (
        *("torch", "moe.diagnosis", "moe.fitness", "moe.probes", "moe.settings", "moe.version"),
        *("comm.memory", "comm.report"),
    ),
    "moe.jobs.report": ("moe.settings", "comm.report"),
    "moe.jobs.predict": (*("moe.settings", "moe.version", "comm.analytic", "comm.report"),),
}
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
    if not name.startswith("moe.jobs") and name != "moe.__main__":
        assert not any(matches(one, "moe.jobs") for one in names)


def test_there_is_something_to_check():
    assert len(MODULES) > 30
    assert "torch" in imported(ROOT / "comm" / "spawn.py")  # a late import is seen
    for prefix in RULES:
        assert any(matches(name, prefix) for name in MODULES), f"no module for the rule of {prefix}"
