"""job=doctor: does this machine have what the run needs that the other words describe?

probes (what there is) --> fitness, diagnosis (what to think of it) --> a line for each, and 7 where
the run would fail. One process; no rank is started.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from functools import cache

from comm.memory import free_bytes
from comm.report.answer import LABEL
from comm.report.console import WIDTH, print_lines
from comm.report.layout import Line, labelled, line, wrap
from moe import diagnosis, fitness, probes
from moe.diagnosis import Host, Master
from moe.fitness import FAIL, OK, WARN, Finding
from moe.settings import UNFIT, Config
from moe.version import VERSION

Check = tuple[str, Callable[[], Finding]]
COLUMNS = (6, 15)  # of the state and of what was looked at
STYLES = {OK: "", WARN: "yellow", FAIL: "bold red"}


def launch(config: Config) -> int:
    """Print the findings; 0, or UNFIT where one is FAIL."""
    findings = examine(checks(config))
    print_lines(page(config, findings, WIDTH))
    return UNFIT if any(finding.state == FAIL for finding in findings) else 0


def run_rank(config: Config) -> int:
    """Under torchrun the first rank of each machine looks; the others have nothing to do."""
    return launch(config) if os.environ.get("LOCAL_RANK", "0") == "0" else 0


def examine(all_checks: Sequence[Check]) -> list[Finding]:
    """What each check found; one that cannot be made is a finding, too."""
    findings = []
    for what, look in all_checks:
        try:
            findings.append(look())
        except Exception as error:  # the doctor goes on, whatever is wrong with one organ
            text = " ".join(f"{type(error).__name__}: {error}".split())
            findings.append(Finding(FAIL, what, text[:300]))
    return findings


def checks(config: Config) -> list[Check]:
    """In the order of the page: this machine, its network, what is installed."""
    launched = "RANK" in os.environ
    local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", config.world_size))
    host = cache(probes.own_host)
    master = cache(lambda: probes.master(os.environ))
    return [
        ("memory", lambda: fitness.memory(config, local_ranks, free_bytes())),
        ("open files", lambda: fitness.open_files(config, *fitness.file_limits())),
        ("TMPDIR", lambda: fitness.temporary_folder(tempfile.gettempdir())),
        ("threads", lambda: _threads(local_ranks)),
        ("shared memory", lambda: _shared_memory(config)),
        ("interface", lambda: _interface(host(), master(), launched)),
        ("host name", lambda: diagnosis.host_name(host(), master())),
        ("port", lambda: _port(host(), master(), launched)),
        ("TCP_INFO", lambda: diagnosis.tcp_info(*probes.acknowledged())),
        (
            "namespaces",
            lambda: diagnosis.namespaces(*probes.namespace_way(), probes.missing_tools()),
        ),
        ("torch", lambda: _software(config)),
        ("dtypes", lambda: diagnosis.dtypes(probes.refused_dtypes(host().loopback))),
        ("GPUs", lambda: _gpus(config, local_ranks)),
        *([("GPU memory", lambda: _gpu_memory(config, local_ranks))] if _on_gpus(config) else []),
    ]


def _threads(local_ranks: int) -> Finding:
    usable = getattr(os, "sched_getaffinity", None)  # a container or a job may have fewer
    cores = len(usable(0)) if usable else os.cpu_count() or 1
    return diagnosis.threads(local_ranks, cores, os.environ.get("OMP_NUM_THREADS", ""))


def _shared_memory(config: Config) -> Finding:
    trouble = probes.shared_memory_trouble()
    return diagnosis.shared_memory(
        trouble, config.dispatcher.name == "one_sided", probes.shm_free()
    )


def _interface(host: Host, master: Master, launched: bool) -> Finding:
    wanted = os.environ.get("GLOO_SOCKET_IFNAME", "")
    return diagnosis.interface(host, master, wanted, forked=not launched)


def _port(host: Host, master: Master, launched: bool) -> Finding:
    here = probes.is_here(host, master)
    trouble = "" if master.error else probes.port_trouble(master, here, joined=launched)
    return diagnosis.port(master, here, launched, trouble, probes.free_port())


def _backend(config: Config) -> str:
    """comm.world.resolve_backend without its refusals: those have lines of their own here."""
    if config.backend != "auto":
        return config.backend
    return "nccl" if config.device == "cuda" else "gloo"


def _software(config: Config) -> Finding:
    import torch
    import torch.distributed as dist

    there = dist.is_available()
    gloo, nccl = there and dist.is_gloo_available(), there and dist.is_nccl_available()
    return diagnosis.software(str(torch.__version__), gloo, nccl, _backend(config))


def _gpus(config: Config, local_ranks: int) -> Finding:
    import torch

    return fitness.gpus(config, local_ranks, torch.cuda.device_count())


def _on_gpus(config: Config) -> bool:
    if config.device != "cuda":
        return False
    import torch

    return torch.cuda.device_count() > 0


def _gpu_memory(config: Config, local_ranks: int) -> Finding:
    import torch

    count = torch.cuda.device_count()
    free = [torch.cuda.mem_get_info(gpu)[0] for gpu in range(count)]
    names = [torch.cuda.get_device_name(gpu) for gpu in range(count)]
    return diagnosis.gpu_memory(fitness.rank_bytes(config), -(-local_ranks // count), free, names)


def page(config: Config, findings: Sequence[Finding], width: int) -> list[Line]:
    """A line for each finding, its remedy behind an arrow, and what it comes to."""
    counts = {state: sum(one.state == state for one in findings) for state in (OK, WARN, FAIL)}
    asked = (
        f"doctor: {config.model.name} at scale {config.scale.name}, {config.world_size} ranks,"
        f" dispatcher {config.dispatcher.name}, device {config.device}"
    )
    lines = [
        *labelled(f"WideEP {VERSION}", asked, width, LABEL, "bold"),
        line(),
        *(one for finding in findings for one in _lines(finding, width)),
        line(),
    ]
    verdict = (
        "this run would fail here: type what stands behind the arrows"
        if counts[FAIL]
        else "this run can start here"
    )
    told = ", ".join(f"{count} {state}" for state, count in counts.items())
    return [*lines, *labelled("  RESULT", f"{verdict} ({told})", width, LABEL, "bold")]


def _lines(finding: Finding, width: int) -> Iterator[Line]:
    """ok  what  value  ->  remedy; the remedy on a line of its own where the rest is long."""
    state, what = COLUMNS
    indent = 2 + state + what
    text = wrap(finding.value, width - indent)
    remedy = [f"-> {finding.remedy}"] if finding.remedy else []
    if remedy and len(text[-1]) + 2 + len(remedy[0]) <= width - indent:
        text, remedy = [*text[:-1], f"{text[-1]}  {remedy[0]}"], []
    head = ("  ", ""), (f"{finding.state:<{state}}", STYLES[finding.state])
    yield (*head, (f"{finding.what:<{what}}{text[0]}", ""))
    for rest in text[1:]:
        yield line(" " * indent + rest)
    for rest in remedy:  # never broken: it is to be copied
        yield line(" " * indent + rest)
