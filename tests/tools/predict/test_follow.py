"""`evaluate RUN --follow`: evaluates the checkpoints of a run beside it."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from processes import module_of

from raytrain_ddp import DataConfig, TrainConfig, fit_locally
from raytrain_ddp.checkpoint.lease import Lease
from raytrain_ddp.checkpoint.run_folder import checkpoint_store, run_storage
from raytrain_ddp.config.sections import LogConfig
from raytrain_ddp.errors import ConfigError
from raytrain_ddp.evaluate import main
from raytrain_ddp.tools.report.write import report

LIMIT_S = 120.0


@contextmanager
def command(name: str, *argv: str, cwd: Path) -> Iterator[subprocess.Popen[str]]:
    words = [sys.executable, "-m", module_of(name), *argv]
    with subprocess.Popen(words, cwd=cwd, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def wait_for(path: Path) -> None:
    until_s = time.monotonic() + LIMIT_S
    while not path.exists() and time.monotonic() < until_s:
        time.sleep(0.05)


def evaluations(file: Path) -> list[dict[str, Any]]:
    """Without their times."""
    records = [json.loads(line) for line in file.read_text().splitlines()]
    found = [record for record in records if record["kind"] == "eval"]
    for record in found:
        assert record.pop("seconds") > 0
    return found


@pytest.fixture
def ended(tmp_path: Path) -> TrainConfig:
    """A run with checkpoints of the steps 2 and 4."""
    config = TrainConfig(
        name="d",
        storage=str(tmp_path),
        epochs=2,
        limit_train_batches=2,
        data=DataConfig("digits"),
        log=LogConfig(tensorboard=False),
    )
    fit_locally(config)
    return config


def test_each_checkpoint_is_evaluated_beside_a_run_with_the_metrics_of_the_run(tmp_path: Path):
    flags = "--local --name beside --epochs 3 --checkpoint.keep-last 9 --checkpoint.every-s 0"
    run = tmp_path / "runs" / "beside"
    with command("fit", "digits", *flags.split(), "--log.no-tensorboard", cwd=tmp_path) as training:
        wait_for(run / "lease.json")
        wait_for(run / "config.toml")
        with command("evaluate", "beside", "--follow", cwd=tmp_path) as follower:
            out, _ = follower.communicate(timeout=LIMIT_S)
            assert training.wait(LIMIT_S) == follower.returncode == 0
    found = evaluations(run / "followed.jsonl")
    assert found == evaluations(run / "metrics.jsonl")
    assert [record["step"] for record in found] == [23, 46, 69]
    assert [line.split()[:3] for line in out.splitlines()] == [
        ["step", step, "loss"] for step in ("23", "46", "69")
    ]
    (run / "metrics.jsonl").unlink()
    assert "top1 (evaluation)" in report(run, predict=False).path.read_text()


def test_ctrl_c_ends_it_and_the_next_call_evaluates_what_is_left(
    ended: TrainConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    run = tmp_path / "d"
    with (
        Lease.take(run_storage(ended)),
        command("evaluate", str(run), "--follow", cwd=tmp_path) as follower,
    ):
        assert follower.stdout is not None
        assert follower.stdout.readline().startswith("step 2  ")
        follower.send_signal(signal.SIGINT)
        assert follower.wait(LIMIT_S) == 130
    assert [record["step"] for record in evaluations(run / "followed.jsonl")] in ([2], [2, 4])
    assert main([str(run), "--follow"]) == 0
    assert evaluations(run / "followed.jsonl") == evaluations(run / "metrics.jsonl")
    capsys.readouterr()
    assert main([str(run), "--follow"]) == 0
    assert capsys.readouterr().out == ""


def test_a_damaged_checkpoint_is_named_and_passed_over(
    ended: TrainConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    newest, _ = checkpoint_store(run_storage(ended)).names()
    weights = tmp_path / "d" / "checkpoints" / str(newest) / "model.safetensors"
    weights.write_bytes(b"?" * weights.stat().st_size)
    capsys.readouterr()
    assert main([str(tmp_path / "d"), "--follow"]) == 0
    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith("step 2  loss")
    assert "step 4  is not evaluated" in second
    assert "is damaged" in second


def test_flags_that_follow_does_not_read_are_refused(tmp_path: Path):
    for flags in (["--per-class"], ["--checkpoint", "last"], ["--data", "digits"]):
        with pytest.raises(ConfigError, match="with --device only"):
            main(["r", "--follow", *flags])
    with pytest.raises(ConfigError, match="no run there"):
        main([str(tmp_path), "--follow"])
