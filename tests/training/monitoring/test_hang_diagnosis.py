"""Rows 32 and 33: workers that hang, with three gloo processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from processes import Died, Group, Raised
from tiny import (
    ScriptedSession,
    TinyNet,
    TinyTask,
    WorkerResult,
    bits,
    kept_steps,
    plain,
    run_tiny,
    tiny_config,
)
from torch import nn

from raytrain_ddp.checkpoint.lease import Owner
from raytrain_ddp.checkpoint.run_folder import EVENTS_FILE, HANGS, read_history, run_storage
from raytrain_ddp.checkpoint.storage import open_storage
from raytrain_ddp.config.sections import DdpConfig, ScalingConfig
from raytrain_ddp.config.train_config import TrainConfig
from raytrain_ddp.errors import DataError, RetriesExhausted
from raytrain_ddp.failpoints import FOLDER_VARIABLE, VARIABLE, arm
from raytrain_ddp.ray_backend.mailbox import Mailbox
from raytrain_ddp.training.monitoring import hang_diagnosis
from raytrain_ddp.training.monitoring.hang_diagnosis import (
    Hang,
    RankStatus,
    diagnose,
    is_compiling,
    is_hang,
    on_device,
)
from raytrain_ddp.training.monitoring.phase_clock import Clock
from raytrain_ddp.training.monitoring.watchdog import State, Watchdog, ask_s
from raytrain_ddp.training.runtime.world import World

BeforeStep = Callable[[int, Path, int], None]
SHORT_LIMIT = ScalingConfig(hang_s=2.0)
LOST_PEER = Died(RetriesExhausted.exit_status)


def hung_config(folder: Path, name: str, **changes: Any) -> TrainConfig:
    return tiny_config(folder, name, scaling=SHORT_LIMIT, **changes)


def run_with(
    rank: int,
    size: int,
    config: dict[str, Any],
    text: str,
    folder: str,
    prepare_session: Callable[[ScriptedSession], None] | None = None,
) -> WorkerResult:
    arm(text, folder)
    try:
        return run_tiny(rank, size, config, prepare_session=prepare_session)
    finally:
        arm("", "")


def run_alongside(
    rank: int, size: int, config: dict[str, Any], folder: str, then: BeforeStep
) -> tuple[WorkerResult, float]:
    """`then` is called on each rank before each step."""

    def prepare_session(session: ScriptedSession) -> None:
        session.before_step = partial(then, rank, Path(folder))

    started = time.monotonic()
    return run_tiny(rank, size, config, prepare_session=prepare_session), time.monotonic() - started


def barrier_on_rank_1(rank: int, _: Path, step: int) -> None:
    if (rank, step) == (1, 6):
        dist.barrier()


def receive_on_rank_1(rank: int, _: Path, step: int) -> None:
    if (rank, step) == (1, 6):
        dist.recv(torch.zeros(1), 0)  # rank 0 sends nothing


def in_backward_on_rank_1(
    at: int, then: Callable[[Any], None], rank: int, _: Path, step: int
) -> None:
    """Calls `then` where only the gradient of the first layer is missing."""
    if (rank, step) == (1, at):
        before = TinyTask.loss

        def loss(self: TinyTask, model: TinyNet, batch: Any) -> Any:
            TinyTask.loss = before  # type: ignore[method-assign]
            model.conv.weight.register_hook(then)
            return before(self, model, batch)

        TinyTask.loss = loss  # type: ignore[assignment,method-assign]


def stick(_: Any) -> None:
    time.sleep(60)


def fail(_: Any) -> None:
    raise ZeroDivisionError


def slow_on_rank_1(rank: int, _: Path, step: int) -> None:
    time.sleep(0.12 if rank == 1 else 0.0)


def slow_log_on_rank_0(session: ScriptedSession) -> None:
    """Like a tracking server that is retried many times."""
    if session.recorder is not None:
        log = session.recorder.log
        add = log.add

        def slow(record: Any) -> None:
            time.sleep(4.0 if record.step == 15 else 0.0)
            add(record)

        log.add = slow  # type: ignore[method-assign]


def fail_on_rank_0(rank: int, _: Path, step: int) -> None:
    if (rank, step) == (0, 13):
        raise DataError("a record of rank 0 is bad")


def pause_all(rank: int, folder: Path, step: int) -> None:
    """Like a closed laptop lid or a frozen container."""
    if step == 8:
        folder.mkdir(exist_ok=True)
        (folder / f"pid-{rank}").write_text(f"{os.getpid()}\n")
        while len(list(folder.glob("pid-*"))) < 3:
            time.sleep(0.01)
        if rank == 0:
            wake = "sleep 5; kill -CONT $(cat pid-*)"
            subprocess.Popen(["sh", "-c", f"kill -STOP $(cat pid-*); {wake}"], cwd=folder)


def status(rank: int, **changes: Any) -> RankStatus:
    """Of a rank that waits in the all-reduce of step 9, beyond its time limit."""
    usual: dict[str, Any] = {"step": 9, "doing": "gradient exchange", "collective": 40}
    usual |= {"name": "all_reduce", "waits": True, "at": "a.py:1 in f"}
    return RankStatus(rank, **{**usual, "still_s": 31.0, "patience_s": 30.0, **changes})


def diagnosis(*signs: RankStatus, size: int = 3) -> tuple[str, tuple[int, ...]]:
    owners = [Owner(f"{n}", f"h{n}", 1 + n, "now", "another machine", 0) for n in range(size)]
    hang = diagnose({each.rank: each for each in signs}, owners)
    return hang.text, hang.ranks


ALL_REDUCE = "the all-reduce of step 9 (gradient exchange, collective 40)"


def test_fault_33_the_rank_that_the_others_wait_for_is_found_from_all_statuses():
    idle = {"waits": False, "doing": "data wait", "name": "broadcast", "collective": 39}
    assert diagnosis(status(0), status(1), status(2, **idle)) == (
        f"rank 2 (h2) did not enter {ALL_REDUCE}: it is in data wait (a.py:1 in f); the others "
        "wait 31 s",
        (2,),
    )
    text, ranks = diagnosis(status(0), status(2))
    assert ranks == (1,)
    assert f"rank 1 (h1) did not enter {ALL_REDUCE}: it does not respond" in text
    text, ranks = diagnosis(status(0), status(1, name="barrier"), status(2))
    assert ranks == (1,)
    assert "it is in the barrier of step 9" in text
    text, ranks = diagnosis(
        status(0, collective=39), status(1), size=2
    )  # of two ranks, the one that is behind
    assert ranks == (0,)
    text, ranks = diagnosis(status(0), status(1), status(2))
    assert (ranks, "all ranks are in" in text) == ((), True)
    text, ranks = diagnosis(*(status(rank, **idle) for rank in range(3)))
    assert (ranks, "no rank has finished step 9" in text) == ((), True)


def recorded(*states: str, kind: str = "nccl:all_reduce") -> list[dict[str, Any]]:
    """Entries of torch's flight recorder."""
    return [
        {"profiling_name": kind, "state": state, "collective_seq_id": 38 + n}
        for n, state in enumerate(states)
    ]


@pytest.mark.parametrize(
    ("doing", "inside", "entries", "expected"),
    [
        # The host waits for a flag that follows the all-reduce that its GPU executes.
        (
            "agreement",
            False,
            recorded("completed", "completed", "started", "scheduled"),
            ("gradient exchange", True, (40, "all_reduce")),
        ),
        ("agreement", False, recorded("completed"), ("compute", False, None)),  # own kernels
        ("agreement", True, recorded("started"), ("agreement", True, None)),  # the vote, on CPUs
        ("agreement", False, [], ("agreement", True, None)),  # nothing is known
        ("agreement", False, recorded("started", kind="gloo:x"), ("agreement", True, None)),
        ("data wait", False, recorded("started"), ("data wait", False, None)),
        ("gradient exchange", False, [], ("gradient exchange", True, None)),
    ],
)
def test_fault_33_a_collective_stuck_on_a_gpu_is_reported_as_the_gradient_exchange(
    doing: str,
    inside: bool,
    entries: list[dict[str, Any]],
    expected: tuple[str, bool, tuple[int, str] | None],
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(hang_diagnosis, "collectives", lambda: entries)
    assert on_device(doing, inside) == expected


def test_fault_33_the_rank_whose_gpu_did_not_reach_the_collective_is_named(
    monkeypatch: pytest.MonkeyPatch,
):
    """The GPUs of two hosts are in an all-reduce; the third host's GPU still computes."""
    signs = []
    for rank, states in enumerate([("completed",), ("started",), ("started",)]):
        monkeypatch.setattr(hang_diagnosis, "collectives", lambda found=states: recorded(*found))
        doing, waits, stuck = on_device("agreement", inside=False)
        number, name = stuck or (-1, "")
        changes = {"doing": doing, "waits": waits, "collective": number, "name": name}
        signs.append(status(rank, **changes, at="nonfinite.py:9 in read"))
    assert diagnosis(*signs) == (
        "rank 0 (h0) did not enter the all-reduce of step 9 (gradient exchange, collective 38): it "
        "is in compute (nonfinite.py:9 in read); the others wait 31 s",
        (0,),
    )


def test_it_is_not_a_hang_while_one_rank_is_within_its_time_limit():
    """For example, rank 0 waits for the storage while the others wait for it."""
    assert is_hang({0: status(0), 1: status(1)})
    assert not is_hang({0: status(0, doing="checkpoint", patience_s=1800.0), 1: status(1)})


@pytest.mark.parametrize("size", [3, 100, 1000, 4000, 100_000])
def test_at_most_a_hundred_ranks_per_second_ask_for_all_statuses(size: int):
    assert size / ask_s(30.0, size) <= 100
    assert ask_s(30.0, 3) < 2.1


def test_the_mailbox_exchanges_statuses_only_between_ranks_of_one_start():
    mailbox = Mailbox()
    assert mailbox.exchange_status("a", 0, "x") == {0: "x"}
    assert mailbox.exchange_status("a", 1, "y") == {0: "x", 1: "y"}
    assert mailbox.exchange_status("a", 0, None) == {1: "y"}
    assert mailbox.exchange_status("b", 2, "z") == {2: "z"}


def collective_name(collective: str) -> str:
    """The name in messages: older versions of torch do not record gloo's collectives."""
    version = tuple(int(part) for part in torch.__version__.split(".")[:2])
    return collective if version >= (2, 14) else "collective"


def hang_report(config: TrainConfig) -> tuple[Path, dict[str, Any]]:
    """The folder with the stacks, and the content of hang.json."""
    (folder,) = (Path(run_storage(config).path) / HANGS).iterdir()
    return folder, json.loads((folder / "hang.json").read_text())


@pytest.mark.each_version
def test_fault_33_a_stopped_rank_is_named_and_killed_and_the_run_resumes_with_the_same_bits(
    workers: Group, tmp_path: Path
):
    whole, config = tiny_config(tmp_path, "whole"), hung_config(tmp_path, "hung")
    workers(3, run_tiny, plain(whole))
    at = "train.before_step:stop@rank=2,step=14"
    ends = workers.outcomes(3, run_with, plain(config), at, str(tmp_path / "fired"))
    assert ends == [LOST_PEER, LOST_PEER, Died(-9)]
    folder, hang = hang_report(config)
    assert (hang["ranks"], hang["step"]) == ([2], 14)
    assert hang["text"].startswith("rank 2 (")
    assert f"did not enter the {collective_name('all-reduce')}" in hang["text"]
    assert "its process is stopped (SIGSTOP" in hang["text"]
    for rank in (0, 1):
        assert "in train" in (folder / f"rank-{rank}.txt").read_text()
    workers(3, run_tiny, plain(config))
    assert bits(config) == bits(whole)


def test_fault_33_a_rank_that_holds_the_gil_is_reported_by_its_peers_with_its_stack(
    workers: Group, tmp_path: Path
):
    config = hung_config(tmp_path, "hung")
    at = "train.after_backward:gil(60)@rank=0,step=5"
    ends = workers.outcomes(3, run_with, plain(config), at, str(tmp_path / "fired"))
    assert ends == [Died(-9), LOST_PEER, LOST_PEER]
    folder, hang = hang_report(config)
    assert hang["ranks"] == [0]
    assert "the GIL" in hang["text"]
    assert "in act" in (folder / "rank-0.txt").read_text()  # a function of failpoints.py


@pytest.mark.parametrize("then", [barrier_on_rank_1, receive_on_rank_1])
def test_fault_33_a_rank_that_skips_a_collective_is_named_with_its_stack(
    workers: Group, tmp_path: Path, then: BeforeStep
):
    config = hung_config(tmp_path, "hung")
    ends = workers.outcomes(3, run_alongside, plain(config), str(tmp_path), then)
    assert ends == [LOST_PEER] * 3
    folder, hang = hang_report(config)
    assert (hang["ranks"], hang["step"]) == ([1], 6)
    assert f"did not enter the {collective_name('all-reduce')} of step 6" in hang["text"]
    assert then.__name__ in (folder / "rank-1.txt").read_text()


@pytest.mark.parametrize(("size", "step"), [(3, 6), (4, 10)])
def test_fault_33_a_rank_that_hangs_during_the_gradient_exchange_is_named(
    size: int, step: int, workers: Group, tmp_path: Path
):
    """At step 10, one of four ranks has no samples."""
    config = hung_config(tmp_path, "hung", exact=True, ddp=DdpConfig(bucket_cap_mb=0.001))
    then = partial(in_backward_on_rank_1, step, stick)
    assert (
        workers.outcomes(size, run_alongside, plain(config), str(tmp_path), then)
        == [LOST_PEER] * size
    )
    folder, hang = hang_report(config)
    assert (hang["ranks"], hang["step"]) == ([1], step)
    kind = collective_name("all-to-all")
    assert f"did not enter the {kind} of step {step} (gradient exchange" in hang["text"]
    assert "it is in compute (" in hang["text"]
    assert "in stick" in (folder / "rank-1.txt").read_text()


def test_a_task_that_fails_during_the_gradient_exchange_ends_all_ranks(
    workers: Group, tmp_path: Path
):
    config = tiny_config(tmp_path, "failed", exact=True, ddp=DdpConfig(bucket_cap_mb=0.001))
    then = partial(in_backward_on_rank_1, 6, fail)
    ends = workers.outcomes(3, run_alongside, plain(config), str(tmp_path), then, wait_s=10)
    assert [end.name for end in ends] == ["RuntimeError", "ZeroDivisionError", "RuntimeError"]


def test_fault_32_33_a_slow_rank_or_a_pause_of_all_ranks_is_not_a_hang(
    workers: Group, tmp_path: Path
):
    slow, paused = (hung_config(tmp_path, name) for name in ("slow", "paused"))
    (ran, took_s), *_ = workers(3, run_alongside, plain(slow), str(tmp_path), slow_on_rank_1)
    assert took_s > 0.1 * ran.outcome.step  # many times hang_s in total
    (ran, took_s), *_ = workers(3, run_alongside, plain(paused), str(tmp_path / "p"), pause_all)
    assert took_s > 4
    assert ran.outcome.step == ran.outcome.total_steps
    assert not (tmp_path / "slow" / HANGS).exists()
    assert not (tmp_path / "paused" / HANGS).exists()


@pytest.mark.parametrize("site", ["start.warmed_up", "evaluate"])
def test_fault_33_a_rank_stopped_in_a_phase_with_a_long_limit_is_named_soon(
    workers: Group, tmp_path: Path, site: str
):
    config = hung_config(tmp_path, "hung")
    ends = workers.outcomes(3, run_with, plain(config), f"{site}:stop@rank=0", f"{tmp_path}/fired")
    assert ends == [Died(-9), LOST_PEER, LOST_PEER]
    _, hang = hang_report(config)
    assert hang["ranks"] == [0]
    assert "its process is stopped" in hang["text"]


def test_fault_33_slow_data_and_a_slow_log_are_not_hangs(workers: Group, tmp_path: Path):
    config = tiny_config(tmp_path, "slow", scaling=ScalingConfig(hang_s=3.0))
    at = "data.read:sleep(5)@rank=1,step=8"
    ran = workers(3, run_with, plain(config), at, str(tmp_path / "fired"), slow_log_on_rank_0)
    assert ran[0].outcome.step == ran[0].outcome.total_steps
    assert not [*(tmp_path / "slow" / HANGS).rglob("hang.json")]


def fail_with(rank: int, size: int, config: dict[str, Any], text: str, folder: str) -> WorkerResult:
    def prepare_session(session: ScriptedSession) -> None:
        session.before_step = partial(fail_on_rank_0, rank, Path(folder))

    return run_with(rank, size, config, text, folder, prepare_session)


def test_fault_33_a_failed_rank_that_finishes_its_commit_is_not_a_hang(
    workers: Group, tmp_path: Path
):
    config = hung_config(tmp_path, "failed")
    at = "checkpoint.manifest:sleep(7)@step=10"
    ends = workers.outcomes(3, fail_with, plain(config), at, str(tmp_path / "fired"), wait_s=12)
    assert all(isinstance(end, Raised) for end in ends), ends
    assert ends[0].name == "DataError"
    assert kept_steps(config) == [10]


def test_fault_33_compiling_is_distinguished_from_running_compiled_code():
    """A step of another size is recompiled, which may take minutes."""
    seen = []

    def backend(graph: torch.fx.GraphModule, _: object) -> Any:
        seen.append(is_compiling(threading.get_ident()))

        def run(*inputs: torch.Tensor) -> Any:
            seen.append(is_compiling(threading.get_ident()))
            return graph(*inputs)

        return run

    class Net(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:  # torch 2.10 compiles none of its own
            return super().forward(x) * 2

    net = Net(2, 2)
    net.compile(backend=backend)
    net(torch.ones(1, 2))
    assert seen == [True, False]
    assert not is_compiling(threading.get_ident())


def test_the_time_limit_of_a_wait_in_a_collective_is_that_of_a_step(tmp_path: Path):
    """For example, ranks wait for the sample count of a step from a stopped rank."""
    clock = Clock(torch.device("cpu"))
    storage = open_storage(str(tmp_path))
    owners = [Owner.here()]
    dog = Watchdog(clock, 30.0, 0, owners, storage, lambda _: {}, Owner.state, lambda _: None)
    dog.close()
    assert dog.patience_s("compute", waits=False) == 1800.0  # no step is finished
    assert dog.patience_s("compute", waits=True) == 300.0  # all ranks must wait for so long
    clock.steps = 1
    waiting = {("data wait", True): 30.0, ("data wait", False): 300.0, ("writing", False): 300.0}
    waiting |= {("compilation", False): 1800.0, ("evaluation", True): 1800.0}
    assert {each: dog.patience_s(*each) for each in waiting} == waiting


def watch(
    folder: Path,
    others: Callable[[], list[RankStatus]],
    state: State,
    doing: str = "evaluation",
    rank: int = 0,
    of_run: Callable[[int], int] = int,
) -> Hang | None:
    """The hang that a rank finds within 5 s; the other two are on another machine."""
    found: list[Hang] = []
    ended = threading.Event()
    clock = Clock(torch.device("cpu"))
    clock.steps, clock.doing = 1, doing
    owners = [Owner(f"{n}", "far", 1 + n, "now", "its boot", 0) for n in range(3)]
    owners[rank] = Owner.here()

    def exchange(mine: RankStatus | None) -> dict[int, RankStatus]:
        kept = mine is not None and mine.kept
        return {each.rank: replace(each, kept=kept) for each in others()}

    def end(hang: Hang) -> None:
        found.append(hang)
        ended.set()

    storage = open_storage(str(folder))
    dog = Watchdog(clock, 1.0, rank, owners, storage, exchange, state, end, of_run)
    ended.wait(5)
    dog.close()
    return found[0] if found else None


def test_fault_33_a_rank_stopped_on_another_host_in_an_evaluation_is_named(
    tmp_path: Path,
):
    said_before = [status(n, doing="evaluation", patience_s=60.0, still_s=1.0) for n in (1, 2)]

    def new(rank: int, **changes: Any) -> list[RankStatus]:
        return [replace(said_before[rank - 1], still_s=time.monotonic() % 10, **changes)]

    def cannot_look(_: Owner) -> str:
        raise OSError

    cases: dict[str, tuple[Callable[[], list[RankStatus]], State]] = {
        "rank 2 is silent and stopped": (
            lambda: new(1),
            lambda owner: "T" if owner.pid == 3 else "S",
        ),
        "rank 1 was stopped after a sign": (
            lambda: [said_before[0], *new(2)],
            lambda owner: "T" if owner.pid == 2 else "S",
        ),
        "rank 2 sees that rank 1 is stopped": (lambda: new(2, stopped=[1]), lambda _: ""),
        "rank 2 is silent and runs": (lambda: new(1), lambda _: "S"),
        "rank 2 is silent, nobody can look": (lambda: new(1), cannot_look),
        "all say something new": (lambda: [*new(1), *new(2)], lambda _: "T"),
        "rank 1 has gone on since": (lambda: [*new(1), *new(2, stopped=[1])], lambda _: ""),
    }
    with ThreadPoolExecutor(len(cases)) as pool:
        tried = pool.map(lambda case: watch(tmp_path / case[0], *case[1]), cases.items())
    hangs = dict(zip(cases, tried, strict=True))
    ranks = [hang and hang.ranks for hang in hangs.values()]
    assert ranks == [(2,), (1,), (1,), None, None, None, None]
    first = hangs["rank 2 is silent and stopped"]
    assert first is not None
    assert first.text.startswith("rank 2 (far) did not enter the all-reduce")
    assert "its process is stopped (SIGSTOP" in first.text


def test_fault_33_texts_and_files_have_the_ranks_of_the_run_when_workers_are_missing(
    tmp_path: Path,
):
    """Ranks 0, 3 and 4 remain, and the last one is stopped."""
    world = World(0, 3, 0, torch.device("cpu"), 1, ranks=(0, 3, 4))

    def others() -> list[RankStatus]:
        return [status(1, doing="evaluation", still_s=time.monotonic() % 10)]

    def state(owner: Owner) -> str:
        return "T" if owner.pid == 3 else "S"

    hang = watch(tmp_path, others, state, of_run=world.of_run)
    assert hang is not None
    assert hang.text.startswith("rank 4 (far) did not enter the all-reduce")
    assert hang.ranks == (2,)
    files = {path.name: path for path in tmp_path.rglob("*") if path.is_file()}
    assert "rank-0.txt" in files
    document = json.loads(files["hang.json"].read_text())
    assert document["ranks"] == [4]
    assert sorted(each["rank"] for each in document["signs"]) == [0, 3]


def test_fault_33_a_rank_whose_status_no_longer_changes_is_named_after_its_time_limit(
    tmp_path: Path,
):
    """The rank reported that it waits, then kept the GIL or was stopped. Here it is the lowest
    rank, which otherwise checks the processes of other machines."""
    before = status(0, doing="evaluation", still_s=1.0, patience_s=3.0)

    def others() -> list[RankStatus]:
        return [before, status(2, still_s=30 + time.monotonic() % 10)]

    def patient() -> list[RankStatus]:
        return [replace(before, patience_s=60.0), others()[1]]

    tried = [
        watch(tmp_path / "lock", others, lambda _: "S", "gradient exchange", rank=1),
        watch(tmp_path / "stopped", patient, lambda _: "T", "evaluation", rank=1),
        watch(tmp_path / "patient", patient, lambda _: "S", "gradient exchange", rank=1),
    ]
    assert [hang and hang.ranks for hang in tried] == [(0,), (0,), None]
    assert tried[0] is not None
    assert "it is stopped, or dead, or one of its threads holds the GIL" in tried[0].text


def test_a_rank_that_was_stopped_before_is_not_reported_as_stopped_again(tmp_path: Path):
    """Otherwise its peers would end the run in the next long evaluation."""
    clock = Clock(torch.device("cpu"))
    said: list[RankStatus | None] = []
    owners = [Owner.here(), Owner.here()]

    def exchange(mine: RankStatus | None) -> dict[int, RankStatus]:
        said.append(mine)
        return {}

    storage = open_storage(str(tmp_path))
    dog = Watchdog(clock, 1.0, 0, owners, storage, exchange, lambda _: "T", lambda _: None)
    until(lambda: any(each is not None and each.stopped for each in said))
    clock.steps += 100  # before the time limit for a silent rank
    clock.beat()
    until(lambda: None in said and said[-1] is not None)
    dog.close()
    first = said[said.index(None) + 1]
    assert first is not None
    assert first.stopped == ()


@pytest.mark.parametrize("patient", ["data wait", "checkpoint"])
def test_the_phase_after_a_long_wait_has_the_full_time_limit_of_a_step(
    tmp_path: Path, patient: str
):
    """Two ranks wait for this one, which waits for a batch or writes, then computes."""
    exchanged: list[RankStatus | None] = []
    found: list[Hang] = []
    clock = Clock(torch.device("cpu"))
    clock.steps, clock.doing = 1, patient
    owners = [Owner(f"{n}", "far", 1 + n, "now", "its boot", 0) for n in range(3)]
    owners[0] = Owner.here()
    waiting = {n: status(n, still_s=9.0, patience_s=1.0) for n in (1, 2)}

    def exchange(mine: RankStatus | None) -> dict[int, RankStatus]:
        exchanged.append(mine)
        return waiting

    storage = open_storage(str(tmp_path))
    dog = Watchdog(clock, 1.0, 0, owners, storage, exchange, lambda _: "S", found.append)
    until(lambda: any(each is not None and each.still_s > 1.5 for each in exchanged))
    if patient == "checkpoint":
        clock.beat()
    clock.doing = "compute"
    time.sleep(0.8)
    dog.close()
    assert found == []
    assert None not in exchanged, "the others would take it for one that does not respond"


@pytest.mark.parametrize("is_over", [False, True])
def test_a_rank_that_has_not_left_a_finished_generation_names_no_other_rank(
    tmp_path: Path, is_over: bool
):
    """The others are silent: they wait for it in the next generation."""
    found: list[Hang] = []
    clock = Clock(torch.device("cpu"))
    clock.steps, clock.doing = 1, "data wait"
    owners = [Owner(f"{n}", "far", 1 + n, "now", "its boot", 0) for n in range(3)]
    owners[0] = Owner.here()
    storage = open_storage(str(tmp_path))
    ending = found.append, int, lambda: is_over
    dog = Watchdog(clock, 0.2, 0, owners, storage, lambda _: {}, lambda _: "S", *ending)
    until(lambda: bool(found))
    dog.close()
    assert found[0].ranks == (() if is_over else (1, 2))
    assert ("is still in the process group that ended with a lost rank" in found[0].text) == is_over


def until(what: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not what():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.slow
def test_fault_33_torchrun_restarts_a_hung_run(tmp_path: Path):
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=3"]
    command += ["--max-restarts=1", "--standalone", "-m", "raytrain_ddp.fit"]
    command += ["--name=hung", "--epochs=3", "--scaling.hang-s=2"]
    armed = {VARIABLE: "train.before_step:stop@rank=1,step=40"}
    armed |= {FOLDER_VARIABLE: f"{tmp_path / 'fired'}", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command,
        cwd=tmp_path,
        env={**os.environ, **armed},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert "did not enter the all-reduce of step 40" in done.stdout
    events = read_history(
        run_storage(TrainConfig(name="hung", storage=str(tmp_path / "runs"))), EVENTS_FILE
    )
    assert [event["step"] for event in events if event["kind"] == "failed"] == [40]
