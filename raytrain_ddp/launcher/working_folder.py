"""Chooses the script's working folder on each machine: the driver's, or a copy of it."""

from __future__ import annotations

import os
import socket
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from raytrain_ddp.errors import PreflightError
from raytrain_ddp.launcher import code_shipping
from raytrain_ddp.launcher.rank_environment import Worker
from raytrain_ddp.launcher.run_options import RunOptions

_MARK_AGE_S = 600.0

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
    here, flags = Path.cwd(), options.flags
    if not elsewhere or flags.ship == "never":
        return {}
    _require_script(options, here, elsewhere, ask)
    why = {worker.rank: "--ship always" for worker in elsewhere}
    if flags.ship == "auto":
        why = _lacking(here, elsewhere, ask)
    lacks = [worker for worker in elsewhere if worker.rank in why]
    if not lacks:
        return {}
    import ray

    archive = ray.put(code_shipping.pack_folder(here))
    places = ask(lacks, "unpack", archive, code_shipping.copy_name(here, socket.gethostname()))
    for worker, place in zip(lacks, places, strict=True):
        tell(f"{worker.where} works in a copy of {here} ({why[worker.rank]}): {place}")
    return {worker.rank: place for worker, place in zip(lacks, places, strict=True)}


def _require_script(
    options: RunOptions, here: Path, elsewhere: Sequence[Worker], ask: AskAgents
) -> None:
    if options.module or options.flags.no_python:
        return
    script = os.path.normpath(here / options.program)
    if Path(script).is_relative_to(here):
        return
    for worker, there in zip(elsewhere, ask(elsewhere, "exists", script), strict=True):
        if not there:
            raise PreflightError(
                f"{script} is not on {worker.where}, and is not copied there, as it is outside "
                f"the folder in which run was called, {here}. Call run in the script's folder or "
                "one above it."
            )


def _lacking(here: Path, elsewhere: Sequence[Worker], ask: AskAgents) -> dict[int, str]:
    """The nodes that do not have the same files, and how they differ."""
    with _marked(here) as mark:
        seen = ask(elsewhere, "exists", mark) if mark else [False] * len(elsewhere)
    others = [worker for worker, sees in zip(elsewhere, seen, strict=True) if not sees]
    if not others:
        return {}
    mine = code_shipping.contents(here)
    why: dict[int, str] = {}
    for worker, theirs in zip(others, ask(others, "contents", str(here)), strict=True):
        other = code_shipping.difference(mine, theirs)
        if other:
            lacks = "it is not there" if theirs is None else f"its {other} is another there"
            why[worker.rank] = lacks
    return why


@contextmanager
def _marked(folder: Path) -> Iterator[str]:
    """A marker file that shows other nodes whether they share the folder; "" if it is not writable.
    A shared folder needs no comparison, however large it is."""
    try:
        for left in folder.glob(f"{code_shipping.MARK}*"):  # left by a killed run
            if left.stat().st_mtime < time.time() - _MARK_AGE_S:
                left.unlink()
        number, name = tempfile.mkstemp(prefix=code_shipping.MARK, dir=folder)
    except OSError:
        yield ""
        return
    os.close(number)
    try:
        yield name
    finally:
        os.unlink(name)
