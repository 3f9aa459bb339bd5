"""Compares what two runs left behind."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from json import dumps
from typing import Any

from raytrain_ddp.checkpoint.run_folder import CLOCKS, checkpoint_store, read_history
from raytrain_ddp.checkpoint.storage import TEMP_PREFIX, Storage
from raytrain_ddp.checkpoint.store import MANIFEST_FILE, CheckpointName
from raytrain_ddp.errors import CheckpointError


@dataclass(frozen=True)
class RunResults:
    """One run's results: hashes of what must be equal, and files that must not exist."""

    weights: str
    optimizer: str
    samples: str
    log: str
    steps: Sequence[int]
    leftovers: Sequence[str]


def results_of(run: Storage) -> RunResults:
    """Reads a run's folder. Everything is verified against the newest checkpoint's manifest.

    Raises:
        CheckpointError: the newest checkpoint is damaged, or there is none.
    """
    store = checkpoint_store(run)
    names = store.names()
    if not names:
        raise CheckpointError(f"{run}: there is no checkpoint.")
    newest = store.open(names[0])
    newest.verify()
    history = [_timeless(record) for record in read_history(run)]
    audit = [record for record in history if record["kind"] == "audit"]
    others = [record for record in history if record["kind"] != "audit"]
    hashes = {name: file.sha256 for name, file in newest.manifest.files.items()}
    weights = [hashes[n] for n in ("model.safetensors", "trained.safetensors") if n in hashes]
    return RunResults(
        weights=" ".join(weights),  # with an average, also those that are trained
        optimizer=" ".join(hashes[n] for n in sorted(hashes) if n.startswith("optimizer")),
        samples=_digest(audit),
        log=_digest(others),
        steps=[record["step"] for record in others if record["kind"] == "train"],
        leftovers=leftovers(run),
    )


def leftovers(run: Storage) -> list[str]:
    """Temporary files, and folders of checkpoints without a manifest."""
    entries = run.walk()
    whole = {e.removesuffix(MANIFEST_FILE) for e in entries if e.endswith(MANIFEST_FILE)}
    return [
        entry
        for entry in entries
        if TEMP_PREFIX in entry
        or (
            entry.endswith("/")
            and CheckpointName.parse(entry.rstrip("/").rpartition("/")[2])
            and entry not in whole
        )
    ]


def _timeless(record: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in record.items() if key not in CLOCKS}


def _digest(records: Sequence[Mapping[str, Any]]) -> str:
    lines = (dumps(record, sort_keys=True) for record in records)
    return sha256("\n".join(lines).encode()).hexdigest()
