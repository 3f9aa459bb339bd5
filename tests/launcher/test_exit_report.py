"""Who failed first, what is said of it, and the output of all ranks on a slow or closed console."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from processes import ROOT

from raytrain_ddp.launcher.exit_report import RankExit, failure_report, first_failure
from raytrain_ddp.launcher.output import Output
from raytrain_ddp.launcher.rank_environment import Placement, assign_ranks

WORKERS = assign_ranks([Placement(n, f"n{n}", f"10.0.0.{n}", f"w{n}") for n in range(3)])


def reported(output: Output, rank: int, text: str, at: float) -> None:
    output.take(rank, "stderr", f"{text}\n".encode(), at)


def same_clock(ranks: Sequence[int]) -> dict[int, float]:
    return {}


TRACEBACK = "Traceback (most recent call last):\n  File x\nValueError: rank {}"


def test_the_rank_that_raised_first_is_named_even_if_its_process_ends_last():
    output = Output(lambda rank, stream: False, None)
    reported(output, 2, "before\n" + TRACEBACK.format(2), at=10.0)
    reported(output, 0, TRACEBACK.format(0), at=10.1)
    ends = {0: RankExit(1, 10.2), 2: RankExit(1, 10.6), 1: RankExit(-15, 11.0, asked="SIGTERM")}
    assert first_failure(ends, output, same_clock) == 2
    text = failure_report(2, ends, WORKERS, output)
    assert text.splitlines()[0] == "rank 2 failed first, on w2 (10.0.0.2): exit status 1"
    assert "ValueError: rank 2" in text
    assert "before" not in text
    assert "ValueError: rank 0" not in text
    assert text.splitlines()[-1] == (
        "the others: rank 0 exit status 1; rank 1 killed by SIGTERM (we sent SIGTERM)"
    )


def test_clock_offsets_are_applied_when_ordering_failures():
    """Rank 1's clock is 100 s ahead; rank 0 was asked to end, so its exit is no evidence."""
    output = Output(lambda rank, stream: False, None)
    ends = {0: RankExit(-15, 1.0, asked="SIGTERM"), 1: RankExit(3, 109.5), 2: RankExit(4, 10.0)}
    assert first_failure(ends, output, lambda ranks: {1: 100.0, 2: 0.0}) == 1
    assert first_failure(ends, output, lambda ranks: {1: 99.0, 2: 0.0}) == 2
    assert first_failure(ends, output, lambda ranks: {1: 99.0}) == 1  # it is unknown for rank 2


def test_a_lost_node_is_the_cause_of_its_peers_errors():
    output = Output(lambda rank, stream: False, None)
    ends = {
        0: RankExit(1, 10.0),
        1: RankExit(None, 15.0, lost="the node died"),
        2: RankExit(0, 9.0),
    }
    assert first_failure(ends, output, same_clock) == 1
    assert ends[1].exit_status == 7
    assert "lost: the node died" in failure_report(1, ends, WORKERS, output)


SLOW_CONSOLE = """
import os, sys
from raytrain_ddp.launcher.output import Output
with Output(lambda rank, stream: True, None, hurried=lambda: os.path.exists("hurry")) as output:
    for n in range(20_000):
        output.take(0, "stdout", b"%d\\n" % n, 0.0)
    print("behind" if output.behind else "", file=sys.stderr, flush=True)
"""


def test_a_slow_console_blocks_no_rank_and_gets_all_lines_unless_the_process_is_stopped(
    tmp_path: Path,
):
    for stopped in (False, True):
        with console_of(SLOW_CONSOLE, tmp_path) as process:
            assert process.stderr.readline() == "behind\n"  # and has not read a line yet
            if stopped:
                (tmp_path / "hurry").touch()
            else:
                expected = [f"[rank 0] {n}" for n in range(20_000)]
                assert process.stdout.read().splitlines() == expected
            assert process.wait(20) == 0


def console_of(script: str, folder: Path) -> Any:
    """A process whose console is a pipe that the test reads when it wants to."""
    return subprocess.Popen(
        [sys.executable, "-c", script],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
