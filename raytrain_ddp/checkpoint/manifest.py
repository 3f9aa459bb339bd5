"""The manifest of a checkpoint; it is written last, and a checkpoint without it does not exist."""

from __future__ import annotations

import functools
import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from importlib import metadata
from typing import Any

from raytrain_ddp.checkpoint.storage import is_plain_name
from raytrain_ddp.errors import CheckpointError

FORMAT = 1
# Keys of state.json.
RENEWED = "renewed"  # at the start of a branch: the optimizer's options come from the config
BRANCHED_AT = "branched_at"  # the step up to which the run has its state from another run

# The seal stays the last line in all formats, to distinguish damage from a newer format.
_SEAL = re.compile(rb'"sha256": "([0-9a-f]{64})"\n\}\n')
_SEAL_BYTES = len('"sha256": ""\n}\n') + 64


class DamagedError(CheckpointError):
    """A checkpoint that exists but differs from what was written; older ones may still be good."""


@functools.cache  # reads a file and parses it: 3 ms
def package_version() -> str:
    """The installed version of raytrain_ddp, or ``"unknown"`` in a bare checkout."""
    try:
        return metadata.version("raytrain_ddp")
    except metadata.PackageNotFoundError:
        return "unknown"


@dataclass(frozen=True)
class FileEntry:
    """Size and content of one payload file; ``sha256`` is 64 lower-case hex digits."""

    size_bytes: int
    sha256: str

    def __post_init__(self) -> None:
        _require(_is_count(self.size_bytes), "size_bytes", self.size_bytes)
        _require(
            isinstance(self.sha256, str) and bool(re.fullmatch("[0-9a-f]{64}", self.sha256)),
            "sha256",
            self.sha256,
        )


@dataclass(frozen=True)
class Manifest:
    """Everything known about a checkpoint without opening its files.

    ``step`` counts finished optimizer steps, ``epoch`` is the one that the next step belongs to,
    ``attempt`` counts the starts of the run from 1. ``config`` holds JSON values only, with text
    as keys. ``files`` is filled in by ``CheckpointStore.commit``.

    Raises:
        ValueError: a field has a value that no checkpoint can have.
    """

    step: int
    epoch: int
    attempt: int
    world_size: int
    config: Mapping[str, Any]
    data_fingerprint: str
    files: Mapping[str, FileEntry] = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)
    finished: bool = False
    written_by: str = field(default_factory=package_version)
    format: int = FORMAT

    def __post_init__(self) -> None:
        for name in ("step", "epoch", "attempt"):
            _require(_is_count(getattr(self, name)), name, getattr(self, name))
        _require(_is_count(self.world_size) and self.world_size > 0, "world_size", self.world_size)
        _require(isinstance(self.config, Mapping), "config", self.config)
        _require(isinstance(self.data_fingerprint, str), "data_fingerprint", self.data_fingerprint)
        _require(isinstance(self.files, Mapping), "files", self.files)
        for name, entry in self.files.items():
            _require(is_plain_name(name) and isinstance(entry, FileEntry), "files", name)
        _require(isinstance(self.metrics, Mapping), "metrics", self.metrics)
        for name, value in self.metrics.items():
            _require(isinstance(name, str) and _is_number(value), f"metrics {name!r}", value)
        _require(isinstance(self.finished, bool), "finished", self.finished)
        _require(isinstance(self.written_by, str), "written_by", self.written_by)
        _require(_is_count(self.format) and self.format == FORMAT, "format", self.format)

    @property
    def size_bytes(self) -> int:
        """Of all files."""
        return sum(each.size_bytes for each in self.files.values())

    def to_json(self) -> bytes:
        """ASCII JSON, whose last entry is the sha256 of all bytes before that entry.

        Metrics and config values that are not finite are written as ``NaN`` and ``Infinity``.
        """
        content = {f.name: getattr(self, f.name) for f in fields(self)}
        content["files"] = {name: asdict(entry) for name, entry in self.files.items()}
        head = json.dumps(content, sort_keys=True, indent=1).removesuffix("\n}") + ",\n "
        digest = hashlib.sha256(head.encode()).hexdigest()
        return f'{head}"sha256": "{digest}"\n}}\n'.encode()

    @staticmethod
    def from_json(data: bytes) -> Manifest:
        """The inverse of `to_json`.

        Raises:
            DamagedError: these are not the bytes of a manifest, or not all of them are.
            CheckpointError: a newer version of this package wrote it.
        """
        seal = _SEAL.fullmatch(data[-_SEAL_BYTES:])
        if not seal:
            raise DamagedError("The manifest is truncated or not a manifest.")
        if hashlib.sha256(data[:-_SEAL_BYTES]).hexdigest().encode() != seal.group(1):
            raise DamagedError("The manifest does not match its own sha256.")
        try:
            content = json.loads(data)
            version = content.get("format")
            if _is_count(version) and version > FORMAT:
                raise CheckpointError(
                    f"The checkpoint has format {version}, written by raytrain_ddp "
                    f"{content.get('written_by')}; this is {package_version()}, which reads "
                    f"formats up to {FORMAT}: upgrade it, or use another run name."
                )
            known = {f.name for f in fields(Manifest)}
            _require(set(content) == known | {"sha256"}, "fields", sorted(content))
            del content["sha256"]
            content["files"] = {
                name: FileEntry(**entry) for name, entry in content["files"].items()
            }
            return Manifest(**content)
        except (ValueError, TypeError, AttributeError, RecursionError) as error:
            raise DamagedError(f"The manifest has invalid content: {error}") from None


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _require(is_right: bool, name: str, value: object) -> None:
    if not is_right:
        raise ValueError(f"manifest: {name} cannot be {str(value)[:200]!r}")
