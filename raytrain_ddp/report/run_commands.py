"""The commands that made a run, continue it and use it, to be copied."""

from __future__ import annotations

import shlex
from contextlib import suppress

from raytrain_ddp.checkpoint.run_folder import CONFIG_FILE
from raytrain_ddp.config.recipe import from_dict, parse
from raytrain_ddp.driver.config_flags import command_of_run
from raytrain_ddp.errors import RaytrainError
from raytrain_ddp.report.history import RunHistory


def commands_of(history: RunHistory) -> list[tuple[str, str]]:
    """(what it is for, command)"""
    files, found = history.files, []
    word = shlex.quote(files.place.address)
    with suppress(RaytrainError, OSError, ValueError):  # of another version, or damaged
        text = files.place.read(CONFIG_FILE).decode("utf-8", errors="replace")
        found.append(("made it", command_of_run(from_dict(parse(text)))))
    if files.place.is_local and history.state != "finished":
        found.append(("continues it", f"python -m raytrain_ddp.fit {word}/{CONFIG_FILE}"))
    if history.state == "running":
        found.append(("is it making progress?", f"python -m raytrain_ddp.doctor --run {word}"))
    if files.kept:
        found.append(("evaluates it", f"python -m raytrain_ddp.evaluate {word}"))
        out = "--out predictions.parquet"
        found.append(("predicts", f"python -m raytrain_ddp.predict {word} {out}"))
    found.append(("this page as a file", f"python -m raytrain_ddp.report {word}"))
    if files.owner is not None:
        stop = f"kill -TERM {files.owner.pid}"
        here = "" if files.owner.is_here() else f", on {files.owner.host}"
        found.append((f"stops it with a checkpoint{here}", stop))
    return found
