"""The display: pure formatting, the plain lines, and the live block as a terminal receives it."""

import io
import math
import os
import re
import subprocess
import sys
import time
from dataclasses import replace
from typing import Any

import pytest
from event_records import event
from rich.console import Console
from rich.text import Text

from raytrain_ddp.result import FitResult
from raytrain_ddp.tools.display import progress_display as module
from raytrain_ddp.tools.display import redraw
from raytrain_ddp.tools.display.formatting import error_summary
from raytrain_ddp.tools.display.progress_display import Pace

TRACEBACK = """The task failed:
Traceback (most recent call last):
  File "task.py", line 3, in loss
    raise RuntimeError(text)
RuntimeError: sizes differ:
\tconv.weight: 3
second line
(rank 0)"""


def test_only_the_first_line_of_an_error_is_shown():
    assert error_summary(TRACEBACK) == "The task failed: RuntimeError: sizes differ:"
    assert error_summary("a line\nand another") == "a line"


PLAN = {
    "kind": "plan",
    "run": "digits",
    "start_step": 0,
    "total_steps": 276,
    "steps_per_epoch": 23,
    "epochs": 12,
    "batch_size": 64,
    "slots": 4,
    "micro_batch": 16,
    "world_size": 2,
    "device": "cpu",
    "parameters": 12345,
    "train_samples": 1437,
    "eval_samples": 360,
    "resumed_from": None,
}


class Display(module.Display):
    """Takes records instead of events."""

    def handle(self, record: dict[str, object]) -> None:
        super().handle(event(record))


CONTROL = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]")


def train(step: int, **changes: object) -> dict[str, object]:
    line = {"kind": "train", "step": step, "epoch": (step - 1) // 23, "loss": 1.0, "lr": 0.05}
    split_s = {"data": 0.012, "compute": 0.088}
    timing = {"step_s": 0.1, "split_s": split_s, "peak_memory_bytes": 900 * 2**20}
    return line | {"samples_per_s": 812.0, "timing": timing, "seconds": step / 10} | changes


def evaluation(step: int, *, best: bool = True) -> dict[str, object]:
    metrics = {"loss": 0.4, "top1": 0.97222, "top5": 1.0}
    known = {"kind": "eval", "step": step, "epoch": (step - 1) // 23, "metrics": metrics}
    return known | {"seconds": 0.3, "best": best, "monitor": "top1"}


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """A fake clock, which only a test advances."""
    for name in ("NO_COLOR", "FORCE_COLOR", "COLUMNS", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)
    stopped = Clock()
    monkeypatch.setattr(module, "clock", stopped)
    return stopped


class Stream(io.StringIO):
    """Records what was written at the last flush."""

    flushed = ""

    def flush(self) -> None:
        self.flushed = self.getvalue()


def plain() -> tuple[Display, Stream]:
    stream = Stream()
    return Display(Console(file=stream), live=False), stream


def live(width: int = 80) -> tuple[Display, io.StringIO]:
    stream = io.StringIO()
    console = Console(file=stream, force_terminal=True, width=width, height=30, color_system=None)
    return Display(console, live=True), stream


def block(shown: Display) -> list[str]:
    return shown.__rich__().plain.split("\n")


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0.00 s"),
        (0.994, "0.99 s"),
        (0.996, "1.0 s"),
        (9.94, "9.9 s"),
        (9.96, "10 s"),
        (59.4, "59 s"),
        (59.6, "1m00s"),
        (725, "12m05s"),
        (3599.6, "1h00m"),
        (11520, "3h12m"),
        (183600, "51h00m"),
    ],
)
def test_seconds_are_formatted(seconds: float, text: str) -> None:
    assert module.format_seconds(seconds) == text


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (3.21, "3.2"),
        (7, "7"),
        (99.6, "100"),
        (812.4, "812"),
        (1437, "1437"),
        (9999.7, "10,000"),
        (25557032, "25,557,032"),
    ],
)
def test_counts_are_formatted(count: float, text: str) -> None:
    assert module.format_count(count) == text


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("loss", 0.4, "0.4000"),
        ("loss", 1234.5, "1234"),
        ("loss", 123456.0, "1.235e+05"),
        ("loss", math.nan, "nan"),
        ("loss", math.inf, "inf"),
        ("top1", 0.97222, "97.22 %"),
        ("eval/top5", 1.0, "100.0 %"),
        ("accuracy", 0.5, "50.00 %"),
        ("top1", 97.2, "97.20"),  # already a percentage of the user's
        ("stop1", 0.5, "0.5000"),
    ],
)
def test_metrics_have_four_digits_and_accuracies_are_percentages(
    name: str, value: float, text: str
) -> None:
    assert module.format_metric(name, value) == text


def test_the_plan_is_one_line() -> None:
    batch, about = module.format_plan(event(PLAN))
    assert batch == ("64 = 4 slots x 16, on 2 workers; 1437 samples, 23 steps an epoch, 276 in all")
    assert about == "digits: 12 epochs on cpu, 12,345 parameters, 360 samples to evaluate"
    resumed = PLAN | {"world_size": 1, "unit": "images", "resumed_from": "step-00000120-a0001"}
    batch, about = module.format_plan(event(resumed))
    assert "on 1 worker; 1437 images" in batch
    assert about.endswith("360 images to evaluate; resumed from step-00000120-a0001")


def test_flow_breaks_lines_only_between_parts() -> None:
    parts = [Text("epoch 1"), Text("loss 0.4"), Text("top1 97 %")]
    assert module.flow(parts, 80).plain == "epoch 1  loss 0.4  top1 97 %"
    assert module.flow(parts, 17).plain == "epoch 1  loss 0.4\n    top1 97 %"
    assert module.flow(parts, 16).plain == "epoch 1\n    loss 0.4\n    top1 97 %"
    assert module.flow(parts, 3).plain == "epoch 1\n    loss 0.4\n    top1 97 %"


def test_time_left_is_the_remaining_steps_at_the_usual_pace() -> None:
    pace = Pace(0, 100, 0.0)
    assert pace.left_s(10, 5.0) == pytest.approx(90 * 0.5)
    assert pace.left_s(20, 10.0) == pytest.approx(80 * 0.5)
    assert pace.left_s(30, 45.0) == pytest.approx(70 * 0.5)  # one slow line changes nothing


def test_time_left_spreads_evaluations_over_the_steps() -> None:
    pace = Pace(0, 100, 0.0)
    pace.left_s(10, 1.0)
    pace.paused_s += 4.0
    assert pace.left_s(20, 6.0) == pytest.approx(80 * (0.1 + 4.0 / 20))


def test_time_left_after_a_restart_waits_for_a_second_line() -> None:
    pace = Pace(50, 100, math.nan)
    assert math.isnan(pace.left_s(60, 1000.0))
    assert pace.left_s(70, 1002.0) == pytest.approx(30 * 0.2)
    assert pace.left_s(80, 1.0) == pytest.approx(20 * 0.2)  # a restarted clock is ignored


def test_plain_lines_look_like_a_log(clock: Clock) -> None:
    shown, stream = plain()
    with shown:
        shown.handle({"kind": "phase", "name": "starting Ray"})
        clock.now += 2.1
        shown.handle({"kind": "phase", "name": "placing 2 workers"})
        clock.now += 1.3
        shown.handle(PLAN)
        shown.handle(train(10, loss=1.2345678))
        shown.handle({"kind": "checkpoint", "step": 10, "name": "c"})
        shown.handle(evaluation(23))
        shown.handle(evaluation(46, best=False))
        shown.handle({"kind": "note", "text": "worker 1 is slow"})
    assert stream.getvalue().splitlines() == [
        " 0.00 s  starting Ray",
        "  2.1 s  placing 2 workers",
        "  3.4 s  64 = 4 slots x 16, on 2 workers; 1437 samples, 23 steps an epoch, 276 in all",
        "  3.4 s  digits: 12 epochs on cpu, 12,345 parameters, 360 samples to evaluate",
        "  3.4 s  epoch  1/12  step  10/276  loss 1.235  lr 0.05000  812 samples/s  "
        "data 12 %  27 s left",
        "  3.4 s  epoch  1/12  step  23/276  eval  loss 0.4000  top1 97.22 %  top5 100.0 %  * best",
        "  3.4 s  epoch  2/12  step  46/276  eval  loss 0.4000  top1 97.22 %  top5 100.0 %",
        "  3.4 s  note: worker 1 is slow",
    ]


def test_plain_output_has_no_control_codes_even_with_forced_color() -> None:
    stream = io.StringIO()
    with Display(Console(file=stream, force_terminal=True, color_system="truecolor")) as shown:
        shown.handle({"kind": "phase", "name": "starting Ray"})
        shown.handle(PLAN)
        shown.handle(train(10))
        shown.handle(evaluation(23))
        trace = "Traceback\n  \x1b[31mZeroDivisionError\x1b[0m"
        shown.handle({"kind": "failed", "rank": 1, "message": "no", "traceback": trace})
        shown.summary("digits", replace(RESULT, best={}, last={}, seconds={}))
    assert "ZeroDivisionError" in stream.getvalue()
    assert "\x1b" not in stream.getvalue()
    assert "\r" not in stream.getvalue()


def test_each_plain_line_is_flushed_at_once() -> None:
    shown, stream = plain()
    shown.handle({"kind": "phase", "name": "starting Ray"})
    assert stream.flushed.endswith("starting Ray\n")
    shown.handle(PLAN)
    shown.handle(train(10))
    assert "step  10/276" in stream.flushed


def test_the_bottleneck_is_reported_once_known_and_again_when_it_changes(
    clock: Clock,
) -> None:
    shown, stream = plain()
    shown.handle(PLAN)
    waiting = {"step_s": 1.0, "split_s": {"data": 0.5, "compute": 0.5}}
    working = {"step_s": 1.0, "split_s": {"data": 0.01, "compute": 0.99}}
    for step in range(1, 260):
        shown.handle(train(step, timing=waiting if step < 130 else working))
        clock.now += 1
    reported = [line[9:] for line in stream.getvalue().splitlines() if "of the time" in line]
    assert [text.split(":")[0] for text in reported] == [
        "waits for data 50 % of the time",
        "computes 99 % of the time",
    ]


def plain_steps(stream: io.StringIO) -> list[int]:
    return [int(step) for step in re.findall(r"step +(\d+)/276  loss", stream.getvalue())]


def test_plain_training_lines_are_two_seconds_apart(clock: Clock) -> None:
    shown, stream = plain()
    shown.handle(PLAN)
    for step in range(1, 21):
        shown.handle(train(step))
        clock.now += 0.5
    assert plain_steps(stream) == [1, 5, 9, 13, 17]


def test_plain_lines_end_each_epoch_whether_or_not_its_last_step_is_logged() -> None:
    shown, stream = plain()
    shown.handle(PLAN)
    for step in (10, 20, 23):
        shown.handle(train(step))
    assert plain_steps(stream) == [10, 23]
    for step in (30, 40, 50, 60):  # 46 is not among them
        shown.handle(train(step))
    assert plain_steps(stream) == [10, 23, 40]
    assert re.search(r"epoch +2/12  step +40/276", stream.getvalue())
    shown.handle(evaluation(69))
    assert plain_steps(stream) == [10, 23, 40, 60]  # an evaluation flushes held-back lines
    shown.handle(train(70))
    shown.handle(train(75))
    with shown:
        pass
    assert plain_steps(stream)[-1] == 75  # nor does the end


def test_a_dead_workers_steps_after_the_last_line_are_reported_as_repeated() -> None:
    shown, stream = plain()
    with shown:
        shown.handle(PLAN)
        shown.handle(train(130))
        shown.handle({"kind": "failed", "rank": 1, "step": 137, "message": "was killed"})
        shown.handle(PLAN | {"start_step": 115})
    assert "after step 115 of 276, 22 steps again" in stream.getvalue()


@pytest.mark.parametrize(
    ("plan", "reported"),
    [
        ({"replaced": [0, 1]}, "ranks 0 and 1 replaced; continuing after step 136 of 276\n"),
        (
            {"replaced": [2], "world_size": 4},
            "grew from 2 to 4 workers after step 136 of 276, nothing repeated\n",
        ),
        ({"replaced": [], "world_size": 2}, "continuing with 2 workers after step 136 of 276\n"),
    ],
)
def test_a_replaced_or_omitted_worker_repeats_no_steps(plan: dict[str, Any], reported: str) -> None:
    """The step in progress had not been completed."""
    shown, stream = plain()
    with shown:
        shown.handle(PLAN)
        shown.handle(train(130))
        shown.handle({"kind": "failed", "rank": 1, "step": 137, "message": "was killed"})
        shown.handle(PLAN | {"start_step": 136} | plan)
    assert reported in stream.getvalue()
    assert "again" not in stream.getvalue()


def test_a_restart_is_reported_in_one_line_and_the_run_continues() -> None:
    for shown, stream in (plain(), live()):
        with shown:
            shown.handle(PLAN)
            shown.handle(train(130))
            shown.handle({"kind": "phase", "name": "placing 1 worker"})
            shown.handle(PLAN | {"world_size": 1, "start_step": 115})
            shown.handle(train(120))
            shown.handle(evaluation(138))
        out = CONTROL.sub("", stream.getvalue())
        reported = "restarted with 1 worker (before: 2) after step 115 of 276, 15 steps again"
        assert out.count(reported) == 1
        assert out.count("4 slots x 16") == 1
        assert "epoch  6/12  step 138/276  eval" in out


def test_time_left_includes_pauses_and_is_reset_when_workers_change() -> None:
    shown, _ = live()

    def left() -> list[str]:
        return re.findall(r"\S+(?: s)?(?= left)", " ".join(block(shown)))

    shown.handle(PLAN)
    shown.handle(train(20, seconds=2.0))
    assert left() == ["26 s"]  # 256 steps at 0.1 s
    shown.handle(evaluation(23) | {"seconds": 4.0})
    shown.handle({"kind": "pause", "seconds": 2.0})  # for a checkpoint
    shown.handle(train(40, seconds=10.0))
    assert left() == ["59 s"]  # 236 steps at 0.1 s, and 6 s of pauses in 40 steps
    shown.handle(PLAN | {"start_step": 23})
    assert left() == []
    shown.handle(train(30, seconds=900.0))
    assert left() == []
    shown.handle(train(40, seconds=902.0))
    assert left() == ["47 s"]
    shown.handle(train(276, seconds=1000.0))
    assert left() == []


def test_unknown_event_kinds_are_ignored() -> None:
    shown, stream = plain()
    shown.handle({"kind": "at", "step": 3})
    shown.handle({"kind": "died", "texts": {}})
    assert stream.getvalue() == ""


def test_failures_show_rank_message_and_traceback() -> None:
    shown, stream = plain()
    trace = 'Traceback (most recent call last):\n  File "task.py", line 3\nValueError: [bold]no\n'
    shown.handle({"kind": "failed", "rank": 1, "message": "ValueError: no", "traceback": trace})
    shown.handle({"kind": "failed", "rank": None, "message": "no worker left", "traceback": ""})
    assert stream.getvalue() == (
        f" 0.00 s  rank 1 failed: ValueError: no\n{trace} 0.00 s  failed: no worker left\n"
    )


RESULT = FitResult(
    status="finished",
    step=276,
    total_steps=276,
    monitor="top1",
    best={"loss": 0.05, "top1": 0.9889, "step": 253},
    last={"loss": 0.04, "top1": 0.9861, "step": 276},
    path="runs/digits",
    best_checkpoint=None,
    last_checkpoint=None,
    seconds={"start-up": 4.21, "training": 12.0, "total": 75.0},
)
MORE = [
    ("run", "/long/" + "x" * 90 + "/digits"),
    ("evaluate", "python -m raytrain_ddp.evaluate runs/digits"),
]


def test_the_summary_states_how_the_run_ended() -> None:
    shown, stream = plain()
    shown.summary("digits", RESULT, "", MORE)
    assert stream.getvalue().splitlines() == [
        "",
        "digits: finished at step 276 of 276",
        "  best               step 253  top1 98.89 %  loss 0.05000",
        "  last               step 276  top1 98.61 %  loss 0.04000",
        "  time               start-up 4.2 s  training 12 s  total 1m15s",
        f"  run                /long/{'x' * 90}/digits",
        "  evaluate           python -m raytrain_ddp.evaluate runs/digits",
    ]


def test_the_summary_omits_missing_values() -> None:
    shown, stream = plain()
    end = replace(RESULT, status="interrupted", step=120, best={}, last={}, seconds={})
    shown.summary("digits", end)
    assert stream.getvalue().strip() == "digits: interrupted at step 120 of 276"


@pytest.mark.parametrize("width", [40, 80])
def test_the_live_summary_never_wraps_a_path_or_a_command(width: int) -> None:
    shown, stream = live(width)
    shown.__enter__()
    shown.summary("digits", RESULT, "", MORE)
    assert not shown._block.is_started
    lines = [line.strip() for line in CONTROL.sub("", stream.getvalue()).splitlines()]
    assert any(line.endswith(MORE[0][1]) for line in lines)
    assert any(line.endswith(MORE[1][1]) for line in lines)


LIMIT = "waits for data 38 % of the time: more CPUs per worker, smaller images, less augmentation"


@pytest.mark.parametrize("width", [40, 60, 80, 200])
def test_the_bottleneck_is_wrapped_between_words_in_a_narrow_terminal(width: int) -> None:
    shown, stream = live(width)
    shown.summary("digits", RESULT, LIMIT)
    out = CONTROL.sub("", stream.getvalue())
    lines = out[out.index("  training  ") :].splitlines()
    assert " ".join(" ".join(lines).split()) == f"training {LIMIT}"
    assert all(len(line) <= width for line in lines)
    shown, stream = plain()
    shown.summary("digits", RESULT, LIMIT, MORE)
    assert f"  training           {LIMIT}\n" in stream.getvalue()


def test_a_run_beyond_the_requested_epochs_shows_100_percent_of_its_last_epoch() -> None:
    shown, _ = live(60)
    shown.handle(PLAN | {"start_step": 276, "total_steps": 138, "epochs": 6})
    assert "100 %" in block(shown)[0]
    assert len(block(shown)[0]) == 60
    assert block(shown)[1].startswith("epoch 6/6 ")


def test_a_live_phase_spins_and_leaves_a_line_with_its_duration(clock: Clock) -> None:
    shown, stream = live()
    shown.handle({"kind": "phase", "name": "starting Ray"})
    clock.now += 1.5
    first = block(shown)[0]
    assert first.endswith(" starting Ray  1.5 s")
    clock.now += 0.6
    assert block(shown)[0][0] != first[0]  # the spinner turns
    shown.handle({"kind": "phase", "name": "placing 2 workers"})
    assert "  starting Ray  2.1 s\n" in stream.getvalue()
    assert "placing 2 workers" in block(shown)[0]
    shown.handle(PLAN)
    assert "placing" not in "".join(block(shown))


def test_the_next_phase_is_shown_when_the_finished_one_is_printed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Printing redraws the block: an empty one in between would flicker."""
    shown, _ = live()
    seen: list[str] = []
    monkeypatch.setattr(shown, "_print", lambda *parts, **_: seen.append(block(shown)[0]))
    shown.handle({"kind": "phase", "name": "starting Ray"})
    shown.handle({"kind": "phase", "name": "placing 2 workers"})
    assert len(seen) == 1
    assert "placing 2 workers" in seen[0]


def test_the_live_block_shows_progress_speed_and_time_left(clock: Clock) -> None:
    shown, stream = live()
    shown.handle(PLAN | {"unit": "images"})
    shown.handle(train(60))
    shown.handle({"kind": "checkpoint", "step": 46, "name": "c"})
    shown.handle(train(69))
    clock.now += 5.7
    bar, *cells = block(shown)
    limit = next(n for n, line in enumerate(cells) if line.startswith("waits for data 12 % of"))
    assert " ".join(cells[limit:]).endswith("smaller images (convert), less augmentation")
    cells = cells[:limit]
    assert bar.count("━") == int(len(re.findall("[━─]", bar)) * 0.25)
    assert bar.endswith("  25 %  5.7 s")
    assert [cell for line in cells for cell in re.split(r"  +(?!\d+/)", line.strip())] == [
        "epoch  3/12",
        "step  69/276",
        "loss 1.000",
        "lr 0.05000",
        "812 images/s",
        "compute 88 %",
        "data 12 %",
        "memory 900 MiB",
        "15 s left",  # 207 steps at 0.1 s, 5.7 s of which have passed
        "saved step 46",
    ]
    assert "loss" not in stream.getvalue()  # training lines are in the block only


@pytest.mark.parametrize("width", [16, 20, 40, 60, 80, 100, 200])
def test_the_live_block_fits_the_terminal_and_keeps_its_shape(width: int) -> None:
    shown, _ = live(width)
    shown.handle(PLAN)
    shapes = set()
    for step, changes in ((69, {}), (230, {"samples_per_s": 123456.7, "lr": 1e-7, "loss": 1e9})):
        shown.handle(train(step, **changes))
        shown.handle({"kind": "checkpoint", "step": step, "name": "c"})
        lines = block(shown)
        assert all(len(line) <= width for line in lines)
        shapes.add(tuple(len(line) for line in lines))
    assert len(shapes) == 1
    cells = 1 + math.ceil(10 / max(1, min(width, 100) // 20))
    words = " ".join(lines[cells:])
    assert re.fullmatch(r"waits for data \d+ % of the time: more .* less augmentation", words)


def test_live_evaluation_is_one_line_of_80_columns() -> None:
    shown, stream = live(80)
    shown.handle(PLAN)
    shown.handle(evaluation(23))
    last = stream.getvalue().splitlines()[-1]
    assert last == "epoch  1/12  step  23/276  eval  loss 0.4000  top1 97.22 %  top5 100.0 %  ★"


def test_the_live_loss_is_smoothed_except_for_nan() -> None:
    shown, _ = live()
    shown.handle(PLAN)
    for step, loss, text in ((1, 1.0, "1.000"), (2, 2.0, "1.300"), (3, math.nan, "nan")):
        shown.handle(train(step, loss=loss))
        assert f"loss {text} " in " ".join(block(shown))
    shown.handle(train(4, loss=3.0))
    assert "loss 3.000 " in " ".join(block(shown))


def test_the_live_block_is_erased_at_the_end() -> None:
    """What remains after the block is erased are the permanent lines."""
    shown, stream = live()
    with shown:
        shown.handle({"kind": "phase", "name": "starting Ray"})
        shown.handle(PLAN)
        shown.handle(train(69))
        shown.handle({"kind": "note", "text": "hello"})
    out = stream.getvalue()
    assert "\x1b[?25l" in out  # the cursor was hidden
    assert out.rindex("\x1b[?25h") > out.rindex("\x1b[?25l")  # and is shown again
    assert out.rindex("\x1b[2K") > out.rindex("━")  # the block was erased
    assert "note: hello\n" in CONTROL.sub("", out)


@pytest.mark.parametrize(
    ("encoding", "tty", "expected"),
    [("utf-8", True, True), ("utf-8", False, False), ("ascii", True, False)],
)
def test_the_live_block_needs_a_capable_terminal(encoding: str, tty: bool, expected: bool) -> None:
    class Terminal(io.TextIOWrapper):
        def isatty(self) -> bool:
            return tty

    stream = Terminal(io.BytesIO(), encoding=encoding)
    console = Console(file=stream, force_terminal=True, _environ={"TERM": "xterm"})
    with Display(console) as shown:
        shown.handle({"kind": "note", "text": "5 → 6"})  # characters outside ASCII must not raise
    stream.flush()
    out = stream.buffer.getvalue().decode(encoding)  # type: ignore[attr-defined]
    assert ("\x1b[?25l" in out) is expected
    assert ("5 → 6" if encoding == "utf-8" else "5 ? 6") in out


def test_no_color_disables_colors(monkeypatch: pytest.MonkeyPatch) -> None:
    def written() -> str:
        stream = io.StringIO()
        console = Console(file=stream, force_terminal=True, color_system="standard")
        Display(console, live=True).handle({"kind": "note", "text": "hello"})
        return stream.getvalue()

    assert "\x1b[33m" in written()
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b[33m" not in written()


def test_training_continues_when_the_reader_of_the_pipe_exits() -> None:
    """Ctrl-C ends tee first in ``fit | tee log``: the run still has a checkpoint to write."""
    script = (
        "import sys; from raytrain_ddp.tools.display.progress_display import Display\n"
        "from raytrain_ddp.events import Note\n"
        "with Display() as display:\n"
        "    for n in range(20000): display.handle(Note('x' * 50))\n"
        "sys.stderr.write('saved')"
    )
    run = subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert run.stdout is not None
    assert run.stderr is not None
    with run, run.stdout, run.stderr:
        assert "x" * 50 in run.stdout.readline()
        run.stdout.close()
        assert run.stderr.read() == "saved"
        assert run.wait(timeout=60) == 0


def test_the_display_needs_neither_torch_nor_ray() -> None:
    script = (
        "import sys, raytrain_ddp.tools.display.progress_display\n"
        "print([name for name in ('torch', 'ray', 'numpy', 'pyarrow') if name in sys.modules])"
    )
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert run.stdout == "[]\n"


def test_narrowing_the_terminal_leaves_no_fragments_of_the_block(monkeypatch: pytest.MonkeyPatch):
    """tmux and others rewrap existing lines; a terminal that cuts them off, like xterm, has no more
    rows than before."""
    for breaks in (True, False):
        for name in redraw.BREAKING:
            monkeypatch.delenv(name, raising=False)
        if breaks:
            monkeypatch.setenv("TMUX", "/tmp/tmux")
        shown, stream = live(width=80)
        shown.handle(PLAN)
        shown.handle(train(5))
        with shown:
            shown._block.refresh()
            lines = [len(line) for line in block(shown)]
            for width in (30, 100):
                shown._console.width = width
                rows = sum(max(1, math.ceil(length / width)) for length in lines)
                stream.truncate(stream.seek(0))
                shown.handle({"kind": "note", "text": "hello"})
                before, _, _ = stream.getvalue().partition("hello")
                assert rows > len(lines) or width == 100
                ups = before.count("\x1b[1A")
                assert ups >= rows - 1 if breaks else ups == len(lines) - 1
                lines = [len(line) for line in block(shown)]


@pytest.mark.parametrize("live", [True, False])
def test_fault_58_a_closed_terminal_does_not_end_the_run(live: bool) -> None:
    ours, theirs = os.openpty()
    with os.fdopen(theirs, "w", buffering=1) as terminal:
        display = Display(Console(file=terminal, force_terminal=True), live=live)
        with display as shown:
            shown.handle({"kind": "note", "text": "before"})
            os.close(ours)
            for _ in range(3):
                shown.handle({"kind": "note", "text": "nobody sees this"})
            time.sleep(0.3)  # the block is drawn by a thread
