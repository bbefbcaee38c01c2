"""The doctor: every bad day of a machine makes the right line, and no check makes it crash."""

import errno
import os
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from run_configs import base_config

from comm.report.layout import plain_text
from moe import diagnosis, netns, probes
from moe.__main__ import main
from moe.diagnosis import Host, Master
from moe.fitness import FAIL, OK, WARN, Finding
from moe.jobs import doctor
from moe.settings import DispatcherConfig

ROOT = Path(__file__).parent.parent
INTERFACES = {"lo": ["127.0.0.1", "::1"], "eth0": ["10.0.0.5"], "ib0": ["192.168.7.5"]}
HOST = Host("box", INTERFACES, ["10.0.0.5"])
HERE = Master("")
THERE = Master("head", 29500, ["10.0.0.1"], source="10.0.0.5")

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="Linux and macOS")


@pytest.fixture(autouse=True)
def alone(monkeypatch):
    """No torchrun around the tests, and no wishes of who runs them."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR"):
        monkeypatch.delenv(name, raising=False)
    for name in ("MASTER_PORT", "GLOO_SOCKET_IFNAME", "OMP_NUM_THREADS", "WIDEEP_STATUS_FILE"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    ("host", "master", "wanted", "forked", "state", "said", "remedy"),
    [
        (HOST, HERE, "", True, OK, "lo (all ranks are forked here)", ""),
        (HOST, HERE, "", False, OK, "eth0 (has the address of the host's name)", ""),
        (HOST, HERE, "ib0", True, OK, "ib0 (by GLOO_SOCKET_IFNAME)", ""),
        (HOST, HERE, "eth9", True, FAIL, "no such interface up here; there are lo, eth0", "=lo"),
        (HOST, THERE, "eth9", False, FAIL, "GLOO_SOCKET_IFNAME=eth9: no such", "IFNAME=eth0"),
        (HOST, THERE, "", False, OK, "eth0 (has the address of the host's name), on the way", ""),
        (HOST, THERE, "ib0", False, WARN, "MASTER_ADDR=head leaves by eth0", "IFNAME=eth0"),
        (HOST, THERE, "lo", False, FAIL, "no other machine reaches it", "IFNAME=eth0"),
        # Debian gives a host's name an address of loopback, and gloo believes it.
        (
            replace(HOST, looked_up=["127.0.1.1"]), THERE, "", False,
            FAIL, "lo (has the address of the host's name); no other machine", "IFNAME=eth0",
        ),
        (replace(HOST, looked_up=["192.168.7.5", "10.0.0.5"]), HERE, "", False, OK, "ib0 (has", ""),
        (HOST, replace(THERE, source=None), "lo", False, FAIL, "no other machine", "IFNAME=eth0"),
        (HOST, Master("haed", error="not known"), "", False, OK, "eth0 (has the address", ""),
        (replace(HOST, looked_up=[]), THERE, "", False, FAIL, "name leads nowhere", "IFNAME=eth0"),
        (replace(HOST, looked_up=[]), HERE, "", False, OK, "lo (the host's name leads nowhere", ""),
    ],
)  # fmt: skip
def test_the_interface(host, master, wanted, forked, state, said, remedy):
    found = diagnosis.interface(host, master, wanted, forked)
    assert found.state == state and said in found.value
    assert found.remedy.endswith(remedy) and bool(found.remedy) == bool(remedy)


@pytest.mark.parametrize(
    ("change", "here", "there", "said"),
    [
        ({}, OK, OK, "box is 10.0.0.5"),
        ({"looked_up": [], "error": "Name or service not known"}, WARN, FAIL, "box: Name or serv"),
        ({"looked_up": ["10.9.9.9"]}, WARN, FAIL, "box is 10.9.9.9, which no interface here has"),
        ({"seconds": 2.5}, WARN, WARN, "found after 2.5 s"),
        ({"looked_up": ["127.0.1.1"]}, OK, OK, "box is 127.0.1.1"),
    ],
)
def test_the_name_of_the_host(change, here, there, said):
    host = replace(HOST, **change)
    for master, state, address in ((HERE, here, "127.0.1.1"), (THERE, there, "10.0.0.5")):
        found = diagnosis.host_name(host, master)
        assert found.state == state and said in found.value
        line = f"as root: echo '{address} box' >> /etc/hosts"
        assert found.remedy == ("" if state == OK else line)


def test_the_port():
    assert diagnosis.port(HERE, True, False, "", 4).state == OK
    at_home = Master("localhost", 29500, ["127.0.0.1"])
    found = diagnosis.port(at_home, True, False, "Address already in use", 4444)
    assert found == Finding(
        FAIL, "port", "localhost:29500: Address already in use", "export MASTER_PORT=4444"
    )
    found = diagnosis.port(THERE, False, False, "timed out", 4444)
    assert found.state == FAIL and "firewall" in found.remedy
    found = diagnosis.port(Master("haed", error="Name or service not known"), False, False, "", 4)
    assert found.state == FAIL and found.value == "MASTER_ADDR=haed: Name or service not known"


def test_a_busy_port_is_seen(monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        number = taken.getsockname()[1]
        place = Master("localhost", number, ["127.0.0.1"])
        assert probes.port_trouble(place, here=True, joined=False) == os.strerror(errno.EADDRINUSE)
        assert probes.port_trouble(place, here=True, joined=True) == ""  # torchrun's own store
        monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
        monkeypatch.setenv("MASTER_PORT", str(number))
        found = dict(doctor.checks(base_config()))["port"]()
        assert found.state == FAIL and found.remedy.startswith("export MASTER_PORT=")
    assert probes.port_trouble(place, here=True, joined=False) == ""
    assert probes.port_trouble(place, here=True, joined=True) == "nobody listens"
    assert probes.port_trouble(place, here=False, joined=False) == ""  # not started yet


def test_names_and_routes_of_this_machine(monkeypatch):
    assert "127.0.0.1" in sum(probes.interfaces().values(), [])
    assert probes.look_up("localhost")[1] == ""
    assert probes.route_source("127.0.0.1") == "127.0.0.1"
    place = probes.master({"MASTER_ADDR": "localhost", "MASTER_PORT": "29500"})
    assert (place.port, place.elsewhere) == (29500, False)
    assert probes.is_here(HOST, place) and probes.is_here(HOST, HERE)
    assert not probes.is_here(HOST, THERE)
    with pytest.raises(ValueError, match="MASTER_PORT=x: must be a number"):
        probes.master({"MASTER_PORT": "x"})

    def unknown(*_, **__):
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    assert probes.look_up("box") == ([], "Name or service not known")
    assert probes.own_host().error == "Name or service not known"


def test_an_interface_that_is_down_is_none(monkeypatch):
    stats = probes.psutil.net_if_stats()
    down = {name: one._replace(isup=False) for name, one in stats.items()}
    monkeypatch.setattr(probes.psutil, "net_if_stats", lambda: down)
    assert probes.interfaces() == {}


def test_a_name_server_that_does_not_answer_is_not_waited_for(monkeypatch):
    monkeypatch.setattr(probes, "LOOKUP_S", 0.05)
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: __import__("time").sleep(2))
    assert probes.look_up("box") == ([], "no answer within 0.05 s")


@pytest.mark.parametrize(
    ("ranks", "cores", "omp", "state", "remedy"),
    [
        (8, 16, "", OK, ""),
        (8, 16, "2", OK, ""),
        (8, 2, "", OK, ""),  # slow, and right
        (8, 16, "4", WARN, "export OMP_NUM_THREADS=2"),
        (8, 2, "2", WARN, "export OMP_NUM_THREADS=1"),
        (8, 2, "many", FAIL, "export OMP_NUM_THREADS=1"),
        (8, 2, "0", FAIL, "export OMP_NUM_THREADS=1"),
    ],
)
def test_threads(ranks, cores, omp, state, remedy):
    found = diagnosis.threads(ranks, cores, omp)
    assert (found.state, found.remedy) == (state, remedy)


def test_shared_memory(monkeypatch):
    reason = "shared memory of ranks needs Linux (memfd, futex); this is sunos"
    assert diagnosis.shared_memory(None, True, 1 << 30).value.endswith("1.0 GiB left, which is not"
                                                                       " used")  # fmt: skip
    assert diagnosis.shared_memory(None, True, None).state == OK  # /dev/shm is not needed
    assert diagnosis.shared_memory(reason, False, None).state == WARN
    found = diagnosis.shared_memory(reason, True, None)
    assert (found.state, found.value, found.remedy) == (FAIL, reason, "dispatcher=rank_dedup")
    monkeypatch.setattr(sys, "platform", "sunos")
    assert probes.shared_memory_trouble() == reason
    config = base_config(dispatcher=DispatcherConfig("one_sided"))
    assert dict(doctor.checks(config))["shared memory"]().state == FAIL


@pytest.mark.skipif(sys.platform != "linux", reason="Linux")
def test_memory_that_cannot_be_had_is_seen(monkeypatch):
    assert probes.shared_memory_trouble() is None

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    assert "No space left on device" in probes.shared_memory_trouble()


@pytest.mark.parametrize(
    ("version", "gloo", "nccl", "wanted", "state", "said"),
    [
        ("2.13.0+cpu", True, False, "gloo", OK, "2.13.0+cpu, with gloo"),
        ("2.6.0", True, True, "nccl", OK, "2.6.0, with gloo and nccl"),
        ("2.13.0+cpu", True, False, "nccl", FAIL, "the run needs nccl"),
        ("2.13.0", False, False, "gloo", FAIL, "with neither gloo nor nccl; the run needs gloo"),
        ("2.5.1", True, True, "gloo", FAIL, "older than 2.6"),
    ],
)
def test_torch(version, gloo, nccl, wanted, state, said):
    found = diagnosis.software(version, gloo, nccl, wanted)
    assert found.state == state and said in found.value
    assert bool(found.remedy) == (state == FAIL)


def test_types_that_gloo_refuses():
    """Field case 24: they travel as bytes, and the doctor really asks gloo."""
    refused = probes.refused_dtypes("lo" if sys.platform == "linux" else "lo0")
    assert set(refused) <= set(diagnosis.AS_BYTES) and "int16" in refused
    assert "GLOO_SOCKET_IFNAME" not in os.environ
    found = diagnosis.dtypes(refused)
    assert found.state == OK and "int16" in found.value and "uint8" in found.value
    assert diagnosis.dtypes({"uint8": "Invalid scalar type"}).state == FAIL
    assert diagnosis.dtypes({}).state == OK


def test_tcp_info(monkeypatch):
    assert diagnosis.tcp_info(100, 100, "").state == OK
    assert diagnosis.tcp_info(100, 99, "").state == WARN
    found = diagnosis.tcp_info(100, None, "darwin has another structure")
    assert found.state == WARN and found.value.endswith("darwin has another structure")
    if sys.platform == "linux":
        assert probes.acknowledged() == (probes.PROBE_BYTES, probes.PROBE_BYTES, "")
        monkeypatch.setattr(probes, "_bytes_acked", lambda _: None)
        assert probes.acknowledged()[1] is None
        monkeypatch.setattr(probes, "_bytes_acked", iter([0] + [7] * 10**6).__next__)
    monkeypatch.setattr(sys, "platform", "darwin")
    assert probes.acknowledged() == (probes.PROBE_BYTES, None, "darwin has another structure")


@pytest.mark.skipif(sys.platform != "linux", reason="Linux")
def test_namespaces(monkeypatch):
    assert diagnosis.namespaces("as root", "", []).state == OK
    found = diagnosis.namespaces("user namespace", "", ["ip", "tc"])
    assert found.state == WARN and "ip and tc not found" in found.value
    assert diagnosis.namespaces("", "Operation not permitted", []).state == WARN
    way, reason = probes.namespace_way()
    assert bool(way) != bool(reason)
    refused = subprocess.CompletedProcess([], 1, "", "unshare: unshare failed: Not permitted\n")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: refused)
    assert probes.namespace_way() == ("", "unshare: unshare failed: Not permitted")
    monkeypatch.undo()
    monkeypatch.setenv("PATH", "/nowhere")
    assert probes.namespace_way() == ("", "unshare (util-linux) is not found")
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setattr(netns, "SYSTEM_PATHS", "/none")
    assert probes.missing_tools() == ["ip", "tc"]


def test_gpu_memory():
    names = ["H200", "H200"]
    assert diagnosis.gpu_memory(4 << 30, 2, [9 << 30, 8 << 30], names).state == OK
    found = diagnosis.gpu_memory(4 << 30, 3, [90 << 30, 8 << 30], names)
    assert found.state == FAIL
    assert found.value == "needs about 12.0 GiB a GPU, and 8.0 GiB are free (H200)"


def test_a_check_that_raises_is_a_finding():
    def broken():
        raise RuntimeError("a\nb")

    def fine():
        return Finding(OK, "y", "well")

    assert doctor.examine([("x", broken), ("y", fine)]) == [
        Finding(FAIL, "x", "RuntimeError: a b"),
        Finding(OK, "y", "well"),
    ]


def test_whatever_breaks_the_doctor_finishes(monkeypatch, capsys):
    """Every probe raises; only open files, threads and torch ask no probe."""

    def broken(*_, **__):
        raise OSError(errno.EIO, "Input/output error")

    names = [n for n in vars(probes) if callable(getattr(probes, n)) and not n.startswith("_")]
    for name in names:
        if getattr(getattr(probes, name), "__module__", "") == probes.__name__:
            monkeypatch.setattr(probes, name, broken)
    monkeypatch.setattr(doctor, "free_bytes", broken)
    monkeypatch.setattr("torch.cuda.device_count", broken)
    assert doctor.launch(base_config(ranks=8)) == 7
    page = capsys.readouterr().out
    assert page.count("FAIL ") == page.count("Input/output error") == 9
    assert "this run would fail here" in page


def test_the_page(capsys):
    findings = [
        Finding(OK, "memory", "much"),
        Finding(FAIL, "port", "head:29500: taken", "export MASTER_PORT=1"),
        Finding(WARN, "host name", "word " * 40, "echo " + "x" * 69),
    ]
    lines = [plain_text(one) for one in doctor.page(base_config(ranks=8), findings, 100)]
    assert max(map(len, lines)) <= 100
    assert "  ok    memory         much" in lines
    assert "  FAIL  port           head:29500: taken  -> export MASTER_PORT=1" in lines
    assert f"{'':23}-> echo {'x' * 69}" in lines  # to be copied, hence in one piece
    assert lines[-1].endswith("(1 ok, 1 warn, 1 FAIL)")


def test_the_command_and_its_status(monkeypatch, capsys):
    """On this machine, as it is, and with one thing spoilt after the other."""
    assert main(["doctor", "tokens=8"]) == 0
    page = capsys.readouterr().out
    told = [line.split()[1] for line in page.splitlines() if line.startswith(("  ok", "  warn"))]
    assert len(told) == 13 and "FAIL  " not in page
    assert main(["doctor", "tokens=1000000000"]) == 7
    assert "FAIL  memory" in capsys.readouterr().out
    monkeypatch.setattr("moe.fitness.file_limits", lambda: (20, 4096))
    assert main(["doctor"]) == 7
    assert "-> ulimit -n " in capsys.readouterr().out
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nowhere0")
    assert main(["doctor"]) == 7
    assert "FAIL  interface      GLOO_SOCKET_IFNAME=nowhere0: no such" in capsys.readouterr().out
    assert main(["doctor", "ep_size=3"]) == 2  # a mistake, not an unfit machine
    assert main(["doctor", "bench.warmup=3"]) == 2


def test_under_torchrun_one_rank_of_a_machine_looks(monkeypatch, capsys):
    for name, value in (("RANK", "5"), ("WORLD_SIZE", "8"), ("LOCAL_RANK", "1")):
        monkeypatch.setenv(name, value)
    assert main(["doctor"]) == 0
    assert capsys.readouterr().out == ""


def test_every_line_is_explained():
    text = (ROOT / "docs" / "doctor.md").read_text()
    lines = [what for what, _ in doctor.checks(base_config())]
    assert len(lines) == 13
    for what in [*lines, "GPU memory"]:
        assert f"\n| {what} | " in text, what
