"""Finishes a run: its result, its curves, and suggestions for the next step."""

from __future__ import annotations

import json
import re
import shlex
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Literal

from raytrain_ddp.checkpoint.manifest import Manifest
from raytrain_ddp.checkpoint.run_folder import (
    CHECKPOINTS,
    CURVES_FILE,
    LOG_FILE,
    LOGS,
    METRICS_FILE,
    TENSORBOARD,
    checkpoint_store,
    read_events,
    read_history,
)
from raytrain_ddp.checkpoint.storage import Storage
from raytrain_ddp.checkpoint.store import CheckpointName
from raytrain_ddp.config.rules import IMAGES
from raytrain_ddp.config.train_config import TrainConfig
from raytrain_ddp.driver.result import FitResult
from raytrain_ddp.events import End, Eval
from raytrain_ddp.records import log_records
from raytrain_ddp.tools.report.bottleneck import split_of
from raytrain_ddp.uri import below

_COMMIT_S, _PAUSE_S = 60.0, 0.1


def result_of(
    run: Storage,
    status: Literal["finished", "interrupted", "already complete"],
    step: int,
    total_steps: int,
    seconds: Mapping[str, float],
    signal: int = 0,
) -> FitResult:
    """The result of a run that has ended; the rest of it is read from the run's folder."""
    history = read_history(run)
    evaluations = [record for record in log_records(history) if isinstance(record, Eval)]
    bests = [record for record in evaluations if record.best]
    best, last = (
        {**records[-1].metrics, "step": records[-1].step} if records else {}
        for records in (bests, evaluations)
    )
    names = checkpoint_store(run).names()
    at_best = next((name for name in names if name.step == best.get("step")), None)
    return FitResult(
        status=status,
        step=step,
        total_steps=total_steps,
        monitor=evaluations[-1].monitor if evaluations else "",
        best=best,
        last=last,
        path=run.address,
        best_checkpoint=_place(run, at_best),
        last_checkpoint=_place(run, names[0] if names else None),
        history=history,
        seconds=seconds,
        signal=signal,
    )


def is_tidy(run: Storage) -> bool:
    """Whether the last start of a complete run ended normally, and was not killed after its last
    commit."""
    events = read_events(run)
    return bool(events) and isinstance(events[-1].event, End)


def tidy(config: TrainConfig, run: Storage, manifest: Manifest) -> None:
    """Does the remaining work for a complete run; only its owner may call this.

    Raises:
        RunLockedError: another start has continued the run.
        CheckpointError: the newest checkpoint is damaged.
        OSError: the storage does not respond, or is not writable.
    """
    from raytrain_ddp.checkpoint.metrics_log import write_log  # imports torch

    store, newest = checkpoint_store(run), CheckpointName(manifest.step, manifest.attempt)
    if store.names()[:1] == [newest]:  # otherwise it is damaged, and must not be swept
        store.claim(newest, {"why": "what a kill left of a complete run is removed"})
        store.sweep()
        records = json.loads(store.open(newest).read(LOG_FILE))
        # On an object store, the last records may be missing. A newer version may have written
        # records and keys that this one does not know: they stay.
        write_log(run, records)
        log = log_records(records)
        best = next((r.step for r in reversed(log) if isinstance(r, Eval) and r.best), None)
        kept = next((name for name in store.names() if name.step == best), None)
        store.prune(config.checkpoint.keep_last, kept)


def run_summary(
    config: TrainConfig, result: FitResult, flags: str = ""
) -> tuple[str, list[tuple[str, str]]]:
    """The main bottleneck, and (title, path or command) of each line at the end of a run.

    Args:
        flags: added to each training command, as ``--local``.
    """
    name, place, word = config.name, result.path, shlex.quote(result.path)
    again = f"python -m raytrain_ddp.fit {word}/config.toml{flags}"  # of a local run
    commands = []
    # No command can load an object, or a class from a script, a notebook or a function.
    is_importable = re.search(r"^__main__:|<locals>|<lambda>|\)$", config.task) is None
    if result.monitor and is_importable:
        commands.append(("evaluate", f"python -m raytrain_ddp.evaluate {word}"))
    if result.monitor and config.task == IMAGES:
        out = shlex.quote(f"{name}.csv")
        commands.append(("predict", f"raytrain predict {word} --out {out}"))
    if not is_importable:
        commands.append(("train longer", "run the same Python code again, with more epochs"))
    elif result.status == "interrupted":
        commands.append(("resume", again if "://" not in place else "the same command again"))
    elif "://" not in place:
        commands.append(("train longer", f"{again} {_twice(config, result)}"))
        commands.append(("train again", f"{again} --name {shlex.quote(f'{name}-2')}"))
    commands.append(("report", f"raytrain report {word}"))
    if config.log.tensorboard and "://" not in place:
        commands.append(("see the curves", f"tensorboard --logdir {word}/{TENSORBOARD}"))
    paths = {"curves": below(place, CURVES_FILE), "metrics": below(place, METRICS_FILE)}
    if result.best_checkpoint:
        paths["best checkpoint"] = result.best_checkpoint
    if result.last_checkpoint:
        paths["last checkpoint"] = result.last_checkpoint
    if Path(place, LOGS).is_dir():
        paths["logs"] = f"{place}/{LOGS}"
    return split_of(log_records(result.history)).limit(), [*paths.items(), *commands]


def wait_for_rank_0(run: Storage, step: int) -> None:
    """Waits up to a minute until rank 0 has committed the last checkpoint. Before the first step,
    there is none."""
    until_s = time.monotonic() + (_COMMIT_S if step else 0.0)
    while time.monotonic() < until_s:
        with suppress(OSError):
            if any(name.step >= step for name in checkpoint_store(run).names()):
                return
        time.sleep(_PAUSE_S if run.is_local else 10 * _PAUSE_S)


def _twice(config: TrainConfig, result: FitResult) -> str:
    """The flag that doubles the training; a run may be longer than its config."""
    if config.steps:
        return f"--steps {2 * max(config.steps, result.step)}"
    epochs = max((record.get("epoch", 0) + 1 for record in result.history), default=1)
    return f"--epochs {2 * max(config.epochs, epochs)}"


def _place(run: Storage, name: CheckpointName | None) -> str | None:
    return run.join(CHECKPOINTS).join(str(name)).address if name else None
