"""Makes the result of a command, a file or a folder, in a hidden folder next to it.

    .NAME.converting/     such as that of `convert`; deleted when the result has its name
      lock                held by one process at a time
      plan.json           what is made, and how: compared when the command is repeated
      result              gets the name NAME by one rename
      ...                 parts: finished work, which the same command uses again

A part is complete or not there: any process that sees the folder writes it by `replace_with` or
`write_json`, with `Staging.folder` as their `state`. If the parts depend on the plan only,
the result has the same bytes, whoever made them, and however often the command was killed.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from raytrain_ddp.errors import ConfigError, DataError, PreflightError, RunLockedError
from raytrain_ddp.files import fsync, is_utf8, replace_with

_READ_BYTES = 2**20


class Staging:
    """The folder in which `out` is made. Nothing is written before `held`.

    Args:
        verb: what the command does, such as "converting".
        shown: the result, as the user named it, for messages: ``--out a.csv``.
    """

    def __init__(self, out: Path, verb: str, shown: str) -> None:
        self.out, self._shown = out, shown
        self.folder = out.parent / f".{out.name}.{verb}"
        self.plan = self.folder / "plan.json"
        self.result = self.folder / "result"

    def require_place(self, overwrite: bool, other: str) -> None:
        """Raises ConfigError if the result cannot be at `out`, or `out` is there already.

        Args:
            other: why an existing `out` is never replaced; "": `overwrite` replaces it.
        """
        require_utf8(self._shown.partition(" ")[0], self.out)  # writers require it, too
        is_there, why = self.out.exists(), "exists already: give another name, or --overwrite"
        if not self.out.parent.is_dir():
            raise ConfigError(f"{self._shown}: there is no folder {self.out.parent}.")
        if is_there and (other or not overwrite):
            raise ConfigError(f"{self._shown}: {f'{other}: give another name' if other else why}.")

    @contextmanager
    def held(self) -> Iterator[None]:
        """Locks the folder for this process; deletes it at the end unless it has parts.

        Raises:
            RunLockedError: another process holds the lock.
            PreflightError: the folder cannot be written to.
        """
        refusal = f"{self._shown}: another process is writing it: wait for it, or stop it."
        with self.writing():
            self.folder.mkdir(parents=True, exist_ok=True)
            lock = (self.folder / "lock").open("w")
        with lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                raise RunLockedError(refusal) from None
            if not self._is_here(lock):  # it was deleted by a process that has just finished
                raise RunLockedError(refusal)
            try:
                for left in self.folder.glob("tmp-*"):  # by a process that was killed
                    _delete(left)
                yield
            except KeyboardInterrupt:
                if self.parts():
                    text = "Finished work is kept: run the same command again to continue."
                    print(text, file=sys.stderr)
                raise
            finally:
                if self._is_here(lock) and not self.parts():
                    _delete(self.folder)

    def parts(self) -> list[Path]:
        """All that is kept if the command is stopped now."""
        with suppress(FileNotFoundError, NotADirectoryError):
            own = ("lock", self.plan.name, self.result.name)
            paths = sorted(self.folder.iterdir())
            return [each for each in paths if each.name not in own and each.name[:4] != "tmp-"]
        return []

    def begin(self, plan: Mapping[str, Any], overwrite: bool | None = None) -> None:
        """Records what is made, or compares it with what was begun before.

        Args:
            plan: all that the parts depend on.
            overwrite: delete the parts of another plan. None: the command has no such flag.

        Raises:
            ConfigError: there are parts of another plan.
            DataError: the record is damaged.
        """
        anew = f"delete {self.folder}" if overwrite is None else "--overwrite"
        before = None
        try:
            before = read_json(self.plan)
        except DataError as error:
            if self.parts() and not overwrite:
                raise DataError(f"{error} To begin anew: {anew}.") from None
        if before == plan:
            return
        if self.parts() and not overwrite:
            changes = "; ".join(different(before or {}, plan))
            what = f"{self._shown}: was begun with other input ({changes})"
            raise ConfigError(f"{what}: repeat that command, or {anew}.")
        with self.writing():
            for path in (*self.parts(), self.result):
                _delete(path)
            write_json(self.plan, plan, self.folder)

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Raises PreflightError, which says what is kept, for an OSError such as a full disk."""
        try:
            yield
        except OSError as error:
            kept = f" Finished work is kept in {self.folder}: the same command continues."
            reason = f"cannot be written: {error.strerror or error}"
            raise PreflightError(
                f"{self._shown}: {reason}.{kept if self.parts() else ''}"
            ) from error

    def finish(self) -> None:
        """Gives `result` its name, in place of what has it, and deletes the folder."""
        with self.writing():
            fsync(self.result)
            if self.out.is_dir():  # a rename does not replace it
                os.replace(self.out, self.folder / "tmp-replaced")
            os.replace(self.result, self.out)
            fsync(self.out.parent)
            _delete(self.folder)

    def _is_here(self, lock: IO[str]) -> bool:
        with suppress(OSError):
            return os.path.samestat((self.folder / "lock").stat(), os.fstat(lock.fileno()))
        return False


def _delete(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def require_utf8(name: str, path: Path) -> None:
    """Raises ConfigError, with this name of the option, unless a path `is_utf8`."""
    if not is_utf8(str(path)):
        raise ConfigError(f"{name} {path}: must be UTF-8: use another name.")


def sha256_of(path: Path) -> str:
    """The SHA-256 digest of a file's content, in hexadecimal."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_READ_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def different(before: Mapping[str, Any], now: Mapping[str, Any], name: str = "") -> list[str]:
    """``["seed: 1, was 0"]``: the differences between two records, which may be nested."""
    lines = []
    for key in sorted({*before, *now}):
        old, new = before.get(key), now.get(key)
        if isinstance(old, dict) and isinstance(new, dict):
            lines += different(old, new, key)
        elif old != new:
            what = f"{name} {key}" if name else key
            digest = isinstance(old, str) and isinstance(new, str) and len(old) == len(new) == 64
            lines.append(f"{what} changed" if digest else f"{what} {new!r}, was {old!r}")
    return lines


def write_json(path: Path, content: Mapping[str, Any], state: Path) -> None:
    """Atomic and durable."""
    with replace_with(path, state) as temp:
        temp.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    fsync(path.parent)


def read_json(path: Path) -> dict[str, Any] | None:
    """None if there is no such file.

    Raises:
        DataError: it is no JSON object.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except ValueError:
        content = None
    if not isinstance(content, dict):
        raise DataError(f"{path}: is damaged: no JSON object.")
    return content
