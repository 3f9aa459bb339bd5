"""The result of `fit`, and the listener that shows a run; without PyArrow, for the display."""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from raytrain_ddp.config.train_config import TrainConfig
from raytrain_ddp.events import Event

if TYPE_CHECKING:
    from raytrain_ddp.checkpoint.storage import Storage


@dataclass(frozen=True)
class FitResult:
    """The end of a run. `raytrain_ddp.report(result.path)` and `plot(result.path)` show it.

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
        signal: number of the signal that interrupted the run, else 0.
        of_ray: see `ray`; pickled, as loading it imports Ray.
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
    of_ray: bytes = field(repr=False, default=b"")

    @property
    def ray(self) -> Any:
        """Ray Train's own `ray.train.Result`: metrics, path, and the best and the last checkpoint.
        None if Ray has not trained, or if it was lost at the very end."""
        return pickle.loads(self.of_ray) if self.of_ray else None

    @property
    def metrics(self) -> Mapping[str, float]:
        """The metrics of the last evaluation."""
        return self.last

    @property
    def exit_status(self) -> int:
        """0, or 128 + the signal."""
        return 128 + self.signal if self.signal else 0


class Listener:
    """Shows a run; this one shows nothing. Entered before the first event.

    The commands, and `fit` and `fit_locally` of the package, pass one that shows the run on the
    terminal or in the notebook.
    """

    def __enter__(self) -> Listener:
        return self

    def __exit__(self, *_: object) -> None: ...

    def handle(self, event: Event) -> None:
        """Takes in one event, also from the thread that commits checkpoints."""

    def draw(self, run: Storage, name: str) -> None:
        """Draws the pictures in a finished run's folder; called by the process that owns the run.

        Raises:
            OSError: it cannot be written.
        """

    def summary(self, config: TrainConfig, end: FitResult, flags: str) -> None:
        """Shows the end of a run.

        Args:
            flags: how it was trained, as ``--local``.
        """
