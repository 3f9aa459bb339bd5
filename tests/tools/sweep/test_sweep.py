"""The command `sweep`: what it refuses before anything starts, its trials, and its end."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tiny import bits, newest, tiny_config

from raytrain_ddp import fit_locally
from raytrain_ddp.checkpoint.lease import Lease
from raytrain_ddp.checkpoint.run_folder import run_storage
from raytrain_ddp.checkpoint.storage import open_storage
from raytrain_ddp.config.recipe import load, to_dict
from raytrain_ddp.config.train_config import TrainConfig
from raytrain_ddp.errors import RaytrainError, RunLockedError, TaskError, status_of
from raytrain_ddp.tools.report.run_files import read_run, state_of
from raytrain_ddp.tools.sweep.__main__ import main, parse
from raytrain_ddp.tools.sweep.trials import prepared
from raytrain_ddp.tools.sweep.tune_engine import train_trial

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
    ("--space batch_size=32,64 micro_batch=16,64", 2, "batch_size micro_batch"),
    (f"--space {LR} --space model.dropout=0:0.5", 2, "--space"),
    ("--space optim.lr=0.1,x", 2, "optim.lr number"),
    ("--space optim.name=sgd,adam", 2, "optim.name adamw"),
    ("--space optim.betas=0.1,0.2", 2, "optim.betas"),
    ("--space model.name=resnet18,resnet1888", 2, "resnet1888"),
    ("--space data.source=digits,/nowhere", 4, "/nowhere"),
    ("--space optim.momentum=0:0.9 --optim.name adamw", 2, "optim.momentum optim.name"),
    ("--space task-options.width=1,2", 2, "task_options"),
    (f"--space {LR} --trials 0", 2, "--trials 0"),
    (f"--space {LR} --parallel 0", 2, "--parallel 0"),
    (f"--space {LR} --search grid", 2, "--search --trials"),
    (f"--space {LR} --search optuna --seeds 2", 2, "--seeds"),
    (f"--space {LR} --asha 1 --seeds 2", 2, "--seeds"),
    (f"--space {LR} --asha 99", 2, "--asha epochs"),
    (f"--space {LR} --optim.lr 0.1", 2, "optim.lr --space"),
    (f"--space {LR} --scheduler asha", 2, "--scheduler --asha"),
    (f"--space {LR} --optim.betas 0.8 0.9", 2, "optim.betas optim.name"),
    (f"--space {LR} --scaling.num-workers 2", 2, "scaling.num_workers"),
    (f"--space {LR} --scaling.max-failures=2", 2, "scaling.max_failures"),
    (f"--space {LR} --resume-from x", 2, "--resume-from"),
    (f"--space {LR} --task nothing.py:Task", 2, "nothing.py"),
    (f"--space {LR} --data.eval-split none", 2, "data.holdout"),
    (f"--space {LR} --name run", 2, "run --name"),
    (f"--space {LR} --name other", 2, "--space --epochs --name"),
]


def test_an_invalid_sweep_is_refused_before_anything_starts(tmp_path: Path):
    files = {"run/config.toml": "", "other/sweep.json": a_sweep()}
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
    settings = {"space": ["optim.lr=1:2"], "search": "random", "seeds": 1}
    settings |= {"epochs": 3, "steps": 0}
    known = {"settings": settings, "points": [], "config": to_dict(load("digits"))}
    return json.dumps(known)


def test_a_flag_that_has_an_effect_in_some_trials_is_accepted():
    both = "--space optim.name=sgd,adamw --optim.momentum 0.8 --dry-run"
    assert main(["digits", *both.split()]) == 0


def test_a_missing_optuna_is_reported_before_anything_starts(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("raytrain_ddp.tools.sweep.trials.find_spec", lambda name: None)
    with pytest.raises(RaytrainError, match=r"pip install 'raytrain_ddp\[sweep\]'") as caught:
        main(["digits", "--space", LR, "--search", "optuna"])
    assert status_of(caught.value) == 3


def test_a_dry_run_prints_the_trials_and_writes_nothing(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
):
    assert main(["digits", *f"--space {LR} --trials 2 --seeds 2 --dry-run".split()]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 4
    assert lines[1].split() == ["trial-0001", "optim.lr=0.3414", "seed=1"]
    assert main(["digits", "--space", "optim.nesterov=true,false", "--dry-run"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 2  # all of a small space
    assert [*tmp_path.iterdir()] == []


# ------------------------------------------------------------------ what is known of its trials


def made(folder: Path, values: list[float | None], words: str) -> None:
    """The runs of a sweep that has ended: with these evaluations, or failed."""
    sweep = prepared(parse(["digits", *words.split()]), [])
    sweep.folder.mkdir()
    sweep.save()
    for (name, _), value in zip(sweep.points.items(), values, strict=True):
        metrics = {"top1": value, "loss": 1.0}
        record = {"kind": "eval", "step": 9, "metrics": metrics, "monitor": "top1", "best": True}
        end = {"kind": "end", "time": "2026-11-20T20:00:00Z", "status": 0 if value else 6}
        run = folder / "runs" / "s" / name
        run.mkdir(parents=True)
        (run / "config.toml").write_text(f'name = "{name}"')
        (run / "metrics.jsonl").write_text(f"{json.dumps(record)}\n" if value else "")
        (run / "events.jsonl").write_text(json.dumps({**end, "message": "no luck\nin detail"}))


@pytest.mark.parametrize(
    ("values", "seeds", "best"),
    [
        ([0.5, None, 0.7], 1, "trial-0002"),
        ([0.9, 0.1, 0.6, 0.7], 2, "trial-0003"),
        ([0.99, None, 0.6, 0.8], 2, "trial-0003"),  # one of its seeds has failed
    ],
)
def test_points_are_compared_by_the_mean_of_their_seeds(
    values: list[float | None],
    seeds: int,
    best: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
):
    words = f"--space {LR} --name s --trials {len(values) // seeds} --seeds {seeds}"
    made(tmp_path, values, words)
    assert main(["digits", *words.split()]) == 0  # finds nothing to do
    out = capsys.readouterr().out
    assert f"{len(values)} of {len(values)} trials are over" in out
    assert f"best      {best}" in out
    assert ("mean of 2 seeds" in out) == (seeds > 1)
    assert re.search(r"train it  python -m raytrain_ddp.fit .*--optim.lr 0\.", out)
    assert "raytrain report" in out


def test_a_sweep_whose_trials_all_failed_has_their_status(tmp_path: Path):
    words = ["digits", "--space", "optim.nesterov=true,false", "--name", "s"]
    made(tmp_path, [None, None], "--space optim.nesterov=true,false --name s")
    with Lease.take(open_storage("runs/s")), pytest.raises(RunLockedError):
        main(words)
    with pytest.raises(TaskError, match=r"no luck[^-]*--name"):
        main(words)


# ------------------------------------------------------------------ a trial is a run


def train(config: TrainConfig, stops_at: int = 0) -> dict[str, Any]:
    """What a trial returns; it is stopped once it has been evaluated after so many epochs."""

    def report(result: dict[str, Any]) -> None:
        if result["epochs"] == stops_at > 0:
            raise SystemExit(0)

    return train_trial(lambda: config, report)


def test_a_stopped_and_continued_trial_has_the_same_bits_as_a_run(tmp_path: Path):
    base = tiny_config(tmp_path, "plain", task=TASK)
    plain = replace(base, scaling=replace(base.scaling, cpus_per_worker=1.0))
    fit_locally(plain)
    trial = replace(plain, name="trial")
    with pytest.raises(SystemExit):
        train(trial, 1)
    assert newest(trial).manifest.step == 11  # the request came after step 10 was evaluated
    assert state_of(read_run(run_storage(trial))).name == "stopped"
    end = train(trial)
    run = read_run(run_storage(trial))
    assert end["value"] == run.value
    assert state_of(run).name == "finished"
    assert bits(trial) == bits(plain)
    assert train(trial) == end  # nothing is trained
    assert len(read_run(run_storage(trial)).plans) == 2


def test_an_error_that_would_come_again_fails_a_trial_and_others_are_raised(tmp_path: Path):
    base = tiny_config(tmp_path, "diverges", task=TASK)
    diverges = replace(base, optim=replace(base.optim, lr=1e30))
    assert "step 2" in train(diverges)["cause"]
    state = state_of(read_run(run_storage(diverges)))
    assert state.name == "failed"
    assert "step 2" in state.cause
    with pytest.raises(ZeroDivisionError):
        train_trial(lambda: replace(base, name="raises"), lambda _: 1 / 0)  # type: ignore[arg-type, return-value]
    refused = {"task_options": {"no-such-option": "1"}}
    assert "no-such-option" in train_trial(lambda: replace(base, **refused), print)["cause"]


# ------------------------------------------------------------------ with a real Ray

FEW = "--limit-train-batches 3 --limit-eval-batches 4 --log.no-tensorboard --checkpoint.every-s 0"


def run(folder: Path, words: str, ended: int, number: int) -> str:
    """Runs the command; sends it a signal as soon as so many trials have ended. Returns its
    output."""
    line = [sys.executable, "-m", "raytrain_ddp.tools.sweep", *shlex.split(words)]
    with subprocess.Popen(
        line, cwd=folder, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    ) as driver:
        deadline = time.monotonic() + 400
        while driver.poll() is None and time.monotonic() < deadline:
            if sum(state != "gone" for state in states(folder).values()) >= ended:
                driver.send_signal(number)
                break
            time.sleep(0.05)
        out, _ = driver.communicate(timeout=400)
    return f"{out}\nstatus {driver.returncode}"


def states(folder: Path) -> dict[str, str]:
    """How the trials are that are not running."""
    places = sorted(folder.glob("runs/*/trial-*"))
    found = {each.name: state_of(read_run(open_storage(str(each)))).name for each in places}
    return {name: state for name, state in found.items() if state != "running"}


def steps(place: Path, kind: str = "eval") -> list[int]:
    lines = (place / "metrics.jsonl").read_text().splitlines()
    return [each["step"] for each in map(json.loads, lines) if each["kind"] == kind]


@pytest.mark.ray
@pytest.mark.parametrize("search", ["random", "optuna"])
def test_a_killed_sweep_continues_without_losing_or_repeating_a_trial(search: str, tmp_path: Path):
    """SIGKILL of the driver, then Ctrl-C, then to its end."""
    words = f"digits {FEW} --space {LR} --trials 5 --epochs 5 --asha 1 --search {search}"
    sweep = tmp_path / "runs" / "digits-sweep"
    assert "status -9" in run(tmp_path, words, 1, signal.SIGKILL)
    killed = {n: state for n, state in states(tmp_path).items() if state != "gone"}
    before = {name: (sweep / name / "metrics.jsonl").read_text() for name in killed}
    points = json.loads((sweep / "sweep.json").read_text())["points"]
    out = run(tmp_path, words, 3, signal.SIGINT)
    assert "status 130" in out
    assert "the same command again" in out
    out = run(tmp_path, words, 99, 0)
    assert "status 0" in out
    assert "5 of 5 trials are over" in out
    assert json.loads((sweep / "sweep.json").read_text())["points"][: len(points)] == points
    after = states(tmp_path)
    assert [*after] == [f"trial-{n:04}" for n in range(5)]
    assert "finished" in after.values()
    assert {*after.values()} <= {"finished", "stopped"}
    assert {name: after[name] for name in killed} == killed
    for name, log in before.items():  # none is trained after its end
        assert (sweep / name / "metrics.jsonl").read_text() == log
    for name, state in after.items():  # each step is evaluated once
        found = steps(sweep / name)
        assert found == sorted({*found})
        assert found[-1] == 15 or state == "stopped"


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
    out = run(tmp_path, f"{words} --space optim.lr=0.01,0.02,1e30 --name s", 99, 0)
    assert "status 0" in out
    assert sorted(states(tmp_path).values()) == ["failed", "finished", "finished"]
    assert not os.path.exists(tmp_path / "kill")
