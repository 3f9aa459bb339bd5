"""How worker failures are handled: the policy receives events, and no Ray is started."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from event_records import event as made
from event_records import record

from raytrain_ddp.errors import RetriesExhausted
from raytrain_ddp.events import Died
from raytrain_ddp.ray_backend import failure_policy
from raytrain_ddp.ray_backend.failure_causes import is_ended_for_memory

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
        self, at: int | None = 0, new: Sequence[int] | None = None, ranks: Sequence[int] = (0, 1, 2)
    ) -> Scenario:
        self.starts += 1
        for rank in ranks:
            event = {"kind": "joined", "start": f"{self.starts}", "rank": rank, "node": f"n{rank}"}
            assert self.policy.take(event) is None
        if at is None:  # killed before there was a plan
            return self
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
        for_memory = [rank for rank in texts if is_ended_for_memory(texts[rank])]
        died = {"kind": "died", "texts": texts, "preempted": [], "for_memory": for_memory}
        return self.policy.take(died)

    def saved(self, step: int) -> Scenario:
        assert self.policy.take({"kind": "checkpoint", "step": step, "seconds": 0.1}) is None
        return self


def numbers(event: Event | None) -> tuple[Any, ...]:
    """The rank, the step, where the run resumes (None: the others go on), and the count of failures
    in a row, as shown."""
    assert event is not None
    text = event["message"]
    resumes = re.search(r"resuming from (?:step (\d+)|the start)", text)
    place = int(resumes[1] or 0) if resumes else None
    count = re.search(r"failure (\d+) of at most \d+", text)
    assert count is not None
    return event["rank"], event["step"], place, int(count[1])


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
    assert numbers(shown) == (1, 33, 23, 1)
    assert shown is not None
    assert shown["node"] == "n1"


def test_one_death_counts_once_however_often_ray_reports_it():
    scenario = Scenario().start()
    assert scenario.killed(1, 5) is not None
    assert scenario.killed(1, 5) is None


def test_scaling_max_failures_consecutive_failures_end_the_run():
    scenario = Scenario(most=2)
    for count, step in enumerate((5, 9)):
        assert numbers(scenario.start().killed(rank=1, step=step)) == (1, step, 0, count + 1)
    with pytest.raises(RetriesExhausted, match=r"max_failures") as caught:
        scenario.start().killed(rank=1, step=7)
    assert caught.value.exit_status == 7
    cause = {name: caught.value.cause[name] for name in ("rank", "node", "step")}
    assert cause == {"rank": 1, "node": "n1", "step": 7}
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("steps", [(5, 5), (5, 4, 5, 4)], ids=["in a row", "others in between"])
def test_fault_48_three_deaths_of_a_rank_at_the_same_step_end_the_run(steps: Sequence[int]):
    """Two may be a coincidence if something outside kills workers. On a busy machine the step at
    which a rank died is known only roughly."""
    scenario = Scenario(most=100)
    for step in steps:
        assert scenario.start(at=3).killed(rank=1, step=step) is not None
    with pytest.raises(RetriesExhausted, match="step 5"):
        scenario.start(at=3).killed(rank=1, step=5)


def test_fault_48_the_same_error_at_the_same_step_twice_ends_the_run_at_once():
    scenario, texts = Scenario(most=100), {0: "OSError: so", 1: "gloo"}

    def failed() -> Event | None:
        scenario.start().words(1, "peer", 5).words(0, "outside", 5)
        return scenario.policy.take({"kind": "died", "texts": texts, "preempted": []})

    assert numbers(failed())[:2] == (0, 5)
    with pytest.raises(RetriesExhausted, match=r"rank 0 .*OSError: so.* n0 .*step 5"):
        failed()


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


def test_fault_25_a_worker_ended_by_rays_memory_monitor_is_replaced_once():
    why = "NODE_OUT_OF_MEMORY Worker exit detail: the node was running low on memory"
    scenario = Scenario(most=100)
    shown = scenario.start().killed(rank=1, step=5, why=why)
    assert shown is not None
    assert "memory" in shown["message"]
    with pytest.raises(RetriesExhausted, match=r"--micro-batch.*--data\.prefetch-mib"):
        scenario.start().killed(rank=2, step=9, why=why)


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
    assert numbers(shown) == (None, 40, 23, 1)
    assert "rank 2 (n2) did not enter the all-reduce of step 40" in shown["message"]


def test_fault_33_48_hangs_at_the_same_step_twice_or_too_often_end_the_run():
    scenario = Scenario()
    assert hung(scenario.start(), 40) is not None
    with pytest.raises(RetriesExhausted, match=r"step 40"):
        hung(scenario.start(), 40)
    scenario = Scenario(most=1)
    assert hung(scenario.start(), 40) is not None
    with pytest.raises(RetriesExhausted, match=r"max_failures.*step 41"):
        hung(scenario.start(), 41)


def test_surviving_workers_keep_running_unless_none_is_left():
    scenario = Scenario(replaced=3).start().saved(23)
    assert numbers(scenario.died(1))[2:] == (None, 1)
    assert numbers(scenario.start(at=33, new=[1]).died(0, 1, 2))[2:] == (23, 1), "not committed"


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


def test_fault_34_a_preemption_does_not_count_as_a_failure():
    scenario = Scenario(most=0)
    for number in range(3):
        died = {"kind": "died", "texts": {1: KILLED.format(number)}, "preempted": [1]}
        shown = scenario.start().policy.take(died)
        assert shown is not None
        assert shown["kind"] == "preempted"


def test_fault_07_events_from_a_zombie_are_ignored():
    scenario = Scenario().start().start()
    old = {"kind": "failed", "start": "1", "rank": 0, "step": 1, "cause": "error", "status": 8}
    assert scenario.policy.take({**old, "error": "RunLockedError", "message": "x"}) is None
    assert "x" not in scenario.policy.ended("the controller")["message"].split(";")[0]


def test_a_failure_of_ray_train_itself_is_retried_and_counted():
    """For example, when the workers cannot form a group: Ray Train does not retry that."""
    scenario = Scenario(most=2)
    why = "Training failed due to controller error:\nConnection refused\n"
    assert [numbers(scenario.policy.ended(why))[2:] for _ in range(2)] == [(0, 1), (0, 2)]
    with pytest.raises(RetriesExhausted, match="Connection refused"):
        scenario.policy.ended(why)
    scenario.start().saved(7)
    assert numbers(scenario.policy.ended(why))[2:] == (7, 1)
