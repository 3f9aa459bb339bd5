"""One table for "the same bits": features x {stopped, killed, resized}, in pairs.

`FEATURES` has a row for each feature. Any two values of different rows occur together in at least
one config, which trains on three workers, once undisturbed and once interrupted and resumed. The
weights, the optimizer's state, the moving average, and the log must be equal. What `fit` refuses
before it starts must be accepted without the field that the error names.
"""

from __future__ import annotations

import itertools
import random
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image
from processes import Died, Group
from tiny import ScriptedMembership, bits, log_of, plain

from raytrain_ddp.checkpoint.run_folder import run_storage
from raytrain_ddp.config.recipe import from_dict
from raytrain_ddp.config.train_config import TrainConfig
from raytrain_ddp.driver.dry_run import dry_run
from raytrain_ddp.errors import RaytrainError
from raytrain_ddp.fit import parse_fit

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
SOURCES: Mapping[str, Flags] = {
    "digits": {"data.source": "digits", "limit-train-batches": "4", "limit-eval-batches": "4"},
    "folder": {"data.source": "FOLDER/images", "data.image-size": "24"},
    "parquet": {"data.source": "FOLDER/parquet", "data.image-size": "24"},
    "numbers": {
        "data.source": "FOLDER/parquet",
        "data.target-columns": "x y",
        "loss.name": "huber",
    },
    "tags": {"data.source": "FOLDER/parquet", "data.target-columns": "p q", "loss.name": "bce"},
}
INTERRUPTIONS = ("stopped", "killed", "resized")
# Flag -> its values besides the default.
FEATURES: Mapping[str, str] = {
    "exact": "true",
    "steps": "7",
    "overfit-batches": "2",
    "batch-size": "48",
    "micro-batch": "4",
    "data.workers": "0 2",
    "data.shuffle": "full block",
    "data.holdout": "0.2",
    "data.start-size": "16",
    "data.bad-records": "skip",
    "augment.crop": "none random",
    "augment.policy": "randaugment trivial augmix",
    "augment.erase": "0.3",
    "augment.mixup": "0.2",
    "augment.cutmix": "1",
    "augment.repeats": "2",
    "loss.name": "focal bce",
    "loss.class-weights": "balanced",
    "model.freeze": "backbone",
    "optim.name": "adamw sgd",
    "optim.head-lr": "0.01",
    "optim.clip-norm": "0.5",
    "optim.nonfinite": "skip",
    "schedule.name": "step constant",
    "compute.precision": "bf16 fp16",
    "compute.channels-last": "true",
    "ddp.bucket-cap-mb": "0.01",
    "ddp.static-graph": "true",
    "ddp.compression": "bf16",
    "ema.decay": "0.9",
    "eval.every-steps": "2",
    "eval.micro-batch": "5",
    "stop.patience": "1",
    "checkpoint.every-steps": "1 4",
    "log.audit": "true",
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


Case = Mapping[str, str]  # "data", "end" and flags -> value; "": the default


def pairwise(values: Mapping[str, Sequence[str]], draws: random.Random) -> list[Case]:
    """Cases in which any two values of different rows occur together at least once."""
    both = itertools.combinations(sorted(values), 2)
    left = {((a, x), (b, y)) for a, b in both for x in values[a] for y in values[b]}
    cases: list[Case] = []
    while left:
        wanted = dict(min(left))
        candidates = [
            {name: draws.choice(each) for name, each in values.items()} | wanted for _ in range(40)
        ]
        found = [{*itertools.combinations(sorted(each.items()), 2)} & left for each in candidates]
        best = max(range(len(found)), key=lambda index: len(found[index]))
        cases.append(candidates[best])
        left -= found[best]
    return cases


VALUES = {
    "data": [*SOURCES],
    "end": INTERRUPTIONS,
    **{name: ["", *values.split()] for name, values in FEATURES.items()},
}
CASES = pairwise(VALUES, random.Random(0))


def flags_of(case: Case, folder: Path) -> Flags:
    """Small sizes, which the case's own flags replace, and then those that its data needs."""
    small = {"batch-size": "32", "micro-batch": "8", "epochs": "2", "log.every-steps": "1"}
    small |= {"checkpoint.every-s": "0", "log.tensorboard": "false", "optim.lr": "0.01"}
    source = {k: v.replace("FOLDER", str(folder)) for k, v in SOURCES[case["data"]].items()}
    if source["data.source"] != "digits":
        source |= {"model.name": f"{folder}/net.py:net", "data.image-size": "24"}
    own = {name: value for name, value in case.items() if name in FEATURES and value}
    resized = {"exact": "true"} if case["end"] == "resized" else {}
    return {**small, **own, **source, **resized}


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

    from raytrain_ddp.config.recipe import settled
    from raytrain_ddp.driver.fit_driver import write_config
    from raytrain_ddp.training.build import Build
    from raytrain_ddp.training.loop import take_part
    from raytrain_ddp.training.runtime.world import World

    world = World(rank, size, rank, torch.device("cpu"), 1)
    config = settled(from_dict(given), has_bf16=False)
    if world.is_main:
        write_config(config, run_storage(config))
    membership = ScriptedMembership(world, stop_at, die_at)
    outcome = take_part(membership, config, lambda _: Build(config, world))
    assert outcome is not None
    return outcome.step


def same_bits(
    case: Case, draws: random.Random, folder: Path, workers: Group, storage: Path
) -> None:
    flags = accepted(flags_of(case, folder), storage)
    left_alone = config_of(flags, storage, "left-alone")
    total = workers(SIZE, ran, plain(left_alone), 0, 0)[0]
    disturbed = config_of(flags, storage, "disturbed")
    resized = case["end"] == "resized"
    before, after = draws.choice([(3, 1), (1, 3), (2, 3)]) if resized else (SIZE, SIZE)
    step = draws.randrange(1, max(2, total))
    ends = (0, step) if case["end"] == "killed" else (step, 0)
    results = workers.outcomes(before, ran, plain(disturbed), *ends, wait_s=8.0)
    assert isinstance(results[-1], Died) if ends[1] else results == [step] * before, flags
    assert workers(after, ran, plain(disturbed), 0, 0)[0] == total, flags
    assert bits(disturbed) == bits(left_alone), flags
    assert log_of(disturbed) == log_of(left_alone), flags


@pytest.mark.parametrize("number", range(len(CASES)))
def test_an_interrupted_run_ends_with_the_bits_of_an_undisturbed_one(
    number: int, folder: Path, workers: Group, tmp_path: Path
) -> None:
    same_bits(CASES[number], random.Random(number), folder, workers, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(200))
def test_an_interrupted_run_with_random_features_ends_with_the_same_bits(
    seed: int, folder: Path, workers: Group, tmp_path: Path
) -> None:
    draws = random.Random(seed)
    case = {name: draws.choice(values) for name, values in VALUES.items()}
    same_bits(case, draws, folder, workers, tmp_path)
