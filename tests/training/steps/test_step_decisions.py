"""Decisions after a step: by the number of steps, the clock, and signals; all ranks agree."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from processes import Died, Group
from tiny import (
    STEPS_PER_EPOCH,
    TinyTask,
    bits,
    kept_steps,
    log_of,
    newest,
    plain,
    run_tiny,
    tiny_config,
)

from raytrain_ddp.checkpoint import checkpoint_interval
from raytrain_ddp.checkpoint.checkpoint_interval import Life, SaveTimer
from raytrain_ddp.config.recipe import from_dict
from raytrain_ddp.config.sections import CheckpointConfig, EvalConfig, LogConfig
from raytrain_ddp.config.train_config import TrainConfig
from raytrain_ddp.signals import STOP_SIGNALS
from raytrain_ddp.training.build import Build
from raytrain_ddp.training.loop import take_part
from raytrain_ddp.training.membership import Membership, Requests
from raytrain_ddp.training.runtime.world import World
from raytrain_ddp.training.steps.step_decisions import Cadence

# ------------------------------------------------------------------ by the number of steps


def test_what_is_due_follows_from_the_number_of_steps():
    config = TrainConfig(
        steps=9,
        checkpoint=CheckpointConfig(every_epochs=0, every_steps=4),
        eval=EvalConfig(every_epochs=1, every_steps=4),
        log=LogConfig(every_steps=3),
    )
    cadence = Cadence(config, steps_per_epoch=5)
    due = {
        "log": [s for s in range(1, 10) if cadence.logs(s)],
        "evaluate": [s for s in range(1, 10) if cadence.evaluates(s)],
        "save": [s for s in range(1, 10) if cadence.saves(s)],
    }
    assert due == {"log": [1, 3, 5, 6, 9], "evaluate": [4, 5, 8, 9], "save": [4, 8, 9]}


# ------------------------------------------------------------------ agreed on by all ranks


@dataclass(frozen=True)
class Asking:
    """Ranks ask for something in some steps: (rank, step) -> requests."""

    script: Mapping[tuple[int, int], Requests]
    only_main: bool

    def __call__(self, membership: Any) -> None:
        rank, membership.only_main_asks = membership.world.rank, self.only_main

        def requests(step: int | None, may_join: bool = False) -> Requests:
            membership.step = step or membership.step
            return self.script.get((rank, step), Requests()) if step else Requests()

        def look() -> None:
            membership.events.append({"kind": "looked", "step": membership.step})

        membership.requests, membership.look = requests, look


@pytest.mark.parametrize(
    ("only_main", "saves", "looks"), [(False, [2, 4, 6], [4, 6]), (True, [4, 6], [5])]
)
def test_all_ranks_fulfill_the_request_of_one_rank_after_the_same_step(
    only_main: bool, saves: list[int], looks: list[int], workers: Group, tmp_path: Path
):
    """Under Ray, only rank 0 is asked."""
    script = {
        (1, 2): Requests(save=True),
        (2, 4): Requests(look=True),
        (0, 4): Requests(save=True),
        (0, 6): Requests(stop=15),
        (1, 6): Requests(stop=10, look=True),
    }
    if only_main:
        script[0, 5] = Requests(look=True)
    kept = CheckpointConfig(every_epochs=0, every_s=0.0, keep_last=9)
    config = tiny_config(tmp_path, "asking", epochs=1, checkpoint=kept)
    ran = workers(3, run_tiny, plain(config), None, 0, 0, Asking(script, only_main))
    assert {(r.outcome.step, r.outcome.signal) for r in ran} == {(6, 15)}
    assert kept_steps(config) == saves
    for r in ran:  # all, as it is a collective
        assert [event["step"] for event in r.events if event["kind"] == "looked"] == looks


# ------------------------------------------------------------------ by the clock


def test_a_checkpoint_is_due_every_given_number_of_seconds_or_never(
    monkeypatch: pytest.MonkeyPatch,
):
    second = 0
    clock = SimpleNamespace(monotonic=lambda: 1000.0 + second)
    monkeypatch.setattr(checkpoint_interval, "time", clock)
    timer, never = (SaveTimer(s, Life(), lambda _: None) for s in (30.0, 0.0))
    asked = []
    for second in range(100):
        assert not never.is_due()
        if timer.is_due():
            asked.append(second)
            timer.saved(0.1)
    assert asked == [30, 60, 90]


def life_of(config: TrainConfig) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(newest(config).read("life.json"))
    return document


def test_the_failures_and_age_of_a_run_are_kept_for_the_next_start(workers: Group, tmp_path: Path):
    config = tiny_config(tmp_path, "aged", checkpoint=CheckpointConfig(every_s="auto"))
    workers(1, run_tiny, plain(config), None, 13)
    first = life_of(config)
    assert (first["attempt"], first["failures"], first["ended"]) == (1, 0, True)
    assert workers.outcomes(1, run_tiny, plain(config), None, 0, 24) == [Died(9)]
    workers(1, run_tiny, plain(config))
    last = life_of(config)
    assert (last["attempt"], last["failures"], last["ended"]) == (3, 1, True)
    assert 0 < first["lived_s"] < last["lived_s"]


# ------------------------------------------------------------------ signals


class Signalled(Membership):
    """Its process receives one or two signals in the middle of step 7."""

    signals: Sequence[int] = ()

    def requests(self, step: int | None, may_join: bool = False) -> Requests:
        if step == 7 and self.world.rank == 1 % self.world.size:
            for number in self.signals:
                os.kill(os.getpid(), number)
        return super().requests(step)


def run_signalled(
    rank: int, size: int, config: Mapping[str, Any], signals: list[int]
) -> tuple[int, int, bool]:
    """Step and signal of the outcome, and whether the handlers are restored."""
    made = from_dict(config)
    before = [signal.getsignal(number) for number in STOP_SIGNALS]
    world = World(rank, size, rank, torch.device("cpu"), threads=1)
    membership = Signalled(world, lambda _: None)
    membership.signals = signals
    membership.stop_on_signals()
    outcome = take_part(membership, made, lambda _: Build(made, world, TinyTask(made)))
    assert outcome is not None
    restored = [signal.getsignal(number) for number in STOP_SIGNALS] == before
    return outcome.step, outcome.signal, restored


@pytest.mark.parametrize(
    "signals",
    [*([number] for number in STOP_SIGNALS), [signal.SIGHUP] * 2],  # of a closing terminal
)
def test_fault_35_55_a_signal_to_any_rank_ends_all_with_a_checkpoint_and_handlers_are_restored(
    signals: list[int], workers: Group, tmp_path: Path
):
    """Also fault 34: on request, Slurm announces a preemption with SIGUSR1 or SIGUSR2."""
    config = tiny_config(tmp_path, "signalled", epochs=1)
    results = workers(2, run_signalled, plain(config), signals)
    assert results == [(7, int(signals[0]), True)] * 2
    assert newest(config).name.step == 7


# ------------------------------------------------------------------ signals during an evaluation


@dataclass(frozen=True)
class StopInEvaluation:
    """Rank 1 is asked to stop before chunk `at` of the first evaluation."""

    at: int

    def __call__(self, membership: Any) -> None:
        left = [*range(self.at, -99, -1)]

        def requests(step: int | None, may_join: bool = False) -> Requests:
            stops = step is None and left.pop(0) == 0 and membership.world.rank == 1
            return Requests(stop=15 if stops else 0)

        membership.requests = requests


LONG = {"eval_rows": 83}  # 11 chunks: three ranks have 3, 4 and 4


@pytest.mark.parametrize("epochs", [1, 2])
def test_a_signal_interrupts_an_evaluation_and_its_repetition_gives_the_same_bits(
    epochs: int, workers: Group, tmp_path: Path
):
    whole, cut = (tiny_config(tmp_path, name, epochs=epochs) for name in ("whole", "cut"))
    workers(3, run_tiny, plain(whole), LONG)
    # In the first evaluation, and then in its repetition at the last possible chunk.
    for at in (0, 1):
        for r in workers(3, run_tiny, plain(cut), LONG, 0, 0, StopInEvaluation(at)):
            assert (r.outcome.step, r.outcome.signal) == (STEPS_PER_EPOCH, 15)
            assert "eval" not in {event["kind"] for event in r.events}
    manifest = newest(cut).manifest
    assert (manifest.step, manifest.finished, manifest.metrics) == (STEPS_PER_EPOCH, False, {})
    workers(3, run_tiny, plain(cut), LONG)
    assert bits(cut) == bits(whole)
    assert newest(cut).manifest.finished
    assert log_of(cut) == log_of(whole)


def test_fault_35_a_second_signal_of_any_kind_ends_the_process_at_once(
    workers: Group, tmp_path: Path
):
    config = tiny_config(tmp_path, "impatient", epochs=1)
    two = [signal.SIGUSR1, signal.SIGTERM]
    assert workers.outcomes(1, run_signalled, plain(config), two) == [Died(-signal.SIGTERM)]
