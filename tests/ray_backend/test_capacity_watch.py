"""Waiting for nodes and workers, notices of preemption, and clocks; without Ray."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest
from event_records import to

from raytrain_ddp.errors import PreflightError
from raytrain_ddp.events import Alive, Joined
from raytrain_ddp.ray_backend import ray_membership
from raytrain_ddp.ray_backend.capacity_watch import CapacityWatch
from raytrain_ddp.ray_backend.mailbox import Draining
from raytrain_ddp.ray_backend.placement import Layout
from raytrain_ddp.ray_backend.ray_membership import STOP, Notice

Event = Mapping[str, Any]


def layout(least: int, most: int) -> Layout:
    return Layout(least, most, True, {"CPU": 2, "GPU": 1}, "nccl")


class FakeWaiting:
    """A Waiting whose clock and cluster are set by the test."""

    def __init__(self, least: int, most: int, least_left: int = 0) -> None:
        self.now, self.nodes = 0.0, [{"CPU": 2, "GPU": 1}] * 3
        self.notes: list[Event] = []
        nodes, now = (lambda: self.nodes), (lambda: self.now)
        self.waiting = CapacityWatch(
            layout(least, most), 60, nodes, to(self.notes), now, least_left
        )

    def lacks(self) -> list[str]:
        """The reports of missing capacity."""
        return [note["text"] for note in self.notes if "waiting up to" in note["text"]]

    def run(self, seconds: float) -> None:
        until = self.now + seconds
        while self.now < until:
            self.now += 1
            self.waiting.look()


def test_fault_04_the_wait_for_missing_nodes_ends_at_its_time_limit():
    fake = FakeWaiting(3, 3)
    fake.waiting.take(Joined("1", 0, "n"))
    fake.run(20)
    fake.nodes.pop()
    fake.run(50)
    (lack,) = fake.lacks()
    assert {"60", "3", "2"} <= {*lack.replace(":", " ").split()}  # seconds, wanted, room for
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
    fake = FakeWaiting(3, 3, least_left=1)
    fake.nodes.pop()
    for alive in (2, 1):
        fake.waiting.take(Alive(alive))
        fake.run(200)
    assert fake.lacks() == []
    fake.waiting.take(Alive(0))
    with pytest.raises(PreflightError, match=r"scaling\.wait_s"):
        fake.run(100)


def test_fault_42_workers_that_never_start_end_the_run_despite_free_capacity():
    fake = FakeWaiting(1, 3)
    with pytest.raises(PreflightError, match="1 to 3 workers"):
        fake.run(600)
    fake = FakeWaiting(1, 3)
    fake.run(100)
    fake.waiting.take(Joined("1", 0, "n"))
    fake.run(2000)
    fake.waiting.lost()
    with pytest.raises(PreflightError):
        fake.run(600)


ONE = {"n1": [1]}


class FakeNotice:
    """A Notice with a fake clock and fake answers from Ray."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, every_s: float = 3.0) -> None:
        self.now, self.said, self.notes = 1000.0, None, []
        clock = SimpleNamespace(monotonic=lambda: self.now, time=lambda: self.now + 5e8)
        monkeypatch.setattr(ray_membership, "time", clock)
        self.notice = Notice(every_s, to(self.notes))

    def drain(self, left_s: float | None, nodes: Mapping[str, list[int]] = ONE) -> None:
        deadline_ms = None if left_s is None else int(1e3 * (self.now + 5e8 + left_s))
        ranks = sorted(rank for ranks in nodes.values() for rank in ranks)
        self.said = Draining(deadline_ms, sorted(nodes), ranks)

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


def test_fault_34_a_notice_saves_a_checkpoint_at_once_and_again_before_the_end(
    monkeypatch: pytest.MonkeyPatch,
):
    taken = FakeNotice(monkeypatch)
    assert taken.steps(10) == []
    taken.drain(30)
    wished = taken.steps(29)
    saves = [at for at, requests in wished if requests.save]
    stops = [at for at, requests in wished if requests.stop]
    assert saves == [12.5]  # polled every 3 s
    assert stops[0] == 35.0  # 5 s before the end
    assert {requests.stop for _, requests in wished if requests.stop} == {STOP}
    assert len(taken.notes) == 1
    assert "rank 1 " in taken.notes[0]["text"]


def test_fault_34_further_nodes_and_an_earlier_end_are_taken_into_account(
    monkeypatch: pytest.MonkeyPatch,
):
    taken = FakeNotice(monkeypatch)
    taken.notice.committed(6.0)
    taken.notice.committed(0.1)
    taken.drain(None)
    assert [requests.save for _, requests in taken.steps(20)] == [True]
    assert taken.notice.left_s() == pytest.approx(120, abs=20)
    taken.drain(20, {"n0": [0], "n1": [1]})
    wished = taken.steps(20)
    assert [requests.save for _, requests in wished].count(True) == 1
    assert next(at for at, requests in wished if requests.stop) == 27.0  # of 40
    assert "rank 0, 1" in taken.notes[-1]["text"]


@pytest.mark.slow
def test_fault_54_time_while_the_process_is_suspended_does_not_count():
    """A driver that was suspended must not take the head's silence for its death."""
    code = (
        "import time; from raytrain_ddp.membership.roster import CallClock\n"
        "awake, began = CallClock(), time.monotonic()\n"
        "print(flush=True)\n"
        "while time.monotonic() - began < 4: awake(); time.sleep(0.05)\n"
        "print(awake())"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        child.stdout.readline()
        child.send_signal(signal.SIGSTOP)
        time.sleep(4)
        child.send_signal(signal.SIGCONT)
        assert float(child.stdout.readline()) < 2.5
