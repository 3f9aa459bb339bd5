"""Writes the report of one or several runs to a file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from raytrain_ddp.checkpoint.storage import Storage
from raytrain_ddp.errors import ConfigError
from raytrain_ddp.files import expanded, replace_with
from raytrain_ddp.tools.report.history import history_of
from raytrain_ddp.tools.report.page import page_of_runs, sections_of_run, sections_of_runs
from raytrain_ddp.tools.report.predictions import predictions
from raytrain_ddp.tools.report.run_files import RunFiles, read_run

REPORT_FILE = "report.html"


def write_report(places: Sequence[str], out: str | None, predict: bool, device: str) -> Path:
    """Writes the report of one run, or of several runs side by side; returns where it is.
    The arguments are the command's.

    Raises:
        ConfigError: the run or device does not exist, or the file cannot be written.
        PreflightError: a run's storage does not respond.
    """
    if out is not None:
        _require_page(expanded(out))  # before minutes of predictions
    if device != "auto":
        if not predict or len(places) > 1:
            raise ConfigError(
                "--device has no effect: it applies only to the predictions of a single run."
            )
        from raytrain_ddp.training.runtime.world import choose_device  # imports torch

        choose_device(device)
    runs = _with_distinct_names([read_run(place) for place in places])
    histories = [history_of(files) for files in runs]
    if len(histories) == 1:
        shown = predictions(histories[0], device) if predict else ""
        body = sections_of_run(histories[0], shown)
    else:
        body = sections_of_runs(histories)
    path = _below(runs[0].place) if len(runs) == 1 else Path(REPORT_FILE)
    path = expanded(out) if out is not None else path
    _write(path, page_of_runs(body, histories))
    return path


def _with_distinct_names(runs: Sequence[RunFiles]) -> list[RunFiles]:
    """Runs of the same name get as much of their path as necessary: a/digits, b/digits."""
    parts = [[part for part in run.place.path.split("/") if part] for run in runs]

    def name(number: int) -> str:
        own = parts[number]
        others = [each for each in parts if each != own]
        need = (n for n in range(1, len(own)) if all(each[-n:] != own[-n:] for each in others))
        return "/".join(own[-next(need, len(own)) :])

    return [replace(run, name=name(number)) for number, run in enumerate(runs)]


def _below(folder: Storage) -> Path:
    return Path(folder.path if folder.is_local else ".") / REPORT_FILE


def _require_page(path: Path) -> None:
    """Raises ConfigError unless it is the name of a page, which the next report may replace."""
    if not path.name or path.is_dir():
        raise ConfigError(f"{path}: is a folder: set --out to a file, such as report.html.")
    if path.suffix.lower() not in (".html", ".htm"):
        raise ConfigError(f"{path}: set --out to a file that ends in .html.")


def _write(path: Path, page: str) -> None:
    """Atomically, so that a browser always sees a complete report."""
    _require_page(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replace_with(path, path.parent) as temporary:
            temporary.write_text(page, encoding="utf-8", errors="replace")
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written ({error.strerror}): set --out.") from error
