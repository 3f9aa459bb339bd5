"""Reports worker failures that Ray detects to the driver. Runs in Ray Train's controller."""

from __future__ import annotations

from typing import Any

import ray
from ray import cloudpickle
from ray.exceptions import RayActorError
from ray.train import UserCallback

from raytrain_ddp.messages import ControllerStarted, Died

_MOST_CHARACTERS = 4000


class FailureCallback(UserCallback):  # type: ignore[misc]
    """A killed worker cannot report its failure; Ray detects it.

    Args:
        mailbox: handle of the Mailbox actor.
        driver: the driver's own actor id, if it is an actor.
    """

    def __init__(self, mailbox: Any, driver: str | None) -> None:
        self._mailbox, self._driver, self._reported = mailbox, driver, False

    def __setstate__(self, state: dict[str, Any]) -> None:
        """In the controller: gives the driver a handle to it, which Ray Train does not offer."""
        self.__dict__ |= state
        context = ray.get_runtime_context()
        if not self._reported and context.get_actor_id() not in (None, self._driver):
            self._reported = True  # the controller passes copies to its workers
            handle = cloudpickle.dumps(context.current_actor)
            self._mailbox.push.remote([ControllerStarted(handle)])

    def after_exception(self, run_context: Any, worker_exceptions: dict[int, Exception]) -> None:
        """Called at each check that finds dead workers; the driver handles each death once."""
        texts = {rank: described(error) for rank, error in worker_exceptions.items()}
        preempted = [rank for rank, error in worker_exceptions.items() if was_preempted(error)]
        self._mailbox.push.remote([Died(texts, preempted)])


def described(error: Exception) -> str:
    """What Ray says of a dead worker, for `Died`."""
    return f"{type(_inner(error)).__name__}: {error}"[:_MOST_CHARACTERS]


def _inner(error: Exception) -> Exception:
    """The underlying cause if Ray Train only reports a dead worker."""
    inner: Exception = getattr(error, "health_check_failure", error)
    return inner


def was_preempted(error: Exception) -> bool:
    """Whether a worker died with a node whose preemption had been announced."""
    inner = _inner(error)
    return isinstance(inner, RayActorError) and inner.preempted
