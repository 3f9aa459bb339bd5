"""Ray's authentication token: anyone who can read it can run code as its owner."""

from __future__ import annotations

import os
import secrets
import stat
import sys
from collections.abc import Callable
from pathlib import Path

from raytrain_ddp.errors import PreflightError

_MODE, _TOKEN, _PATH = "RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"


def use_token(embedded: bool, tell: Callable[[str], None] = lambda _: None) -> None:
    """Enables Ray's token authentication: always for our own Ray, for a cluster if a token exists.

    `ray start` uses an existing token by default, but a connecting driver does not, and is
    refused. Ray reads the mode once, when it is imported. So the mode stays set, and nothing is
    changed if Ray was imported without it.

    Raises:
        PreflightError: others can read the token; see `_secure`.
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
        _secure(file, file == own, embedded, tell)


def _make(file: Path) -> None:
    """Creates a token readable only by this user if there is none; Ray's own would have a
    umask-dependent mode."""
    try:
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with open(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as opened:
            opened.write(secrets.token_hex(32))
    except FileExistsError:
        return
    except OSError as error:
        raise PreflightError(f"Ray's token {file} cannot be written: {error.strerror}.") from None


def _secure(file: Path, in_own_folder: bool, embedded: bool, tell: Callable[[str], None]) -> None:
    """Removes other users' access to the file, and their write access to its folder, if that is
    Ray's.

    Raises:
        PreflightError: its mode cannot be changed, and a Ray is to be started with it. (A file
            mounted by a cluster keeps its mode.)
    """
    mode = stat.S_IMODE(file.stat().st_mode)
    try:
        folder = stat.S_IMODE(file.parent.stat().st_mode)
        if in_own_folder and folder & 0o022:
            file.parent.chmod(folder & ~0o022)
        if mode & 0o077:
            file.chmod(0o600)
            tell(
                f"other users could read Ray's token {file} (mode {mode:03o}); its mode is now "
                "600. If this machine has other users, remove it: a new one is created."
            )
    except OSError as error:
        if embedded:
            raise PreflightError(
                f"other users can read Ray's token {file} (mode {mode:03o}), and its mode cannot "
                f"be changed: {error.strerror}. Set RAY_AUTH_TOKEN_PATH to another file."
            ) from None
