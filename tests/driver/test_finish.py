"""What remains to be done for a complete run whose driver was killed."""

from __future__ import annotations

import json
from pathlib import Path

from faulty_storage import manifest, payload

from raytrain_ddp.checkpoint.run_folder import checkpoint_store, read_history, run_storage
from raytrain_ddp.config.train_config import TrainConfig
from raytrain_ddp.driver.finish import is_tidy, tidy


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
    assert is_tidy(run)
    assert read_history(run) == log
