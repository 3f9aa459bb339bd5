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
from raytrain_ddp.config.sections import DdpConfig, EmaConfig, LogConfig
from raytrain_ddp.config.train_config import TrainConfig
from raytrain_ddp.training.roster import Member, Roster, Seat

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
    least: int,
    size: int,
) -> None:
    """One process of a rank; also the first code that a forked process runs."""
    import torch

    from raytrain_ddp.messages import Outcome
    from raytrain_ddp.ray_backend.failure_causes import cause_of
    from raytrain_ddp.training.generations import NewcomerWaits, Place, through_generations
    from raytrain_ddp.training.live_state import LiveState
    from raytrain_ddp.training.local_session import LocalSession
    from raytrain_ddp.training.loop import train
    from raytrain_ddp.training.recorder import Best
    from raytrain_ddp.training.session import Requests
    from raytrain_ddp.training.world import World, broadcast

    torch.set_num_threads(1)
    failpoints.arm(points, folder)
    office = _Office(("127.0.0.1", port), b"test")
    office.connect()
    roster = office.roster()  # type: ignore[attr-defined]

    class Registry:
        def meet(self, member: Member) -> Seat | None:
            return roster.meet(member)[0]  # type: ignore[no-any-return]

        def is_over(self, member: Member) -> bool:
            return roster.is_over(member)  # type: ignore[no-any-return]

    class Session(LocalSession):
        """Asks for newcomers at each step, as Ray's does now and then."""

        def requests(self) -> Requests:
            if self.world.size < W:
                time.sleep(0.2)  # so that a new process starts in the meantime
            return super().requests()._replace(look=least < W)

        def look(self) -> None:
            if broadcast(self.world.is_main and roster.has_newcomer(), self.world):
                raise NewcomerWaits

    made = from_dict(config)
    events: list[Any] = []
    outcomes: list[Outcome] = []
    sizes: list[int] = []

    def start(live: LiveState | None) -> LocalSession:
        sizes.append(place.seat.size)
        world = World(place.seat.rank, place.seat.size, rank, torch.device("cpu"), 1)
        return Session(made, world, Best("loss", "min"), events.append, live)

    def run(session: LocalSession) -> None:
        outcomes.append(train(made, TinyTask(made, **options), session))

    member = Member(rank, size, least, os.urandom(8).hex(), 0, "here", most=W)
    place = Place(member, "127.0.0.1", Registry())
    through_generations(place, start, run, lambda error: cause_of(error) == "peer", most=3)
    plans = [e for e in events if type(e).__name__ == "Plan"]
    note = {
        "steps": [plan.start_step for plan in plans],
        "sizes": sizes,
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
    """Three ranks, or `size` and the others later; a process that is killed is replaced."""

    def __init__(
        self,
        forks: Any,
        config: TrainConfig,
        folder: Path,
        points: str,
        least: int = W,
        late_s: float = 0.0,
        size: int = W,
        **options: Any,
    ) -> None:
        folder.mkdir(exist_ok=True)
        self._arguments = plain(config), options, str(folder), points, least, size
        self._forks, self.folder, self._late_s = forks, folder, late_s
        self.roster = roster = Roster()
        self._dead: dict[int, float] = {}  # rank -> when it is replaced
        office = BaseManager(("127.0.0.1", 0), b"test")
        office.register("roster", callable=lambda: roster)
        server = office.get_server()
        self._port = server.address[1]
        threading.Thread(target=server.serve_forever, daemon=True).start()
        self.deaths = 0
        self._ranks = {rank: self._begin(rank) for rank in range(size)}

    def _begin(self, rank: int) -> Any:
        process = self._forks.Process(target=_work, args=(rank, self._port, *self._arguments))
        process.start()
        return process

    def wait(self) -> list[dict[str, Any]]:
        """Until all ranks have ended; what the processes that ended normally note."""
        until = time.monotonic() + _LIMIT_S
        while any(process.exitcode != 0 for process in self._ranks.values()):
            assert time.monotonic() < until, "not done in time"
            if self.roster.node_ids and len(self._ranks) < W:  # the first ones train
                self._ranks |= {rank: self._begin(rank) for rank in range(len(self._ranks), W)}
            for rank, process in self._ranks.items():
                if process.exitcode not in (0, None):
                    assert process.exitcode == -9, f"rank {rank} failed: {process.exitcode}"
                    if rank not in self._dead:
                        self.deaths += 1
                        self._dead[rank] = time.monotonic() + self._late_s
                        self.roster.died(rank)
                    if time.monotonic() >= self._dead[rank]:
                        del self._dead[rank]
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


@pytest.mark.each_version
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
    points = ";".join(f"train.before_step:kill@rank={rank},step=27" for rank in range(W))
    run = Run(forks, config, tmp_path / "fired", points)
    notes = run.wait()
    assert run.deaths == W
    # The commit of step 20 goes on beside the training.
    assert [note["steps"] for note in notes if note["steps"]] in ([[10]], [[20]])
    assert all(each is None for note in notes for each in note["replaced"])
    assert bits(config) == bits(undisturbed)
    assert log_of(config) == log_of(undisturbed)


def test_without_the_share_of_the_dead_all_go_on_from_the_checkpoint(
    forks: Any, undisturbed: TrainConfig, tmp_path: Path
) -> None:
    """Under Ray such workers are restarted, see `start_of`."""
    config = tiny_config(tmp_path, "run", ddp=DdpConfig(shard_optimizer=True))
    run = Run(forks, config, tmp_path / "fired", "train.after_backward:kill@rank=1,step=17")
    notes = run.wait()
    assert run.deaths == 1
    assert [note["steps"] for note in notes if note["steps"]] == [[0, 10]]
    assert bits(config) == bits(undisturbed)
    assert log_of(config) == log_of(undisturbed)


@pytest.mark.parametrize(
    ("points", "least", "smallest"),
    [  # smallest: the size of the smallest generation, if it is always the same
        ("train.before_step:kill@rank=1,step=3", 1, 2),
        ("train.after_step:kill@rank=0,step=4", 2, 2),
        ("train.after_backward:kill@rank=2,step=3;train.after_step:kill@rank=1,step=5", 1, 1),
        ("train.before_step:kill@rank=0,step=3;train.before_step:kill@rank=2,step=3", 1, 1),
        ("train.before_step:kill@rank=0,step=3;train.before_step:kill@rank=2,step=3", 2, None),
    ],
)
def test_fault_49_with_exact_the_others_do_not_wait(
    forks: Any,
    exact_alone: TrainConfig,
    tmp_path: Path,
    points: str,
    least: int,
    smallest: int | None,
) -> None:
    """Compared with one process that is left alone."""
    config = tiny_config(tmp_path, "run", exact=True)
    run = Run(forks, config, tmp_path / "fired", points, least, late_s=3.0)  # survivors import Ray
    notes = run.wait()
    assert run.deaths == points.count(":kill@")
    assert all(note["step"] == TOTAL_STEPS for note in notes)
    assert bits(config) == bits(exact_alone)
    assert log_of(config) == log_of(exact_alone)
    sizes = max((note["sizes"] for note in notes), key=len)
    assert min(sizes) >= least
    assert smallest is None or min(sizes) == smallest
    assert sizes[0] == sizes[-1] == 3
    starts = [note["steps"] for note in notes]
    assert all(steps == sorted(steps) for steps in starts)


@pytest.mark.parametrize(
    "points",
    [
        "",
        "train.before_step:kill@rank=2,step=12;train.after_step:kill@rank=0,step=17",
        "start.loaded:kill@rank=2;train.after_backward:kill@rank=1,step=9",
    ],
)
def test_fault_28_a_further_rank_joins_between_two_steps(
    forks: Any, exact_alone: TrainConfig, tmp_path: Path, points: str
) -> None:
    config = tiny_config(tmp_path, "run", exact=True)
    run = Run(forks, config, tmp_path / "fired", points, least=1, late_s=1.0, size=2)
    notes = run.wait()
    assert run.deaths == points.count(":kill@")
    assert bits(config) == bits(exact_alone)
    assert log_of(config) == log_of(exact_alone)
    sizes = max((note["sizes"] for note in notes), key=len)
    assert max(sizes) == 3
    if not points:
        assert sizes == [2, 3]
        assert [note["replaced"] for note in notes if note["replaced"]] == [[None, [2]]]


@pytest.fixture(scope="module")
def exact_alone(tmp_path_factory: pytest.TempPathFactory) -> TrainConfig:
    config = tiny_config(tmp_path_factory.mktemp("alone"), "alone", exact=True)
    run_tiny(0, 1, plain(config), {})
    return config
