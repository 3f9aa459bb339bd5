"""The commands `fit` and `evaluate` from outside: their output and exit status."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import warm_python
from processes import ENVIRONMENT, run_cli
from refused_commands import TASK
from rich.console import Console

from raytrain_ddp.checkpoint.lease import Lease
from raytrain_ddp.checkpoint.run_folder import checkpoint_store, run_storage
from raytrain_ddp.config.recipe import load, settled
from raytrain_ddp.config.train_config import TrainConfig
from raytrain_ddp.driver.fit_driver import fit
from raytrain_ddp.errors import PreflightError
from raytrain_ddp.failpoints import FOLDER_VARIABLE, VARIABLE
from raytrain_ddp.fit import parse_fit
from raytrain_ddp.tools.display.progress_display import Display

TRAIN = ("--name", "small", "--local", "--batch-size", "256", "--micro-batch", "64")
EPOCHS = ("--epochs", "1", "--eval.every-epochs", "1")


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a finished run "small" of one epoch over the digits."""
    folder = tmp_path_factory.mktemp("finished")
    answer = run_cli("fit", *TRAIN, *EPOCHS, cwd=folder, warm=True)
    assert answer.status == 0, answer.err
    assert "ray" not in answer.heavy
    return folder


def contents(folder: Path) -> dict[str, tuple[int, bytes]]:
    """Time and content of every file and folder below."""
    return {
        str(path): (path.stat().st_mtime_ns, path.read_bytes() if path.is_file() else b"")
        for path in sorted(folder.rglob("*"))
    }


def test_print_config_is_toml_that_loads_to_the_same_config(tmp_path: Path):
    for argv in (
        ("imagenet-resnet50", "--scaling.num-workers", "1:8", "--augment.flip"),
        ("--name", "x", "--data.mean", "0.1", "0.2", "0.3", "--optim.lr", "3e-4"),
        ("--task", "mine.py:Mine", "--task-options", "a", "b c"),
    ):
        answer = run_cli("fit", *argv, "--print-config", cwd=tmp_path)
        (tmp_path / "again.toml").write_text(answer.out)
        assert (answer.status, answer.heavy) == (0, [])
        assert load(str(tmp_path / "again.toml")) == parse_fit(argv).config


def test_dry_run_prints_the_plan_and_starts_no_worker(tmp_path: Path):
    argv = ("--dry-run", "--epochs", "10", "--batch-size", "96", "--micro-batch", "32")
    answer = run_cli("fit", *argv, "--scaling.num-workers", "2", cwd=tmp_path, warm=True)
    assert answer.status == 0, answer.err
    assert "ray" not in answer.heavy
    assert list(tmp_path.iterdir()) == []  # nothing is written
    said = " ".join(answer.out.split())
    # 1437 rows in 3 lanes of 479: 14 full steps of 96, and one of 93.
    for words in (
        *("96 = 3 slots x 32", "2 workers", "slots per worker: 1, 2", "1437", "360"),
        *("15 per epoch (the last has 93 images), 150 in 10 epochs", "131,754 parameters"),
        *("epoch 1: 0.1", "batch_size = 96"),
    ):
        assert words in said
    assert "[data]" not in said  # only what differs from the defaults


def test_fault_30_starting_a_finished_run_reports_it_and_changes_no_file(finished: Path):
    before = contents(finished)
    for argv in (TRAIN, tuple(arg for arg in TRAIN if arg != "--local"), (*TRAIN, "--dry-run")):
        answer = run_cli("fit", *argv, *EPOCHS, cwd=finished, warm=True)
        assert answer.status == 0, answer.err
        assert re.search("already complete|complete at step 6", answer.out)
        assert "ray" not in answer.heavy
        assert contents(finished) == before


def killed_at(point: str, folder: Path) -> TrainConfig:
    """A run with a checkpoint after each step, killed at a failpoint; its config."""
    often = ("--checkpoint.every-steps", "1", "--checkpoint.keep-last", "2")
    armed = {VARIABLE: point, FOLDER_VARIABLE: str(folder / "fired")}
    killed = warm_python.run(
        [sys.executable, "-m", "raytrain_ddp.fit", *TRAIN, *EPOCHS, *often],
        cwd=folder,
        env={**os.environ, **ENVIRONMENT, **armed},
    )
    assert killed.returncode == -9, killed.stderr
    return replace(parse_fit([*TRAIN, *EPOCHS, *often]).config, storage=str(folder / "runs"))


def test_fault_03_30_a_restart_finishes_pruning_that_was_killed_at_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)

    def again() -> None:
        result = fit(config, display=Display(Console(quiet=True), live=False))
        assert (result.status, result.step) == ("already complete", 6)

    config = killed_at("prune.manifest:kill@step=4", tmp_path)
    run = run_storage(config)
    half_deleted = Path(run.path) / "checkpoints" / "step-00000004-a0001"
    (Path(run.path) / "lease.json").unlink()
    before = contents(tmp_path)
    with Lease.take(run):  # training continues with it
        again()
    after = contents(tmp_path)
    assert {path for path in after if after[path] != before.get(path)} == {run.path}
    assert half_deleted.is_dir()

    again()
    assert not half_deleted.exists()
    assert [name.step for name in checkpoint_store(run).names()] == [6, 5]
    done = contents(tmp_path)
    assert {*Path(run.path).iterdir()} >= {Path(run.path, "curves.png")}
    again()
    assert contents(tmp_path) == done

    (tmp_path / "before").mkdir()
    config = killed_at("checkpoint.committed:kill@step=6", tmp_path / "before")
    run = run_storage(config)
    log = run.read("metrics.jsonl")
    as_in_a_bucket = log.splitlines(keepends=True)[:-2]
    run.write_atomic("metrics.jsonl", b"".join(as_in_a_bucket))
    again()
    assert [name.step for name in checkpoint_store(run).names()] == [6, 5]
    assert run.read("metrics.jsonl") == log


def test_a_run_writes_all_its_files_and_evaluate_prints_the_metrics_of_training(finished: Path):
    run = finished / "runs" / "small"
    names = {path.name for path in run.iterdir()}
    assert {"config.toml", "metrics.jsonl", "checkpoints", "curves.png", "tensorboard"} <= names
    reported = parse_fit([*TRAIN, *EPOCHS]).config
    data = replace(reported.data, classes=tuple("0123456789"))
    wanted = replace(reported, storage=str(run.parent), data=data)
    assert load(str(run / "config.toml")) == settled(wanted, has_bf16=False)
    assert [path.name for path in finished.iterdir()] == ["runs"]
    records = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    logged = next(record for record in records if record["kind"] == "eval")["metrics"]
    answer = run_cli("evaluate", "small", "--per-class", "--device", "cpu", cwd=finished, warm=True)
    assert answer.status == 0, answer.err
    figures = dict(re.findall(r"^  (\w+) +(\d\.\d+)$", answer.out, re.MULTILINE))
    assert figures == {name: f"{value:.6f}" for name, value in logged.items()}
    assert "360 images, each exactly once" in answer.out
    supports = re.findall(r"^ *(\d) +(\d+) +\d+ ", answer.out, re.MULTILINE)
    assert [name for name, _ in supports] == list("0123456789")
    assert sum(int(support) for _, support in supports) == 360


def test_fault_27_a_changed_config_is_refused_with_a_table(finished: Path):
    before = contents(finished)
    changed = ("--optim.lr", "0.2", "--seed", "3", "--checkpoint.every-s", "5")
    answer = run_cli("fit", *TRAIN, *EPOCHS, *changed, cwd=finished)
    assert (answer.status, answer.heavy) == (2, [])
    assert re.search(r"seed\s+0 -> 3\n  optim\.lr\s+0\.1 -> 0\.2", answer.err)
    assert "every_s" not in answer.err  # free to change
    assert contents(finished) == before


def test_files_named_like_modules_of_libraries_do_not_replace_them(tmp_path: Path):
    """But what the user's own code imports beside it is the user's, also if Python has one."""
    for name in ("csv", "dataclasses", "json", "random", "rich", "torch", "typing"):
        (tmp_path / f"{name}.py").write_text("raise RuntimeError('of the user')")
    task = TASK.replace("from torch", "import helper, test\nfrom torch")
    task = task.replace("nn.Linear(1, 1)", "nn.Linear(1, helper.ONE, bias=test.BIAS)")
    task = task.replace("batch): return None", 'batch): return model(batch["x"]).sum()')
    (tmp_path / "mine.py").write_text(task)
    (tmp_path / "helper.py").write_text("ONE = 1")
    (tmp_path / "test.py").write_text("BIAS = True")
    flags = ("--task", "mine.py:Mine", "--dry-run", "--local", "--scaling.use-gpu", "false")
    done = subprocess.run(
        [sys.executable, "-m", "raytrain_ddp.fit", *flags],
        cwd=tmp_path,
        env={**os.environ, **ENVIRONMENT},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "model          2 parameters" in done.stdout


def test_without_ray_fit_says_so_in_one_line_and_trains_locally(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "path").mkdir()
    missing = "raise ModuleNotFoundError('No module named ray', name='ray')"
    (tmp_path / "path/ray.py").write_text(missing)
    monkeypatch.setitem(ENVIRONMENT, "PYTHONPATH", f"{tmp_path}/path:{ENVIRONMENT['PYTHONPATH']}")
    argv = ("--name", "small", "--batch-size", "256", "--micro-batch", "64", *EPOCHS)
    answer = run_cli("fit", *argv, cwd=tmp_path, warm=True)
    assert answer.status == PreflightError.exit_status
    assert answer.err.count("\n") == 1
    assert "--local" in answer.err
    assert run_cli("fit", *argv, "--local", cwd=tmp_path, warm=True).status == 0
