"""The metrics for Prometheus, the queries on them, and the log of a worker."""

from __future__ import annotations

import json
import logging
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from event_records import event as made
from processes import ENVIRONMENT

from raytrain_ddp.command_line import parse_fit
from raytrain_ddp.ray_backend.dashboard import describe_dashboard
from raytrain_ddp.ray_backend.prometheus import (
    ENDED,
    EVALUATING,
    GAUGES,
    PREFIX,
    STARTING,
    TRAINING,
    PrometheusMetrics,
)
from raytrain_ddp.ray_backend.worker_log import WorkerLog
from raytrain_ddp.training.runtime.world import World

HERE = Path(__file__).parents[1]
MONITORING = HERE.parent / "clusters" / "monitoring"
DASHBOARD = json.loads((MONITORING / "raytrain.json").read_text())
RULES = (MONITORING / "raytrain.rules.yml").read_text()

PLAN = {
    "kind": "plan",
    "start_step": 0,
    "total_steps": 276,
    "epochs": 12,
    "world_size": 2,
    "device": "cpu",
}
TRAIN = {
    "kind": "train",
    "step": 20,
    "epoch": 0,
    "loss": 2.25,
    "lr": 0.1,
    "samples_per_s": 812.0,
    "skipped": 3,
    "nonfinite": 1,
    "seconds": 4.0,
    "timing": {
        "step_s": 0.08,
        "split_s": {"data": 0.02, "compute": 0.06},
        "peak_memory_bytes": 2**30,
        "slowest": {"rank": 1, "phase": "data", "ratio": 1.5},
        "flops_per_s": 2e9,
        "mfu": 0.4,
    },
    "scalars": {"aux": 0.5},
}
EVAL = {
    "kind": "eval",
    "step": 23,
    "epoch": 0,
    "metrics": {"loss": 1.5, "top1": 0.5},
    "monitor": "top1",
    "best": True,
    "seconds": 0.7,
}
CHECKPOINT = {
    "kind": "checkpoint",
    "step": 23,
    "name": "step-23",
    "seconds": 0.2,
    "size_bytes": 7 * 2**20,
    "tries": 1,
}
NOTE = {"kind": "note", "text": "full"}
FAILED = {"kind": "failed", "rank": 1, "step": 24, "message": "crashed"}


class FakeGauges:
    """Replaces Ray's gauges: the newest value by name and tags, without the tags of the run."""

    def __init__(self) -> None:
        self.values: dict[tuple[str, ...], float] = {}
        self.metrics = PrometheusMetrics("digits", self.gauge)

    def gauge(self, name: str, reported: str, tags: tuple[str, ...]) -> Any:
        values = self.values

        class Gauge:
            def set(self, value: float, given: dict[str, str]) -> None:
                assert {*given} == {*tags}
                assert isinstance(value, float)
                assert given["run"] == "digits"
                values[(name, *(given[tag] for tag in tags if tag != "run"))] = value

        assert name.startswith(PREFIX)
        assert reported.endswith(".")
        return Gauge()

    def take(self, *events: Mapping[str, Any]) -> FakeGauges:
        for event in events:
            self.metrics.take(made(event))
        return self

    def __getitem__(self, key: str) -> float:
        name, *tags = key.split()
        return self.values[(PREFIX + name, *tags)]


def test_each_log_record_sets_its_gauges() -> None:
    reported = FakeGauges().take(PLAN, TRAIN)
    expected = {
        "state": TRAINING,
        "step": 20,
        "steps_planned": 276,
        "epochs_planned": 12,
        "world_size": 2,
        "epoch": 0,
        "loss": 2.25,
        "learning_rate": 0.1,
        "samples_per_second": 812,
        "nonfinite_steps": 1,
        "skipped_samples": 3,
        "step_seconds": 0.08,
        "phase_seconds data": 0.02,
        "phase_seconds compute": 0.06,
        "peak_memory_bytes": 2**30,
        "slowest_rank_ratio 1 data": 1.5,
        "flops_per_second": 2e9,
        "mfu_ratio": 0.4,
        "training_scalar aux": 0.5,
    }
    assert {key: reported[key] for key in expected} == expected
    assert time.time() - 5 < reported["last_step_timestamp_seconds"] <= time.time()
    reported.take(
        EVAL, CHECKPOINT, {"kind": "pause", "seconds": 0.03}, {"kind": "checkpoint_failed"}
    )
    expected = {
        "evaluation loss": 1.5,
        "evaluation top1": 0.5,
        "best_evaluation top1": 0.5,
        "evaluation_seconds": 0.7,
        "checkpoints": 1,
        "checkpoints_failed": 1,
        "checkpoint_step": 23,
        "checkpoint_seconds": 0.2,
        "checkpoint_bytes": 7 * 2**20,
        "checkpoint_stall_seconds": 0.03,
    }
    assert {key: reported[key] for key in expected} == expected
    assert {name for name, *_ in reported.values} == {PREFIX + name for name in GAUGES}, (
        "all are used"
    )


def test_a_phase_or_slowest_rank_that_no_longer_applies_is_set_to_zero() -> None:
    timing = {**TRAIN["timing"], "split_s": {"compute": 0.06}}  # type: ignore[dict-item]
    timing["slowest"] = {"rank": 0, "phase": "compute", "ratio": 1.2}
    reported = FakeGauges().take(PLAN, TRAIN, {**TRAIN, "step": 40, "timing": timing})
    assert reported["phase_seconds data"] == 0
    assert reported["slowest_rank_ratio 1 data"] == 0
    assert reported["slowest_rank_ratio 0 compute"] == 1.2


def test_restarts_are_counted_by_cause_and_start_at_zero() -> None:
    reported = FakeGauges()
    causes = ("failure", "preemption", "resize")
    assert [reported[f"restarts {cause}"] for cause in causes] == [0, 0, 0]
    assert reported["state"] == STARTING
    reported.take(PLAN, FAILED)
    assert reported["state"] == STARTING
    reported.take(FAILED, {**PLAN, "start_step": 20})  # died once more before it trained
    assert (reported["state"], reported["step"]) == (TRAINING, 20)
    reported.take(
        {"kind": "preempted", "text": "all is saved"}, {"kind": "preempted", "text": "gone"}
    )
    reported.take(PLAN, {**PLAN, "world_size": 3})
    assert [reported[f"restarts {cause}"] for cause in causes] == [2, 1, 1]
    assert reported["world_size"] == 3


def test_the_last_step_is_reported_between_the_lines_of_the_log_and_not_by_a_restart() -> None:
    reported = FakeGauges().take(PLAN)
    began = reported["last_step_timestamp_seconds"]
    reported.take({"kind": "at", "step": 1}, FAILED, PLAN, {"kind": "at", "step": 1})
    assert reported["last_step_timestamp_seconds"] == began, "a run that dies at once makes no step"
    reported.take({"kind": "at", "step": 8})
    assert reported["step"] == 7
    assert reported["last_step_timestamp_seconds"] > began


def test_failing_gauges_do_not_fail_the_run() -> None:
    class Broken:
        def set(self, *_: object) -> None:
            raise RuntimeError("Ray is gone")

    PrometheusMetrics("digits", lambda *_: Broken()).take(made(TRAIN))
    FakeGauges().take({"kind": "train"}, {"kind": "phase"}, {**TRAIN, "timing": {}})


def test_gauges_are_exported_repeatedly_until_the_run_has_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("raytrain_ddp.ray_backend.prometheus._EXPORT_EVERY_S", 0.01)
    reported = FakeGauges().take(PLAN, TRAIN)
    before = dict(reported.values)
    reported.values.clear()
    deadline = time.monotonic() + 10
    while reported.values != before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert reported.values == before
    reported.metrics.close()
    time.sleep(0.05)
    assert reported["state"] == 0
    reported.values.clear()
    time.sleep(0.05)
    assert not reported.values


def test_the_units_are_in_the_names() -> None:
    counted = {"state", "step", "steps_planned", "epoch", "epochs_planned", "world_size"}
    counted |= {"restarts", "checkpoints", "checkpoints_failed", "checkpoint_step"}
    counted |= {"nonfinite_steps", "skipped_samples"}
    without_unit = {"loss", "learning_rate", "training_scalar", "evaluation", "best_evaluation"}
    for name in {*GAUGES} - counted - without_unit:
        assert re.search(r"_(seconds|bytes|ratio|per_second)$", name), name
    assert all(re.fullmatch(r"[a-z_]+", name) for name in GAUGES)


def test_an_evaluation_is_reported_as_state_and_its_end_counts_as_a_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 1000.0
    monkeypatch.setattr(time, "time", lambda: now)
    reported = FakeGauges().take(PLAN, TRAIN, {"kind": "evaluating", "step": 20})
    assert reported["state"] == EVALUATING
    now += 2000
    reported.take(EVAL)
    assert (reported["state"], reported["last_step_timestamp_seconds"]) == (TRAINING, now)
    assert reported.take({"kind": "evaluating", "step": 46}, FAILED)["state"] == STARTING


def test_only_the_currently_slowest_rank_is_exported_repeatedly() -> None:
    def slow(rank: int) -> dict[str, Any]:
        reported = {"rank": rank, "phase": "data", "ratio": 1.1}
        return {**TRAIN, "timing": {**TRAIN["timing"], "slowest": reported}}  # type: ignore[dict-item]

    reported = FakeGauges().take(PLAN, *map(slow, range(500)))
    values = reported.values
    ratios = [v for (name, *_), v in values.items() if name.endswith("slowest_rank_ratio")]
    assert sorted(ratios) == [0.0] * 499 + [1.1]
    again = [key for key in reported.metrics._newest if key[0] == "slowest_rank_ratio"]
    assert again == [("slowest_rank_ratio", "499", "data")]


def test_a_single_remaining_worker_is_not_slow() -> None:
    alone = {name: each for name, each in TRAIN["timing"].items() if name != "slowest"}  # type: ignore[attr-defined]
    reported = FakeGauges().take(PLAN, TRAIN, {**PLAN, "world_size": 1}, {**TRAIN, "timing": alone})
    assert reported["slowest_rank_ratio 1 data"] == 0


# ------------------------------------------------------------------ queries to Prometheus


def expressions() -> Iterator[tuple[str, str]]:
    """(where, PromQL) of the dashboard and the rules."""
    for panel in DASHBOARD["panels"]:
        for target in panel.get("targets", ()):
            yield panel["title"], target["expr"]
    for annotation in DASHBOARD["annotations"]["list"]:
        yield annotation["name"], annotation["expr"]
    for variable in DASHBOARD["templating"]["list"]:
        yield variable["name"], variable.get("definition", "")
    for rule in re.split(r"- alert: ", RULES)[1:]:
        yield rule.split()[0], rule[rule.index("expr:") : rule.index("labels:")]


def test_dashboard_and_rules_query_exactly_the_exported_metrics() -> None:
    asked = set()
    for where, promql in expressions():
        for name, selector in re.findall(r"\bray_raytrain_(\w+)(?:\{(.*?)\})?", promql):
            assert name in GAUGES, f"{where}: {name}"
            labels = {*re.findall(r"(\w+)\s*[=!]", selector)}
            assert labels <= {"run", *GAUGES[name][1]}, f"{where}: {labels}"
            asked.add(name)
        grouped = re.findall(r"\b(?:by|on) \((.*?)\)", promql)
        labels = {label for group in grouped for label in group.split(", ") if label}
        assert labels - {"SessionName"} <= {
            "run",
            *(tag for _, tags in GAUGES.values() for tag in tags),
        }, where
        rays = {*re.findall(r"\bray_(?!raytrain_)\w+", promql)}
        assert rays == ({"ray_node_cpu_count"} if where == "RaytrainGone" else set()), where
    seldom = {"epoch", "epochs_planned", "step_seconds", "flops_per_second", "evaluation_seconds"}
    assert {*GAUGES} - asked == seldom | {"checkpoint_step"}


def test_each_panel_has_a_description_a_unit_and_its_own_position() -> None:
    assert DASHBOARD["uid"] == "raytrain"
    assert [v["name"] for v in DASHBOARD["templating"]["list"]] == ["datasource", "run"]
    panels = DASHBOARD["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        at = panel["gridPos"]
        cells = {(at["x"] + x, at["y"] + y) for x in range(at["w"]) for y in range(at["h"])}
        assert at["x"] + at["w"] <= 24
        assert not cells & taken, f"{panel['title']} covers another panel"
        taken |= cells
        if panel["type"] == "row":
            continue
        assert panel["description"].endswith("."), panel["title"]
        unit = panel["fieldConfig"]["defaults"]["unit"]
        for target in panel["targets"]:
            assert target["datasource"]["uid"] == "${datasource}"
            if re.fullmatch(r"max by \(\w+\) \(ray_raytrain_\w*_seconds\{.*\}\)", target["expr"]):
                assert unit == "s", panel["title"]
    state = next(panel for panel in panels if panel["title"] == "State")
    names = state["fieldConfig"]["defaults"]["mappings"][0]["options"]
    assert {*names} == {str(each) for each in (ENDED, STARTING, TRAINING, EVALUATING)}
    rows = [panel["title"] for panel in panels if panel["type"] == "row"]
    assert rows == ["Health", "Speed", "Learning", "Checkpoints"]


def test_the_commands_of_the_readme_exist() -> None:
    text = (MONITORING / "README.md").read_text()
    for name in re.findall(r"^\| `(\S+)` \|", text, re.M):
        assert (MONITORING / name).is_file()
    programs = []
    commands = [shlex.split(line) for line in re.findall(r"^    (\S.*)", text, re.M)]
    for words in commands:
        program, *arguments = (word for word in words if not word.startswith("GF_"))
        programs.append(program)
        for path in (word for word in arguments if word.startswith("clusters/")):
            assert (HERE.parent / path).is_file(), path
        if program == "python":
            assert parse_fit(arguments[2:]).dashboard
    assert programs == ["python", "prometheus", "cp", "grafana"]


@pytest.mark.skipif(shutil.which("promtool") is None, reason="Prometheus is not installed")
@pytest.mark.parametrize(
    "words", [("test", "rules", "tests/monitoring.test.yml"), ("check", "config", "prometheus.yml")]
)
def test_prometheus_accepts_the_configuration_and_its_rules_fire_as_expected(
    words: tuple[str, ...],
) -> None:
    folder = HERE.parent if words[0] == "test" else MONITORING
    done = subprocess.run(
        ["promtool", *words], cwd=folder, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


# ------------------------------------------------------------------ dashboard and logs


def test_the_dashboard_address_is_reported_with_the_page_of_the_run() -> None:
    here = describe_dashboard("127.0.0.1", 8265, "02000000")
    assert here == "dashboard: http://127.0.0.1:8265/#/jobs/02000000"
    away = describe_dashboard("127.0.0.1", 8265, "02000000", "10.0.0.5")
    assert away == f"{here}, after ssh -NL 8265:127.0.0.1:8265 10.0.0.5"
    assert "ssh" not in describe_dashboard("10.0.0.5", 8265, "02000000", "10.0.0.5")


def test_a_workers_log_has_a_header_and_few_lines(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    timing = {**TRAIN["timing"], "split_s": {"data": 0.2, "compute": 0.6}}  # type: ignore[dict-item]
    log = WorkerLog(World(1, 2, 1, torch.device("cpu"), 1))
    with caplog.at_level(logging.INFO, "raytrain_ddp"):
        log.take(made(PLAN))
        for step in range(20, 120):
            now += 0.5
            log.take(made({**TRAIN, "step": step, "timing": timing}))
        outcome = {"kind": "outcome", "step": 276, "metrics": {"top1": 0.75}}
        short = [EVAL, CHECKPOINT] * 3  # of very short epochs
        for event in (*short, {"kind": "phase", "name": "x"}, NOTE, outcome):
            log.take(made(event))
    lines = caplog.messages
    first = r"\S+Z  rank 1: one of 2 on \S+, cpu, process \d+; from step 0 to 276"
    assert re.fullmatch(first, lines[0])
    assert len(lines) == 1 + 5 + 4, "a line of steps in ten seconds"
    assert lines[1].endswith("  rank 1: step 20/276, loss 2.250, 812 samples/s")
    assert "812 samples/s; waits for data 25 % of" in lines[5], "not before it is known"
    assert [line.split("  ")[1] for line in lines[-4:]] == [
        "rank 1: step 23/276, evaluation: loss 1.500, top1 50.00 %",
        "rank 1: checkpoint of step 23: 7 MiB, committed in 0.20 s",
        "rank 1: full",
        "rank 1: ended at step 276, evaluation: top1 75.00 %",
    ]


# ------------------------------------------------------------------ a real Ray


@pytest.mark.ray
@pytest.mark.slow
def test_ray_lists_the_run_its_workers_and_logs_and_exports_its_metrics(
    tmp_path: Path,
) -> None:
    command = (sys.executable, "-m", "raytrain_ddp.fit", "--dashboard", "--name", "watched")
    flags = ("--epochs", "500", "--scaling.num-workers", "2", "--storage", str(tmp_path / "runs"))
    environment = {**os.environ, **ENVIRONMENT}
    environment.pop("RAY_ADDRESS", None)
    with subprocess.Popen((*command, *flags), env=environment, stdout=subprocess.PIPE) as fit:
        try:
            assert fit.stdout is not None
            lines = (line.decode() for line in fit.stdout)
            reported = next(line for line in lines if "dashboard: " in line)
            base = re.findall(r"http://[\w.]+:\d+", reported)[0]
            asked = f"{base}/api/train/v2/runs/v1"
            run = until(lambda: json.loads(get(asked))["train_runs"][0], "'world_rank': 1")
            workers = run["attempts"][-1]["workers"]
            assert (run["name"], [w["world_rank"] for w in workers]) == ("watched", [0, 1])
            places = json.loads(get(f"{base}/api/prometheus/sd"))[0]["targets"]
            figures = until(
                lambda: "".join(get(f"http://{place}/metrics") for place in places),
                "ray_raytrain_loss{",
            )
            names = {*re.findall(r"^ray_raytrain_(\w+)\{.*run=\"watched\"", figures, re.M)}
            assert names >= {"state", "step", "loss", "phase_seconds", "restarts", "world_size"}
            for worker in workers:
                log = Path(worker["log_file_path"]).read_text()
                assert f"rank {worker['world_rank']}: one of 2 on " in log
                assert f"rank {worker['world_rank']}: step " in log
        finally:
            fit.send_signal(signal.SIGINT)
            fit.communicate(timeout=100)
    assert fit.returncode == 130


def get(url: str) -> str:
    token = Path.home() / ".ray" / "auth_token"
    asked = urllib.request.Request(url, headers={"Authorization": f"Bearer {token.read_text()}"})
    with urllib.request.urlopen(asked, timeout=10) as answer:
        return str(answer.read().decode())


def until(ask: Callable[[], Any], sign: str) -> Any:
    """The first response that contains this text."""
    deadline = time.monotonic() + 90
    answer: Any = None
    while time.monotonic() < deadline:
        with suppress(IndexError, OSError):
            answer = ask()
            if sign in str(answer):
                return answer
        time.sleep(1)
    raise AssertionError(f"no {sign} in {answer}")
