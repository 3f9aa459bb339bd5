"""Ray's authentication token: anyone who can read it can run code as its owner."""

from __future__ import annotations

import os
import secrets
import stat
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from raytrain_ddp.errors import PreflightError

_MODE, _TOKEN, _PATH = "RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"


def use_token(embedded: bool, tell: Callable[[str], None] = lambda _: None) -> None:
    """Enables Ray's token authentication: always for our own Ray, for a cluster if a token exists.

    `ray start` uses an existing token by default, but a connecting driver does not, and is
    refused. Ray reads the mode once, when it is imported. So the mode stays set, and nothing is
    changed if Ray was imported without it.

    Raises:
        PreflightError: others can read or replace the token; see `_secure`.
    """
    own = Path.home() / ".ray" / "auth_token"
    given = bool(os.environ.get(_TOKEN) or os.environ.get(_PATH))
    if "ray._raylet" not in sys.modules and (embedded or given or own.is_file()):
        os.environ.setdefault(_MODE, "token")
    if os.environ.get(_MODE, "token").lower() != "token" or os.environ.get(_TOKEN):
        return  # not set: `ray.init` creates a token itself, with a mode by the umask
    file = Path(os.environ.get(_PATH) or own)
    if embedded and not given:
        _make(file)
    if file.exists():
        _secure(file, embedded, tell)


def _make(file: Path) -> None:
    """Creates a token readable only by this user if there is none; Ray's own would have a
    umask-dependent mode."""
    try:
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        number = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        return
    except OSError as error:
        raise PreflightError(f"Ray's token {file} cannot be written: {error.strerror}.") from None
    with os.fdopen(number, "w") as opened:
        opened.write(secrets.token_hex(32))


def _secure(file: Path, embedded: bool, tell: Callable[[str], None]) -> None:
    """Removes other users' access to the file, and their write access to its folder.

    Raises:
        PreflightError: it belongs to another user; or its mode cannot be changed, and a Ray is to
            be started with it. (A file mounted by a cluster keeps its mode.)
    """
    found, own = file.stat(), os.geteuid()
    if found.st_uid not in (own, 0):
        raise PreflightError(
            f"Ray's token {file} belongs to user {found.st_uid}, who could use it to run code as "
            "you. Remove it: a new one is created automatically, or by `ray get-auth-token "
            "--generate`."
        )
    folder = file.parent.stat()
    try:
        if folder.st_uid == own and folder.st_mode & 0o022 and not folder.st_mode & stat.S_ISVTX:
            file.parent.chmod(stat.S_IMODE(folder.st_mode) & ~0o022)
        if found.st_mode & 0o077:
            file.chmod(0o600)
    except OSError as error:
        if embedded:
            raise PreflightError(
                f"other users can read Ray's token {file} (mode {found.st_mode & 0o777:03o}), and "
                f"its mode cannot be changed: {error.strerror}. Set RAY_AUTH_TOKEN_PATH to another "
                "file."
            ) from None
    with suppress(OSError):
        if found.st_mode & 0o077 and not file.stat().st_mode & 0o077:
            tell(
                f"other users could read Ray's token {file} (mode {found.st_mode & 0o777:03o}); "
                "its mode is now 600. If this machine has other users, remove it: a new one is "
                "created."
            )
