"""Compares what two runs left behind."""

from __future__ import annotations

from hashlib import sha256
from json import dumps
from typing import NamedTuple

from raytrain_ddp.checkpoint.run_folder import CLOCKS, newest_checkpoint, read_history
from raytrain_ddp.checkpoint.storage import TEMP_PREFIX, Storage
from raytrain_ddp.checkpoint.store import MANIFEST_FILE, CheckpointName
from raytrain_ddp.errors import CheckpointError


class Row(NamedTuple):
    """A fact about both runs, which must be equal."""

    what: str
    undisturbed: str
    disturbed: str

    @property
    def equal(self) -> bool:
        return self.undisturbed == self.disturbed


def compare(undisturbed: Storage, disturbed: Storage) -> list[Row]:
    """Compares the results of two runs that have ended.

    Raises:
        CheckpointError: a newest checkpoint is damaged, or there is none.
    """
    ours, theirs = results_of(undisturbed), results_of(disturbed)
    return [Row(what, value, theirs[what]) for what, value in ours.items()]


def results_of(run: Storage) -> dict[str, str]:
    """What must be equal in equal runs: the beginnings of hashes, and files left over.

    Raises:
        CheckpointError: the newest checkpoint is damaged, or there is none.
    """
    if (newest := newest_checkpoint(run)) is None:
        raise CheckpointError(f"{run}: there is no checkpoint.")
    newest.verify()
    files = sorted((name, file.sha256) for name, file in newest.manifest.files.items())
    history = [{k: v for k, v in each.items() if k not in CLOCKS} for each in read_history(run)]
    hashed = {
        # With an average, also those that are trained.
        "weights": [f for f in files if f[0] in ("model.safetensors", "trained.safetensors")],
        "optimizer": [f for f in files if f[0].startswith("optimizer")],
        "samples": [record for record in history if record["kind"] == "audit"],
        "log": [record for record in history if record["kind"] != "audit"],
    }
    left = leftovers(run)
    return {
        **{f"{what} (sha256)": _digest(records) for what, records in hashed.items()},
        "leftover files": f"{len(left)} {', '.join(left[:3])}".strip(),
    }


def leftovers(run: Storage) -> list[str]:
    """Temporary files, and folders of checkpoints without a manifest."""
    entries = run.walk()
    whole = {e.removesuffix(MANIFEST_FILE) for e in entries if e.endswith(MANIFEST_FILE)}
    folders = {e for e in entries if e.endswith("/") and CheckpointName.parse(e.split("/")[-2])}
    return [e for e in entries if TEMP_PREFIX in e or e in folders - whole]


def _digest(records: object) -> str:
    return sha256(dumps(records, sort_keys=True).encode()).hexdigest()[:16]
