"""Runs that end before their last epoch or use a part of the data; the same after a restart."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import Died, Group
from tiny import (
    EVAL_ROWS,
    ScriptedMembership,
    TinyTask,
    WorkerResult,
    bits,
    log_of,
    newest,
    plain,
    run_tiny,
    tiny_config,
)

from raytrain_ddp.config.sections import CheckpointConfig, DataConfig, StopConfig
from raytrain_ddp.config.train_config import TrainConfig
from raytrain_ddp.driver.preflight import is_complete
from raytrain_ddp.errors import ConfigError
from raytrain_ddp.events import Eval, Train
from raytrain_ddp.training.build import Build
from raytrain_ddp.training.evaluation import chunks_of
from raytrain_ddp.training.monitoring import step_timing
from raytrain_ddp.training.optimizer.lr_schedule import learning_rate
from raytrain_ddp.training.runtime.world import World
from raytrain_ddp.training.steps.step_decisions import Patience

NEVER = CheckpointConfig(every_epochs=0, every_s=0.0)


def evals(config: TrainConfig) -> list[int]:
    return [record["step"] for record in log_of(config) if record["kind"] == "eval"]


def end(ran: Sequence[WorkerResult]) -> tuple[int, int, int]:
    (outcome,) = {(r.outcome.step, r.outcome.total_steps, r.outcome.signal) for r in ran}
    return outcome


# ------------------------------------------------------------------ early stopping


def stops_after(values: Sequence[float], goal: str, **stop: Any) -> list[int]:
    """The evaluations (from 1) after which the run would end."""
    patience = Patience(StopConfig(**stop), "score", goal)
    return [n for n, value in enumerate(values, 1) if patience.see({"score": value})]


def test_patience_counts_evaluations_in_a_row_without_improvement():
    assert stops_after([3, 2, 2, 2.5, 1, 1, 1], "min", patience=2) == [4, 7]
    assert stops_after([1, 2, 2, 1.5, 3], "max", patience=2) == [4]
    assert stops_after([1, 1, 1, 1], "max", patience=0) == []
    assert stops_after([1, 1.05, 1.1, 1.15], "max", patience=2, min_delta=0.1) == [3]
    assert stops_after([math.nan, math.nan, 1], "min", patience=2) == [2]
    log = [Train(step=1), Eval(step=2, metrics={"score": 1.0}), Eval(step=4, metrics={"score": 1})]
    assert Patience(StopConfig(patience=1), "score", "min").replay(log)
    assert not Patience(StopConfig(patience=2), "score", "min").replay(log)


def test_a_stopped_or_killed_run_stops_early_at_the_same_step_and_is_finished(
    workers: Group, tmp_path: Path
):
    """The evaluations at 10, 20, ... have these scores; two without improvement end it at 40."""
    options = {"scores": [3.0, 2.0, 2.0, 2.5, 1.0, 1.0]}
    stop = StopConfig(patience=2)
    made = {"epochs": 6, "stop": stop, "checkpoint": dataclasses.replace(NEVER, every_steps=15)}
    whole = tiny_config(tmp_path, "whole", **made)
    ran = workers(3, run_tiny, plain(whole), options)
    assert end(ran) == (40, 40, 0)
    assert newest(whole).manifest.finished
    assert is_complete(whole, newest(whole).manifest)

    config = tiny_config(tmp_path, "disturbed", **made)
    workers(3, run_tiny, plain(config), options, 33)
    *_, last = workers.outcomes(3, run_tiny, plain(config), options, 0, 38)
    assert last == Died(9)
    assert end(workers(3, run_tiny, plain(config), options)) == (40, 40, 0)
    assert evals(config) == [10, 20, 30, 40]
    assert bits(config) == bits(whole)
    assert end(workers(3, run_tiny, plain(config), options)) == (40, 40, 0)  # takes no step

    patient = dataclasses.replace(config, stop=StopConfig(patience=3))
    assert not is_complete(patient, newest(config).manifest)
    assert end(workers(3, run_tiny, plain(patient), options)) == (60, 60, 0)


def test_patience_without_an_evaluation_set_is_refused(tmp_path: Path):
    alone = World(0, 1, 0, torch.device("cpu"), threads=1)
    fields = ("stop", StopConfig(patience=2)), ("limit_eval_batches", 3)
    for field, value in (*fields, ("data", DataConfig(eval_crop=0.9))):
        config = tiny_config(tmp_path, "run", **{field: value})
        task = TinyTask(config)
        Build(config, alone, task).open_data()
        task.eval_data = lambda: None  # type: ignore[method-assign]
        with pytest.raises(ConfigError, match=field):
            Build(config, alone, task).open_data()


# ------------------------------------------------------------------ steps and time


def test_steps_replace_epochs_also_in_the_schedule_and_a_larger_number_continues_the_run(
    workers: Group, tmp_path: Path
):
    short, config = (tiny_config(tmp_path, name, steps=13) for name in ("short", "stopped"))
    assert end(workers(3, run_tiny, plain(short))) == (13, 13, 0)
    assert evals(short) == [10, 13]
    rates = [record["lr"] for record in log_of(short) if record["kind"] == "train"]
    as_epochs = dataclasses.replace(short, steps=0, epochs=1)
    assert rates == [learning_rate(short, step, 10) for step in range(13)]
    assert rates[-1] < 0.3 * max(rates)
    assert learning_rate(as_epochs, 9, 10) == learning_rate(
        dataclasses.replace(short, steps=10), 9, 10
    )
    workers(3, run_tiny, plain(config), None, 7)
    workers(3, run_tiny, plain(config))
    assert bits(config) == bits(short)
    more = dataclasses.replace(config, steps=15)
    assert not is_complete(more, newest(config).manifest)
    assert end(workers(3, run_tiny, plain(more))) == (15, 15, 0)


class Shifted:
    """The module `time`, with a clock that `before_step` advances by an hour."""

    def __init__(self) -> None:
        self.by_s, self.perf_counter = 0.0, time.perf_counter

    def monotonic(self) -> float:
        return time.monotonic() + self.by_s

    def __call__(self, membership: ScriptedMembership) -> None:
        membership.before_step = self.before_step

    def before_step(self, step: int) -> None:
        self.by_s += 3600 * (step == 3)


def test_a_run_ends_at_max_time_with_an_evaluation_and_continues_with_a_larger_max_time(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    shifted = Shifted()
    monkeypatch.setattr(step_timing, "time", shifted)
    config = tiny_config(tmp_path, "timed", epochs=1, max_time="1h", checkpoint=NEVER)
    step, total, signal = end([run_tiny(0, 1, plain(config), prepare=shifted)])
    assert (total, signal) == (step, 0)
    assert step in (3, 4)
    assert evals(config) == [step]
    assert newest(config).manifest.finished
    assert is_complete(config, newest(config).manifest)
    assert end([run_tiny(0, 1, plain(config))])[0] == step  # max_time is reached
    longer = dataclasses.replace(config, max_time="1d")
    assert not is_complete(longer, newest(config).manifest)
    assert end([run_tiny(0, 1, plain(longer))]) == (10, 10, 0)


# ------------------------------------------------------------------ parts of the data


def rows_of_epochs(ran: Sequence[WorkerResult], steps: int) -> list[list[int]]:
    """The rows of each epoch of `steps` steps, in order."""
    epochs: dict[int, list[int]] = {}
    for worker in ran:
        for step, rows in worker.seen:
            epochs.setdefault((step - 1) // steps, []).extend(rows)
    return [sorted(rows) for _, rows in sorted(epochs.items())]


@pytest.mark.parametrize("field", ["limit_train_batches", "overfit_batches"])
def test_a_limited_epoch_has_that_many_steps_and_overfitting_repeats_the_same_rows(
    field: str, workers: Group, tmp_path: Path
):
    config = tiny_config(tmp_path, "limited", **{field: 2})
    ran = workers(3, run_tiny, plain(config))
    assert end(ran) == (6, 6, 0)
    assert evals(config) == [2, 4, 6]
    first, second, third = rows_of_epochs(ran, 2)
    assert len({*first}) == 64
    assert (first == second == third) is (field == "overfit_batches")
    stopped = tiny_config(tmp_path, "stopped", **{field: 2})
    for stop in (3, 0):
        workers(3, run_tiny, plain(stopped), None, stop)
    assert bits(stopped) == bits(config)


def test_a_limited_evaluation_covers_all_data_evenly_and_is_the_same_on_any_workers(
    workers: Group, tmp_path: Path
):
    assert chunks_of(100, 10, 4) == [0, 2, 5, 7]
    assert chunks_of(100, 10, 50) == range(10)
    found: list[Mapping[str, float]] = []
    for size in (1, 3):
        config = tiny_config(
            tmp_path, f"on-{size}", epochs=1, exact=True, limit_eval_batches=4, micro_batch=8
        )
        workers(size, run_tiny, plain(config))
        found += [record["metrics"] for record in log_of(config) if record["kind"] == "eval"]
    assert found[0] == found[1]
    assert "skipped" not in found[0]
    whole = tiny_config(tmp_path, "whole", epochs=1, exact=True)
    workers(1, run_tiny, plain(whole))
    assert [r["metrics"] for r in log_of(whole) if r["kind"] == "eval"] != found[:1]
    assert EVAL_ROWS > 4 * 8
