"""clusters/lan.yaml from its first command to its third, on three hosts and from a fourth."""

from __future__ import annotations

import re

import pytest
from cluster import Cluster


@pytest.mark.lab
@pytest.mark.timeout(900)
def test_the_default_run_is_watched_from_the_laptop_and_its_results_are_fetched(lan: Cluster):
    command = lan.train("--scaling.num-workers 3")
    assert command.wait(240) == 0, command
    steps = [(at, line) for at, line in command.lines if re.search(r"step +\d+/276", line)]
    assert len(steps) >= 12, command
    assert steps[-1][0] - steps[0][0] > 2, "lines come while it trains, not all at its end"
    assert "on 3 workers" in command.output()
    assert "digits: finished at step 276 of 276" in command.output()
    assert "3 local.cluster.node" in lan.laptop("ray exec clusters/lan.yaml 'ray status'")

    lan.laptop(
        f"mkdir results; ray rsync-down clusters/lan.yaml {lan.shared}/runs/digits/ results/"
    )
    here = lan.lab.home("laptop") / "project" / "results"
    assert (here / "curves.png").read_bytes() == (
        lan.shared / "runs" / "digits" / "curves.png"
    ).read_bytes()
    lan.take_down()
    for host in ("head", "w1", "w2"):
        assert lan.lab.processes(host) == [], host
