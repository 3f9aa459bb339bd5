"""The user's code for machines that do not have it."""

from __future__ import annotations

import hashlib
import io
import os
import tarfile
from collections.abc import Iterator
from pathlib import Path

from raytrain_ddp.errors import PreflightError

MOST_BYTES = 100 * 1024 * 1024
_MOST_FILES = 20_000
_LEFT_OUT = {
    *(".git", ".hg", ".svn", "__pycache__", "node_modules", "runs", "wandb", ".tox", ".nox"),
    *(".venv", "venv", ".mypy_cache", ".ruff_cache", ".pytest_cache", ".hypothesis"),
}
_ENVIRONMENTS = ("pyvenv.cfg", "conda-meta")


def code_hash(folder: Path) -> str | None:
    """A hash of all Python files in a folder; None where it is missing or far too large."""
    if not folder.is_dir():
        return None
    digest = hashlib.sha256()
    for count, path in enumerate(_files(folder)):
        if count > _MOST_FILES:
            return None
        if path.suffix == ".py":
            name = path.relative_to(folder).as_posix().encode()
            digest.update(b"%d %b %d " % (len(name), name, path.stat().st_size))
            digest.update(path.read_bytes())
    return digest.hexdigest()


def pack(folder: Path) -> bytes:
    """The folder as a tar file, without version control, environments, caches and runs.

    Raises:
        PreflightError: that is more than 100 MiB, or very many files; it names the largest.
    """
    sizes: dict[str, int] = {}
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w") as files:
        for count, path in enumerate(_files(folder)):
            name = path.relative_to(folder)
            top = name.parts[0]
            sizes[top] = sizes.get(top, 0) + path.lstat().st_size
            if sum(sizes.values()) > MOST_BYTES or count > _MOST_FILES:
                raise PreflightError(_too_large(folder, sizes))
            files.add(path, arcname=name.as_posix(), recursive=False)
    return archive.getvalue()


def place_name(folder: Path, host: str) -> str:
    """The name that a folder's copies have: the same at each call, so that what a script has left
    there, its checkpoints for instance, is found again."""
    return f"{folder.name}-{hashlib.sha256(f'{host}:{folder}'.encode()).hexdigest()[:8]}"


def _too_large(folder: Path, sizes: dict[str, int]) -> str:
    largest = sorted(sizes, key=lambda name: -sizes[name])[:3]
    named = ", ".join(f"{name} {sizes[name] / 2**20:.0f} MiB" for name in largest)
    return (
        f"{folder} is not on all machines of the cluster, and with more than 100 MiB or "
        f"{_MOST_FILES:,} files too large to be copied there (so far: {named}). Run from a folder "
        "with the code alone, or from one that all machines share; --ship never copies nothing."
    )


def _files(folder: Path) -> Iterator[Path]:
    """All files to be copied, in a fixed order."""
    for place, folders, names in os.walk(folder):
        folders[:] = sorted(
            name
            for name in folders
            if name not in _LEFT_OUT
            and not any(os.path.exists(os.path.join(place, name, each)) for each in _ENVIRONMENTS)
        )
        yield from (Path(place, name) for name in sorted(names))
