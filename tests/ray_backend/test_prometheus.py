"""The metrics for Prometheus, and the queries on them."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from event_records import event as made

from raytrain_ddp.ray_backend.prometheus import (
    GAUGES,
    PREFIX,
    STARTING,
    TRAINING,
    PrometheusMetrics,
)

HERE = Path(__file__).parents[1]
MONITORING = HERE.parent / "clusters" / "monitoring"
DASHBOARD = json.loads((MONITORING / "raytrain.json").read_text())
RULES = (MONITORING / "raytrain.rules.yml").read_text()

PLAN = {"kind": "plan", "start_step": 0, "total_steps": 276, "epochs": 12, "world_size": 2}
PLAN["device"] = "cpu"
TIMING = {
    "step_s": 0.08,
    "split_s": {"data": 0.02, "compute": 0.06},
    "peak_memory_bytes": 2**30,
    "slowest": {"rank": 1, "phase": "data", "ratio": 1.5},
    "flops_per_s": 2e9,
    "mfu": 0.4,
}
TRAIN = {"kind": "train", "step": 20, "epoch": 0, "loss": 2.25, "lr": 0.1, "seconds": 4.0}
TRAIN |= {"samples_per_s": 812.0, "skipped": 3, "nonfinite": 1, "scalars": {"aux": 0.5}}
TRAIN["timing"] = TIMING
EVAL = {"kind": "eval", "step": 23, "epoch": 0, "metrics": {"loss": 1.5, "top1": 0.5}}
EVAL |= {"monitor": "top1", "best": True, "seconds": 0.7}
CHECKPOINT = {"kind": "checkpoint", "step": 23, "name": "step-23", "seconds": 0.2}
CHECKPOINT |= {"size_bytes": 7 * 2**20, "tries": 1}
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
        **{"state": TRAINING, "step": 20, "steps_planned": 276, "world_size": 2, "loss": 2.25},
        **{"learning_rate": 0.1, "samples_per_second": 812, "nonfinite_steps": 1},
        **{"skipped_samples": 3, "phase_seconds data": 0.02, "slowest_rank_ratio 1 data": 1.5},
    }
    assert {key: reported[key] for key in expected} == expected
    at_start = reported["last_step_timestamp_seconds"]
    reported.take(FAILED, PLAN, {"kind": "at", "step": 1})
    assert reported["last_step_timestamp_seconds"] == at_start, "a restart makes no step"
    reported.take(
        EVAL, CHECKPOINT, {"kind": "pause", "seconds": 0.03}, {"kind": "checkpoint_failed"}
    )
    expected = {
        **{"evaluation top1": 0.5, "best_evaluation top1": 0.5, "checkpoints": 1},
        **{"checkpoints_failed": 1, "checkpoint_step": 23, "checkpoint_stall_seconds": 0.03},
    }
    assert {key: reported[key] for key in expected} == expected
    assert {name for name, *_ in reported.values} == {PREFIX + name for name in GAUGES}
    timing = {**TIMING, "slowest": {"rank": 0, "phase": "compute", "ratio": 1.2}}
    reported.take({**TRAIN, "step": 40, "timing": timing})
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
            assert labels <= {"run", *GAUGES[name].tags}, f"{where}: {labels}"
            asked.add(name)
        grouped = re.findall(r"\b(?:by|on) \((.*?)\)", promql)
        labels = {label for group in grouped for label in group.split(", ") if label}
        assert labels - {"SessionName"} <= {
            "run",
            *(tag for gauge in GAUGES.values() for tag in gauge.tags),
        }, where
        rays = {*re.findall(r"\bray_(?!raytrain_)\w+", promql)}
        assert rays == ({"ray_node_cpu_count"} if where == "RaytrainGone" else set()), where
    seldom = {"epoch", "epochs_planned", "step_seconds", "flops_per_second", "evaluation_seconds"}
    assert {*GAUGES} - asked == seldom | {"checkpoint_step"}


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
