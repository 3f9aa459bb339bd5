"""The command `sweep`: what it refuses before anything starts, its trials, and its end."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from tiny import bits, newest, tiny_config

from raytrain_ddp.checkpoint.lease import Lease
from raytrain_ddp.checkpoint.run_folder import read_events, run_storage
from raytrain_ddp.checkpoint.storage import open_storage
from raytrain_ddp.config.recipe import load, to_dict
from raytrain_ddp.config.train_config import TrainConfig
from raytrain_ddp.driver.fit_driver import fit_locally
from raytrain_ddp.errors import RaytrainError, RunLockedError, TaskError, status_of
from raytrain_ddp.events import Plan, SweepStop
from raytrain_ddp.tools.display.progress_display import Display
from raytrain_ddp.tools.sweep.__main__ import main, parse
from raytrain_ddp.tools.sweep.run_sweep import prepared
from raytrain_ddp.tools.sweep.sweep_display import SweepDisplay
from raytrain_ddp.tools.sweep.trial_run import train_trial
from raytrain_ddp.tools.sweep.trials import Sweep, trial_config

TASK = f"{Path(__file__).parents[2] / 'tiny.py'}:TinyTask"
LR = "optim.lr=log:1e-3:1"


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


# ------------------------------------------------------------------ before anything starts

REFUSED = [  # words, exit status, what the error names
    ("", 2, "--space"),
    ("--space optim.lrr=0.1,0.2", 2, "optim.lrr"),
    ("--space nothing.like.it=1,2", 2, "nothing"),
    ("--space batch_size=32:256", 2, "batch_size"),
    ("--space batch_size=32,64 micro_batch=16,64 --search grid", 2, "batch_size micro_batch"),
    (f"--space {LR} --space model.dropout=0:0.5", 2, "--space"),
    ("--space optim.lr=0.1,x", 2, "optim.lr number"),
    ("--space optim.name=sgd,adam", 2, "optim.name adamw"),
    ("--space optim.betas=0.1,0.2", 2, "optim.betas"),
    ("--space model.name=resnet18,resnet1888", 2, "resnet1888"),
    ("--space data.source=digits,/nowhere", 4, "/nowhere"),
    ("--space optim.momentum=0:0.9 --optim.name adamw", 2, "optim.momentum optim.name"),
    ("--space task-options.width=1,2", 2, "task_options"),
    (f"--space {LR} --trials 0", 2, "--trials 0"),
    (f"--space {LR} --trials 1001 --seeds 10", 2, "--trials --seeds 10,000"),
    (f"--space {LR} --parallel 0", 2, "--parallel 0"),
    (f"--space {LR} --search grid", 2, "--search"),
    (f"--space {LR} --search optuna --seeds 2", 2, "--seeds"),
    (f"--space {LR} --scheduler asha --seeds 2", 2, "--seeds"),
    (f"--space {LR} --scheduler pbt", 2, "--scheduler none asha"),
    (f"--space {LR} --task nothing.py:Task", 2, "nothing.py"),
    (f"--space {LR} --data.eval-split none", 2, "data.holdout"),
    (f"--space {LR} --name run", 2, "run --name"),
    (f"--space {LR} --name damaged", 5, "sweep.json"),
    (f"--space {LR} --name other", 2, "--space --epochs --name"),
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
    known = {"metric": "", "mode": "max", "trials": [trial], "config": to_dict(load("digits"))}
    settings = {"space": ["optim.lr=1:2"], "search": "random", "seeds": 1}
    settings |= {"epochs": 3, "steps": 0}
    return json.dumps({**known, "settings": settings})


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
    assert lines[1].split() == ["trial-0001", "optim.lr=0.02492", "seed=1"]
    assert main(["digits", "--space", "optim.nesterov=true,false", "--dry-run"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 2  # all of a small space
    assert [*tmp_path.iterdir()] == []


# ------------------------------------------------------------------ what is known of its trials


def made(folder: Path, values: list[float | None], seeds: int = 1, mode: str = "max") -> Sweep:
    storage = open_storage(str(folder))
    sweep = Sweep(replace(load("digits"), name="s"), storage, {"space": [LR]}, len(values))
    sweep.metric, sweep.mode = "top1", mode
    for number, value in enumerate(values):
        seed = {"seed": number % seeds} if seeds > 1 else {}
        trial = sweep.add({"optim.lr": 0.1 + number // seeds, **seed})
        trial.value, trial.state = value, "done" if value is not None else "failed"
    return sweep


def test_points_are_compared_by_the_mean_of_their_seeds(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
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
    with SweepDisplay(made(tmp_path, [0.5, None, 0.7, 0.9], 2)) as display:
        display.summary([("train it", "a command")])
    out = capsys.readouterr().out
    assert "trial-0003" in out
    assert "80.00 % ± 14.14 %" in out
    assert out.endswith("a command\n")


def test_a_sweep_whose_trials_all_failed_has_their_status(tmp_path: Path):
    words = ["digits", "--space", "optim.nesterov=true,false", "--name", "s"]
    (tmp_path / "runs" / "s").mkdir(parents=True)
    with Lease.take(open_storage("runs/s")), pytest.raises(RunLockedError):
        main(words)
    sweep = prepared(parse(words))
    for trial in sweep.trials:
        trial.state, trial.message = "failed", "no luck\nin detail"
    sweep.save()
    with pytest.raises(TaskError, match=r"no luck[^-]*--name"):
        main(words)  # continues, and finds nothing to do


# ------------------------------------------------------------------ a trial is a run


def train(base: TrainConfig, name: str, stops_at: int = 0, **values: Any) -> dict[str, Any]:
    """The end of a trial, which is stopped once it has been evaluated after so many epochs."""

    def report(result: dict[str, Any]) -> None:
        if result["epochs"] == stops_at > 0:
            raise SystemExit(0)

    return train_trial(base, name, values, report)


def test_a_stopped_and_continued_trial_has_the_same_bits_as_a_run(tmp_path: Path):
    base = tiny_config(tmp_path, "s", task=TASK)
    base = replace(base, scaling=replace(base.scaling, cpus_per_worker=1.0))
    plain = replace(trial_config(base, "plain", {}))
    fit_locally(plain, display=Display(Console(quiet=True), live=False))
    with pytest.raises(SystemExit):
        train(base, "trial", 1)
    trial = replace(plain, name="trial")
    assert newest(trial).manifest.step == 11  # the request came after step 10 was evaluated
    events = [each.event for each in read_events(run_storage(trial))]
    assert any(isinstance(event, SweepStop) for event in events)
    end = train(base, "trial")
    assert (end["state"], end["epochs"], end["mode"]) == ("done", 3, "min")
    assert end["score"] == -end["value"]
    assert bits(trial) == bits(plain)
    assert train(base, "trial") == end  # nothing is trained
    again = [each.event for each in read_events(run_storage(trial))]
    assert sum(isinstance(event, Plan) for event in again) == 2


def test_an_error_that_would_come_again_fails_a_trial_and_others_are_raised(tmp_path: Path):
    base = tiny_config(tmp_path, "s", task=TASK)
    end = train(base, "diverges", **{"optim.lr": 1e30})
    assert end["state"] == "failed"
    assert "step 2" in end["message"]
    assert "batch_size" in train(base, "refused", batch_size=0)["message"]
    with pytest.raises(ZeroDivisionError):
        train_trial(base, "raises", {}, lambda _: 1 / 0)  # type: ignore[arg-type, return-value]


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


def ends(sweep: Path, killed: list[Any]) -> Iterator[int | None]:
    """The exit status of each run, None if its newest start has none; not of those that were over
    when the sweep was killed, perhaps before their checkpoint."""
    before = [trial["name"] for trial in killed if over([trial])]
    for file in sweep.glob("trial-*/events.jsonl"):
        events = [json.loads(line) for line in file.read_text().splitlines()]
        last = [event for event in events if event["kind"] in ("plan", "end")][-1:]
        if file.parent.name not in before:
            yield last[0].get("status") if last else None


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
    assert {*ends(file.parent, killed)} <= {0, 143}  # done, or stopped with a checkpoint
    out = run(tmp_path, words, lambda t: False, 0)
    assert "status 0" in out
    assert {*ends(file.parent, killed)} <= {0, 143}
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
