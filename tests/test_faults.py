"""Rows of the fault matrix (FAULTS.md) that belong to no other file: clocks, secrets."""

from __future__ import annotations

import os
import random
import time
from pathlib import Path

import pytest
from processes import Group, run_cli
from tiny import WorkerResult, bits, log_of, newest, plain, run_tiny, tiny_config

HOUR_S = 3600.0


def run_with_a_wrong_clock(
    rank: int, size: int, config: dict[str, object], offset_s: float, stop_at: int
) -> WorkerResult:
    """Each rank's wall clock is off by its own amount, and jumps at each reading."""
    real, jumps = time.time, random.Random(rank)
    shift = offset_s * (rank + 1)
    time.time = lambda: real() + shift + jumps.uniform(-HOUR_S, HOUR_S)
    try:
        return run_tiny(rank, size, config, None, stop_at)
    finally:
        time.time = real


def test_fault_36_differing_and_jumping_clocks_do_not_change_the_run(
    workers: Group, tmp_path: Path
):
    """Back by an hour, then forward by a day, with shuffled file times: the order is by step."""
    whole, config = (tiny_config(tmp_path, name) for name in ("whole", "skewed"))
    workers(3, run_tiny, plain(whole))
    shuffled = random.Random(36)
    for stop, offset_s in ((11, 0.0), (13, -HOUR_S), (0, 24 * HOUR_S)):
        ran = workers(3, run_with_a_wrong_clock, plain(config), offset_s, stop)
        assert ran[0].outcome.step == (stop or ran[0].outcome.total_steps)
        for path in (tmp_path / "skewed").rglob("*"):
            moment = shuffled.uniform(0, 2e9)
            os.utime(path, (moment, moment))
    assert bits(config) == bits(whole)
    assert log_of(config) == log_of(whole)
    assert newest(config).manifest.attempt == 3


CANARY = "Canary4567SecretThatMustNotShow"
SECRETS = {
    "AWS_SECRET_ACCESS_KEY": CANARY,
    "AWS_SESSION_TOKEN": CANARY,
    "GOOGLE_APPLICATION_CREDENTIALS": f"/{CANARY}.json",
    "RAY_AUTH_TOKEN": CANARY + "x" * 32,
    "WANDB_API_KEY": CANARY,
}


def test_fault_45_no_secret_of_the_environment_or_a_uri_appears_in_files_or_output(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    for name, value in SECRETS.items():
        monkeypatch.setenv(name, value)
    small = ("--local", "--epochs", "1", "--batch-size", "256", "--micro-batch", "64")
    answers = [
        run_cli("fit", "--name", "secret", *small, cwd=tmp_path, warm=True),
        run_cli("fit", "--name", "secret", *small, "--seed", "1", cwd=tmp_path),  # refused
        run_cli("evaluate", "secret", cwd=tmp_path, warm=True),
    ]
    assert [answer.status for answer in answers] == [0, 2, 0], answers
    closed = "endpoint_override=127.0.0.1:9&scheme=http"
    for flag, uri in (
        ("--storage", f"s3://key:{CANARY}@bucket/runs?{closed}"),
        ("--data.source", f"s3://bucket/x?secret_key={CANARY}&{closed}"),
        ("--storage", f"nonsense://user:{CANARY}@host/runs?token={CANARY}"),
    ):
        answers.append(run_cli("fit", "--local", flag, uri, cwd=tmp_path, warm=True))
        assert answers[-1].status in (2, 3, 4), answers[-1]
    said = "".join(answer.out + answer.err for answer in answers)
    assert CANARY not in said
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert {"config.toml", "metrics.jsonl", "manifest.json"} <= {path.name for path in files}
    assert [path for path in files if CANARY.encode() in path.read_bytes()] == []
