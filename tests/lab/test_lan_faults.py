"""Faults of hosts and their links while three of them train; times as seen on the way."""

from __future__ import annotations

import threading
import time

import pytest
from cluster import Cluster, Run

# 9 s of the file's health checks, then Ray's and our own wait, and workers that import torch.
STANDSTILL_S = 90.0
WAITS = "waiting up to 150 s: for 2 to 3 workers"


def check_same_training(run: Run, undisturbed: Run) -> None:
    """Asserts equal samples in each step, and equal losses except for the order of summation."""
    ours, theirs = (
        [(each["step"], each["sha256"]) for each in of.history("audit")]
        for of in (run, undisturbed)
    )
    assert ours == theirs
    losses, expected = ([each["loss"] for each in of.history("train")] for of in (run, undisturbed))
    assert losses == pytest.approx(expected, rel=2e-4)


@pytest.mark.lab
@pytest.mark.timeout(900)
def test_fault_04_a_host_is_power_cycled_and_the_run_ends_with_the_same_bits(
    lan: Cluster, undisturbed: Run
):
    with lan.own("--scaling.num-workers 3 --scaling.wait-s 120") as run:
        run.wait_for_step(12)
        lan.lab.crash("w2")
        time.sleep(15)
        lan.lab.boot("w2")
        run.wait_for_start(2)
        run.finish()
    assert run.sizes() == [3, 3]
    assert len(run.events("failed")) == 1
    check_same_training(run, undisturbed)
    assert run.weights() == undisturbed.weights()


@pytest.mark.lab
@pytest.mark.timeout(900)
@pytest.mark.parametrize("workers", ["3 --exact", "2:3 --scaling.wait-s 150"])
def test_fault_04_63_the_rest_continues_after_two_hosts_power_off_in_the_same_second(
    lan: Cluster, workers: str
):
    """Ray Train's controller would end all workers.

    With 2:3, the remaining one waits for another one, reports it, and keeps its state.
    """
    with lan.own(f"--scaling.num-workers {workers}") as run:
        run.wait_for_step(12)
        off = time.time()
        both = [threading.Thread(target=lan.lab.crash, args=(host,)) for host in ("w1", "w2")]
        for each in both:
            each.start()
        for each in both:
            each.join()
        if "exact" in workers:
            run.wait_for_start(2)
            begin, end = run.standstill(off)
        else:
            run.wait_for("a word", lambda: any(WAITS in e["text"] for e in run.events("note")))
        for host in ("w1", "w2"):
            lan.lab.boot(host)
        again = run.wait_for("three", lambda: len(run.sizes()) > 1 and run.sizes()[-1] == 3)
        run.wait_for("a step of three", lambda: run.times(again))
        if "exact" not in workers:
            begin, end = run.standstill(off)
        run.finish()
    assert end - begin < STANDSTILL_S
    assert run.sizes()[0] == run.sizes()[-1] == 3
    assert all(event["replaced"] is not None for event in run.events("plan")[1:])
    failed = [event["message"] for event in run.events("failed")]
    assert 2 <= len(failed) <= 4
    assert all("only its process is replaced" in message for message in failed)
    assert [each["step"] for each in run.history("train")] == [*range(1, 361)]
