"""`doctor`: its rows from findings, its findings on this machine, and both on a real Ray."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from ray_cluster import two_nodes
from rich.console import Console

from raytrain_ddp.tools.doctor.__main__ import main
from raytrain_ddp.tools.doctor.assessment import Report, Row, assess, merged, show
from raytrain_ddp.tools.doctor.storage_probe import commit_beside_driver, exercise_storage

GIB = 2**30
Findings = dict[str, Any]
Change = Callable[[Findings], object]


def cluster(*names: str, gpus: int = 0) -> Findings:
    """A healthy cluster; the driver is on the first node."""
    installed = {"Python": "3.11.7", "Ray": "2.60.0", "raytrain_ddp": "0.1.0, code 57de7642"}
    installed |= {"torch": "2.15.0", "NCCL": "2.30.7" if gpus else None}
    nodes = {
        name: {
            "ip": f"10.0.0.{number}",
            "ray": {"CPU": 8.0, "GPU": float(gpus)} if gpus else {"CPU": 8.0},
            "versions": dict(installed),
            "devices": gpus,
            "resolves": f"10.0.0.{number}",
        }
        for number, name in enumerate(names, start=1)
    }
    measured = {"ranks": 2, "latency_s": 0.0001, "bus_bytes_per_s": 9e9}
    reduced = [
        {"where": f"within {name}", "nodes": [name], **measured, "gpus": [gpu()] * gpus}
        for name in names
    ]
    if len(names) > 1:
        reduced.append({"where": "across", "nodes": [*names], **measured, "gpus": [gpu()]})
    return {
        "workers": "2 workers over gloo",
        "lacks": "",
        "versions": installed,
        "nodes": nodes,
        "storage": {name: {"commit_s": 0.01} for name in (*names, "driver")},
        "data": {name: {"train": [1437, "aa"], "eval": [360, "bb"]} for name in names},
        "all_reduce": reduced,
    }


def gpu(free_gib: int = 79) -> list[Any]:
    return ["NVIDIA H100", free_gib * GIB, 80 * GIB]


def rows_of(findings: Findings) -> Report:
    return assess(findings, "/shared/runs", "digits")


def of(report: Report, check: str) -> list[Row]:
    return [row for row in report.rows if row.check == check]


@pytest.mark.parametrize("gpus", [0, 2])
@pytest.mark.parametrize("names", [["one"], ["head", "w1", "w2"]])
def test_a_healthy_cluster_has_only_ok_rows(names: list[str], gpus: int):
    report = rows_of(cluster(*names, gpus=gpus))
    assert {(row.verdict, row.advice) for row in report.rows} == {("ok", "")}
    assert bool(of(report, "NCCL")) == (gpus > 0)
    everywhere = "all 3 nodes" if len(names) > 1 else "one"
    for check in ("Python", "Ray", "raytrain_ddp", "torch", "GPUs", "storage", "data"):
        assert [row.where for row in of(report, check)] == [everywhere]


def put(path: str, value: Any) -> Change:
    """Sets ``a.b.c`` of the findings; `last` is the second node."""

    def change(findings: Findings) -> None:
        *folders, name = path.replace("last", "nodes.w1").split(".")
        place: Any = findings
        for folder in folders:
            place = place[int(folder) if isinstance(place, list) else folder]
        place[name] = value

    return change


def unconnected(findings: Findings) -> None:
    findings["all_reduce"][-1]["error"] = "RuntimeError: Gloo connectFullMesh failed"
    findings["nodes"]["w1"]["resolves"] = "127.0.1.1"


V = "last.versions"
CASES: list[tuple[str, Change, str, str, str, str]] = [
    # check, change, verdict, where, text of the finding, text of the advice
    ("workers", put("lacks", "CPU: want 9, have 8"), "fail", "2 nodes", "want 9, have 8", ""),
    ("node", put("nodes.w1", {"error": "no answer"}), "fail", "w1", "no answer", "raylet"),
    ("Python", put(f"{V}.Python", "3.11.8"), "fail", "w1", "3.11.8", "has 3.11.7"),
    ("Ray", put(f"{V}.Ray", None), "fail", "w1", "not installed", "has 2.60.0"),
    ("GPUs", put("last.ray.GPU", 1.0), "warn", "w1", "Ray counts 1", "--num-gpus"),
    ("GPUs", put("all_reduce.1.gpus", [gpu(), gpu(9)]), "warn", "w1", "9.0 GiB free", "Another"),
    ("all-reduce", unconnected, "fail", "across", "connectFullMesh", "w1 resolves to 127.0.1.1,"),
    ("all-reduce", unconnected, "fail", "across", "RuntimeError: ", "GLOO_SOCKET_IFNAME"),
    (
        "all-reduce",
        put("all_reduce.2.bus_bytes_per_s", 12e6),
        "warn",
        "across",
        "11 MiB/s",
        "fewer",
    ),
    ("all-reduce", put("all_reduce.0.error", "no GPU"), "fail", "within head", "no GPU", "status"),
    ("storage", put("storage.w1", {"error": "denied {x}"}), "fail", "w1", "denied {x}", "/shared"),
    ("storage", put("storage.driver", {"error": "full"}), "fail", "driver", "full", "rights"),
    ("data", put("data.w1", {"error": "no such file"}), "fail", "w1", "no such", "the same path"),
    ("data", put("data.w1.train", [1437, "cc"]), "fail", "", "2 different data sets", "Copy"),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[0]}: {case[4]}")
def test_a_single_problem_is_found_on_its_node_with_advice(
    case: tuple[str, Change, str, str, str, str],
):
    check, change, verdict, where, found, advice = case
    findings = cluster("head", "w1", gpus=2)
    change(findings)
    report = rows_of(findings)
    row = of(report, check)[0]
    assert (row.verdict, row.where) == (verdict, where)
    assert found in row.found
    assert advice in row.advice
    assert (report.count("fail"), report.count("warn")) == (verdict == "fail", verdict == "warn")


def test_places_with_the_same_finding_share_a_row_and_the_worst_come_first():
    for names, expected in (
        ([*"abcde", "driver"], "all 5 nodes"),
        (["a", "driver"], "a"),
        (["b", "driver"], "b, driver"),
        ([*"abcd"], "a, b, c and 1 more"),
    ):
        rows = [Row("x", name, "same") for name in names] + [Row("x", "e", "", "fail", "do")]
        assert merged(rows, [*"abcde"]) == [rows[-1], Row("x", expected, "same")]


@pytest.mark.parametrize("width", [80, 200])
def test_the_table_fits_the_terminal_with_advice_below_each_problem(width: int):
    findings = cluster("head", "w1", "w2", gpus=8)
    findings["storage"]["w1"] = {"error": "OSError: [bold]denied[/bold]: " + "long " * 30}
    findings["nodes"]["w2"]["ray"]["GPU"] = 7
    text = io.StringIO()
    show(rows_of(findings), Console(file=text, width=width, highlight=False))
    lines = text.getvalue().splitlines()
    assert max(map(len, lines)) <= min(width, 110)
    assert lines[-1] == "1 failure, 1 warning: a run would not get far."
    assert "[bold]denied[/bold]" in text.getvalue()
    assert sum(line.lstrip().startswith("-> ") for line in lines) == 2
    assert next(line for line in lines if "denied" in line).rstrip().endswith("fail")


def on_node(uri: str, folder: str) -> dict[str, dict[str, Any]]:
    return {"w1": commit_beside_driver(uri, folder, "w1", seen_s=0)}


def test_the_storage_is_tested_with_commits_and_left_unchanged(tmp_path: Path):
    uri = str(tmp_path / "new" / "runs")
    seen: list[int] = []

    def ask(folder: str) -> dict[str, dict[str, Any]]:
        answers = on_node(uri, folder)
        seen.append(len([*Path(uri, folder).glob("*/checkpoints/*/manifest.json")]))
        return answers

    found = exercise_storage(uri, ask)
    assert seen == [4], "two places, each with two checkpoints after the pruning"
    assert [*found] == ["w1", "driver"]
    assert all(answer["commit_s"] > 0 and "error" not in answer for answer in found.values())
    assert list(Path(uri).iterdir()) == []


def test_a_node_with_a_folder_of_its_own_and_a_damaged_checkpoint_are_found(tmp_path: Path):
    (tmp_path / "mine").mkdir()
    found = exercise_storage(str(tmp_path / "mine"), partial(on_node, str(tmp_path / "own")))
    assert "what driver has committed cannot be seen" in found["w1"]["error"]
    assert "error" not in found["driver"]

    def ask(folder: str) -> dict[str, dict[str, Any]]:
        payload = next(tmp_path.glob(f"mine/{folder}/driver/*/step-00000003-*/model.safetensors"))
        content = payload.read_bytes()
        payload.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
        return on_node(str(tmp_path / "mine"), folder)

    found = exercise_storage(str(tmp_path / "mine"), ask)
    assert "model.safetensors is damaged" in found["w1"]["error"]
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]
    assert list((tmp_path / "mine").iterdir()) == []


def test_a_storage_that_cannot_be_written_is_reported_without_secrets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "file").touch()
    uri = "s3://AKIAKEY:hush@bucket/runs?endpoint_override=127.0.0.1:1&scheme=http"
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    for place in (str(tmp_path / "file"), uri):
        found = exercise_storage(place, lambda _: pytest.fail("no node need try"))
        assert [*found] == ["driver"]
        assert found["driver"]["error"]
        assert "hush" not in found["driver"]["error"]


@pytest.mark.ray
@pytest.mark.filterwarnings("ignore")  # Ray's own warnings
def test_doctor_checks_a_real_ray_and_leaves_nothing(
    unchanged_process: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    with two_nodes():
        status = main(["--json", "--storage", str(tmp_path / "runs")])
    captured = capsys.readouterr()
    reported = json.loads(captured.out)
    assert "doctor: testing the storage" in captured.err
    verdicts = {row["check"]: (row["where"], row["verdict"]) for row in reported["rows"]}
    for check in ("Python", "Ray", "raytrain_ddp", "torch", "GPUs", "storage", "data"):
        assert verdicts[check] == ("all 2 nodes", "ok")
    assert status == reported["status"] == 0
    within, across = reported["findings"]["all_reduce"]
    assert (within["ranks"], len(within["nodes"])) == (2, 1)
    assert (across["ranks"], len(across["nodes"])) == (2, 2)
    assert all(each["latency_s"] < 1 and each["bus_bytes_per_s"] > 0 for each in (within, across))
    assert list((tmp_path / "runs").iterdir()) == []
