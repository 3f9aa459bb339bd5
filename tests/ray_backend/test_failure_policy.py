"""How worker failures are handled: the policy receives events, and no Ray is started."""

from __future__ import annotations

import copy
import itertools
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
from event_records import event as made
from event_records import record, to
from processes import Group, Raised

from raytrain_ddp.checkpoint.storage import open_storage
from raytrain_ddp.config.sections import ScalingConfig
from raytrain_ddp.config.train_config import TrainConfig
from raytrain_ddp.errors import DataError, PreflightError, RetriesExhausted, TaskError
from raytrain_ddp.messages import Alive, ControllerStarted, Died, Joined
from raytrain_ddp.ray_backend import capacity_watch, cluster, failure_policy
from raytrain_ddp.ray_backend.capacity_watch import CapacityWatch, stopped_workers
from raytrain_ddp.ray_backend.placement import Layout, workers_that_fit
from raytrain_ddp.ray_backend.ray_output import _LazyFile, ray_output_to_file
from raytrain_ddp.ray_backend.ray_settings import applied_settings, ray_settings
from raytrain_ddp.ray_backend.worker import WorkerSettings, report_failure
from raytrain_ddp.ray_backend.worker_process import Tee
from raytrain_ddp.signals import handling, heeded

Event = Mapping[str, Any]


class FailurePolicy(failure_policy.FailurePolicy):
    """Takes and returns records instead of events."""

    def take(self, event: Event) -> Event | None:  # type: ignore[override]
        shown = super().take(made(event))
        return shown and record(shown)

    def ended(self, why: str) -> Event:  # type: ignore[override]
        return record(super().ended(why))


KILLED = "The actor died unexpectedly before finishing this task. actor_id: {} Worker exit type: "


class Scenario:
    """Reports to a policy what happens to three workers, one start after another."""

    def __init__(self, most: int = 3, replaced: int = 0) -> None:
        self.policy = FailurePolicy(most, replaced=replaced)
        self.starts = 0

    def start(
        self, at: int = 0, new: Sequence[int] | None = None, ranks: Sequence[int] = (0, 1, 2)
    ) -> Scenario:
        self.starts += 1
        for rank in ranks:
            event = {"kind": "joined", "start": f"{self.starts}", "rank": rank, "node": f"n{rank}"}
            assert self.policy.take(event) is None
        assert self.policy.take({"kind": "plan", "start_step": at, "replaced": new}) is None
        return self

    def died(self, *ranks: int) -> Event | None:
        """These ranks are dead; the others survive and report nothing."""
        texts = {rank: KILLED.format(f"{self.starts}-{rank}") for rank in ranks}
        return self.policy.take({"kind": "died", "texts": texts, "preempted": []})

    def words(self, rank: int, cause: str, step: int | None, error: str = "OSError") -> Scenario:
        event = {"kind": "failed", "start": f"{self.starts}", "rank": rank, "step": step}
        said = {"error": error, "message": f"{error}: so", "traceback": "", "status": 1}
        self.policy.take({**event, **said, "cause": cause})
        return self

    def killed(self, rank: int, step: int | None, why: str = "SYSTEM_ERROR") -> Event | None:
        """One rank is killed; its peers report that they lost it, unless there is no step yet."""
        peers = [] if step is None else [r for r in range(3) if r != rank]
        for peer in peers:
            self.words(peer, "peer", step, "RuntimeError")
        texts = {rank: KILLED.format(self.starts) + why, **dict.fromkeys(peers, "connection")}
        return self.policy.take({"kind": "died", "texts": texts, "preempted": []})

    def saved(self, step: int) -> Scenario:
        assert self.policy.take({"kind": "checkpoint", "step": step, "seconds": 0.1}) is None
        return self


def test_fault_04_simultaneously_lost_hosts_count_as_one_failure_with_new_workers():
    """Ray reports each worker; a new one was placed on a host not yet known to be lost."""
    scenario = Scenario(most=2, replaced=3).start()
    policy, dead = scenario.policy, {"kind": "died", "preempted": []}
    shown = [
        policy.take({**dead, "texts": {rank: f"{rank} is dead, says {n}"}})
        for n, rank in enumerate((2, 1, 2))
    ]
    reported = [f"{event['step']} {event['message']}" for event in shown if event]
    assert [text.partition("failure ")[2][:1] for text in reported] == ["1", "1", "2"]
    assert "while starting" in reported[2]
    with pytest.raises(RetriesExhausted, match="workers failed 3 times"):
        policy.take({**dead, "texts": {2: "2 is dead once more"}})


def test_fault_01_a_killed_worker_is_reported_with_rank_node_step_and_resume_step():
    shown = Scenario().start().saved(23).killed(rank=1, step=33)
    assert shown is not None
    assert (shown["kind"], shown["rank"], shown["step"]) == ("failed", 1, 33)
    for words in (
        "crashed, or was killed",
        "on n1",
        "at step 33",
        "from step 23",
        "1 of at most 3",
    ):
        assert words in shown["message"]


def test_one_death_counts_once_however_often_ray_reports_it():
    scenario = Scenario().start()
    assert scenario.killed(1, 5) is not None
    assert scenario.killed(1, 5) is None


def test_failures_separated_by_checkpoints_never_end_the_run():
    scenario = Scenario(most=1)
    for number in range(100):
        scenario.start(at=10 * number).saved(10 * number + 5)
        assert scenario.killed(rank=1, step=10 * number + 7) is not None


def test_a_checkpoint_whose_event_was_lost_counts_once_a_start_resumes_from_it():
    scenario = Scenario(most=0)
    with pytest.raises(RetriesExhausted):
        scenario.start().killed(0, 4)
    scenario = Scenario(most=1)
    assert scenario.start().killed(0, 8) is not None
    assert scenario.start(at=7).killed(0, 8) is not None


def test_scaling_max_failures_consecutive_failures_end_the_run():
    scenario = Scenario(most=2)
    for step in (5, 9):
        assert scenario.start().killed(rank=1, step=step) is not None
    with pytest.raises(RetriesExhausted, match=r"failed 3 times .*max_failures = 2") as caught:
        scenario.start().killed(rank=1, step=7)
    assert caught.value.exit_status == 7
    assert caught.value.cause["rank"] == 1
    assert (caught.value.cause["node"], caught.value.cause["step"]) == ("n1", 7)
    assert "\n" not in str(caught.value)


def test_fault_48_three_deaths_of_a_rank_at_the_same_step_end_the_run():
    """Two may be a coincidence if something outside kills workers."""
    scenario = Scenario(most=100)
    assert scenario.start(at=3).killed(rank=1, step=5) is not None
    assert scenario.start(at=3).killed(rank=1, step=5) is not None
    with pytest.raises(RetriesExhausted, match="at step 5, as it did before") as caught:
        scenario.start(at=3).killed(rank=1, step=5)
    assert "no checkpoint in between" in str(caught.value)
    assert "native crash" in str(caught.value)


def test_fault_48_three_deaths_without_progress_end_the_run_despite_others_in_between():
    """The step at which a rank died is known only roughly on a busy machine."""
    scenario = Scenario(most=100)
    for step in (5, 4, 5, 4):
        assert scenario.start(at=3).killed(rank=1, step=step) is not None
    with pytest.raises(RetriesExhausted, match="at step 5, as it did before"):
        scenario.start(at=3).killed(rank=1, step=5)


def test_fault_48_the_same_error_at_the_same_step_twice_ends_the_run_at_once():
    scenario = Scenario(most=100).start()
    texts = {0: "OSError: so", 1: "gloo"}
    scenario.words(1, "peer", 5).words(0, "outside", 5)
    shown = scenario.policy.take({"kind": "died", "texts": texts, "preempted": []})
    assert shown is not None
    assert shown["rank"] == 0
    assert "failed (OSError: so)" in shown["message"]
    scenario.start().words(0, "outside", 5)
    with pytest.raises(RetriesExhausted, match=r"rank 0 failed \(OSError: so\) on n0 at step 5"):
        scenario.policy.take({"kind": "died", "texts": texts, "preempted": []})


@pytest.mark.parametrize(
    ("rank", "step", "saved"), [(1, 6, 0), (2, 5, 0), (1, 5, 4)], ids=["step", "rank", "progress"]
)
def test_fault_48_another_step_or_rank_or_a_checkpoint_in_between_is_not_a_crash_loop(
    rank: int, step: int, saved: int
):
    scenario = Scenario(most=100)
    for _ in range(2):
        assert scenario.start().killed(rank=1, step=5) is not None
    scenario.start()
    if saved:
        scenario.saved(saved)
    assert scenario.killed(rank, step) is not None


def test_fault_48_the_step_of_a_lone_workers_death_is_its_last_reported_step():
    policy = FailurePolicy(100)
    for number in range(3):
        joined = {"kind": "joined", "start": f"{number}", "rank": 0, "node": "n0"}
        for event in (joined, {"kind": "plan", "start_step": 0}, {"kind": "at", "step": 12}):
            assert policy.take(event) is None
        died = {"kind": "died", "texts": {0: KILLED.format(number)}, "preempted": []}
        if number < 2:
            shown = policy.take(died)
            assert shown is not None
            assert shown["step"] == 12
        else:
            with pytest.raises(RetriesExhausted, match="at step 12, as it did before"):
                policy.take(died)


def test_deaths_during_startup_are_not_a_crash_loop_but_are_counted():
    scenario = Scenario(most=2)
    for _ in range(2):
        scenario.start()
        scenario.policy._start.step = None  # killed before there was a plan
        shown = scenario.killed(rank=1, step=None)
        assert shown is not None
        assert "while starting; resuming from the start" in shown["message"]
    scenario.start()
    with pytest.raises(RetriesExhausted, match="failed 3 times"):
        scenario.killed(rank=1, step=None)


def test_fault_25_a_worker_ended_by_rays_memory_monitor_is_replaced_once():
    why = "NODE_OUT_OF_MEMORY Worker exit detail: the node was running low on memory"
    scenario = Scenario(most=100)
    shown = scenario.start().killed(rank=1, step=5, why=why)
    assert shown is not None
    assert "ended by Ray because its node ran out of memory" in shown["message"]
    with pytest.raises(RetriesExhausted, match="again") as caught:
        scenario.start().killed(rank=2, step=9, why=why)
    for knob in ("--micro-batch", "--data.prefetch-mib", "--scaling.cpus-per-worker"):
        assert knob in str(caught.value)


def hung(scenario: Scenario, step: int) -> Event | None:
    """Two ranks report that the third keeps them waiting and end; one then loses the other."""
    message = f"rank 2 (n2) did not enter the all-reduce of step {step}. Stacks are kept."
    for rank in (0, 1):
        reported = {"kind": "failed", "start": f"{scenario.starts}", "rank": rank, "step": step}
        words = {"error": "the hang of rank 2", "message": message, "traceback": "", "status": 7}
        assert scenario.policy.take({**reported, **words, "cause": "hang"}) is None
    scenario.words(1, "peer", step, "RuntimeError")
    texts = {rank: KILLED.format(scenario.starts) for rank in range(3)}
    return scenario.policy.take({"kind": "died", "texts": texts, "preempted": []})


def test_fault_33_a_hang_is_a_failure_with_a_stated_cause():
    shown = hung(Scenario().start().saved(23), 40)
    assert shown is not None
    assert shown["hung"]
    assert "rank 2 (n2) did not enter the all-reduce of step 40" in shown["message"]
    assert "resuming from step 23 (failure 1 of at most 3 in a row)" in shown["message"]


def test_fault_33_48_hangs_at_the_same_step_twice_or_too_often_end_the_run():
    scenario = Scenario()
    assert hung(scenario.start(), 40) is not None
    with pytest.raises(RetriesExhausted, match=r"step 40.*as before, with no checkpoint in"):
        hung(scenario.start(), 40)
    scenario = Scenario(most=1)
    assert hung(scenario.start(), 40) is not None
    with pytest.raises(RetriesExhausted, match=r"2 times .*max_failures = 1.*step 41"):
        hung(scenario.start(), 41)


def test_fault_33_all_ranks_ended_by_a_hang_count_as_one_failure():
    scenario = Scenario(most=1, replaced=3).start()
    for rank in (0, 1):
        scenario.words(rank, "hang", 40)
    shown = scenario.died(2)
    assert shown is not None
    assert shown["hung"]
    assert scenario.died(0, 1) is None


def test_surviving_workers_keep_running_unless_none_is_left():
    scenario = Scenario(replaced=3).start().saved(23)
    shown = scenario.died(1)
    assert shown is not None
    assert shown["message"].endswith(
        "; only its process is replaced (failure 1 of at most 3 in a row)"
    )
    shown = scenario.start(at=33, new=[1]).died(0, 1, 2)
    assert shown is not None
    assert "resuming from step 23 (failure 1 of" in shown["message"], "33 is not committed"


def test_steps_without_a_checkpoint_are_progress_if_workers_survive():
    scenario = Scenario(most=1, replaced=3).start()
    for step in range(10, 100, 10):
        assert scenario.died(1) is not None
        scenario.start(at=step, new=[1])
    assert scenario.died(1) is not None
    scenario.start(at=90, new=[1])
    with pytest.raises(RetriesExhausted):
        scenario.died(1)


def test_new_workers_that_fail_do_not_end_a_run_that_makes_progress() -> None:
    """Ranks 0 and 2 have continued without rank 1."""
    scenario = Scenario(most=1, replaced=3).start(ranks=(0, 2))
    for step in range(10, 60, 10):
        scenario.policy.take({"kind": "at", "step": step})
        texts = {1: KILLED.format(step)}
        assert not scenario.policy.stops_training(Died(texts, []))
        assert scenario.policy.take({"kind": "died", "texts": texts, "preempted": []}) is not None
    assert scenario.policy.stops_training(Died({2: "x"}, []))
    texts = {1: KILLED.format(60)}
    with pytest.raises(RetriesExhausted):
        scenario.policy.take({"kind": "died", "texts": texts, "preempted": []})


def test_fault_33_a_hang_is_reported_although_the_others_continued_before_ray_reports_it() -> None:
    scenario = Scenario(replaced=3).start()
    scenario.words(0, "hang", 40).start(at=39, new=[])
    shown = scenario.died(2)
    assert shown is not None
    assert shown["hung"]
    scenario.saved(41)
    assert scenario.died(1) is not None, "a failure of its own"


def test_fault_34_a_preemption_does_not_count_as_a_failure():
    scenario = Scenario(most=0)
    for _ in range(5):
        scenario.start()
        texts = {1: KILLED.format(scenario.starts)}
        shown = scenario.policy.take({"kind": "died", "texts": texts, "preempted": [1]})
        assert shown == {"kind": "preempted", "text": "n1 preempted (rank 1)"}


def test_fault_34_preempted_nodes_are_counted_when_ray_does_not_see_their_workers(
    monkeypatch: pytest.MonkeyPatch,
):
    scenario = Scenario(replaced=3)
    scenario.policy.most_preemptions = 1
    scenario.start()

    def preempted(*ranks: int) -> Event | None:
        texts = {rank: KILLED.format(next(numbers)) for rank in ranks}
        return scenario.policy.take({"kind": "died", "texts": texts, "preempted": [*ranks]})

    numbers = itertools.count()
    for _ in range(2):  # two workers of the same node
        assert preempted(1) == {"kind": "preempted", "text": "n1 preempted (rank 1)"}
    with pytest.raises(RetriesExhausted, match=r"max_preemptions allows: n2 preempted \(rank 2\)"):
        preempted(2)
    scenario.policy.most_preemptions = 2
    monkeypatch.setattr(failure_policy, "_TOGETHER_S", -1.0)
    with pytest.raises(RetriesExhausted, match=r"max_preemptions allows: n2 preempted"):
        preempted(2)  # it had returned


def test_fault_04_a_lost_node_is_named_although_its_peers_report_only_a_lost_connection():
    scenario = Scenario().start()
    scenario.words(0, "peer", 7, "RuntimeError").words(2, "peer", 7, "RuntimeError")
    texts = {0: "Connection closed by peer", 2: "Connection closed by peer"}
    shown = scenario.policy.take({"kind": "died", "texts": texts, "preempted": []})
    assert shown is not None
    assert shown["rank"] == 1
    assert "on n1 at step 7" in shown["message"]


def test_user_errors_and_our_own_errors_end_the_run_at_once():
    scenario = Scenario().start()
    event = {"kind": "failed", "start": "1", "rank": 0, "step": 1, "cause": "error"}
    said = {"error": "X", "message": "x", "status": 4}
    with pytest.raises(DataError, match=r"^x$"):
        scenario.policy.take({**event, **said, "traceback": ""})
    with pytest.raises(TaskError, match="at step 1 on n0, rank 0:\nTraceback") as caught:
        scenario.policy.take({**event, **said, "traceback": "Traceback"})
    assert caught.value.cause == {"rank": 0, "node": "n0", "step": 1, "error": "X"}


def test_fault_07_events_from_a_zombie_are_ignored():
    scenario = Scenario().start().start()
    old = {"kind": "failed", "start": "1", "rank": 0, "step": 1, "cause": "error", "status": 8}
    assert scenario.policy.take({**old, "error": "RunLockedError", "message": "x"}) is None
    assert scenario.policy.ended("the controller")["message"].startswith("the controller; ")


def test_a_start_that_dies_before_its_first_event_is_not_judged_by_older_events():
    scenario = Scenario()
    assert scenario.start().killed(1, 5) is not None
    shown = scenario.policy.take({"kind": "died", "texts": {1: "gone"}, "preempted": []})
    assert shown is not None
    assert "while starting; resuming from the start (failure 2 of" in shown["message"]


def test_a_failure_of_ray_train_itself_is_retried_and_counted():
    """For example, when the workers cannot form a group: Ray Train does not retry that."""
    scenario, why = (
        Scenario(most=2),
        "Training failed due to controller error:\nConnection refused\n",
    )
    reported = [scenario.policy.ended(why)["message"] for _ in range(2)]
    assert (
        reported[1]
        == "Connection refused; resuming from the start (failure 2 of at most 2 in a row)"
    )
    with pytest.raises(RetriesExhausted, match="Connection refused"):
        scenario.policy.ended(why)
    scenario.start().saved(7)
    assert "from step 7 (failure 1 of" in scenario.policy.ended(why)["message"]
    with pytest.raises(RetriesExhausted, match="max_preemptions"):
        scenario.policy.ended("Training was interrupted by node preemption")


def test_a_preemption_is_recognized_whatever_its_peers_reported():
    scenario = Scenario().start().words(1, "peer", 3, "RuntimeError")
    with pytest.raises(RetriesExhausted, match="max_preemptions"):
        scenario.policy.ended("Training was interrupted by node preemption")


def test_progress_after_a_start_from_an_older_checkpoint_counts_from_it():
    scenario = Scenario(most=1).start(at=100)
    assert scenario.killed(1, 105) is not None
    scenario.start(at=20).saved(30)  # the one of step 100 was damaged
    shown = scenario.killed(1, 35)
    assert shown is not None
    assert "resuming from step 30 (failure 1 of" in shown["message"]


def test_the_driver_gets_a_handle_to_the_controller_but_not_to_its_workers(
    monkeypatch: pytest.MonkeyPatch,
):
    import ray

    from raytrain_ddp.ray_backend.failure_callback import FailureCallback

    pushed: list[Any] = []
    mailbox = SimpleNamespace(push=SimpleNamespace(remote=pushed.extend))
    process = SimpleNamespace(get_actor_id=lambda: None, current_actor=None)
    monkeypatch.setattr(ray, "get_runtime_context", lambda: process)
    made = copy.copy(FailureCallback(mailbox, None))  # copied in the driver, too
    process.get_actor_id, process.current_actor = lambda: "c", "the controller"
    held = copy.copy(made)
    process.get_actor_id, process.current_actor = lambda: "w", "a worker"
    copy.copy(held)
    assert [event.actor for event in pushed] == ["the controller"]
    assert isinstance(pushed[0], ControllerStarted)


def test_the_base_of_a_resumed_run_is_known_before_its_workers():
    policy = FailurePolicy(3, committed=40)
    shown = policy.take({"kind": "died", "texts": {0: "gone"}, "preempted": []})
    assert shown is not None
    assert "resuming from step 40" in shown["message"]


# ------------------------------------------------------------------ capacity for workers


def layout(least: int, most: int) -> Layout:
    return Layout(least, most, True, {"CPU": 2, "GPU": 1}, "nccl")


def test_capacity_is_counted_per_node():
    nodes = [{"CPU": 4, "GPU": 4}, {"CPU": 1, "GPU": 1}, {"CPU": 64}, {"CPU": 64, "GPU": 1.0}]
    assert workers_that_fit(layout(1, 8), nodes) == 3
    assert workers_that_fit(layout(1, 8), []) == 0
    shared = Layout(1, 8, True, {"CPU": 1, "GPU": 0.1}, "gloo")
    assert workers_that_fit(shared, [{"CPU": 64, "GPU": 1}]) == 10


class FakeWaiting:
    """A Waiting whose clock and cluster are set by the test."""

    def __init__(self, least: int, most: int) -> None:
        self.now, self.nodes = 0.0, [{"CPU": 2, "GPU": 1}] * 3
        self.notes: list[Event] = []
        self.changes: list[float] = []
        self.waiting = CapacityWatch(
            layout(least, most),
            60,
            lambda: self.nodes,
            lambda: self.changes.append(self.now),
            to(self.notes),
            lambda: self.now,
            list,
        )

    def lacks(self) -> list[str]:
        """The reports of missing capacity."""
        return [note["text"] for note in self.notes if note["text"].startswith("waiting")]

    def run(self, seconds: float) -> None:
        until = self.now + seconds
        while self.now < until:
            self.now += 1
            self.waiting.look()


@pytest.mark.parametrize("joined", [False, True])
def test_fault_04_the_wait_for_missing_nodes_ends_at_its_time_limit(joined: bool):
    fake = FakeWaiting(3, 3)
    if joined:
        fake.waiting.take(Joined("1", 0, "n"))
    fake.run(20)
    fake.nodes.pop()
    fake.run(50)
    (lack,) = fake.lacks()
    assert "waiting up to 60 s: for 3 workers" in lack
    assert "room for 2" in lack
    with pytest.raises(PreflightError, match=r"scaling\.wait_s"):
        fake.run(20)


def test_fault_04_an_elastic_run_starts_with_fewer_nodes_and_any_run_with_new_ones_in_time():
    fake = FakeWaiting(1, 3)
    del fake.nodes[1:]
    fake.run(200)
    assert fake.lacks() == []
    fake = FakeWaiting(3, 3)
    for _ in range(3):
        node = fake.nodes.pop()
        fake.run(50)
        fake.nodes.append(node)
        fake.run(20)
    assert len(fake.lacks()) == 3


def test_surviving_workers_need_no_capacity_for_the_lost_ones() -> None:
    fake = FakeWaiting(3, 3)
    fake.waiting.least_left = 1
    fake.waiting.take(Alive(2))
    fake.nodes.pop()
    fake.run(500)
    assert fake.lacks() == []
    fake.waiting.take(Alive(0))
    with pytest.raises(PreflightError, match=r"scaling\.wait_s"):
        fake.run(100)


def test_a_node_change_is_reported_once_within_seconds():
    fake = FakeWaiting(1, 3)
    fake.run(30)
    fake.nodes.pop()
    fake.run(30)
    fake.nodes.append({"CPU": 2, "GPU": 1})
    fake.run(30)
    assert [round(at / 30) for at in fake.changes] == [1, 2]


def test_fault_42_workers_that_never_start_end_the_run_despite_free_capacity():
    fake = FakeWaiting(1, 3)
    with pytest.raises(PreflightError, match="has not started 1 to 3 workers in 480 s"):
        fake.run(600)
    fake = FakeWaiting(1, 3)
    fake.run(100)
    fake.waiting.take(Joined("1", 0, "n"))
    fake.run(2000)
    fake.waiting.lost()
    with pytest.raises(PreflightError, match="has not started"):
        fake.run(600)


def test_the_reason_for_a_slow_worker_start_is_reported_every_30_seconds():
    now, stopped = [0.0], ["pid 7 (ray::RayTrainWorker)"]
    nodes, notes = [{"CPU": 2.0, "GPU": 1.0}] * 3, list[str]()
    watch = CapacityWatch(
        layout(2, 3),
        60,
        lambda: nodes,
        lambda: None,
        lambda event: notes.append(event.text),
        lambda: now[0],
        lambda: stopped,
    )

    def wait(seconds: int) -> list[str]:
        notes.clear()
        for _ in range(seconds):
            now[0] += 1
            watch.look()
        return list(notes)

    first, _, third = wait(95)
    assert "has not started 2 to 3 workers yet, after 30 s; room for 3 on 3 node(s)" in first
    assert "after 90 s" in third
    assert "pid 7 (ray::RayTrainWorker) is stopped" in third
    for rank in (2, 0):
        watch.take(made({"kind": "joined", "start": "a", "rank": rank, "node": "n"}))
    (reported,) = wait(30)
    assert "started so far: rank 0, 2, after 12" in reported
    watch.take(made({"kind": "plan", "start_step": 0}))
    assert wait(500) == []
    watch.lost()  # both hosts, each with a worker, in the same second
    del nodes[1:]
    *_, last = wait(31)
    assert "has not started 2 to 3 workers yet, after 30 s; room for 1 on 1 node(s)" in last


@pytest.mark.skipif(sys.platform != "linux", reason="/proc")
def test_a_stopped_ray_worker_is_found_by_its_process_title():
    code = "exec -a ray::RayTrainWorker.run sleep 60"
    with subprocess.Popen(["bash", "-c", code]) as worker:
        reported = f"pid {worker.pid} (ray::RayTrainWorker.run)"
        try:
            title = Path(f"/proc/{worker.pid}/cmdline")
            deadline = time.monotonic() + 20
            while not title.read_bytes().startswith(b"ray::") and time.monotonic() < deadline:
                time.sleep(0.02)
            assert reported not in stopped_workers()
            worker.send_signal(signal.SIGSTOP)
            while reported not in stopped_workers():
                assert time.monotonic() < deadline
                time.sleep(0.02)
        finally:
            worker.kill()


def test_fault_54_time_while_the_process_is_suspended_does_not_count():
    """A driver that was suspended must not take the head's silence for its death."""
    code = (
        "import time; from raytrain_ddp.ray_backend.capacity_watch import AwakeClock\n"
        "awake, began = AwakeClock(), time.monotonic()\n"
        "print(flush=True)\n"
        "while time.monotonic() - began < 4: time.sleep(0.05)\n"
        "print(awake())"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        child.stdout.readline()
        child.send_signal(signal.SIGSTOP)
        time.sleep(4)
        child.send_signal(signal.SIGCONT)
        assert float(child.stdout.readline()) < 2.5


def test_fault_06_an_unresponsive_head_ends_the_run_within_a_time_limit(
    monkeypatch: pytest.MonkeyPatch,
):
    def silent() -> list[Mapping[str, float]]:
        raise ConnectionError("no GCS")

    monkeypatch.setattr(capacity_watch, "_ASK_EVERY_S", 0.01)
    monkeypatch.setattr(capacity_watch, "_HEAD_DEAD_AFTER_S", 0.3)
    monkeypatch.setattr(capacity_watch, "live_node_resources", lambda: [{"CPU": 1.0}])
    nodes = capacity_watch.LiveNodes()
    time.sleep(0.5)
    assert nodes() == [{"CPU": 1.0}]
    monkeypatch.setattr(capacity_watch, "live_node_resources", silent)
    time.sleep(0.5)
    with pytest.raises(RetriesExhausted, match=r"has not answered for 0\.3 s\. Committed"):
        nodes()
    nodes.close()


# ------------------------------------------------------------------ preemption


ONE = {"n1": [1]}


class FakeNotice:
    """A Notice with a fake clock and fake answers from Ray."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, every_s: float = 3.0) -> None:
        from raytrain_ddp.ray_backend import preemption

        self.now, self.said, self.notes = 1000.0, None, []
        clock = SimpleNamespace(monotonic=lambda: self.now, time=lambda: self.now + 5e8)
        monkeypatch.setattr(preemption, "time", clock)
        self.notice = preemption.Notice(every_s, to(self.notes))

    def drain(self, left_s: float | None, nodes: Mapping[str, list[int]] = ONE) -> None:
        deadline_ms = None if left_s is None else int(1e3 * (self.now + 5e8 + left_s))
        ranks = sorted(rank for ranks in nodes.values() for rank in ranks)
        self.said = SimpleNamespace(
            deadline_ms=deadline_ms, preempted_node_ids=sorted(nodes), preempted_ranks=ranks
        )

    def steps(self, seconds: float, each_s: float = 0.5) -> list[tuple[float, Any]]:
        """Runs steps as the training loop does; returns when each request occurred."""
        until, wished = self.now + seconds, []
        while self.now < until:
            requests = self.notice.requests()
            if requests.stop or requests.save:
                wished.append((self.now - 1000, requests))
            if requests.look:
                self.notice.look(self.said)
            self.now += each_s
        return wished


@pytest.mark.filterwarnings("ignore")
def test_fault_34_a_notice_saves_a_checkpoint_at_once_and_again_before_the_end(
    monkeypatch: pytest.MonkeyPatch,
):
    from raytrain_ddp.ray_backend.preemption import STOP

    taken = FakeNotice(monkeypatch)
    assert taken.steps(10) == []
    taken.drain(30)
    wished = taken.steps(29)
    saves = [at for at, requests in wished if requests.save]
    stops = [at for at, requests in wished if requests.stop]
    assert saves == [12.5]  # polled every 3 s
    assert stops[0] == 35.0  # 5 s before the end
    assert {requests.stop for _, requests in wished if requests.stop} == {STOP}
    assert STOP not in signal.valid_signals()  # 1, for one, is SIGHUP
    assert len(taken.notes) == 1
    assert "the node of rank 1 will be preempted in 28 s" in taken.notes[0]["text"]


@pytest.mark.filterwarnings("ignore")
def test_fault_34_the_margin_follows_the_slowest_commit_and_the_steps(
    monkeypatch: pytest.MonkeyPatch,
):
    taken = FakeNotice(monkeypatch)
    taken.notice.committed(6.0)
    taken.notice.committed(0.1)
    taken.drain(60)
    stops = [at for at, requests in taken.steps(60, each_s=2.0) if requests.stop]
    assert stops[0] == 60 - 2 * (6 + 2)


@pytest.mark.filterwarnings("ignore")
def test_fault_34_further_nodes_and_an_earlier_end_are_taken_into_account(
    monkeypatch: pytest.MonkeyPatch,
):
    taken = FakeNotice(monkeypatch)
    taken.drain(None)
    assert [requests.save for _, requests in taken.steps(20)] == [True]
    assert taken.notice.left_s() == pytest.approx(120, abs=20)
    taken.drain(20, {"n0": [0], "n1": [1]})
    wished = taken.steps(20)
    assert [requests.save for _, requests in wished].count(True) == 1
    assert next(at for at, requests in wished if requests.stop) == 35.0
    assert "rank 0, 1" in taken.notes[-1]["text"]


@pytest.mark.filterwarnings("ignore")
def test_preemption_notices_are_not_polled_on_a_local_ray(monkeypatch: pytest.MonkeyPatch):
    taken = FakeNotice(monkeypatch, every_s=0)
    taken.drain(30)
    assert taken.steps(40) == []


# ------------------------------------------------------------------ Ray's settings


@pytest.mark.parametrize(
    ("workers", "timeout_s", "expected"),
    [("2", "auto", "120"), ("1:2", "auto", "5"), ("2", 7, "7")],
)
def test_ray_timeouts_follow_the_config_and_are_restored_after_the_run(
    workers: str, timeout_s: Any, expected: str, monkeypatch: pytest.MonkeyPatch
):
    before = dict(os.environ)
    scaling = ScalingConfig(num_workers=workers, start_timeout_s=timeout_s)
    with applied_settings(ray_settings(TrainConfig(scaling=scaling), embedded=True)):
        assert os.environ["RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S"] == expected
        assert os.environ["RAY_TRAIN_ENABLE_PREEMPTION_WATCHER"] == "0"
    assert dict(os.environ) == before
    monkeypatch.setenv("RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S", "33")
    with applied_settings(ray_settings(TrainConfig(scaling=scaling), embedded=False)):
        assert os.environ["RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S"] == "33"
        assert "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER" not in os.environ
    assert os.environ["RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S"] == "33"


# ------------------------------------------------------------------ a destroyed process group


def reported_cause(rank: int, size: int, torn_down: bool) -> tuple[str, str]:
    """The cause that a rank reports for an error after Ray destroyed its group."""
    import torch
    import torch.distributed as dist

    reported: list[Any] = []
    mailbox = SimpleNamespace(push=SimpleNamespace(remote=reported.extend))
    dist.destroy_process_group()
    try:
        dist.all_reduce(torch.zeros(1))
    except Exception as error:
        with mock.patch("ray.get"):
            report_failure(WorkerSettings({}, ".", (), None, mailbox), rank, 7, error, torn_down)
        raised = type(error).__name__
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    return raised, reported[0].cause


@pytest.mark.filterwarnings("ignore")  # of Ray's import
def test_fault_01_a_rank_whose_group_ray_destroyed_blames_its_peers(
    workers: Group,
):
    assert workers(2, reported_cause, True) == [("ValueError", "peer")] * 2
    assert workers(2, reported_cause, False) == [("ValueError", "error")] * 2


# ------------------------------------------------------------------ no orphans


@pytest.mark.skipif(sys.platform != "linux", reason="Linux does it")
def test_fault_05_a_worker_that_misses_its_raylets_exit_ends_with_it():
    code = (
        "import os, time; from raytrain_ddp.ray_backend.worker_process import end_with_raylet\n"
        "if os.fork(): time.sleep(60)\n"
        "end_with_raylet(); print(flush=True); time.sleep(60)"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    parent.stdout.readline()  # both have started
    killed = time.monotonic()
    parent.kill()
    assert parent.stdout.read() == ""  # once the other end is closed
    assert time.monotonic() - killed < 20
    parent.wait()
    parent.stdout.close()


# ------------------------------------------------------------------ signals


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2"])
def test_fault_35_the_stop_signals_without_ray_also_stop_a_run_on_ray(name: str):
    """The last two are Slurm's warnings before a time limit."""
    number = signal.Signals[name]
    before = signal.getsignal(number)
    heard: list[int] = []
    with handling(heeded(), lambda n, _: heard.append(n)):
        os.kill(os.getpid(), number)
        deadline = time.monotonic() + 10
        while not heard and time.monotonic() < deadline:
            time.sleep(0.01)
    assert heard == [number]
    assert signal.getsignal(number) == before


def test_sighup_is_ignored_under_nohup():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    heard: list[int] = []
    try:
        with handling(heeded(), lambda n, _: heard.append(n)):
            os.kill(os.getpid(), signal.SIGHUP)
            assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
        assert signal.SIGHUP not in heeded()
    finally:
        signal.signal(signal.SIGHUP, before)
    assert heard == []


# ------------------------------------------------------------------ a full disk


full_disk = pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")


@full_disk
def test_fault_08_a_worker_log_on_a_full_disk_costs_no_message_and_no_step(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "rank-0.log").symlink_to("/dev/full")
    streams = sys.stdout, sys.stderr

    def task() -> None:
        with Tee(str(tmp_path / "logs"), 0):
            print("a line", flush=True)
            raise ValueError("its own")

    with pytest.raises(ValueError, match="its own"):
        task()
    assert (sys.stdout, sys.stderr) == streams
    assert capsys.readouterr().out == "a line\n"


def test_fault_08_a_worker_runs_without_a_log_if_none_can_be_created(tmp_path: Path):
    (tmp_path / "logs").write_text("in the way")
    with Tee(str(tmp_path / "logs"), 0):
        print("a line")


@full_disk
def test_fault_08_on_a_full_disk_only_rays_own_output_is_lost(tmp_path: Path):
    (tmp_path / "driver.log").symlink_to("/dev/full")
    with _LazyFile(tmp_path / "driver.log") as log:
        assert log.write("a line\n") == 7
        assert log.write("another\n") == 8


def test_output_of_other_threads_is_not_attributed_to_ray(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    began, ended = threading.Event(), threading.Event()

    def users() -> None:
        began.wait(20)
        print("the user's")
        print("also the user's", file=sys.stderr)
        ended.set()

    thread = threading.Thread(target=users)
    thread.start()
    with ray_output_to_file(open_storage(str(tmp_path))):
        began.set()
        assert ended.wait(20)
        print("from Ray")
        of_ray, own = "from a thread of Ray", "from a new one"
        for name, text in (("ray_print_logs", of_ray), ("ray-tune", "from Tune"), ("own", own)):
            late = threading.Thread(target=print, args=(text,), name=name)
            late.start()
            late.join()
    thread.join()
    assert capsys.readouterr() == ("the user's\nfrom a new one\n", "also the user's\n")
    assert (tmp_path / "logs/driver.log").read_text() == (
        "from Ray\nfrom a thread of Ray\nfrom Tune\n"
    )


def test_a_second_run_on_ray_in_another_thread_is_refused():
    with (
        cluster.only_one(),
        pytest.raises(PreflightError, match="already training on Ray"),
        cluster.only_one(),
    ):
        pass
    with cluster.only_one():  # it is over
        pass


# ------------------------------------------------------------------ the tests' own workers


def raises_with_a_model_at_hand(rank: int, size: int) -> None:
    import torch
    import torch.distributed as dist

    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))
    if rank == 1:
        raise ValueError("mine")
    del model
    dist.all_reduce(torch.zeros(1))


def test_a_rank_that_raises_releases_its_peers_at_once(workers: Group):
    workers(2, len_of_world)  # the processes have started
    began = time.monotonic()
    outcomes = workers.outcomes(2, raises_with_a_model_at_hand)
    assert time.monotonic() - began < 20  # a group times out after 30
    assert all(isinstance(outcome, Raised) for outcome in outcomes)
    assert outcomes[1].name == "ValueError"


def len_of_world(rank: int, size: int) -> int:
    return size
