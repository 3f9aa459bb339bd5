"""A run whose folder is in a bucket: checkpoints, log, and lease on a real S3 server (moto's)."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from processes import Died, Group
from s3 import CREDENTIALS, S3
from tiny import TOTAL_STEPS, bits, log_of, newest, plain, run_tiny, tiny_config

from raytrain_ddp import fit_locally
from raytrain_ddp.checkpoint.run_folder import find_checkpoint
from raytrain_ddp.config.sections import CheckpointConfig
from raytrain_ddp.config.train_config import TrainConfig
from raytrain_ddp.tools.report.run_files import read_run


@pytest.fixture(scope="module")
def whole(workers: Group, tmp_path_factory: pytest.TempPathFactory) -> TrainConfig:
    """The same run, undisturbed, on a disk."""
    config = tiny_config(tmp_path_factory.mktemp("whole"), "run")
    workers(3, run_tiny, plain(config))
    return config


def in_bucket(s3: S3, name: str, tmp_path: Path) -> TrainConfig:
    often = CheckpointConfig(every_steps=4, every_s=0.0)
    config = tiny_config(tmp_path, name, checkpoint=often)
    # The credentials are in the URI: the workers' environment may be older than the server.
    uri = s3.uri("runs").replace("s3://", "s3://test:test@")
    return dataclasses.replace(config, storage=uri)


def test_fault_01_15_a_killed_run_in_a_bucket_with_failing_writes_gives_the_same_result(
    s3: S3, whole: TrainConfig, workers: Group, tmp_path: Path
):
    config = in_bucket(s3, "run", tmp_path)
    s3.fail(6, "PUT")
    assert workers.outcomes(3, run_tiny, plain(config), None, 0, 15)[2] == Died(9)
    assert s3.failing()["PUT"] == 0  # and yet
    assert 4 <= newest(config).name.step < 15
    s3.fail(3, "PUT")
    ran = workers(3, run_tiny, plain(config))
    assert 4 <= ran[0].start_step < 15
    assert s3.failing()["PUT"] == 0
    assert newest(config).name.step == TOTAL_STEPS
    assert bits(config) == bits(whole)
    assert log_of(config) == log_of(whole)


def test_the_result_of_a_run_in_a_bucket_opens_without_further_settings(
    s3: S3, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    for name, value in CREDENTIALS.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("AWS_ENDPOINT_URL", raising=False)
    config = tiny_config(tmp_path, "a-run", epochs=1)
    result = fit_locally(dataclasses.replace(config, storage=s3.uri("my runs")))
    assert result.path.startswith(f"s3://{s3.bucket}/my%20runs/a-run?")
    assert read_run(result.path).train
    for place in (result.path, result.best_checkpoint, result.last_checkpoint):
        assert find_checkpoint(str(place)).manifest.step == result.step
