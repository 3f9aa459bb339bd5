"""The display: formatting, the plain lines, and the live block as a terminal receives it."""

from __future__ import annotations

import io
import math
import os
import re
import subprocess
import sys
from typing import Any

import pytest
from event_records import event
from rich.console import Console

from raytrain_ddp.config.train_config import TrainConfig
from raytrain_ddp.driver.result import FitResult
from raytrain_ddp.tools import formatting
from raytrain_ddp.tools.display import progress_display
from raytrain_ddp.tools.display.terminal import terminal

PLAN = {
    **{"kind": "plan", "run": "digits", "start_step": 0, "total_steps": 276, "epochs": 12},
    **{"steps_per_epoch": 23, "batch_size": 64, "slots": 4, "micro_batch": 16, "world_size": 2},
    **{"device": "cpu", "parameters": 12345, "train_samples": 1437, "eval_samples": 360},
    "resumed_from": None,
}
CONTROL = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]")
RESULT = FitResult(
    status="finished",
    step=276,
    total_steps=276,
    monitor="top1",
    best={"loss": 0.05, "top1": 0.9889, "step": 253},
    last={"loss": 0.04, "top1": 0.9861, "step": 276},
    path=f"/long/{'x' * 90}/digits",
    best_checkpoint=None,
    last_checkpoint=None,
    history=[{"kind": "train", "step": 10, "timing": {"split_s": {"data": 38, "compute": 62}}}],
    seconds={"start-up": 4.21, "training": 12.0, "total": 75.0},
)
CONFIG = TrainConfig(name="digits")
LIMIT = (
    "waits for data 38 % of the time: more scaling.cpus_per_worker, smaller images (convert), less "
    "augmentation"
)


def train(step: int, **changes: object) -> dict[str, object]:
    line = {"kind": "train", "step": step, "epoch": (step - 1) // 23, "loss": 1.0, "lr": 0.05}
    split_s = {"data": 0.012, "compute": 0.088}
    timing = {"step_s": 0.1, "split_s": split_s, "peak_memory_bytes": 900 * 2**20}
    return line | {"samples_per_s": 812.0, "timing": timing, "seconds": step / 10} | changes


def evaluation(step: int, *, best: bool = True) -> dict[str, object]:
    metrics = {"loss": 0.4, "top1": 0.97222, "top5": 1.0}
    known = {"kind": "eval", "step": step, "epoch": (step - 1) // 23, "metrics": metrics}
    return known | {"seconds": 0.3, "best": best, "monitor": "top1"}


class Display(progress_display.Display):
    """Takes records; its clock is set by tests; `said` is what the stream has got."""

    def __init__(self, live: bool, width: int = 80, color: Any = None, tty: bool = False) -> None:
        self.now, self.stream = 100.0, io.StringIO()
        forced = True if live or tty else None
        self.console = Console(
            file=self.stream, force_terminal=forced, width=width, height=30, color_system=color
        )
        super().__init__(self.console, live, lambda: self.now)

    def take(self, *records: dict[str, object]) -> None:
        for record in records:
            self.handle(event(record))

    @property
    def said(self) -> str:
        return CONTROL.sub("", self.stream.getvalue())

    def drawn(self) -> list[str]:
        """The lines of the live block."""
        with self.console.capture() as captured:
            self.console.print(self.block())
        return CONTROL.sub("", captured.get()).rstrip("\n").split("\n")

    def steps(self) -> list[int]:
        return [int(step) for step in re.findall(r"step +(\d+)/276  loss", self.said)]


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NO_COLOR", "FORCE_COLOR", "COLUMNS", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)


def test_numbers_are_formatted():
    seconds = {0: "0.00 s", 0.994: "0.99 s", 0.996: "1.0 s", 9.96: "10 s", 59.6: "1m00s"}
    seconds |= {725: "12m05s", 3599.6: "1h00m", 11520: "3h12m", 183600: "51h00m"}
    counts = {3.21: "3.2", 7: "7", 812.4: "812", 9999.7: "10,000", 25557032: "25,557,032"}
    assert {n: formatting.format_seconds(n) for n in seconds} == seconds
    assert {n: formatting.format_count(n) for n in counts} == counts
    for name, value, text in [
        ("loss", 0.4, "0.4000"),
        ("loss", 123456.0, "1.235e+05"),
        ("loss", math.nan, "nan"),
        ("eval/top5", 1.0, "100.0 %"),
        ("accuracy", 0.5, "50.00 %"),
        ("top1", 97.2, "97.20"),  # already a percentage of the user's
        ("stop1", 0.5, "0.5000"),
    ]:
        assert formatting.format_metric(name, value) == text


def test_plain_lines_look_like_a_log():
    shown = Display(live=False)
    with shown:
        shown.take({"kind": "phase", "name": "starting Ray"})
        shown.now += 2.1
        shown.take({"kind": "phase", "name": "placing 2 workers"})
        shown.now += 1.3
        shown.take(PLAN, train(10, loss=1.2345678), {"kind": "checkpoint", "step": 10, "name": "c"})
        shown.take(evaluation(23), evaluation(46, best=False), {"kind": "note", "text": "slow"})
        shown.take({"kind": "at", "step": 3}, {"kind": "died", "texts": {}})  # not for people
    assert shown.said.splitlines() == [
        " 0.00 s  starting Ray",
        "  2.1 s  placing 2 workers",
        "  3.4 s  64 = 4 slots x 16, on 2 workers; 1437 samples, 23 steps an epoch, 276 in all",
        "  3.4 s  digits: 12 epochs on cpu, 12,345 parameters, 360 samples to evaluate",
        "  3.4 s  epoch  1/12  step  10/276  loss 1.235  lr 0.05000  812 samples/s  "
        "data 12 %  27 s left",
        "  3.4 s  epoch  1/12  step  23/276  eval  loss 0.4000  top1 97.22 %  top5 100.0 %  * best",
        "  3.4 s  epoch  2/12  step  46/276  eval  loss 0.4000  top1 97.22 %  top5 100.0 %",
        "  3.4 s  note: slow",
    ]


def test_plain_training_lines_are_two_seconds_apart_and_end_each_epoch():
    shown = Display(live=False)
    shown.take(PLAN)
    for step in range(1, 21):
        shown.take(train(step))
        shown.now += 0.5
    assert shown.steps() == [1, 5, 9, 13, 17]
    shown = Display(live=False)
    shown.take(PLAN, *(train(step) for step in (10, 20, 23)))
    assert shown.steps() == [10, 23]
    shown.take(*(train(step) for step in (30, 40, 50, 60)))  # 46 is not among them
    assert shown.steps() == [10, 23, 40]
    shown.take(evaluation(69))  # before which held-back lines are printed
    assert shown.steps() == [10, 23, 40, 60]
    shown.take(train(70), train(75))
    with shown:
        pass
    assert shown.steps()[-1] == 75


@pytest.mark.parametrize(
    ("plan", "reported"),
    [
        ({}, "restarted with 2 workers (before: 2) after step 115 of 276, 22 steps again"),
        ({"replaced": [0, 1]}, "ranks 0 and 1 replaced; continuing after step 115 of 276\n"),
        (
            {"replaced": [2], "world_size": 4},
            "grew from 2 to 4 workers after step 115 of 276, nothing repeated\n",
        ),
        ({"replaced": []}, "continuing with 2 workers after step 115 of 276\n"),
    ],
)
def test_a_restart_is_reported_in_one_line(plan: dict[str, Any], reported: str):
    """With the steps after the last line of a dead worker."""
    for shown in (Display(live=False, width=200), Display(live=True, width=200)):
        with shown:
            shown.take(PLAN, train(130))
            shown.take({"kind": "failed", "rank": 1, "step": 137, "message": "was killed"})
            shown.take(PLAN | {"start_step": 115} | plan, evaluation(138))
        assert shown.said.count(reported) == 1
        assert shown.said.count("4 slots x 16") == 1
        assert "epoch  6/12  step 138/276  eval" in shown.said


def test_failures_show_rank_message_and_traceback_without_control_codes():
    shown = Display(live=False, color="truecolor", tty=True)
    trace = 'Traceback (most recent call last):\n  File "task.py", line 3\nValueError: [bold]no\n'
    colored = trace.replace("ValueError", "\x1b[31mValueError\x1b[0m")
    shown.take({"kind": "failed", "rank": 1, "message": "ValueError: no", "traceback": colored})
    shown.take({"kind": "failed", "rank": None, "message": "no worker left", "traceback": ""})
    assert shown.stream.getvalue() == (
        f" 0.00 s  rank 1 failed: ValueError: no\n{trace} 0.00 s  failed: no worker left\n"
    )


def test_the_summary_states_how_the_run_ended_and_breaks_no_path_or_command():
    shown = Display(live=False)
    shown.summary(CONFIG, RESULT, " --local")
    lines = shown.said.splitlines()
    assert lines[:6] == [
        "",
        "digits: finished at step 276 of 276",
        "  best               step 253  top1 98.89 %  loss 0.05000",
        "  last               step 276  top1 98.61 %  loss 0.04000",
        "  time               start-up 4.2 s  training 12 s  total 1m15s",
        f"  training           {LIMIT}",
    ]
    more = {line[:19].strip(): line[19:].strip() for line in lines[6:]}
    assert {"curves", "metrics", "evaluate", "predict", "report"} < {*more}
    assert more["evaluate"] == f"python -m raytrain_ddp.evaluate {RESULT.path}"
    assert more["train longer"].endswith(" --local --epochs 24")
    for width in (40, 80):
        shown = Display(live=True, width=width)
        with shown:
            shown.summary(CONFIG, RESULT, " --local")
        lines = [line.strip() for line in shown.said.splitlines()]
        assert all(any(line.endswith(text) for line in lines) for text in more.values())
        assert LIMIT in " ".join(" ".join(lines).split())
        assert all(len(line) <= width for line in lines if "/long" not in line)


def test_a_live_phase_leaves_a_line_with_its_duration():
    shown = Display(live=True)
    shown.take({"kind": "phase", "name": "starting Ray"})
    shown.now += 2.1
    assert shown.drawn()[0].endswith(" starting Ray  2.1 s")
    shown.take({"kind": "phase", "name": "placing 2 workers"})
    assert "  starting Ray  2.1 s\n" in shown.said
    assert "placing 2 workers" in shown.drawn()[0]
    shown.take(PLAN)
    assert "placing" not in "".join(shown.drawn())


def test_the_live_block_shows_progress_speed_and_time_left():
    shown = Display(live=True)
    shown.take(PLAN | {"unit": "images"}, train(60))
    shown.take({"kind": "checkpoint", "step": 46, "name": "c"}, train(69))
    shown.now += 5.7
    bar, *cells = shown.drawn()
    assert bar.endswith("  25 %  5.7 s")
    limit = next(n for n, line in enumerate(cells) if line.startswith("waits for data 12 % of"))
    assert " ".join("\n".join(cells[limit:]).split()).endswith("(convert), less augmentation")
    assert [c for line in cells[:limit] for c in re.split(r"  +(?!\d+/)", line.strip())] == [
        *("epoch  3/12", "step  69/276", "loss 1.000", "lr 0.05000", "812 images/s"),
        *("compute 88 %", "data 12 %", "memory 900 MiB", "15 s left", "saved step 46"),
    ]
    assert "loss" not in shown.said  # training lines are in the block only
    for step, loss, text in ((70, 2.0, "1.300"), (71, math.nan, "nan"), (72, 3.0, "3.000")):
        shown.take(train(step, loss=loss))  # smoothed, except for nan
        assert f"loss {text} " in " ".join(shown.drawn())
    shown.take(PLAN | {"start_step": 276, "total_steps": 138, "epochs": 6})  # fewer are wanted now
    assert "100 %" in shown.drawn()[0]
    assert shown.drawn()[1].startswith("epoch 6/6 ")


def test_time_left_includes_pauses_and_is_reset_when_workers_change():
    shown = Display(live=True)

    def left() -> list[str]:
        return re.findall(r"\S+(?: s)?(?= left)", " ".join(shown.drawn()))

    shown.take(PLAN, train(20, seconds=2.0))
    assert left() == ["26 s"]  # 256 steps at 0.1 s
    shown.take(evaluation(23) | {"seconds": 4.0}, {"kind": "pause", "seconds": 2.0})
    shown.take(train(40, seconds=10.0))
    assert left() == ["59 s"]  # 236 steps at 0.1 s, and 6 s of pauses in 40 steps
    shown.take(PLAN | {"start_step": 23})
    assert left() == []
    shown.take(train(30, seconds=900.0), train(40, seconds=902.0))
    assert left() == ["47 s"]
    shown.take(train(276, seconds=1000.0))
    assert left() == []


@pytest.mark.parametrize("width", [20, 40, 60, 80, 100, 200])
def test_the_live_block_fits_the_terminal_and_keeps_its_shape(width: int):
    shown = Display(live=True, width=width)
    shown.take(PLAN)
    shapes = set()
    for step, changes in ((69, {}), (230, {"samples_per_s": 123456.7, "lr": 1e-7, "loss": 1e9})):
        shown.take(train(step, **changes), {"kind": "checkpoint", "step": step, "name": "c"})
        assert all(len(line) <= width for line in shown.drawn())
        shapes.add(len(shown.drawn()))
    assert len(shapes) == 1


def test_the_live_block_is_erased_at_the_end():
    shown = Display(live=True)
    with shown:
        shown.take({"kind": "phase", "name": "starting Ray"}, PLAN, train(69))
        shown.take({"kind": "note", "text": "hello"}, evaluation(69))
    out = shown.stream.getvalue()
    assert out.rindex("\x1b[?25h") > out.rindex("\x1b[?25l")  # the cursor was hidden, and is back
    assert out.rindex("\x1b[2K") > out.rindex("━")
    assert "note: hello\n" in shown.said
    last = "epoch  3/12  step  69/276  eval  loss 0.4000  top1 97.22 %  top5 100.0 %  ★"
    assert last in shown.said.splitlines()


@pytest.mark.parametrize(
    ("encoding", "tty", "expected"),
    [("utf-8", True, True), ("utf-8", False, False), ("ascii", True, False)],
)
def test_the_live_block_needs_a_capable_terminal(encoding: str, tty: bool, expected: bool):
    class Terminal(io.TextIOWrapper):
        def isatty(self) -> bool:
            return tty

    stream = Terminal(io.BytesIO(), encoding=encoding)
    console = Console(file=stream, force_terminal=True, _environ={"TERM": "xterm"})
    with progress_display.Display(console) as shown:
        shown.handle(event({"kind": "note", "text": "5 → 6"}))  # not ASCII, which must not raise
    stream.flush()
    out = stream.buffer.getvalue().decode(encoding)  # type: ignore[attr-defined]
    assert ("\x1b[?25l" in out) is expected
    assert ("5 → 6" if encoding == "utf-8" else "5 ? 6") in out


def test_a_terminal_without_a_width_has_one(monkeypatch: pytest.MonkeyPatch):
    for columns, width in (("0", 80), ("5", 20), ("90", 90)):
        monkeypatch.setenv("COLUMNS", columns)
        assert terminal(file=io.StringIO()).width == width


def test_training_continues_when_the_reader_of_the_pipe_exits_and_loads_neither_torch_nor_ray():
    """Ctrl-C ends tee first in ``fit | tee log``: the run still has a checkpoint to write."""
    script = (
        "import sys; from raytrain_ddp.tools.display.progress_display import Display\n"
        "from raytrain_ddp.events import Note\n"
        "with Display() as display:\n"
        "    for n in range(20000): display.handle(Note('x' * 50))\n"
        "heavy = {'torch', 'ray', 'numpy', 'pyarrow'} & {*sys.modules}\n"
        "print([*heavy], file=sys.stderr)"
    )
    run = subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert run.stdout is not None
    assert run.stderr is not None
    with run, run.stdout, run.stderr:
        assert "x" * 50 in run.stdout.readline()
        run.stdout.close()
        assert run.stderr.read() == "[]\n"
        assert run.wait(timeout=60) == 0


@pytest.mark.parametrize("live", [True, False])
def test_fault_58_a_closed_terminal_does_not_end_the_run(live: bool):
    ours, theirs = os.openpty()
    with os.fdopen(theirs, "w", buffering=1) as stream:
        display = progress_display.Display(Console(file=stream, force_terminal=True), live=live)
        with display as shown:
            shown.handle(event({"kind": "note", "text": "before"}))
            os.close(ours)
            for _ in range(3):
                shown.handle(event({"kind": "note", "text": "nobody sees this"}))
