"""Fits on a Ray with eight emulated GPUs, two of which lose a worker: ``on_ray.py FOLDER``, run by
test_gpus_on_ray.py.

Writes a JSON object: for each fit its status, a hash of the weights, and the notes of the workers;
and what `doctor` finds.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import ray
import torch
from rich.console import Console

from raytrain_ddp import TrainConfig, fit
from raytrain_ddp.checkpoint.run_folder import checkpoint_store, run_storage
from raytrain_ddp.config.sections import ComputeConfig, LogConfig, ScalingConfig
from raytrain_ddp.display.progress_display import Display
from raytrain_ddp.doctor.examine import examine
from raytrain_ddp.failpoints import FOLDER_VARIABLE, VARIABLE
from raytrain_ddp.tasks.task_loading import load_task
from raytrain_ddp.training.loop import train
from raytrain_ddp.training.recording.local_session import LocalSession
from raytrain_ddp.training.recording.recorder import Best
from raytrain_ddp.training.runtime.world import World

FOLDER = Path(sys.argv[1])


def main() -> None:
    os.environ[VARIABLE] = "train.after_backward:kill@rank=1,step=5"
    os.environ[FOLDER_VARIABLE] = str(FOLDER / "fired")
    ray.init(address="local", num_cpus=8, num_gpus=8, include_dashboard=False, log_to_driver=False)
    three, shared, eight = (
        ScalingConfig(num_workers=workers, use_gpu=True, backend="gloo", gpus_per_worker=gpus)
        for workers, gpus in ((3, 1.0), (4, 0.5), ("2:8", 1.0))
    )
    found = {"killed": fitted(config("killed", scaling=three))}
    found["shared"] = fitted(config("shared", scaling=shared))
    found["eight"] = fitted(config("eight", scaling=eight))
    os.environ[VARIABLE] = "train.loss:kill@rank=2,step=7"
    os.environ[FOLDER_VARIABLE] = str(FOLDER / "fired-over-nccl")
    over_nccl = replace(three, backend="nccl", replace_workers=True)
    found["over NCCL"] = fitted(config("replaced", scaling=over_nccl, exact=False))
    found["undisturbed"] = fitted(config("undisturbed", scaling=over_nccl, exact=False))
    found["doctor"] = examine(config("examined", scaling=three), None, lambda *_: None).as_dict()
    ray.shutdown()
    del os.environ[VARIABLE]
    alone = config("alone")
    task = load_task(alone)
    best = Best(task.monitor, task.goal)
    with LocalSession(alone, World(0, 1, 0, torch.device("cpu"), 1), best, print) as session:
        train(alone, task, session)
    found["alone"] = {"weights": weights(alone)}
    (FOLDER / "answer.json").write_text(json.dumps(found))


def config(name: str, **changes: Any) -> TrainConfig:
    """Ten steps; the same weights on any number of workers."""
    notes = FOLDER / f"notes-{name}"
    notes.mkdir()
    made = TrainConfig(
        name=name,
        storage=str(FOLDER),
        epochs=1,
        batch_size=64,
        micro_batch=8,
        exact=True,
        limit_train_batches=10,
        limit_eval_batches=2,
        log=LogConfig(every_steps=5, tensorboard=False),
        compute=ComputeConfig(precision="fp32", channels_last=False),  # auto differs on GPUs
        task=f"{Path(__file__).with_name('gpu_task.py')}:Noting",
        task_options={"notes": str(notes)},
    )
    return replace(made, **changes)


def fitted(made: TrainConfig) -> dict[str, Any]:
    text = io.StringIO()
    result = fit(made, display=Display(Console(file=text, width=120), live=False))
    notes = FOLDER / f"notes-{made.name}"
    return {
        "status": result.status,
        "text": text.getvalue(),
        "weights": weights(made),
        "notes": {file.name: file.read_text() for file in sorted(notes.iterdir())},
    }


def weights(made: TrainConfig) -> str:
    newest = checkpoint_store(run_storage(made)).latest()
    return hashlib.sha256(newest.read("model.safetensors")).hexdigest() if newest else ""


main()
