"""A rank is killed, a new process takes its place, and the others keep their state: the same bits
as undisturbed, no step twice."""

from __future__ import annotations

import json
import multiprocessing as mp
import os
import threading
import time
from collections.abc import Mapping
from multiprocessing.managers import BaseManager
from pathlib import Path
from typing import Any

import pytest
from processes import PRELOADED
from tiny import TOTAL_STEPS, TinyTask, bits, newest, plain, run_tiny, tiny_config

from raytrain_ddp import failpoints
from raytrain_ddp.config.input_sections import DataConfig
from raytrain_ddp.config.recipe import from_dict
from raytrain_ddp.config.sections import EmaConfig, LogConfig
from raytrain_ddp.config.train_config import TrainConfig
from raytrain_ddp.training.generations import OVER, Generation, Member, Roster

W = 3
_LIMIT_S = 120.0


class _Office(BaseManager):
    """Serves a roster to other processes, as an actor does under Ray."""


_Office.register("roster")


def _work(
    rank: int,
    port: int,
    config: Mapping[str, Any],
    options: Mapping[str, Any],
    folder: str,
    points: str,
) -> None:
    """One process of a rank; also the first code that a forked process runs."""
    import torch

    from raytrain_ddp.messages import Outcome
    from raytrain_ddp.ray_backend.failure_causes import cause_of
    from raytrain_ddp.training.generations import Place, through_generations
    from raytrain_ddp.training.live_state import LiveState
    from raytrain_ddp.training.local_session import LocalSession
    from raytrain_ddp.training.loop import train
    from raytrain_ddp.training.recorder import Best
    from raytrain_ddp.training.world import World

    torch.set_num_threads(1)
    failpoints.arm(points, folder)
    office = _Office(("127.0.0.1", port), b"test")
    office.connect()
    roster = office.roster()  # type: ignore[attr-defined]
    made = from_dict(config)
    events: list[Any] = []
    outcomes: list[Outcome] = []

    def start(live: LiveState | None) -> LocalSession:
        world = World(rank, W, rank, torch.device("cpu"), 1)
        return LocalSession(made, world, Best("loss", "min"), events.append, live)

    def run(session: LocalSession) -> None:
        outcomes.append(train(made, TinyTask(made, **options), session))

    place = Place(rank, W, "127.0.0.1", "here", lambda member: roster.meet(member)[0])
    through_generations(place, start, run, lambda error: cause_of(error) == "peer", most=3)
    plans = [e for e in events if type(e).__name__ == "Plan"]
    note = {
        "steps": [plan.start_step for plan in plans],
        "replaced": [plan.replaced for plan in plans],
        "step": outcomes[-1].step if outcomes else None,
    }
    (Path(folder) / f"note-{rank}-{os.getpid()}.json").write_text(json.dumps(note))


@pytest.fixture(scope="module")
def forks() -> Any:
    """Processes that have loaded torch."""
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    return context


class Run:
    """Three ranks; a process that is killed is replaced."""

    def __init__(
        self, forks: Any, config: TrainConfig, folder: Path, points: str, **options: Any
    ) -> None:
        folder.mkdir(exist_ok=True)
        self._arguments = plain(config), options, str(folder), points
        self._forks, self.folder = forks, folder
        roster = Roster()
        office = BaseManager(("127.0.0.1", 0), b"test")
        office.register("roster", callable=lambda: roster)
        server = office.get_server()
        self._port = server.address[1]
        threading.Thread(target=server.serve_forever, daemon=True).start()
        self.deaths = 0
        self._ranks = {rank: self._begin(rank) for rank in range(W)}

    def _begin(self, rank: int) -> Any:
        process = self._forks.Process(target=_work, args=(rank, self._port, *self._arguments))
        process.start()
        return process

    def wait(self) -> list[dict[str, Any]]:
        """Until all ranks have ended; what the processes that ended normally note."""
        until = time.monotonic() + _LIMIT_S
        while any(process.exitcode != 0 for process in self._ranks.values()):
            assert time.monotonic() < until, "not done in time"
            for rank, process in self._ranks.items():
                if process.exitcode not in (0, None):
                    assert process.exitcode == -9, f"rank {rank} failed: {process.exitcode}"
                    self.deaths += 1
                    self._ranks[rank] = self._begin(rank)
            time.sleep(0.02)
        return [json.loads(path.read_text()) for path in self.folder.glob("note-*.json")]


def log_of(config: TrainConfig) -> list[dict[str, Any]]:
    """The log without times."""
    timed = {"seconds", "timing", "samples_per_s"}
    records = json.loads(newest(config).read("log.json"))
    return [{k: v for k, v in record.items() if k not in timed} for record in records]


@pytest.fixture(scope="module")
def undisturbed(forks: Any, tmp_path_factory: pytest.TempPathFactory) -> TrainConfig:
    folder = tmp_path_factory.mktemp("undisturbed")
    config = tiny_config(folder, "run")
    run = Run(forks, config, folder / "fired", "")
    notes = run.wait()
    assert [note["step"] for note in notes] == [TOTAL_STEPS] * W
    return config


@pytest.mark.parametrize(
    ("points", "starts"),
    [  # starts: the steps at which the ranks that were not killed began, in order
        ("train.before_step:kill@rank=1,step=7", [0, 6]),
        ("train.loss:kill@rank=2,step=7", [0, 6]),
        ("train.after_backward:kill@rank=1,step=10", [0, 9]),
        ("train.after_step:kill@rank=1,step=10", [0, 10]),
        ("train.after_step:kill@rank=0,step=10", [0, 10]),
        ("evaluate:kill@rank=0,step=20", [0, 20]),
        ("checkpoint.snapshot:kill@rank=0,step=10", [0, 10]),
        ("checkpoint.payload:kill@rank=0,step=20", None),  # training goes on meanwhile
        ("checkpoint.committed:kill@rank=0,step=30", [0, 30]),
        ("train.after_step:kill@rank=1,step=30", [0, 30]),
        ("train.before_step:kill@rank=1,step=7;train.before_step:kill@rank=2,step=7", [0, 6]),
        ("train.before_step:kill@rank=1,step=7;start.opened:kill@rank=1,after=1", [0, 6]),
        ("train.before_step:kill@rank=1,step=7;start.loaded:kill@rank=1,after=1", [0, 6, 6]),
        ("train.before_step:kill@rank=1,step=7;start.warmed_up:kill@rank=2,after=1", [0, 6]),
        ("train.after_step:kill@rank=1,step=10;start.loaded:kill@rank=2,after=1", [0, 10, 10]),
    ],
)
def test_fault_49_50_a_killed_rank_is_replaced_and_the_others_repeat_nothing(
    forks: Any,
    undisturbed: TrainConfig,
    tmp_path: Path,
    points: str,
    starts: list[int] | None,
) -> None:
    config = tiny_config(tmp_path, "run")
    run = Run(forks, config, tmp_path / "fired", points)
    notes = run.wait()
    assert run.deaths == len(points.split(";"))
    assert all(note["step"] == TOTAL_STEPS for note in notes)
    assert bits(config) == bits(undisturbed)
    assert log_of(config) == log_of(undisturbed)
    on_main = [note["steps"] for note in notes if note["steps"]]
    survived = "rank=0" not in points
    assert starts is None or on_main == [starts if survived else starts[1:]]


def test_fault_49_averages_bad_records_and_exact_sums_survive_as_well(
    forks: Any, tmp_path: Path
) -> None:
    """Compared with one process that is left alone."""
    changes: dict[str, Any] = {
        "exact": True,
        "ema": EmaConfig(decay=0.9),
        "data": DataConfig(workers=1, prefetch=2, bad_records="skip", max_bad=100),
        "log": LogConfig(every_steps=5, tensorboard=False, audit=True),
    }
    bad_rows = [3, 70, 71, 150]
    alone = tiny_config(tmp_path, "alone", **changes)
    run_tiny(0, 1, plain(alone), {"bad_rows": bad_rows})
    config = tiny_config(tmp_path, "run", **changes)
    points = (
        "train.after_backward:kill@rank=2,step=14;train.before_step:kill@rank=0,after=1,step=25"
    )
    run = Run(forks, config, tmp_path / "fired", points, bad_rows=bad_rows)
    run.wait()
    assert run.deaths == 2
    assert bits(config) == bits(alone)
    assert log_of(config) == log_of(alone)
    assert any(record.get("skipped") for record in log_of(config))


def test_fault_50_without_a_survivor_the_checkpoint_is_loaded(
    forks: Any, undisturbed: TrainConfig, tmp_path: Path
) -> None:
    config = tiny_config(tmp_path, "run")
    points = ";".join(f"train.before_step:kill@rank={rank},step=17" for rank in range(W))
    run = Run(forks, config, tmp_path / "fired", points)
    notes = run.wait()
    assert run.deaths == W
    assert [note["steps"] for note in notes if note["steps"]] == [[10]]
    assert all(each is None for note in notes for each in note["replaced"])
    assert bits(config) == bits(undisturbed)
    assert log_of(config) == log_of(undisturbed)


# ------------------------------------------------------------------ the roster


class Desk:
    """A roster, and its clock."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.roster = Roster(lambda: self.now_s)

    def asks(self, rank: int, token: str, last: int = 0, size: int = W) -> Generation | None:
        address = f"host:{ord(token[0])}" if rank == 0 else ""
        return self.roster.meet(Member(rank, size, token, last, address, "node"))[0]


def test_a_generation_is_complete_with_all_ranks_and_the_address_of_rank_0() -> None:
    desk = Desk()
    assert desk.asks(0, "a") is None
    assert desk.asks(1, "b") is None
    assert desk.asks(2, "c") == Generation(1, "host:97")
    assert desk.asks(0, "a") == desk.asks(1, "b") == Generation(1, "host:97")


def test_survivors_wait_for_the_new_process_of_a_rank() -> None:
    desk = Desk()
    for rank, token in enumerate("abc"):
        desk.asks(rank, token)
    assert desk.asks(0, "a", last=1) is None
    assert desk.asks(2, "c", last=1) is None
    assert desk.asks(1, "d") == Generation(2, "host:97")
    assert desk.asks(2, "c", last=1) == Generation(2, "host:97")


def test_fault_51_a_process_that_was_replaced_is_refused() -> None:
    desk = Desk()
    for rank, token in enumerate("abc"):
        desk.asks(rank, token)
    desk.asks(1, "d")
    assert desk.asks(1, "b", last=1) == Generation(OVER, "")
    desk.asks(0, "a", last=1)
    assert desk.asks(2, "c", last=1) == Generation(2, "host:97"), "with the new one"
    assert desk.asks(1, "d") == Generation(2, "host:97")


def test_who_no_longer_asks_is_not_counted() -> None:
    desk = Desk()
    desk.asks(1, "b")
    desk.now_s += 10
    desk.asks(0, "a")
    assert desk.asks(2, "c") is None, "rank 1 has died while it waited"
    assert desk.asks(1, "d") == Generation(1, "host:97")


def test_a_roster_that_is_lost_costs_nothing() -> None:
    desk = Desk()
    for rank, token in enumerate("abc"):
        desk.asks(rank, token)
    desk.asks(0, "a", last=1)
    desk.roster = Roster(lambda: desk.now_s)
    assert desk.asks(1, "b", last=1) is None
    assert desk.asks(2, "c", last=1) is None
    assert desk.asks(0, "a", last=1) == Generation(2, "host:97")
