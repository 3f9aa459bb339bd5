"""Tells the driver what Ray says of workers that failed. Runs in Ray Train's controller."""

from __future__ import annotations

from typing import Any

import ray
from ray.exceptions import RayActorError
from ray.train import UserCallback

from raytrain_ddp.messages import ControllerStarted, Died

_MOST_CHARACTERS = 4000


class FailureCallback(UserCallback):  # type: ignore[misc]
    """A worker that is killed says nothing; Ray sees it die.

    Args:
        board: handle of the Board actor.
        driver: the driver's own actor id, if it is an actor.
    """

    def __init__(self, board: Any, driver: str | None) -> None:
        self._board, self._driver, self._told = board, driver, False

    def __setstate__(self, state: dict[str, Any]) -> None:
        """In the controller: gives the driver a hold of it, as Ray Train does not."""
        self.__dict__ |= state
        context = ray.get_runtime_context()
        if not self._told and context.get_actor_id() not in (None, self._driver):
            self._told = True  # the controller hands copies to its workers
            self._board.push.remote([ControllerStarted(context.current_actor)])

    def after_exception(self, run_context: Any, worker_exceptions: dict[int, Exception]) -> None:
        """Called at each look at dead workers; the driver judges one death once."""
        texts = {rank: _said(error) for rank, error in worker_exceptions.items()}
        preempted = [rank for rank, error in worker_exceptions.items() if _was_preempted(error)]
        self._board.push.remote([Died(texts, preempted)])


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
