"""The result of `fit`."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

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


@dataclass(frozen=True)
class FitResult:
    """The end of a run.

    Args:
        status: "interrupted" by a signal after its checkpoint was committed, or "already complete"
            before anything was started.
        step: optimizer steps done.
        total_steps: optimizer steps to do in all.
        monitor: the metric that decides which evaluation is the best.
        best: metrics of the best evaluation, with its "step"; empty if there was none.
        last: metrics of the last evaluation, with its "step".
        path: folder or URI of the run, with the options that locate its store.
        best_checkpoint: folder or URI of the best checkpoint that is kept.
        last_checkpoint: folder or URI of the newest checkpoint.
        history: the records of metrics.jsonl.
        seconds: part of the run -> seconds.
        signal: number of the signal that interrupted, else 0.
    """

    status: Literal["finished", "interrupted", "already complete"]
    step: int
    total_steps: int
    monitor: str
    best: Mapping[str, float]
    last: Mapping[str, float]
    path: str
    best_checkpoint: str | None
    last_checkpoint: str | None
    history: Sequence[Mapping[str, Any]] = field(repr=False, default=())
    seconds: Mapping[str, float] = field(default_factory=dict)
    signal: int = 0

    @property
    def metrics(self) -> Mapping[str, float]:
        """The metrics of the last evaluation."""
        return self.last

    def plot(self) -> Figure:
        """The curves of the run: losses, metrics, learning rate, time; from its current log.

        Returns:
            matplotlib's figure, which notebooks display; `savefig` writes it.
        """
        from raytrain_ddp.tools.display.curves_png import figure_of
        from raytrain_ddp.tools.report.run_files import read_run

        run = read_run(self.path)
        return figure_of(sorted([*run.train, *run.evals], key=lambda each: each.step), run.name)

    def report(self, out: str | os.PathLike[str] | None = None, predict: bool = True) -> ReportFile:
        """Writes the report of the run, one HTML page, which notebooks display.

        Args:
            out: the file. Default: report.html in the run's folder; for a URI, in the current one.
            predict: show wrong predictions of the best checkpoint, if possible on this machine.

        Raises:
            ConfigError: the file cannot be written.
            PreflightError: the storage does not answer.
        """
        from raytrain_ddp.tools.report.write import write_report

        place = None if out is None else os.fspath(out)
        return ReportFile(write_report([self.path], place, predict, "auto"))

    @property
    def exit_status(self) -> int:
        """0, or 128 + the signal."""
        return 128 + self.signal if self.signal else 0
