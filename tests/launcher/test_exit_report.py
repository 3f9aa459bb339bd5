"""Who failed first, what is said of it, and the output of all ranks on a slow or closed console."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from processes import ROOT

from raytrain_ddp.launcher.exit_report import RankExit, failures, report_exit
from raytrain_ddp.launcher.output import Output
from raytrain_ddp.launcher.rank_environment import Placement, assign_ranks
from raytrain_ddp.launcher.run_options import RunFlags

WORKERS = assign_ranks([Placement(n, f"n{n}", f"10.0.0.{n}", f"w{n}") for n in range(3)])


def test_the_rank_that_raised_first_is_named_even_if_its_process_ends_last(
    capsys: pytest.CaptureFixture[str],
):
    output = Output(RunFlags(show="none"), WORKERS, None)
    output.take(0, "stderr", b"before\nRuntimeError: rank 0\n")
    trace = "Traceback (most recent call last):\n  File x\nValueError: rank 2\n"
    ends = {
        0: RankExit(1, 10.2),
        2: RankExit(-15, 10.6, asked=15, asked_at=10.5, raised=trace, raised_at=10.1),
        1: RankExit(-15, 11.0, asked=15, asked_at=10.5),
    }
    assert report_exit(ends, WORKERS, output) == 1
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].startswith("rank 2 failed first, on w2 (10.0.0.2): ")
    assert lines[3] == "  ValueError: rank 2"
    assert lines[-1] == (
        "the others: rank 0 exit status 1: RuntimeError: rank 0; "
        "rank 1 killed by SIGTERM (we sent SIGTERM)"
    )


def test_without_torchs_error_files_the_first_exit_counts_and_a_signal_of_ours_does_not():
    sent = {"asked": 15, "asked_at": 9.0}
    ends = {0: RankExit(-15, 9.1, **sent), 1: RankExit(3, 9.5), 2: RankExit(4, 9.4)}
    assert failures(ends) == [2, 1]
    ends = {0: RankExit(-15, 9.1, **sent, raised="late", raised_at=9.05), 1: RankExit(0, 9.0)}
    assert failures(ends) == []


def test_a_lost_node_is_the_cause_of_its_peers_errors(capsys: pytest.CaptureFixture[str]):
    ends = {
        0: RankExit(1, 10.0),
        1: RankExit(None, 15.0, lost="the node died"),
        2: RankExit(0, 9.0),
    }
    assert report_exit(ends, WORKERS, Output(RunFlags(), WORKERS, None)) == 7
    assert "rank 1 failed first, on w1 (10.0.0.1): lost: the node died" in capsys.readouterr().err


SLOW_CONSOLE = """
import os, sys
from raytrain_ddp.launcher.output import Output
from raytrain_ddp.launcher.rank_environment import Placement, assign_ranks
from raytrain_ddp.launcher.run_options import RunFlags
workers = assign_ranks([Placement(0, "n", "10.0.0.1", "w")])
stopped = lambda: os.path.exists("stopped")
with Output(RunFlags(), workers, None, stopped) as output:
    for n in range(20_000):
        output.take(0, "stdout", b"%d\\n" % n)
        if n == 10:
            print("began", file=sys.stderr, flush=True)
"""


def test_a_slow_console_gets_all_lines_and_a_blocked_one_does_not_prevent_a_stop(tmp_path: Path):
    for stopped in (False, True):
        with subprocess.Popen(
            [sys.executable, "-c", SLOW_CONSOLE],
            cwd=tmp_path,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        ) as process:
            assert process.stdout is not None
            assert process.stderr is not None
            assert process.stderr.readline() == "began\n"  # and has not read a line yet
            if stopped:
                (tmp_path / "stopped").touch()
            else:
                expected = [f"[rank 0] {n}" for n in range(20_000)]
                assert process.stdout.read().splitlines() == expected
            assert process.wait(20) == 0
