"""`doctor`: its assessment of findings, its findings on this machine, and both on a real Ray."""

from __future__ import annotations

import copy
import io
import json
import os
import socket
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from processes import run_cli
from rich.console import Console

from raytrain_ddp import TrainConfig
from raytrain_ddp.checkpoint.run_folder import checkpoint_store
from raytrain_ddp.checkpoint.storage import open_storage
from raytrain_ddp.config.input_sections import DataConfig
from raytrain_ddp.config.recipe import to_dict
from raytrain_ddp.ray_backend.ray_settings import SETTINGS
from raytrain_ddp.tools.display.formatting import format_bytes
from raytrain_ddp.tools.doctor import (
    cluster_probe,
    dataset_probe,
    machine_facts,
    network_facts,
    storage_probe,
)
from raytrain_ddp.tools.doctor.__main__ import main
from raytrain_ddp.tools.doctor.assessment import assess
from raytrain_ddp.tools.doctor.examine import examine
from raytrain_ddp.tools.doctor.output_table import show
from raytrain_ddp.tools.doctor.rows import Note, Report, Row, format_duration, format_rate, grouped

GIB = 2**30
Findings = dict[str, Any]
Place = dict[str, Any]

# ------------------------------------------------------------------ findings of a healthy cluster


def place(name: str, ip: str = "10.0.0.1", gpus: int = 0) -> Place:
    """A node without problems."""
    disk = {"path": "/tmp", "total": 100 * GIB, "free": 60 * GIB}
    gpu = {"name": "NVIDIA H100", "total": 80 * GIB, "free": 79 * GIB}
    found: dict[str, Any] = {
        "host": name,
        "versions": {
            "python": "3.11.7",
            "torch": "2.15.0+cu130",
            "torch_cuda": "13.0",
            "ray": "2.60.0",
            "nccl": "2.30.7",
            "project": "0.1.0, code 57de7642",
            "jpeg": "of the parts that are used",
        },
        "gpus": [dict(gpu) for _ in range(gpus)],
        "driver": {"version": "580.95", "cuda": "13.0"} if gpus else None,
        "cpus": {"machine": 8, "usable": 8, "quota": None},
        "memory": {
            "total": 64 * GIB,
            "available": 60 * GIB,
            "limit": None,
            "swap": 0,
            "swapped": 0,
        },
        "shm": {"path": "/dev/shm", "total": 32 * GIB, "free": 32 * GIB},
        "tmp": disk,
        "storage_disk": dict(disk),
        "open_files": 65536,
        "settings": {"RAY_AUTH_MODE": "token"},
        "token": {"path": "/home/me/.ray/auth_token", "mode": 0o600, "exposed": False},
        "wires": {
            "name": name,
            "resolves": [ip],
            "interfaces": {
                "lo": {"addresses": ["127.0.0.1", "::1"], "mbit_per_s": None},
                "eth0": {"addresses": [ip], "mbit_per_s": 1000},
                "wlan0": {"addresses": ["192.168.7.7"], "mbit_per_s": None},
            },
            "dashboard": [],
            "dashboard_mode": None,
        },
    }
    return {
        "name": name,
        "driver": False,
        "ip": ip,
        "resources": {"CPU": 8.0, "GPU": float(gpus)} if gpus else {"CPU": 8.0},
        "clock": {"ahead_s": 0.001, "within_s": 0.002},
        "facts": found,
        "storage": {"commit_s": 0.008, "bytes_per_s": 5e8, "made": []},
        "seen": {"seconds": 0.2, "misses": []},
        "cleaned": {},
        "data": {"train": [1437, "aa"], "eval": [360, "bb"], "seconds": 0.01},
    }


def cluster(*names: str, gpus: int = 0) -> Findings:
    """A healthy cluster; the driver is on the first node."""
    nodes = [place(name, f"10.0.0.{n}", gpus) for n, name in enumerate(names, start=1)]
    driver = {**copy.deepcopy(nodes[0]), "name": "driver", "driver": True, "on": names[0]}
    for part in ("ip", "resources", "clock"):
        del driver[part]
    measured: dict[str, Any] = {
        "ranks": 2,
        "latency_s": 0.0001,
        "cpu_latency_s": None,
        "bus_bytes_per_s": {"16": 9e9, "64": 10e9},
        "talks": [["10.0.0.1", "10.0.0.2"], ["10.0.0.2", "10.0.0.1"]],
        "nccl": None,
    }
    reduced = [{"kind": "within", "nodes": [names[0]], **measured}]
    if len(names) > 1:
        reduced.append({"kind": "across", "nodes": list(names), **measured})
    return {
        "embedded": False,
        "dashboard": None,
        "run": {
            "storage": "/shared/runs",
            "data": "digits",
            "cpus_per_worker": 1.0,
            "use_gpu": gpus > 0,
            "workers": "2 workers",
            "per_worker": {"CPU": 1.0},
            "backend": "nccl" if gpus else "gloo",
            "least": 2,
            "fit": 8,
            "lacks": "",
        },
        "places": [*nodes, driver],
        "all_reduce": reduced,
    }


def of(report: Report, check: str) -> list[Row]:
    return [row for row in report.rows if row.check == check]


@pytest.mark.parametrize("gpus", [0, 2])
@pytest.mark.parametrize("names", [["one"], ["head", "w1", "w2"]])
def test_a_healthy_cluster_has_only_ok_rows(names: list[str], gpus: int):
    report = assess(cluster(*names, gpus=gpus))
    assert {row.verdict for row in report.rows} == {"ok"}
    assert not any(row.advice for row in report.rows)
    assert report.exit_status == 0
    checks = [row.check for row in report.rows]
    assert ("NCCL" in checks, "CUDA" in checks) == (gpus > 0, gpus > 0)
    assert ("clock" in checks, "shared" in checks) == (len(names) > 1, len(names) > 1)
    (python,) = of(report, "Python")
    assert python.where == ("all 3 nodes" if len(names) > 1 else "one")


# ------------------------------------------------------------------ one problem at a time

Change = Callable[[Findings, Place], object]


def put(path: str, value: Any) -> Change:
    """Sets ``a.b.c`` of the last node."""

    def change(_: Findings, node: Place) -> None:
        *folders, name = path.split(".")
        for folder in folders:
            node = node[folder]
        node[name] = value

    return change


def put_run(**values: Any) -> Change:
    return lambda findings, _: findings["run"].update(values)


def dashboard(host: str, mode: str | None) -> Change:
    def change(findings: Findings, node: Place) -> None:
        findings["dashboard"] = ["10.0.0.2", 8265]
        node["facts"]["wires"] |= {"dashboard": [host], "dashboard_mode": mode}
        if mode == "disabled":
            for each in findings["places"]:
                each["facts"]["settings"] = {}

    return change


def across(**values: Any) -> Change:
    def change(findings: Findings, _: Place) -> None:
        findings["all_reduce"][-1].update(values)

    return change


def cannot_meet(**values: Any) -> Change:
    """The all-reduce across nodes failed."""

    def change(findings: Findings, node: Place) -> None:
        findings["all_reduce"][-1]["error"] = "RuntimeError: Gloo connectFullMesh failed"
        node["facts"]["wires"].update(values)

    return change


VERSIONS = "facts.versions"
CASES: list[tuple[str, Change, str, str, str]] = [
    # check, change, verdict, text of the finding, text of the advice
    ("workers", put_run(lacks="  CPU: want 9, have 8"), "fail", "want 9, have 8", "num-workers"),
    ("workers", put_run(fit=1), "fail", "room for 1", "cpus-per-worker"),
    ("node", put("facts", {"error": "no answer within 120 s"}), "fail", "no answer", "raylet"),
    ("Python", put(f"{VERSIONS}.python", "3.11.8"), "fail", "3.11.8", "has 3.11.7"),
    ("Ray", put(f"{VERSIONS}.ray", "2.61.0"), "fail", "2.61.0", "has 2.60.0"),
    ("Ray", put(f"{VERSIONS}.ray", None), "fail", "not installed", "install"),
    ("project", put(f"{VERSIONS}.project", "0.1.0, code 1"), "fail", "code 1", "same wheel"),
    ("torch", put(f"{VERSIONS}.torch", "2.14.1"), "fail", "2.14.1", "2.15.0"),
    ("torch", put(f"{VERSIONS}.torch", "2.15.1"), "warn", "2.15.1", "2.15.0"),
    ("torch", put(f"{VERSIONS}.torch", "2.15.0+cpu"), "warn", "+cpu", "2.15.0+cu130"),
    ("NCCL", put(f"{VERSIONS}.nccl", "2.29.1"), "fail", "2.29.1", "2.30.7"),
    ("JPEG decoding", put(f"{VERSIONS}.jpeg", "of whole images"), "warn", "whole", "on none"),
    ("CUDA", put(f"{VERSIONS}.torch_cuda", None), "fail", "built for CPUs", "built for CUDA"),
    ("CUDA", put("facts.driver.cuda", "12.8"), "fail", "up to 12.8", "Update the NVIDIA driver"),
    ("GPUs", put("resources.GPU", 1.0), "warn", "2 x NVIDIA H100", "--num-gpus"),
    ("GPUs", put("facts.gpus", []), "fail", "none, Ray counts 2", "nvidia-smi"),
    ("CPUs", put("resources.CPU", 16.0), "warn", "8 usable, Ray counts 16", "--num-cpus 8"),
    ("CPUs", put("facts.cpus.quota", 2.5), "warn", "2.5 usable", "--num-cpus 2"),
    ("memory", put("facts.memory.available", GIB), "warn", "1.0 GiB free of 64 GiB", "stop other"),
    ("memory", put("facts.memory.limit", GIB), "warn", "limit of its cgroup", "stop other"),
    ("memory", put("facts.memory.swapped", 9 * GIB), "warn", "swapping", "stop other"),
    ("/dev/shm", put("facts.shm.free", 64 * 2**20), "warn", "64 MiB free", "--shm-size"),
    ("/tmp", put("facts.tmp", {"path": "/tmp", "total": 99 * GIB, "free": GIB}), "warn", "1.0", ""),
    (
        "disk",
        put("facts.storage_disk", {"path": "/shared/runs", "total": 9 * GIB, "free": 9}),
        *("fail", "0 MiB free of 9.0 GiB", "space in /shared/runs"),
    ),
    ("open files", put("facts.open_files", 1024), "warn", "1024", "ulimit -n 65536"),
    ("clock", put("clock.ahead_s", -3.2), "warn", "3.2 s behind (within 2.0 ms)", "NTP"),
    ("host name", put("facts.wires.resolves", ["127.0.1.1"]), "warn", "127.0.1.1", "IFNAME=eth0"),
    ("host name", cannot_meet(resolves=["127.0.1.1"]), "fail", "127.0.1.1", "IFNAME=eth0"),
    ("host name", cannot_meet(resolves=[]), "fail", "does not resolve", "/etc/hosts"),
    ("host name", cannot_meet(resolves=["10.0.9.9"]), "fail", "10.0.9.9", "/etc/hosts"),
    ("host name", put("facts.wires.resolves", ["192.168.7.7"]), "warn", "wlan0", "IFNAME=eth0"),
    (
        "host name",
        put("facts.settings", {"GLOO_SOCKET_IFNAME": "ens3", "RAY_AUTH_MODE": "token"}),
        *("fail", "ens3", "lo, eth0, wlan0"),
    ),
    ("all-reduce", cannot_meet(), "fail", "connectFullMesh", "GLOO_SOCKET_IFNAME"),
    ("all-reduce", across(error="1 of 2 ranks did not start"), "fail", "1 of 2", "ray status"),
    ("all-reduce", across(bus_bytes_per_s={"16": 12e6}), "warn", "12 MB/s", "8.3 s each step"),
    ("dashboard", dashboard("0.0.0.0", "disabled"), "fail", "0.0.0.0", "RAY_AUTH_MODE=token"),
    ("dashboard", dashboard("::", "disabled"), "fail", "::", "--dashboard-host"),
    ("dashboard", dashboard("10.0.0.2", None), "ok", "requires a token", ""),
    ("dashboard", dashboard("0.0.0.0", "token"), "ok", "requires a token", ""),
    ("dashboard", dashboard("127.0.0.1", "disabled"), "ok", "127.0.0.1, port 8265", ""),
    ("authentication", put("facts.settings", {}), "warn", "none", "ray get-auth-token"),
    ("authentication", dashboard("127.0.0.1", "disabled"), "warn", "none", "auth_token"),
    (
        "token file",
        put("facts.token", {"path": "/t", "mode": 0o644, "exposed": True}),
        *("warn", "644", "chmod 600 /t"),
    ),
    ("storage", put("storage", {"error": "Permission denied {x}"}), "fail", "denied {x}", "rights"),
    ("shared", put("seen.error", "is incomplete"), "fail", "is incomplete", "the same"),
    ("left behind", put("cleaned", {"error": "gone"}), "warn", "gone", "doctor-*"),
    ("data", put("data", {"error": "no such file"}), "fail", "no such file", "the same path"),
    (
        "data",
        put("data", {"error": "ModuleNotFoundError: No module named 'x'"}),
        *("fail", "'x'", "install"),
    ),
    ("data", put("data.train", [1437, "cc"]), "fail", "but different from driver", "Copy"),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[0]}: {case[3]}")
def test_a_single_problem_is_found_on_its_node_with_advice(
    case: tuple[str, Change, str, str, str],
):
    check, change, verdict, found, advice = case
    findings = cluster("head", "w1", gpus=2)
    change(findings, findings["places"][1])
    report = assess(findings)
    row = of(report, check)[-1] if check == "all-reduce" else of(report, check)[0]
    assert row.verdict == verdict
    assert found in row.found
    assert advice in row.advice
    assert bool(row.advice) == (verdict != "ok")
    assert report.exit_status == (3 if report.count("fail") else 0)
    assert report.count("fail") >= (verdict == "fail")


@pytest.mark.parametrize("listens", ["0.0.0.0", "::", "10.0.0.2"])
def test_fault_46_a_publicly_reachable_dashboard_fails_unless_it_requires_a_token(listens: str):
    for mode, status in (("disabled", 3), ("token", 0)):
        findings = cluster("head", "w1")
        dashboard(listens, mode)(findings, findings["places"][1])
        assert assess(findings).exit_status == status


def test_threads_are_compared_with_the_workers_cpus():
    findings = cluster("one")
    findings["places"][0]["facts"]["settings"]["OMP_NUM_THREADS"] = "1"
    assert of(assess(findings), "threads")[0].verdict == "ok"
    findings["run"]["cpus_per_worker"] = 4.0
    (row,) = of(assess(findings), "threads")
    assert (row.verdict, row.found) == ("warn", "OMP_NUM_THREADS=1")


def test_braces_in_external_text_are_literal():
    findings = cluster("one")
    findings["places"][0]["facts"]["settings"]["OMP_NUM_THREADS"] = "{0}}"
    assert of(assess(findings), "threads")[0].found == "OMP_NUM_THREADS={0}}"
    findings["places"][0]["storage"] = {"error": "no '{}' in {bucket}"}
    assert of(assess(findings), "storage")[0].found == "no '{}' in {bucket}"


def test_free_memory_respects_the_cgroup_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "memory.max").write_text(f"{2**30}\n")
    (tmp_path / "memory.current").write_text(f"{2**30 - 2**20}\n")
    (tmp_path / "memory.stat").write_text("anon 5\ninactive_file 4096\nactive_file 7\n")
    monkeypatch.setattr(machine_facts, "_cgroup", lambda *_: [tmp_path / "memory.max"])
    found = machine_facts.memory()
    assert (found["limit"], found["available"]) == (2**30, 2**20 + 4096)


def test_a_machine_without_gpus_passes_unless_the_run_needs_gpus():
    findings = cluster("one")
    assert of(assess(findings), "GPUs")[0] == Row("GPUs", "one", "none")
    findings["run"] = {**findings["run"], "lacks": "scaling.use_gpu = true, but there is no GPU"}
    del findings["run"]["workers"]
    report = assess(findings)
    assert of(report, "workers")[0].verdict == "fail"
    assert report.exit_status == 3


def test_facts_that_a_system_does_not_provide_are_omitted():
    findings = cluster("one")
    kept = ("host", "versions", "wires")
    findings["places"][0]["facts"] |= {
        name: None for name in findings["places"][0]["facts"] if name not in kept
    }
    report = assess(findings)
    assert report.count("fail") == 0
    assert not of(report, "memory")


def test_one_row_shows_which_nodes_share_a_folder():
    findings = cluster("head", "w1", "w2", "w3")
    apart = {"head": {"w2", "w3"}, "w1": {"w2", "w3"}, "driver": {"w2", "w3"}}
    apart |= {name: {"head", "w1", "driver", "w2", "w3"} - {name} for name in ("w2", "w3")}
    for each in findings["places"]:
        each["seen"]["misses"] = sorted(apart[each["name"]])
    (row,) = of(assess(findings), "shared")
    assert row.verdict == "fail"
    assert row.where == "all 4 nodes"
    assert row.found == "3 different places: head, w1 | w2 | w3"
    assert "NFS" in row.advice


# ------------------------------------------------------------------ rows


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["a", "b", "c", "d", "e", "driver"], "all 5 nodes"),
        (["a", "b", "c", "d", "e"], "all 5 nodes"),
        (["a", "driver"], "a"),
        (["b", "driver"], "b, driver (on a)"),
        (["driver"], "driver (on a)"),
        (["a", "b", "c", "d"], "a, b, c and 1 more"),
    ],
)
def test_node_names_are_summarized_briefly(names: list[str], expected: str):
    places = cluster("a", "b", "c", "d", "e")["places"]
    rows = grouped("x", {name: Note("same") for name in names}, places)
    assert [row.where for row in rows] == [expected]


def test_findings_that_differ_only_in_numbers_share_a_row_with_a_range():
    places = cluster("a", "b", "c")["places"]
    sizes = {"a": 20 * GIB, "b": 24 * GIB, "c": 2**40}
    notes = {
        name: Note("{} free", numbers=((value, format_bytes),)) for name, value in sizes.items()
    }
    (row,) = grouped("memory", notes, places)
    assert row.found == "20 GiB to 1.0 TiB free"
    del notes["c"]
    (row,) = grouped("memory", notes, places)
    assert row.found == "20 to 24 GiB free"


def test_the_worst_rows_of_a_check_come_first():
    places = cluster("a", "b", "c")["places"]
    notes = {"a": Note("x"), "b": Note("y", "warn", "do"), "c": Note("z", "fail", "do")}
    assert [row.verdict for row in grouped("x", notes, places)] == ["fail", "warn", "ok"]


def test_numbers_have_two_digits_and_a_unit():
    reported = [format_bytes(count) for count in (2**30 - 1, 80 * GIB, 1.5 * GIB, 5e5)]
    assert reported == ["1.0 GiB", "80 GiB", "1.5 GiB", "0 MiB"]
    assert [format_rate(9.5e6), format_rate(85e6), format_rate(1.94e9)] == [
        "9.5 MB/s",
        "85 MB/s",
        "1.9 GB/s",
    ]
    assert [format_duration(1.2e-4), format_duration(0.004), format_duration(0.5)] == [
        "0.12 ms",
        "4.0 ms",
        "0.50 s",
    ]


@pytest.mark.parametrize("width", [80, 100, 200])
def test_the_table_fits_the_terminal_with_advice_below_each_problem(width: int):
    findings = cluster("head", "w1", "w2", gpus=8)
    findings["dashboard"] = ["0.0.0.0", 8265]
    findings["places"][1]["storage"] = {"error": "OSError: Permission denied: " + "long " * 30}
    for each in findings["places"][:3]:
        each["facts"]["settings"] = {}
    report = assess(findings)
    text = io.StringIO()
    show(report, Console(file=text, width=width, highlight=False))
    lines = text.getvalue().splitlines()
    assert max(map(len, lines)) <= min(width, 110)
    assert "\x1b" not in text.getvalue()
    assert lines[-1] == "2 failures, 1 warning: a run would not get far."
    assert sum(line.startswith("  -> ") for line in lines) == 3
    at = next(n for n, line in enumerate(lines) if line.startswith("authentication"))
    assert lines[at].endswith("warn")
    assert lines[at + 1].startswith("  -> Anyone who reaches Ray's ports")


def test_a_nodes_error_is_reported_in_one_line():
    gloo = RuntimeError("Gloo failed with [/build/gloo/pair.cc:152] Connection refused$1\nmore")
    assert cluster_probe.describe_error(gloo) == "RuntimeError: Gloo failed with Connection refused"
    lacks = RuntimeError("The remote function failed to import ...\nImportError: no torch here\n")
    assert cluster_probe.describe_error(lacks) == "ImportError: no torch here"


# ------------------------------------------------------------------ facts of this machine


def test_machine_facts_are_json_and_their_module_imports_nothing_heavy():
    found = machine_facts.gather_machine_facts("/nowhere/yet/runs", dashboard=None)
    assert json.loads(json.dumps(found)) == found
    assert found["versions"]["python"].startswith("3.")
    assert found["versions"]["torch"]
    assert "code" in found["versions"]["project"]
    assert found["cpus"]["usable"] >= 1
    assert found["memory"]["available"] > 0
    assert found["storage_disk"]["free"] > 0
    assert "lo" in found["wires"]["interfaces"]
    assert found["settings"] is not None


def test_gpus_are_those_listed_by_nvidia_smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "nvidia-smi").write_text(
        "#!/bin/sh\n"
        'case "$1" in --query*) echo "NVIDIA H100 80GB HBM3, 81559, 81008";;\n'
        '*) echo "| NVIDIA-SMI 580.95   Driver Version: 580.95.05   CUDA Version: 13.0 |";; esac\n'
    )
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    (gpu,) = machine_facts.gpus()
    assert gpu == {"name": "NVIDIA H100 80GB HBM3", "total": 81559 * 2**20, "free": 81008 * 2**20}
    assert machine_facts.driver() == {"version": "580.95.05", "cuda": "13.0"}


def test_a_gpu_without_dedicated_memory_is_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "nvidia-smi").write_text('#!/bin/sh\necho "NVIDIA GB10, [N/A], [N/A]"\n')
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    found = machine_facts.gpus()
    assert found == [{"name": "NVIDIA GB10", "total": None, "free": None}]
    findings = cluster("head", gpus=1)
    findings["places"][0]["facts"]["gpus"] = found
    (row,) = [row for row in assess(findings).rows if row.check == "GPUs"]
    assert (row.found, row.verdict) == ("1 x NVIDIA GB10", "ok")


def test_a_token_readable_by_others_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    token = tmp_path / "token"
    token.write_text("secret")
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(token))
    token.chmod(0o600)
    assert machine_facts.token() == {"path": str(token), "mode": 0o600, "exposed": False}
    token.chmod(0o644)
    tmp_path.chmod(0o700)
    reported = machine_facts.token()
    assert reported is not None
    assert not reported["exposed"], "nobody else gets into its folder"
    assert "secret" not in json.dumps(reported)


def test_listening_sockets_and_own_connections_are_found():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert network_facts.listening(port) == ["127.0.0.1"]
        before = network_facts.connections()
        with socket.create_connection(("127.0.0.1", port)) as client, server.accept()[0]:
            new = network_facts.connections() - before
            assert (client.getsockname(), ("127.0.0.1", port)) in new
            assert (("127.0.0.1", port), client.getsockname()) in new
    assert network_facts.listening(port) == []


def test_another_service_on_the_dashboard_port_has_no_dashboard_mode():
    with socket.create_server(("127.0.0.1", 0)) as server:

        def greet() -> None:
            with server.accept()[0] as client:
                client.sendall(b"SSH-2.0-OpenSSH_9.6\r\n")
                client.recv(1024)

        Thread(target=greet, daemon=True).start()
        found = network_facts.gather_network_facts(server.getsockname()[1])
    assert (found["dashboard"], found["dashboard_mode"]) == (["127.0.0.1"], None)


@pytest.mark.skipif(sys.byteorder != "little", reason="as the kernel writes it there")
@pytest.mark.parametrize(
    ("digits", "address"),
    [
        ("0100007F", "127.0.0.1"),
        ("00000000", "0.0.0.0"),
        ("0" * 32, "::"),
        ("00000000000000000000000001000000", "::1"),
        ("0000000000000000FFFF00000100007F", "127.0.0.1"),
    ],
)
def test_addresses_are_parsed_from_the_kernels_format(digits: str, address: str):
    assert network_facts.address_of(digits) == address


# ------------------------------------------------------------------ storage and data


def test_the_storage_is_tested_with_a_commit_and_left_unchanged(tmp_path: Path):
    uri = str(tmp_path / "new" / "runs")
    first = storage_probe.probe_commit(uri, "doctor-1", "place-0")
    second = storage_probe.probe_commit(uri, "doctor-1", "place-1")
    assert first["commit_s"] > 0
    assert first["bytes_per_s"] > 0
    assert (first["made"], second["made"]) == ([uri, str(tmp_path / "new")], [])
    store = checkpoint_store(open_storage(uri).join("doctor-1").join("place-0"))
    assert [name.step for name in store.names()] == [3, 2]
    seen = storage_probe.probe_visibility(uri, "doctor-1", ["place-0", "place-1"], timeout_s=0)
    assert seen["sees"] == ["place-0", "place-1"]
    assert storage_probe.clean_up(uri, "doctor-1", first["made"]) == {}
    assert list(tmp_path.iterdir()) == []


def test_a_machine_with_its_own_folder_does_not_see_the_others(tmp_path: Path):
    for place_name in ("place-0", "place-1"):
        storage_probe.probe_commit(str(tmp_path / place_name), "doctor-1", place_name)
    seen = storage_probe.probe_visibility(
        str(tmp_path / "place-0"), "doctor-1", ["place-1", "place-0"], timeout_s=0
    )
    assert seen["sees"] == ["place-0"]


def test_a_checkpoint_incomplete_on_another_machine_is_an_error(tmp_path: Path):
    storage_probe.probe_commit(str(tmp_path), "doctor-1", "place-0")
    payload = next(tmp_path.glob("doctor-1/place-0/checkpoints/step-00000003-*/model.safetensors"))
    content = payload.read_bytes()
    payload.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    assert "error" in storage_probe.probe_visibility(
        str(tmp_path), "doctor-1", ["place-0"], timeout_s=0
    )


def test_storage_and_data_that_cannot_be_opened_are_reported_without_secrets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "file").touch()
    assert (
        "is a file"
        in storage_probe.probe_commit(str(tmp_path / "file"), "doctor-1", "place-0")["error"]
    )
    config = TrainConfig(data=DataConfig(source=str(tmp_path / "none")))
    assert "no such file" in dataset_probe.probe_data(to_dict(config), str(Path.cwd()), [])["error"]

    def refuse(uri: str) -> None:
        raise OSError(f"AWS Error ACCESS_DENIED for {uri}")

    monkeypatch.setattr(storage_probe, "open_storage", refuse)
    uri = "s3://AKIAKEY:hush@bucket/runs?region=x"
    assert storage_probe.probe_commit(uri, "doctor-1", "a") == {
        "error": "AWS Error ACCESS_DENIED",
        "made": [],
    }


def test_data_are_checked_as_a_worker_opens_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    reported = dataset_probe.probe_data(to_dict(TrainConfig()), str(tmp_path), [])
    assert (reported["train"][0], reported["eval"][0]) == (1437, 360)
    assert reported["train"][1] != reported["eval"][1]


# ------------------------------------------------------------------ the command


def test_help_is_fast(tmp_path: Path):
    answer = run_cli("doctor", "--help-all", cwd=tmp_path)
    assert answer.status == 0
    assert "--address" in answer.out
    assert "--scaling.num-workers" in answer.out
    assert not answer.heavy
    assert answer.cpu_s < 1


def test_an_invalid_config_is_refused_before_ray_is_imported(tmp_path: Path):
    answer = run_cli("doctor", "--optim.name", "adm", cwd=tmp_path)
    assert (answer.status, answer.heavy) == (2, [])
    answer = run_cli("doctor", "--address", "127.0.0.1:1", cwd=tmp_path)
    assert answer.status == 3
    assert "no Ray at 127.0.0.1:1" in answer.err
    assert list(tmp_path.iterdir()) == []


# ------------------------------------------------------------------ on a real Ray


@pytest.fixture(scope="module")
def ray_elsewhere(
    unchanged_process: None, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Path]:
    """A one-node Ray whose processes are in a different folder from this process later."""
    os.environ.setdefault("RAY_AUTH_MODE", "token")
    os.environ.pop("RAY_ADDRESS", None)
    os.environ.update(SETTINGS)
    before, folder = Path.cwd(), tmp_path_factory.mktemp("node")
    os.chdir(folder)
    import ray

    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False)
    os.chdir(before)
    yield folder
    ray.shutdown()


@pytest.mark.ray
@pytest.mark.filterwarnings("ignore")  # Ray's own warnings
def test_doctor_checks_a_real_ray_and_leaves_nothing(
    ray_elsewhere: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    status = main(["--json", "--storage", str(tmp_path / "runs")])
    reported = json.loads(capsys.readouterr().out)
    verdicts = {row["check"]: row["verdict"] for row in reported["rows"]}
    sound = ("workers", "Python", "Ray", "project", "torch", "GPUs", "all-reduce", "storage")
    assert [verdicts[check] for check in (*sound, "data", "authentication")] == ["ok"] * 10
    assert status == reported["status"] == (3 if "fail" in verdicts.values() else 0)
    (reduced,) = reported["findings"]["all_reduce"]
    assert (reduced["kind"], reduced["ranks"]) == ("within", 2)
    assert reduced["latency_s"] < 1
    assert set(reduced["bus_bytes_per_s"]) <= {"16", "64"}
    assert reduced["talks"]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.ray
@pytest.mark.filterwarnings("ignore")
def test_a_storage_folder_not_shared_by_the_node_is_found_before_the_run(
    ray_elsewhere: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(cluster_probe, "measure_all_reduces", lambda *_: [])
    monkeypatch.setattr("raytrain_ddp.tools.doctor.examine._SEEN_S", 0.5)
    config = TrainConfig(storage="/proc/self/cwd/runs")  # each process has its own
    phases: list[str] = []
    report = examine(config, None, phases.append)
    (row,) = of(report, "shared")
    assert row.verdict == "fail"
    assert row.found.startswith("2 different places: ")
    assert "driver (on " in row.found
    assert report.exit_status == 3
    assert phases
    assert not (tmp_path / "runs").exists()
    assert not (ray_elsewhere / "runs").exists()
