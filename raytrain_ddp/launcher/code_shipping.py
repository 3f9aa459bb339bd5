"""The script's working folder on each machine: the driver's, or a copy of it."""

from __future__ import annotations

import hashlib
import io
import os
import socket
import stat
import tarfile
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from raytrain_ddp.errors import PreflightError
from raytrain_ddp.launcher.output import tell
from raytrain_ddp.launcher.rank_environment import Worker

_MARK = ".raytrain-run-"  # prefix of marker files, which reveal a shared folder
_MAX_BYTES = 100 * 1024 * 1024
_LEFT_OUT = {
    *(".git", ".hg", ".svn", "__pycache__", "node_modules", ".tox", ".nox", ".venv"),
    *(".mypy_cache", ".ruff_cache", ".pytest_cache", ".hypothesis"),
}
_AT_THE_TOP = {  # results, and secrets: present if `run` is called in a home folder
    *("runs", "wandb", ".ssh", ".aws", ".azure", ".config", ".gnupg", ".kube", ".docker", ".ray"),
    *(".netrc", ".env"),
}
_OF_ENVIRONMENTS = ("pyvenv.cfg", "conda-meta")

# Calls a method of the agents of some workers, and waits for their answers.
AskAgents = Callable[..., list[Any]]


def provide_folders(ship: str, elsewhere: Sequence[Worker], ask: AskAgents) -> dict[int, str]:
    """The folders of the nodes that work in a copy, by their rank. Others share the driver's.

    Args:
        ship: ``auto``, ``always`` or ``never``.
        elsewhere: the first worker of each node except the driver's.

    Raises:
        PreflightError: the folder cannot be copied.
    """
    here = Path.cwd()
    if not elsewhere or ship == "never":
        return {}
    lacks = elsewhere
    if ship == "auto":  # a new file reveals a shared folder
        with suppress(OSError), tempfile.NamedTemporaryFile(prefix=_MARK, dir=here) as mark:
            seen = ask(elsewhere, "exists", mark.name)
            lacks = [worker for worker, sees in zip(elsewhere, seen, strict=True) if not sees]
    if not lacks:
        return {}
    import ray

    # The same name at each call: files that a script left there, as checkpoints, are found again.
    origin = hashlib.sha256(f"{socket.gethostname()}:{here}".encode()).hexdigest()
    places = ask(lacks, "unpack", ray.put(pack_folder(here)), f"{here.name}-{origin[:8]}")
    for worker, place in zip(lacks, places, strict=True):
        tell(f"{worker.where} works in a copy of {here}: {place}")
    return {worker.node_rank: place for worker, place in zip(lacks, places, strict=True)}


def pack_folder(folder: Path) -> bytes:
    """The folder as a tar file, without version control, environments, caches and results.

    A link to a file is packed as the file. A link to a folder, or a broken one, stays a link, which
    may point outside the folder: a data set has its own place on each machine.

    Raises:
        PreflightError: it has more than 100 MiB, or something cannot be read.
    """
    archive, size = io.BytesIO(), 0

    def as_packed(info: tarfile.TarInfo) -> tarfile.TarInfo | None:
        nonlocal size
        path = folder / info.name
        if path != folder and _is_left_out(path, folder):
            return None
        if info.issym() and path.is_file():
            info = files.gettarinfo(os.path.realpath(path), info.name)
        elif info.issym():
            info.linkname = _target(path, folder)
        elif not (info.isreg() or info.isdir()):
            return None
        size += tarfile.BLOCKSIZE + info.size
        if size > _MAX_BYTES:
            raise PreflightError(
                f"{folder} is not on all machines of the cluster, and with more than 100 MiB too "
                "large to be copied there. Run from a folder with the code alone, or from one that "
                "all machines share; --ship never copies nothing."
            )
        # Belongs to the user who unpacks it, with write permission.
        info.mode |= stat.S_IRWXU if info.isdir() else stat.S_IRUSR | stat.S_IWUSR
        info.uid, info.gid, info.uname, info.gname = 0, 0, "", ""
        return info

    try:
        with tarfile.open(fileobj=archive, mode="w") as files:
            files.add(folder, "", filter=as_packed)
    except OSError as error:
        raise PreflightError(
            f"{folder} cannot be copied to other machines: {error}. Wait until nobody writes there,"
            " or run from a folder that all machines share."
        ) from None
    return archive.getvalue()


def unpack_folder(archive: bytes, place: Path) -> None:
    """Extracts a folder over an earlier copy; files that a script left there stay."""
    place.mkdir(parents=True, exist_ok=True)
    with tarfile.open(fileobj=io.BytesIO(archive)) as files:
        safe = {"filter": "tar"} if hasattr(tarfile, "tar_filter") else {}
        for member in files:
            path = place / member.name
            if path.is_symlink() or path.is_file():
                path.unlink()  # a running process keeps the old file
            files.extract(member, place, **safe)  # type: ignore[arg-type]


def path_in_copy(path: str, here: Path, there: str) -> str:
    """Maps an absolute path in one folder to its copy; other paths stay unchanged."""
    own = Path(os.path.normpath(path))
    if not own.is_absolute() or not own.is_relative_to(here):
        return path
    return str(there / own.relative_to(here))


def _target(link: Path, folder: Path) -> str:
    """The target of a link to a folder, as written in a copy."""
    real, place = os.path.realpath(link), os.path.realpath(link.parent)
    is_inside = Path(real).is_relative_to(os.path.realpath(folder))
    return os.path.relpath(real, place) if is_inside else real


def _is_left_out(path: Path, folder: Path) -> bool:
    if path.name in _LEFT_OUT or any((path / each).exists() for each in _OF_ENVIRONMENTS):
        return True
    is_package = (path / "__init__.py").exists()
    return path.parent == folder and path.name in _AT_THE_TOP and not is_package
