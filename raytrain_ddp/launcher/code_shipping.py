"""Copies the user's code to machines that do not have it."""

from __future__ import annotations

import hashlib
import io
import os
import stat
import tarfile
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path

from raytrain_ddp.errors import PreflightError

MARK = ".raytrain-run-"  # prefix of marker files, which reveal a shared folder
MOST_BYTES = 100 * 1024 * 1024
_MOST_FILES = 20_000
_MOST_HASHED = 10 * 1024 * 1024  # larger files are compared by size: they are hardly code
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


def contents(folder: Path) -> dict[str, str] | None:
    """A hash of each file in a folder, by name; None if it is missing or far too large."""
    if not folder.is_dir():
        return None
    found: dict[str, str] = {}
    for count, path in enumerate(_entries(folder)):
        if count > _MOST_FILES:
            return None
        with suppress(FileNotFoundError):  # just deleted
            if path.is_file():
                size = path.stat().st_size
                data = path.read_bytes() if size <= _MOST_HASHED else b"%d" % size
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
        if here.get(name) != there.get(name) and (
            name.endswith(".py") or (name in here and name in there)
        ):
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
                top = name.parts[0]
                if path.is_file():
                    sizes[top] = sizes.get(top, 0) + path.stat().st_size
                if sum(sizes.values()) > MOST_BYTES or count > _MOST_FILES:
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
    if not os.path.isabs(path) or not Path(os.path.normpath(path)).is_relative_to(here):
        return path
    return str(Path(there) / Path(os.path.normpath(path)).relative_to(here))


def copy_name(folder: Path, host: str) -> str:
    """The name of a folder's copies: the same at each call, so files that a script left
    there, such as checkpoints, are found again."""
    return f"{folder.name}-{hashlib.sha256(f'{host}:{folder}'.encode()).hexdigest()[:8]}"


def _too_large(folder: Path, sizes: dict[str, int]) -> str:
    largest = sorted(sizes, key=lambda name: -sizes[name])[:3]
    named = ", ".join(f"{name} {sizes[name] / 2**20:.0f} MiB" for name in largest)
    return (
        f"{folder} is not on all machines of the cluster, and with more than 100 MiB or "
        f"{_MOST_FILES:,} files too large to be copied there (so far: {named}). Run from a folder "
        "with the code alone, or from one that all machines share; --ship never copies nothing."
    )


def _target(link: Path, folder: Path) -> str:
    """The target of a link to a folder, as written in a copy."""
    real, top = os.path.realpath(link), os.path.realpath(folder)
    if real == top or real.startswith(top + os.sep):
        return os.path.relpath(real, os.path.realpath(link.parent))
    return real


def _nobodys(info: tarfile.TarInfo) -> tarfile.TarInfo:
    """Makes the unpacking user the owner, with write permission."""
    info.mode |= stat.S_IRWXU if info.isdir() else stat.S_IRUSR | stat.S_IWUSR
    info.uid = info.gid = 0
    info.uname = info.gname = ""
    return info


def _entries(folder: Path) -> Iterator[Path]:
    """All entries to copy, in a fixed order: folders, readable files, and links."""
    for place, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if _wanted(folder, Path(place, name)))
        yield from (Path(place, name) for name in folders)
        for name in sorted(names):
            path = Path(place, name)
            left_out = path.parent == folder and (name in _SECRETS or name.startswith(MARK))
            if _is_kept(path) and not left_out:
                yield path


def _is_kept(path: Path) -> bool:
    try:
        mode = path.stat().st_mode
    except OSError:
        return path.is_symlink()  # a broken link
    return stat.S_ISREG(mode) and os.access(path, os.R_OK)


def _wanted(top: Path, folder: Path) -> bool:
    if folder.name in _LEFT_OUT or not os.access(folder, os.R_OK | os.X_OK):
        return False
    if any((folder / each).exists() for each in _ENVIRONMENTS):
        return False
    if folder.name in _SECRETS and folder.parent == top:
        return False
    result = folder.name in _RESULTS and folder.parent == top
    return not result or (folder / "__init__.py").exists()
