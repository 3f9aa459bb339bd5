"""Tells the driver what Ray says of workers that failed. Runs in Ray Train's controller."""

from __future__ import annotations

from typing import Any

from ray.exceptions import RayActorError
from ray.train import UserCallback

_MOST_CHARACTERS = 4000


class Witness(UserCallback):  # type: ignore[misc]
    """A worker that is killed says nothing; Ray sees it die.

    Args:
        board: handle of the Board actor.
    """

    def __init__(self, board: Any) -> None:
        self._board = board

    def after_exception(self, run_context: Any, worker_exceptions: dict[int, Exception]) -> None:
        """Called at each look at dead workers; the driver judges one death once."""
        texts = {rank: _said(error) for rank, error in worker_exceptions.items()}
        preempted = [rank for rank, error in worker_exceptions.items() if _was_preempted(error)]
        self._board.push.remote([{"kind": "died", "texts": texts, "preempted": preempted}])


def _said(error: Exception) -> str:
    return f"{type(_inner(error)).__name__}: {error}"[:_MOST_CHARACTERS]


def _inner(error: Exception) -> Exception:
    """Why Ray Train found a worker dead, where that is what it says."""
    inner: Exception = getattr(error, "health_check_failure", error)
    return inner


def _was_preempted(error: Exception) -> bool:
    """Whether a worker died with a node whose end had been announced to Ray."""
    inner = _inner(error)
    return isinstance(inner, RayActorError) and inner.preempted
