"""What a run is shown by: hears its events, draws its curves, tells how it ended."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from raytrain_ddp.driver.result import FitResult
from raytrain_ddp.messages import Event

if TYPE_CHECKING:
    from raytrain_ddp.checkpoint.storage import Storage


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
        """Draws what a finished run's folder has besides its log; called by the run's owner.

        Raises:
            OSError: it cannot be written.
        """

    def summary(
        self, run: str, end: FitResult, limit: str = "", more: Sequence[tuple[str, str]] = ()
    ) -> None:
        """Tells the end of a run.

        Args:
            limit: what stood most in the way of computing.
            more: (title, path or command).
        """
