"""Random configs: each is refused with a remedy that works, or trains on three workers, and
interruptions do not change the bits."""

from __future__ import annotations

import random
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from logs import log_of
from PIL import Image
from processes import Died, Group
from tiny import ScriptedSession, newest, plain

from raytrain_ddp.checkpoint.run_folder import run_storage
from raytrain_ddp.command_line import parse_fit
from raytrain_ddp.config.recipe import from_dict
from raytrain_ddp.config.train_config import TrainConfig
from raytrain_ddp.driver.dry_run import dry_run
from raytrain_ddp.errors import RaytrainError

Flags = dict[str, str]
SIZE = 3
NET = """
from torch import nn

def net(classes, width=8):
    n = classes
    def block(channels):
        return nn.Conv2d(channels, width, 3, 2, 1), nn.BatchNorm2d(width), nn.ReLU()

    pool = nn.AdaptiveAvgPool2d(1), nn.Flatten()
    return nn.Sequential(*block(3), nn.Dropout2d(0.1), *block(width), *pool, nn.Linear(width, n))
"""
SOURCES: Sequence[Flags] = (
    {"data.source": "digits", "limit-train-batches": "4", "limit-eval-batches": "4"},
    {"data.source": "digits", "limit-train-batches": "3", "model.freeze": "features.0"},
    {"data.source": "FOLDER/images", "data.image-size": "24"},
    {"data.source": "FOLDER/images", "data.image-size": "32", "data.holdout": "0.2"},
    {"data.source": "FOLDER/parquet", "data.image-size": "24"},
    {"data.source": "FOLDER/parquet", "data.target-columns": "x y", "loss.name": "huber"},
    {"data.source": "FOLDER/parquet", "data.target-columns": "p q", "loss.name": "bce"},
)
# How many of 10 configs have the flag, and its possible values.
CHOICES: Mapping[str, tuple[int, str]] = {
    "seed": (2, "7"),
    "exact": (5, "true"),
    "steps": (3, "7 11"),
    "overfit-batches": (1, "2"),
    "data.workers": (3, "0 1 2"),
    "data.prefetch": (3, "1 3"),
    "data.shuffle": (3, "full block"),
    "data.shuffle-window": (2, "1 3"),
    "data.start-size": (2, "16 24"),
    "data.grow-epochs": (2, "1"),
    "data.eval-size": (2, "24 32"),
    "data.interpolation": (2, "bicubic"),
    "data.bad-records": (2, "skip"),
    "augment.crop": (3, "none random"),
    "augment.flip": (2, "true"),
    "augment.policy": (3, "randaugment trivial augmix"),
    "augment.erase": (2, "0.3"),
    "augment.mixup": (2, "0.2"),
    "augment.cutmix": (2, "1"),
    "augment.repeats": (2, "2 3"),
    "augment.spread-repeats": (2, "true"),
    "loss.name": (2, "focal bce cross-entropy"),
    "loss.class-weights": (2, "balanced"),
    "model.freeze": (2, "backbone"),
    "model.unfreeze-epoch": (2, "1"),
    "optim.name": (4, "adamw sgd"),
    "optim.lr": (5, "0.01 0.003"),
    "optim.momentum": (2, "0 0.8"),
    "optim.nesterov": (2, "false"),
    "optim.head-lr": (2, "0.01"),
    "optim.clip-norm": (3, "0.5 1"),
    "optim.nonfinite": (2, "skip"),
    "optim.label-smoothing": (2, "0 0.05"),
    "schedule.name": (4, "cosine step constant"),
    "schedule.warmup-epochs": (3, "0 0.5"),
    "compute.precision": (4, "bf16 fp16 fp32"),
    "compute.channels-last": (2, "true"),
    "compute.deterministic": (2, "true"),
    "ddp.bucket-cap-mb": (2, "1 0.01"),
    "ddp.gradient-as-bucket-view": (2, "false"),
    "ddp.static-graph": (2, "true"),
    "ddp.compression": (3, "bf16 fp16"),
    "ema.decay": (4, "0.9 0.99"),
    "ema.warmup": (2, "false"),
    "eval.every-epochs": (3, "0 2"),
    "eval.every-steps": (3, "2 3"),
    "eval.micro-batch": (3, "5 16"),
    "stop.patience": (2, "1"),
    "checkpoint.every-epochs": (2, "0 2"),
    "checkpoint.every-steps": (4, "1 2 4"),
    "scaling.check-every-steps": (4, "1 3"),
    "log.audit": (2, "true"),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Images of noise in three classes, as an ImageFolder and as Parquet files; a model."""
    made, noise = tmp_path_factory.mktemp("data"), np.random.default_rng(0)
    for split, count in (("train", 50), ("val", 17)):
        rows = []
        for label, name in enumerate(("ant", "bee", "cat")):
            place = made / "images" / split / name
            place.mkdir(parents=True)
            for n in range(count + 7 * (name == "bee")):
                shape = (*noise.integers(20, 44, 2), 3)
                file = place / f"{n}.{'png' if n % 3 else 'jpg'}"
                Image.fromarray(noise.integers(0, 255, shape, dtype=np.uint8)).save(file)
                row = {"image": {"bytes": file.read_bytes(), "path": file.name}, "label": label}
                rows.append({**row, "x": float(label), "y": n / 50, "p": n % 2 > 0, "q": label > 0})
        (made / "parquet").mkdir(exist_ok=True)
        table = pa.Table.from_pylist(sorted(rows, key=lambda row: str(row["y"])))
        pq.write_table(table, made / "parquet" / f"{split}.parquet", row_group_size=16)
    (made / "net.py").write_text(NET)
    return made


def draw_flags(draws: random.Random, folder: Path) -> Flags:
    flags = {"batch-size": draws.choice(["24", "32", "48"]), "epochs": draws.choice(["2", "3"])}
    flags |= {"micro-batch": draws.choice(["2", "4", "8"]), "checkpoint.every-s": "0"}
    flags |= {"log.every-steps": draws.choice(["1", "2", "10"]), "log.tensorboard": "false"}
    for name, (of_ten, values) in CHOICES.items():
        if draws.randrange(10) < of_ten:
            flags[name] = draws.choice(values.split())
    source = {k: v.replace("FOLDER", str(folder)) for k, v in draws.choice(SOURCES).items()}
    if source["data.source"] != "digits":
        source |= {"model.name": f"{folder}/net.py:net", "data.image-size": "24"} | source
    return {**flags, **source}


def config_of(flags: Flags, storage: Path, name: str) -> TrainConfig:
    argv = ["--local", "--storage", str(storage), "--name", name]
    for flag, value in flags.items():
        argv += [f"--{flag}", *value.split()]
    return parse_fit(argv).config


def refusal(flags: Flags, storage: Path) -> str:
    """The error of `fit` before it starts workers; "": none."""
    try:
        dry_run(config_of(flags, storage, "dry"), local=True)
    except RaytrainError as error:
        return str(error)
    return ""


def accepted(flags: Flags, storage: Path) -> Flags:
    """The flags without the fields that errors name first: removing these must always help."""
    left = dict(flags)
    while said := refusal(left, storage):
        names = (name.replace("_", "-") for name in re.findall(r"[a-z_]+(?:\.[a-z_]+)?", said))
        named = [name for name in names if name in left]
        assert named, f"{said}\n{left}"
        del left[named[0]]
    return left


def ran(rank: int, size: int, given: Mapping[str, Any], stop_at: int, die_at: int) -> int:
    """Trains like `fit` on one worker of a group; returns the last step."""
    import torch

    from raytrain_ddp.driver.fit_driver import write_config
    from raytrain_ddp.tasks.task_loading import load_task
    from raytrain_ddp.training.loop import train
    from raytrain_ddp.training.runtime.world import World
    from raytrain_ddp.training.start.settling import settled

    world = World(rank, size, rank, torch.device("cpu"), 1)
    config, _ = settled(from_dict(given), world)
    if world.is_main:
        write_config(config, run_storage(config))
    reads: set[str] = set()
    task = load_task(config, reads)
    with ScriptedSession(config, world, stop_at, die_at) as session:
        return train(config, task, session, reads).step


def tensors(config: TrainConfig) -> dict[str, str]:
    """Hashes of the files with tensors in the newest checkpoint."""
    files = newest(config).manifest.files
    return {name: file.sha256 for name, file in files.items() if name.endswith(".safetensors")}


SEEDS = [*range(4), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(4, 200))]


@pytest.mark.parametrize("seed", SEEDS)
def test_a_run_that_is_stopped_or_killed_and_resumed_ends_with_the_same_bits(
    seed: int, folder: Path, workers: Group, tmp_path: Path
) -> None:
    draws = random.Random(seed)
    flags = accepted(draw_flags(draws, folder), tmp_path)
    left_alone = config_of(flags, tmp_path, "left-alone")
    total = workers(SIZE, ran, plain(left_alone), 0, 0)[0]
    disturbed = config_of(flags, tmp_path, "disturbed")
    sizes = draws.choice([(3, 1), (1, 3), (2, 3)]) if disturbed.exact else (SIZE, SIZE)
    step = draws.randrange(1, max(2, total))
    ends = (step, 0) if draws.randrange(2) else (0, step)
    results = workers.outcomes(sizes[0], ran, plain(disturbed), *ends, wait_s=8.0)
    assert results == [step] * sizes[0] if ends[0] else isinstance(results[-1], Died)
    assert workers(sizes[1], ran, plain(disturbed), 0, 0)[0] == total, flags
    assert tensors(disturbed) == tensors(left_alone), flags
    assert log_of(disturbed) == log_of(left_alone), flags
