"""The command `chaos` with Ray, which replaces the workers that are killed.

A file of its own: files with Ray share one process, and the tests of test_chaos.py need none.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from raytrain_ddp.tools.chaos.__main__ import parse
from raytrain_ddp.tools.chaos.experiment import chaos
from raytrain_ddp.tools.chaos.fault_plan import DRIVER


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_fault_01_05_killed_workers_and_a_killed_driver_on_ray_leave_no_processes(tmp_path: Path):
    words = ("--epochs", "4", "--kills", "3", "--drivers", "2", "--storage", str(tmp_path))
    outcome = chaos(parse(words))
    assert outcome.equal, outcome.rows
    assert len(outcome.disturbed.fired) >= 0.99 * len(outcome.disturbed.plan)
    assert [fault.site for fault in outcome.disturbed.fired].count(DRIVER) == 2
    assert outcome.rows[-1].what == "processes left behind"
