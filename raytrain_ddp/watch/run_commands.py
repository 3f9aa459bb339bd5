"""The commands that made, continue and examine a run; and its stop, with a checkpoint."""

from __future__ import annotations

import os
import shlex
import signal
from contextlib import suppress
from pathlib import Path

from raytrain_ddp.checkpoint.lease import Owner
from raytrain_ddp.checkpoint.run_folder import CONFIG_FILE
from raytrain_ddp.config.recipe import from_dict, parse
from raytrain_ddp.driver.config_flags import command_of_run
from raytrain_ddp.errors import PreflightError, RaytrainError
from raytrain_ddp.report.history import RunHistory


def commands_of(history: RunHistory) -> list[tuple[str, str]]:
    """(what it is for, command)"""
    files, found = history.files, []
    word = shlex.quote(str(files.place))
    with suppress(RaytrainError, OSError, ValueError):  # of another version, or damaged
        text = files.place.read(CONFIG_FILE).decode("utf-8", errors="replace")
        found.append(("made it", command_of_run(from_dict(parse(text)))))
    if files.place.is_local and history.state != "finished":
        found.append(("continues it", f"python -m raytrain_ddp.fit {word}/{CONFIG_FILE}"))
    if history.state == "running":
        found.append(("is it getting on?", f"python -m raytrain_ddp.doctor --run {word}"))
    if files.kept:
        found.append(("evaluates it", f"python -m raytrain_ddp.evaluate {word}"))
    found.append(("as a file, with its mistakes", f"python -m raytrain_ddp.report {word}"))
    if files.owner is not None:
        stop = f"kill -TERM {files.owner.pid}"
        here = "" if files.owner.is_here() else f", on {files.owner.host}"
        found.append((f"stops it with a checkpoint{here}", stop))
    return found


def can_stop(owner: Owner | None) -> bool:
    """Whether it is a live process of this machine and this user."""
    if owner is None or not owner.is_here() or owner.is_dead() or not hasattr(os, "pidfd_open"):
        return False
    try:
        return Path(f"/proc/{owner.pid}").stat().st_uid == os.getuid()
    except OSError:
        return False


def stop(owner: Owner | None) -> None:
    """Asks the process that drives a run to end after the current step, with a checkpoint.

    Raises:
        PreflightError: it is not, or no longer, a process of this machine and user.
    """
    if owner is not None and can_stop(owner):
        with suppress(OSError):
            process = os.pidfd_open(owner.pid)
            try:
                if not owner.is_dead():  # from here on, its number cannot become another's
                    signal.pidfd_send_signal(process, signal.SIGTERM)
                    return
            finally:
                os.close(process)
    raise PreflightError("no process of this machine and user drives this run now.")
