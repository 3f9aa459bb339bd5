"""Stops a run of this machine, with a checkpoint."""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from pathlib import Path

from raytrain_ddp.checkpoint.lease import Owner
from raytrain_ddp.errors import PreflightError
from raytrain_ddp.report.history import RunHistory


def can_stop(owner: Owner | None) -> bool:
    """Whether it is a live process of this machine and this user."""
    if owner is None or not owner.is_here() or owner.is_dead() or not hasattr(os, "pidfd_open"):
        return False
    try:
        return Path(f"/proc/{owner.pid}").stat().st_uid == os.getuid()
    except OSError:
        return False


def stop(history: RunHistory) -> str:
    """Asks the process that drives a run to end after the current step, with a checkpoint.

    Returns:
        What happens now.

    Raises:
        PreflightError: it is not, or no longer, a process of this machine and user.
    """
    owner = history.files.owner
    if owner is not None and can_stop(owner):
        with suppress(OSError):
            process = os.pidfd_open(owner.pid)
            try:
                if not owner.is_dead():  # from here on, its number cannot become another's
                    signal.pidfd_send_signal(process, signal.SIGTERM)
                    return "It ends after the current step, with a checkpoint."
            finally:
                os.close(process)
    raise PreflightError("no process of this machine and user drives this run now.")
