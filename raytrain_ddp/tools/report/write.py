"""Writes reports: of a run, of several, of all runs of a storage, or of a sweep."""

from __future__ import annotations

import json
import os
import shlex
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from raytrain_ddp.checkpoint.lease import owner_of
from raytrain_ddp.checkpoint.run_folder import (
    CONFIG_FILE,
    EVENTS_FILE,
    METRICS_FILE,
    SWEEP_FILE,
    path_of_run,
)
from raytrain_ddp.checkpoint.storage import Storage, is_plain_name, open_storage
from raytrain_ddp.errors import ConfigError, RaytrainError, first_line
from raytrain_ddp.files import expanded, replace_with
from raytrain_ddp.formatting import plural
from raytrain_ddp.tools.report.history import RunHistory, history_of
from raytrain_ddp.tools.report.page import page, sections_of_run
from raytrain_ddp.tools.report.run_files import read_run
from raytrain_ddp.tools.report.runs_page import sections_of_runs

if TYPE_CHECKING:
    from matplotlib.figure import Figure

REPORT_FILE = "report.html"
_MOST_RECORDS = 1000  # of a run among many
_READ: dict[tuple[str, str], tuple[object, RunHistory]] = {}  # -> (what its files were, the run)


@dataclass(frozen=True)
class ReportFile:
    """A report that was written; `path` is its file."""

    path: Path

    def __fspath__(self) -> str:
        return str(self.path)

    def _repr_html_(self) -> str:
        """The page in a frame of its own, for notebooks."""
        page = escape(self.path.read_text(encoding="utf-8"))
        return f'<iframe srcdoc="{page}" style="width:100%;height:800px;border:0"></iframe>'


def plot(run: str | os.PathLike[str]) -> Figure:
    """The curves of a run: losses, metrics, and learning rate; from its current log.

    Args:
        run: its folder, its URI, or its name below runs/; `FitResult.path`.

    Returns:
        matplotlib's figure, which notebooks display; `savefig` writes it.
    """
    from raytrain_ddp.tools.report.curves import figure_of

    files = read_run(os.fspath(run))
    return figure_of(sorted([*files.train, *files.evals], key=lambda each: each.step), files.name)


def report(
    *runs: str | os.PathLike[str], out: str | os.PathLike[str] | None = None, predict: bool = True
) -> ReportFile:
    """Writes a report, one HTML page, which notebooks display.

    Args:
        runs: folders or URIs of runs, or their names below runs/; or one storage or sweep.
        out: the file. Default: report.html in the folder of a single one; else, and for a URI, in
            the current folder.
        predict: show wrong predictions of the best checkpoint, if possible on this machine.

    Raises:
        ConfigError: there is no such run, or the file cannot be written.
        PreflightError: the storage does not answer.
    """
    places = [os.fspath(run) for run in runs]
    return ReportFile(write_report(places, None if out is None else os.fspath(out), predict))


def write_report(
    places: Sequence[str],
    out: str | None = None,
    predict: bool = True,
    device: str = "auto",
    every_s: int = 0,
) -> Path:
    """As `report`; returns where the page is.

    Args:
        device: for the predictions. every_s: the page reloads itself so often; 0: never.
    """
    if out is not None:
        _require_page(expanded(out))  # before minutes of predictions
    if device != "auto":
        if not predict or len(places) > 1:
            raise ConfigError("--device has no effect: it is for the predictions of a single run.")
        from raytrain_ddp.training.runtime.world import choose_device  # imports torch

        choose_device(device)
    folder = open_storage(path_of_run(places[0])) if len(places) == 1 else None
    runs = _runs_in(folder) if folder else {}
    title, badge, text = (folder.path.rstrip("/").rpartition("/")[2] if folder else ""), "", ""
    if folder and (runs or folder.exists(SWEEP_FILE)):
        histories, trouble = [], []
        for name, run in runs.items():
            try:
                histories.append(_history(run, name))
            except (RaytrainError, OSError) as error:  # another user's, or damaged
                trouble.append(f"{name} cannot be read: {first_line(error)}")
        states = Counter(history.state for history in histories).items()
        text = ", ".join([plural(len(histories), "run"), *(f"{n} {state}" for state, n in states)])
        sections = sections_of_runs(histories, _sweep_in(folder), trouble)
    else:
        histories = _with_distinct_names([history_of(read_run(place)) for place in places])
        if folder:
            from raytrain_ddp.tools.report.predictions import predictions

            one = histories[0]
            badge, text = one.state, one.summary
            sections = sections_of_run(one, predictions(one, device) if predict else [])
        else:
            title = " · ".join(history.files.name for history in histories)
            sections = sections_of_runs(histories)
    path = Path(folder.path if folder and folder.is_local else ".") / REPORT_FILE
    path = expanded(out) if out is not None else path
    made = page(title, badge, text, sections, f"raytrain report {shlex.join(places)}", every_s)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replace_with(path, path.parent) as temporary:  # a browser always sees a whole page
            temporary.write_text(made, encoding="utf-8", errors="replace")
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written ({error.strerror}): set --out.") from error
    return path


def _runs_in(folder: Storage) -> dict[str, Storage]:
    """The runs in a storage and in its sweeps; none if it is itself a run."""
    if _is_run(folder):
        return {}
    found = {}
    for name in filter(is_plain_name, folder.names()):
        inner = folder.join(name)
        if _is_run(inner):
            found[name] = inner
        elif inner.exists(SWEEP_FILE):
            found |= {f"{name}/{trial}": run for trial, run in _runs_in(inner).items()}
    return found


def _is_run(folder: Storage) -> bool:
    return any(folder.exists(name) for name in (CONFIG_FILE, METRICS_FILE, EVENTS_FILE))


def _history(run: Storage, name: str) -> RunHistory:
    """A run of a storage; read again only if its files or its owner have changed."""
    seen = [*map(run.stamp, (METRICS_FILE, EVENTS_FILE)), owner_of(run)]
    key = run.address, name
    if key not in _READ or _READ[key][0] != seen:
        _READ[key] = seen, history_of(replace(read_run(run, _MOST_RECORDS), name=name))
    return _READ[key][1]


def _sweep_in(folder: Storage) -> Mapping[str, Any] | None:
    """What the sweep in a folder says of its trials."""
    try:
        found = json.loads(folder.read(SWEEP_FILE)) if folder.exists(SWEEP_FILE) else None
    except ValueError:
        return None
    return found if isinstance(found, dict) and found.get("version") == 1 else None


def _with_distinct_names(histories: Sequence[RunHistory]) -> list[RunHistory]:
    """Runs of the same name are called by their folder, too: a/digits, b/digits."""
    count = Counter(history.files.name for history in histories)
    named = []
    for history in histories:
        files = history.files
        name = files.name if count[files.name] == 1 else "/".join(files.place.path.split("/")[-2:])
        named.append(replace(history, files=replace(files, name=name)))
    return named


def _require_page(path: Path) -> None:
    """Raises ConfigError unless it is the name of a page, which the next report may replace."""
    if path.suffix.lower() not in (".html", ".htm"):
        raise ConfigError(f"{path}: set --out to a file that ends in .html.")
