"""How a command ends that holds a run but is not training, and what a later one completes."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest
from faulty_storage import commit, manifest, payload

from raytrain_ddp.checkpoint.run_folder import (
    checkpoint_store,
    read_events,
    read_history,
    run_storage,
)
from raytrain_ddp.config.train_config import TrainConfig
from raytrain_ddp.driver.finish import is_tidy, tidy
from raytrain_ddp.driver.run_naming import find_run
from raytrain_ddp.driver.run_ownership import owned
from raytrain_ddp.events import End
from raytrain_ddp.records import event_line


def begun(folder: Path) -> TrainConfig:
    config = TrainConfig(name="run", storage=str(folder))
    run_storage(config).mkdir()
    run_storage(config).write_atomic("config.toml", b"")
    return config


def test_a_command_that_is_ended_releases_its_run_and_names_the_step_of_the_next(tmp_path: Path):
    config, shown = begun(tmp_path), []

    def stop() -> None:
        store = checkpoint_store(run_storage(config))
        store.claim(None, {})
        commit(store, 20)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt) as caught, owned(find_run(config), print):
        os.kill(os.getpid(), signal.SIGTERM)
    assert caught.value.args == (signal.SIGTERM,)
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    assert [each.event for each in read_events(run_storage(config))] == [End(143)]
    with pytest.raises(SystemExit), owned(find_run(config), print):  # it can be taken
        raise SystemExit(3)
    with pytest.raises(KeyboardInterrupt), owned(find_run(config), shown.append):
        stop()
    assert shown[0] == End(130)
    assert "step 20" in shown[1].text


def test_records_of_a_newer_version_stay_in_the_log(tmp_path: Path):
    config = TrainConfig(storage=str(tmp_path), name="newer")
    run = run_storage(config)
    log = [
        {"kind": "train", "step": 1, "loss": 1.5, "energy_j": 3.0},
        {"kind": "weather", "step": 1, "clouds": [1, 2]},
        {"kind": "eval", "step": 2, "metrics": {"top1": 0.5}, "best": True, "by_class": {"a": 1}},
    ]
    files = {**payload(2), "log.json": json.dumps(log).encode()}
    store = checkpoint_store(run)
    store.commit(manifest(1), payload(1))
    committed = store.commit(manifest(2), files).manifest
    run.write_atomic("metrics.jsonl", (json.dumps(log[0]) + "\n").encode())
    assert not is_tidy(run)
    tidy(config, run, committed)
    run.write_atomic("events.jsonl", event_line(End(0)).encode())
    assert is_tidy(run)
    assert read_history(run) == log
