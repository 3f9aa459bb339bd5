"""The command `sweep`: what it refuses before anything starts, its trials, and its end."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from tiny import bits, newest, tiny_config

from raytrain_ddp.checkpoint.lease import Lease
from raytrain_ddp.checkpoint.run_folder import read_events, run_storage
from raytrain_ddp.checkpoint.storage import open_storage
from raytrain_ddp.config.recipe import load
from raytrain_ddp.config.sections import OptimConfig
from raytrain_ddp.config.train_config import TrainConfig
from raytrain_ddp.driver.fit_driver import fit_locally
from raytrain_ddp.errors import RaytrainError, RunLockedError, TaskError, status_of
from raytrain_ddp.events import Plan, SweepStop
from raytrain_ddp.tools.display.progress_display import Display
from raytrain_ddp.tools.sweep.__main__ import main, parse
from raytrain_ddp.tools.sweep.run_sweep import prepared
from raytrain_ddp.tools.sweep.space import parse_space
from raytrain_ddp.tools.sweep.sweep_display import SweepDisplay
from raytrain_ddp.tools.sweep.trial_session import train_trial
from raytrain_ddp.tools.sweep.trials import Sweep

TASK = f"{Path(__file__).parents[2] / 'tiny.py'}:TinyTask"
LR = "optim.lr=log:1e-3:1"


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


# ------------------------------------------------------------------ before anything starts

REFUSED = [  # words, exit status, what the error names
    ("", 2, "--space"),
    ("--space batch_size=32:256", 2, "19 of 20 batch_size"),
    ("--space batch_size=32,64 micro_batch=16,64 --search grid", 2, "1 of 4 batch_size = 32"),
    (f"--space {LR} --space model.dropout=0:0.5", 2, "--space"),
    ("--space optim.lr=0.1,x", 2, "1 of 2 optim.lr number"),
    ("--space optim.name=sgd,adam", 2, "optim.name adamw"),
    ("--space optim.betas=0.1,0.2", 2, "optim.betas"),
    ("--space model.name=resnet18,resnet1888 --trials 2", 2, "resnet1888"),
    ("--space data.source=digits,/nowhere --trials 2", 4, "/nowhere"),
    ("--space optim.momentum=0:0.9 --optim.name adamw", 2, "optim.momentum optim.name"),
    ("--space task-options.width=1,2", 2, "task_options.width"),
    (f"--space {LR} --augment.magnitude 5", 2, "augment.magnitude"),
    ("--space optim.name=sgd,adamw --trials 3", 2, "--trials 3 2"),
    (f"--space {LR} --trials 0", 2, "--trials 0"),
    (f"--space {LR} --trials 1001 --seeds 10", 2, "--trials --seeds 10,000"),
    (f"--space {LR} --parallel -1", 2, "--parallel -1"),
    (f"--space {LR} --search grid", 2, "optim.lr"),
    ("--space optim.lr=1,2 --search grid --trials 2", 2, "--trials"),
    (f"--space {LR} --search optuna --seeds 2", 2, "--seeds"),
    (f"--space {LR} --factor 2", 2, "--factor --scheduler"),
    (f"--space {LR} --scheduler asha --factor 1", 2, "--factor"),
    (f"--space {LR} --scheduler asha --first-rung 12", 2, "--first-rung epochs"),
    (f"--space {LR} --scheduler asha --seeds 2", 2, "--seeds"),
    (f"--space {LR} --scheduler asha --steps 9", 2, "--epochs"),
    ("--space epochs=2:9 --scheduler asha", 2, "--epochs"),
    (f"--space {LR} --scheduler pbt", 2, "--scheduler none asha"),
    (f"--space {LR} --scaling.num-workers 2", 2, "--scaling.num-workers"),
    (f"--space {LR} --optim.lr 0.5", 2, "--optim.lr --space"),
    (f"--space {LR} --task nothing.py:Task", 2, "nothing.py"),
    (f"--space {LR} --data.eval-split none", 2, "data.holdout"),
    (f"--space {LR} --name run", 2, "run --name"),
    (f"--space {LR} --name damaged", 5, "sweep.json"),
    (f"--space {LR} --name other", 2, "--space optim.lr=1:2 --name"),
]


def test_an_invalid_sweep_is_refused_before_anything_starts(tmp_path: Path):
    files = {"run/config.toml": "", "damaged/sweep.json": "{}", "other/sweep.json": a_sweep()}
    for name, text in files.items():
        (tmp_path / "runs" / name).parent.mkdir(parents=True)
        (tmp_path / "runs" / name).write_text(text)
    for words, status, names in REFUSED:
        with pytest.raises(RaytrainError) as caught:
            main(["digits", "--dry-run", *words.split()])
        assert (status_of(caught.value), words) == (status, words)
        assert all(name in str(caught.value) for name in names.split()), str(caught.value)
    found = {str(each.relative_to(tmp_path / "runs")) for each in tmp_path.rglob("*.*")}
    assert found == {*files}


def a_sweep() -> str:
    trial = {"name": "trial-0000", "values": {"optim.lr": 1.5}, "state": "running"}
    settings = {"--space": ["optim.lr=1:2"]}
    return json.dumps({"metric": "", "mode": "max", "trials": [trial], "settings": settings})


def test_a_missing_optuna_is_reported_before_anything_starts(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("raytrain_ddp.tools.sweep.run_sweep.find_spec", lambda name: None)
    with pytest.raises(RaytrainError, match=r"pip install 'raytrain_ddp\[sweep\]'") as caught:
        main(["digits", "--space", LR, "--search", "optuna"])
    assert status_of(caught.value) == 3


def test_a_dry_run_prints_the_trials_and_writes_nothing(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
):
    assert main(["digits", *f"--space {LR} --trials 2 --seeds 2 --dry-run".split()]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 4
    assert lines[1].split() == ["trial-0001", "optim.lr=0.02492,", "seed=1"]
    assert main(["digits", "--space", "optim.nesterov=true,false", "--dry-run"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 2  # all of a small space
    assert [*tmp_path.iterdir()] == []


# ------------------------------------------------------------------ what is known of its trials


def made(folder: Path, values: list[float | None], seeds: int = 1, mode: str = "max") -> Sweep:
    space = parse_space([LR])
    fields = ["optim.lr", "seed"][: 1 + (seeds > 1)]
    base, storage = replace(load("digits"), name="s"), open_storage(str(folder))
    sweep = Sweep(base, storage, space, fields, {}, len(values))
    sweep.metric, sweep.mode = "top1", mode
    for number, value in enumerate(values):
        seed = {"seed": number % seeds} if seeds > 1 else {}
        trial = sweep.add({"optim.lr": 0.1 + number // seeds, **seed})
        trial.value, trial.state = value, "done" if value is not None else "failed"
    return sweep


def test_points_are_compared_by_the_mean_of_their_seeds(tmp_path: Path):
    best = lambda *args: made(tmp_path, *args).ranked()[0].name  # noqa: E731
    assert best([0.5, None, 0.7]) == "trial-0002"
    assert best([0.5, None, 0.7], 1, "min") == "trial-0000"
    assert best([0.9, 0.1, 0.6, 0.7], 2) == "trial-0003"
    assert best([0.99, None, 0.6, 0.7], 2) == "trial-0003"  # one of its seeds has failed
    made(tmp_path, [0.5, None, 0.7]).save()
    content = json.loads((tmp_path / "sweep.json").read_text())
    shown = ("version", "metric", "mode", "fields", "best")
    assert [content[name] for name in shown] == [1, "top1", "max", ["optim.lr"], "trial-0002"]
    assert content["trials"][2]["values"] == {"optim.lr": 2.1}
    assert [trial["value"] for trial in content["trials"]] == [0.5, None, 0.7]


@pytest.mark.parametrize("terminal", [True, False])
def test_the_display_fits_the_terminal_and_ends_with_the_best(
    terminal: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("FORCE_COLOR" if terminal else "NO_COLOR", "1")
    sweep = made(tmp_path, [0.5, None, 0.7, 0.9], 2)
    with SweepDisplay(sweep) as display:
        sweep.trials[1].message = "[red]the loss[/] is not finite\nat step 7"
        display.ended(sweep.trials[1])
    display.summary([("train it", "a command")])
    lines = capsys.readouterr().out.splitlines()
    assert any("trial-0001  failed" in line for line in lines)
    assert any("[red]the loss[/] is not finite" in line for line in lines)
    assert any("80.00 % ± 14.14 %" in line for line in lines)
    assert lines[-1].endswith("a command")


def test_a_sweep_whose_trials_all_failed_has_their_status(tmp_path: Path):
    words = ["digits", "--space", "optim.nesterov=true,false", "--name", "s"]
    (tmp_path / "runs" / "s").mkdir(parents=True)
    with Lease.take(open_storage("runs/s")), pytest.raises(RunLockedError):
        main(words)
    sweep = prepared(parse(words), [])
    for trial in sweep.trials:
        trial.state, trial.message = "failed", "no luck\nin detail"
    sweep.save()
    with pytest.raises(TaskError, match=r"no luck\. .*--name"):
        main(words)  # continues, and finds nothing to do


# ------------------------------------------------------------------ a trial is a run


def train(
    config: TrainConfig, told: Callable[[list[Any], threading.Event], None] = lambda *_: None
) -> tuple[dict[str, Any], list[Any]]:
    """The end of a trial, and what it reported; `told` may stop it."""
    stop, said = threading.Event(), list[Any]()

    def tell(evaluated: dict[str, Any]) -> None:
        said.append(evaluated)
        told(said, stop)

    return train_trial(config, tell, stop), said


def test_a_stopped_and_continued_trial_has_the_same_bits_as_a_run(tmp_path: Path):
    plain = tiny_config(tmp_path, "plain", task=TASK)
    plain = replace(plain, scaling=replace(plain.scaling, cpus_per_worker=1.0))
    fit_locally(plain, display=Display(Console(quiet=True), live=False))
    trial = replace(plain, name="trial")
    _, said = train(trial, lambda said, stop: stop.set())
    assert [(e["step"], e["epochs"], e["mode"]) for e in said] == [(10, 1.0, "min")]
    assert newest(trial).manifest.step == 11  # the request came after step 10 was evaluated
    events = [each.event for each in read_events(run_storage(trial))]
    assert any(isinstance(event, SweepStop) for event in events)
    end, said = train(trial)
    assert end["state"] == "done"
    # The earlier evaluation again: the driver may have died in between.
    assert [e["epochs"] for e in said] == [1.0, 2.0, 3.0]
    assert said[-1]["score"] == -said[-1]["value"]
    assert bits(trial) == bits(plain)
    assert train(trial) == (end, said)  # nothing is trained
    again = [each.event for each in read_events(run_storage(trial))]
    assert sum(isinstance(event, Plan) for event in again) == 2


def test_an_error_that_would_come_again_fails_a_trial_and_others_are_raised(tmp_path: Path):
    config = tiny_config(tmp_path, "diverges", task=TASK)
    end, _ = train(replace(config, optim=OptimConfig(lr=1e30)))
    assert end["state"] == "failed"
    assert "step 2" in end["message"]
    end, _ = train(replace(config, name="task", task=TASK.replace("TinyTask", "NoTask")))
    assert "NoTask" in end["message"]

    def fails(*_: Any) -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        train(replace(config, name="raises"), fails)


# ------------------------------------------------------------------ with a real Ray

FEW = "--limit-train-batches 3 --limit-eval-batches 4 --log.no-tensorboard --checkpoint.every-s 0"


def run(folder: Path, words: str, until: Callable[[list[Any]], bool], number: int) -> str:
    """Runs the command; sends it a signal as soon as sweep.json says so. Returns its output."""
    line = [sys.executable, "-m", "raytrain_ddp.tools.sweep", *shlex.split(words)]
    with subprocess.Popen(
        line, cwd=folder, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    ) as driver:
        deadline = time.monotonic() + 200
        while driver.poll() is None and time.monotonic() < deadline:
            if any(until(trials_in(each)) for each in folder.glob("runs/*/sweep.json")):
                driver.send_signal(number)
                break
            time.sleep(0.05)
        out, _ = driver.communicate(timeout=200)
    return f"{out}\nstatus {driver.returncode}"


def trials_in(file: Path) -> list[Any]:
    return list(json.loads(file.read_text())["trials"])


def over(trials: list[Any]) -> int:
    return sum(trial["state"] in ("done", "stopped", "failed") for trial in trials)


@pytest.mark.ray
@pytest.mark.parametrize("search", ["random", "optuna"])
def test_a_killed_sweep_continues_without_losing_or_repeating_a_trial(search: str, tmp_path: Path):
    """SIGKILL of the driver, then Ctrl-C, then to its end."""
    words = f"digits {FEW} --space {LR} --trials 6 --epochs 9 --scheduler asha --search {search}"
    file = tmp_path / "runs" / "digits-sweep" / "sweep.json"
    assert "status -9" in run(tmp_path, words, lambda t: over(t) >= 1, signal.SIGKILL)
    killed = trials_in(file)
    out = run(tmp_path, words, lambda t: over(t) >= 3, signal.SIGINT)
    assert "status 130" in out
    assert "the same command again" in out
    out = run(tmp_path, words, lambda t: False, 0)
    assert "status 0" in out
    after = trials_in(file)
    assert [trial["name"] for trial in after] == [f"trial-{n:04}" for n in range(6)]
    assert over(after) == 6
    assert any(trial["state"] == "done" for trial in after)
    for before, now in zip(killed, after, strict=False):
        assert before["values"] == now["values"]
        assert before["state"] in ("waiting", "running") or before == now
    for trial in after:  # each evaluated step once, and none trained after its end
        folder = file.parent / trial["name"]
        lines = (folder / "metrics.jsonl").read_text().splitlines()
        steps = [each["step"] for each in map(json.loads, lines) if each["kind"] == "eval"]
        assert steps == sorted(set(steps))
        assert steps[-1] == (27 if trial["state"] == "done" else steps[-1])
        assert (folder / "config.toml").exists()


@pytest.mark.ray
def test_a_trial_whose_process_dies_continues_and_a_failing_one_does_not_end_the_others(
    tmp_path: Path,
):
    """The process of one trial is killed once; another diverges."""
    task = tmp_path / "rude.py"
    task.write_text(
        "import os, signal\n"
        f"import sys; sys.path.insert(0, {str(Path(__file__).parents[2])!r})\n"
        "from tiny import TinyTask\n"
        "class Rude(TinyTask):\n"
        "    def loss(self, model, batch):\n"
        "        if os.path.exists('kill'):\n"
        "            os.remove('kill')\n"
        "            os.kill(os.getpid(), signal.SIGKILL)\n"
        "        return super().loss(model, batch)\n"
    )
    (tmp_path / "kill").write_text("")
    words = f"--task {task}:Rude --batch-size 32 --micro-batch 8 --epochs 2 --log.no-tensorboard"
    out = run(tmp_path, f"{words} --space optim.lr=0.01,0.02,1e30 --name s", lambda t: False, 0)
    assert "status 0" in out
    trials = trials_in(tmp_path / "runs" / "s" / "sweep.json")
    assert sorted(trial["state"] for trial in trials) == ["done", "done", "failed"]
    assert not os.path.exists(tmp_path / "kill")
