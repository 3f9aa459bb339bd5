"""The script's working folder on each machine: the driver's, or a copy of it."""

from __future__ import annotations

import hashlib
import io
import os
import socket
import stat
import tarfile
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from raytrain_ddp.errors import PreflightError
from raytrain_ddp.launcher.rank_environment import Worker
from raytrain_ddp.launcher.run_options import RunOptions

_MARK = ".raytrain-run-"  # prefix of marker files, which reveal a shared folder
_MAX_BYTES = 100 * 1024 * 1024
_MAX_FILES = 20_000
_MAX_HASHED = 10 * 1024 * 1024  # larger files are compared by size: they are hardly code
_LEFT_OUT = {
    *(".git", ".hg", ".svn", "__pycache__", "node_modules", ".tox", ".nox", ".venv"),
    *(".mypy_cache", ".ruff_cache", ".pytest_cache", ".hypothesis"),
}
_SECRETS = {  # omitted at the top level: present if `run` is called in a home folder
    *(".ssh", ".aws", ".azure", ".config", ".gnupg", ".kube", ".docker", ".ray", ".netrc"),
    ".env",
}
_RESULTS = {"runs", "wandb"}  # omitted at the top level unless they are packages
_ENVIRONMENTS = ("pyvenv.cfg", "conda-meta")

# Calls a method of the agents of some workers, and waits for their answers.
AskAgents = Callable[..., list[Any]]


def provide_folders(
    options: RunOptions, elsewhere: Sequence[Worker], ask: AskAgents, tell: Callable[[str], None]
) -> dict[int, str]:
    """The folders of the nodes that work in a copy, by rank. Other nodes share the driver's folder,
    or have the same files at the same path.

    Args:
        elsewhere: the first worker of each node except the driver's.

    Raises:
        PreflightError: the folder cannot be copied, or the script is outside of it.
    """
    here = Path.cwd()
    if not elsewhere or options.flags.ship == "never":
        return {}
    script = os.path.normpath(here / options.program)
    if options.is_script and not Path(script).is_relative_to(here):
        for worker, is_there in zip(elsewhere, ask(elsewhere, "exists", script), strict=True):
            if not is_there:
                raise PreflightError(
                    f"{script} is not on {worker.where}, and is not copied there, as it is outside "
                    f"the folder in which run was called, {here}. Call run in the script's folder "
                    "or one above it."
                )
    why = dict.fromkeys(elsewhere, "--ship always")
    if options.flags.ship == "auto":
        why = _lacking(here, elsewhere, ask)
    if not why:
        return {}
    import ray

    # The same name at each call: files that a script left there, as checkpoints, are found again.
    origin = hashlib.sha256(f"{socket.gethostname()}:{here}".encode()).hexdigest()
    places = ask([*why], "unpack", ray.put(pack_folder(here)), f"{here.name}-{origin[:8]}")
    for (worker, reason), place in zip(why.items(), places, strict=True):
        tell(f"{worker.where} works in a copy of {here} ({reason}): {place}")
    return {worker.rank: place for worker, place in zip(why, places, strict=True)}


def _lacking(here: Path, elsewhere: Sequence[Worker], ask: AskAgents) -> dict[Worker, str]:
    """The nodes that do not have the same files, and how they differ. A shared folder, which is
    revealed by a new file in it, needs no comparison, however large it is."""
    seen = [False] * len(elsewhere)
    with suppress(OSError), tempfile.NamedTemporaryFile(prefix=_MARK, dir=here) as mark:
        seen = ask(elsewhere, "exists", mark.name)
    others = [worker for worker, sees in zip(elsewhere, seen, strict=True) if not sees]
    if not others:
        return {}
    mine = contents(here)
    why: dict[Worker, str] = {}
    for worker, theirs in zip(others, ask(others, "contents", str(here)), strict=True):
        if other := difference(mine, theirs):
            why[worker] = "it is not there" if theirs is None else f"its {other} is another there"
    return why


def contents(folder: Path) -> dict[str, str] | None:
    """A hash of each file in a folder, by name; None if it is missing or far too large."""
    if not folder.is_dir():
        return None
    found: dict[str, str] = {}
    for count, path in enumerate(_entries(folder)):
        if count > _MAX_FILES:
            return None
        with suppress(FileNotFoundError):  # just deleted
            if path.is_file():
                size = path.stat().st_size
                data = path.read_bytes() if size <= _MAX_HASHED else b"%d" % size
                found[path.relative_to(folder).as_posix()] = hashlib.sha256(data).hexdigest()
    return found


def difference(here: Mapping[str, str] | None, there: Mapping[str, str] | None) -> str:
    """The name of a file that differs there, or ``""``.

    Code files must exist on both sides. Other files may be missing on one: a missing input causes
    an error, and outputs of a script (a checkpoint of rank 0) are only on its own machine.
    """
    if here is None or there is None:
        return "all"
    for name in sorted(here.keys() | there.keys()):
        is_needed = name.endswith(".py") or (name in here and name in there)
        if is_needed and here.get(name) != there.get(name):
            return name
    return ""


def pack_folder(folder: Path) -> bytes:
    """The folder as a tar file, without version control, environments, caches and results.

    A link to a file is packed as the file. A link to a folder, or a broken one, stays a link, which
    may point outside the folder: a data set has its own place on each machine.

    Raises:
        PreflightError: it has more than 100 MiB or too many files (names the largest), or
            something cannot be read.
    """
    sizes: dict[str, int] = {}
    archive = io.BytesIO()
    try:
        with tarfile.open(fileobj=archive, mode="w", dereference=True) as files:
            for count, path in enumerate(_entries(folder)):
                name = path.relative_to(folder)
                if path.is_file():
                    top = name.parts[0]
                    sizes[top] = sizes.get(top, 0) + path.stat().st_size
                if sum(sizes.values()) > _MAX_BYTES or count > _MAX_FILES:
                    raise PreflightError(_too_large(folder, sizes))
                if path.is_symlink() and not path.is_file():
                    link = tarfile.TarInfo(name.as_posix())
                    link.type, link.linkname = tarfile.SYMTYPE, _target(path, folder)
                    files.addfile(link)
                else:
                    files.add(path, name.as_posix(), recursive=False, filter=_nobodys)
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


def _too_large(folder: Path, sizes: dict[str, int]) -> str:
    largest = sorted(sizes, key=lambda name: -sizes[name])[:3]
    named = ", ".join(f"{name} {sizes[name] / 2**20:.0f} MiB" for name in largest)
    return (
        f"{folder} is not on all machines of the cluster, and with more than 100 MiB or "
        f"{_MAX_FILES:,} files too large to be copied there (so far: {named}). Run from a folder "
        "with the code alone, or from one that all machines share; --ship never copies nothing."
    )


def _target(link: Path, folder: Path) -> str:
    """The target of a link to a folder, as written in a copy."""
    real, place = os.path.realpath(link), os.path.realpath(link.parent)
    is_inside = Path(real).is_relative_to(os.path.realpath(folder))
    return os.path.relpath(real, place) if is_inside else real


def _nobodys(info: tarfile.TarInfo) -> tarfile.TarInfo:
    """Makes the unpacking user the owner, with write permission."""
    info.mode |= stat.S_IRWXU if info.isdir() else stat.S_IRUSR | stat.S_IWUSR
    info.uid = info.gid = 0
    info.uname = info.gname = ""
    return info


def _entries(folder: Path) -> Iterator[Path]:
    """All entries to copy, in a fixed order: folders, readable files, and links."""
    for place, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if _is_wanted(folder, Path(place, name)))
        yield from (Path(place, name) for name in folders)
        for path in (Path(place, name) for name in sorted(names)):
            is_own = path.parent == folder and (
                path.name in _SECRETS or path.name.startswith(_MARK)
            )
            is_link = path.is_symlink() and not path.exists()  # a broken one
            if not is_own and (is_link or (path.is_file() and os.access(path, os.R_OK))):
                yield path


def _is_wanted(top: Path, folder: Path) -> bool:
    if folder.name in _LEFT_OUT or not os.access(folder, os.R_OK | os.X_OK):
        return False
    if any((folder / each).exists() for each in _ENVIRONMENTS):
        return False
    if folder.parent != top:
        return True
    is_result = folder.name in _RESULTS and not (folder / "__init__.py").exists()
    return folder.name not in _SECRETS and not is_result
