"""What is left to do at the end of a run."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Literal

from raytrain_ddp.checkpoint.manifest import Manifest
from raytrain_ddp.checkpoint.run_folder import (
    CHECKPOINTS,
    LOG_FILE,
    checkpoint_store,
    read_events,
    read_history,
)
from raytrain_ddp.checkpoint.storage import Storage
from raytrain_ddp.checkpoint.store import CheckpointName
from raytrain_ddp.config.train_config import TrainConfig
from raytrain_ddp.driver.result import FitResult
from raytrain_ddp.events import End, Eval, Outcome
from raytrain_ddp.records import log_records

_COMMIT_S, _PAUSE_S = 60.0, 0.1


def result_of(run: Storage, end: Outcome | int, seconds: Mapping[str, float]) -> FitResult:
    """The result of a run that has ended; the rest of it is read from the run's folder.

    Args:
        end: how its training ended; or the step of a run that was complete before.
    """
    history = read_history(run)
    evaluations = [record for record in log_records(history) if isinstance(record, Eval)]
    bests = [record for record in evaluations if record.best]
    best, last = (
        {**records[-1].metrics, "step": records[-1].step} if records else {}
        for records in (bests, evaluations)
    )
    names = checkpoint_store(run).names()
    at_best = next((name for name in names if name.step == best.get("step")), None)
    status: Literal["finished", "interrupted", "already complete"] = "already complete"
    if isinstance(end, Outcome):
        status = "interrupted" if end.signal else "finished"
    else:
        end = Outcome(end, end, 0, None, 0, {}, {})
    return FitResult(
        status=status,
        step=end.step,
        total_steps=end.total_steps,
        monitor=evaluations[-1].monitor if evaluations else "",
        best=best,
        last=last,
        path=run.address,
        best_checkpoint=_place(run, at_best),
        last_checkpoint=_place(run, names[0] if names else None),
        history=history,
        seconds=seconds,
        signal=end.signal,
        of_ray=end.of_ray,
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


def wait_for_rank_0(run: Storage, step: int) -> None:
    """Waits up to a minute until rank 0 has committed the last checkpoint. Before the first step,
    there is none."""
    until_s = time.monotonic() + (_COMMIT_S if step else 0.0)
    while time.monotonic() < until_s:
        with suppress(OSError):
            if any(name.step >= step for name in checkpoint_store(run).names()):
                return
        time.sleep(_PAUSE_S if run.is_local else 10 * _PAUSE_S)


def _place(run: Storage, name: CheckpointName | None) -> str | None:
    return run.join(CHECKPOINTS).join(str(name)).address if name else None
