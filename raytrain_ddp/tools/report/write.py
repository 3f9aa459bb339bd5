"""Writes reports: of a run, of several, of all runs of a storage, or of a sweep."""

from __future__ import annotations

import os
import shlex
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from raytrain_ddp.checkpoint.run_folder import SWEEP_FILE, is_run, open_run, path_of_run
from raytrain_ddp.checkpoint.storage import Storage, is_plain_name, open_storage
from raytrain_ddp.errors import ConfigError, RaytrainError, first_line
from raytrain_ddp.files import expanded, replace_with
from raytrain_ddp.tools.formatting import plural
from raytrain_ddp.tools.report.page import html_of, sections_of_run, sections_of_runs
from raytrain_ddp.tools.report.run_files import read_run, state_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure


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
    from raytrain_ddp.tools.report.charts import curves, figure_of

    found = read_run(os.fspath(run))
    return figure_of(curves([found]), found.name)


def report(
    *runs: str | os.PathLike[str],
    out: str | os.PathLike[str] | None = None,
    predict: bool = True,
    every_s: int = 0,
) -> ReportFile:
    """Writes a report, one HTML page, which notebooks display.

    Args:
        runs: folders or URIs of runs, or their names below runs/; or one storage or sweep.
        out: the file. Default: report.html in the folder of a single one; else, and for a URI, in
            the current folder.
        predict: show wrong predictions of the best checkpoint, if possible on this machine.
        every_s: seconds after which the page reloads itself; 0: never.

    Raises:
        ConfigError: there is no such run, or the file cannot be written.
        PreflightError: the storage does not answer.
    """
    path, places = None if out is None else expanded(out), [os.fspath(run) for run in runs]
    if path and path.suffix.lower() not in (".html", ".htm"):
        raise ConfigError(f"{path}: set --out to a file that ends in .html.")
    folder = open_storage(path_of_run(places[0])) if len(places) == 1 else None
    path = path or Path(folder.path if folder and folder.is_local else ".") / "report.html"
    command = f"raytrain report {shlex.join(places)}{f' --every {every_s}' * bool(every_s)}"
    made = html_of(**_about(places, folder, predict), command=command, every_s=every_s)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replace_with(path, path.parent) as temporary:  # a browser always sees a whole page
            temporary.write_text(made, encoding="utf-8", errors="backslashreplace")
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written ({error.strerror}): set --out.") from error
    return ReportFile(path)


def _about(places: Sequence[str], folder: Storage | None, predict: bool) -> dict[str, Any]:
    """What the page shows: see `html_of`."""
    found = _runs_in(folder) if folder else {place: open_run(place) for place in places}
    title = Path(folder.path).name if folder else " · ".join(places)
    is_sweep, badge = folder is not None and folder.exists(SWEEP_FILE), ""
    if not found and not is_sweep:  # a run, or nothing
        from raytrain_ddp.tools.report.predictions import predictions

        run = read_run(places[0])
        badge, text, cause = state_of(run)
        wrong = [cause, *run.damage]
        sections = sections_of_run(run, predictions(run) if predict else [])
    else:
        runs, wrong = [], []
        for name, place in found.items():
            try:
                runs.append(read_run(place, name))
                wrong += [f"{name}: {line}" for line in runs[-1].damage]
            except (RaytrainError, OSError) as error:  # another user's, or damaged
                wrong.append(f"{name} cannot be read: {first_line(error)}")
        states = Counter(state_of(run).name for run in runs).items()
        text = ", ".join([plural(len(runs), "run"), *(f"{n} {state}" for state, n in states)])
        sections = sections_of_runs(runs, is_sweep)
    return {"title": title, "sections": sections, "badge": badge, "text": text, "wrong": wrong}


def _runs_in(folder: Storage) -> dict[str, Storage]:
    """The runs in a storage and in its sweeps; none if it is itself a run."""
    found: dict[str, Storage] = {}
    for name in () if is_run(folder) else filter(is_plain_name, folder.names()):
        inner = folder.join(name)
        if is_run(inner):
            found[name] = inner
        elif inner.exists(SWEEP_FILE):
            found |= {f"{name}/{trial}": run for trial, run in _runs_in(inner).items()}
    return found
