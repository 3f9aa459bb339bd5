"""All of Ray that is not public: why it is used, and what happens without it.

Another version of Ray may lack any of this. What is missing is left out, and a run goes on without
it; `tests/ray_backend/test_ray_private.py` fails then. Imports nothing heavy at its top: the
mailbox imports this.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from raytrain_ddp.ray_backend import worker_setup

_LEFT_OUT = (
    "DatasetsCallback",  # a manager of Ray Data's data sets, which nothing uses
    # Frees the workers' placement if the controller dies, as `RayWorkers` does. It asks the
    # dashboard whether the controller lives: 15 s at the end of a run if there is none.
    "PlacementGroupCleanerCallback",
)


def draining_nodes() -> Mapping[str, int]:
    """The ids of nodes that will be taken away, and when: ms since the epoch, 0 if unknown.

    Ray Train tells it only to workers that all end together. Without it ({}), the others only see
    that a worker has died.
    """
    try:
        from ray._private import state

        ends_ms: Mapping[str, int] = state.state.get_draining_nodes()
    except (ImportError, AttributeError):
        return {}
    return ends_ms


def torch_config(replaces: bool) -> Any:
    """A TorchConfig with which Ray Train makes no process group.

    Args:
        replaces: a worker that dies is replaced while the others live, as each is a replica group
            of its own, which only Ray's own torchft backend has. Without them, see `can_replace`,
            all workers restart.
    """
    from ray.train.backend import Backend
    from ray.train.torch import TorchConfig

    class OwnGroups(Backend):  # type: ignore[misc]
        has_replica_groups = replaces
        share_cuda_visible_devices = True  # as in Ray Train's own: NCCL connects GPUs directly

    class OwnConfig(TorchConfig):  # type: ignore[misc]
        backend_cls = OwnGroups

    return OwnConfig()


def can_replace() -> bool:
    """Whether Ray Train can replace a worker while the others live."""
    from ray.train.backend import Backend

    return hasattr(Backend, "has_replica_groups")


def trainer_class() -> Any:
    """A TorchTrainer without two processes that each start would wait for. Without this, they
    start."""
    from ray.train.torch import TorchTrainer

    class Trainer(TorchTrainer):  # type: ignore[misc]
        def _create_default_callbacks(self) -> list[Any]:
            usual = super()._create_default_callbacks()
            return [each for each in usual if type(each).__name__ not in _LEFT_OUT]

    return Trainer


def underlying(error: Exception) -> Exception:
    """The cause, if Ray Train only reports that a worker is dead. Without it, the less specific
    error is shown, and a preempted node counts as a failure."""
    inner: Exception = getattr(error, "health_check_failure", error)
    return inner


def raylet_of_worker() -> int:
    """The raylet that this process, a worker, belongs to. Without it: the parent process, which is
    another one if the worker was forked by a warm process."""
    return int(os.environ.get("RAY_RAYLET_PID", os.getppid()))


class QuickStartError(RuntimeError):
    """`quick_start` may not fit this Ray: try without."""


@contextmanager
def quick_start(is_warm: bool, has_dashboard: bool) -> Iterator[None]:
    """Makes a Ray that is started in this context start sooner: in 7.5 s instead of 9.8 s.

    Args:
        is_warm: whether its workers are forked: then worker_setup.py sets them up.
        has_dashboard: otherwise, it leaves out what would have nothing to do: the API server, for
            which it waits and which would only report usage statistics, the autoscaler of its one
            machine, and the monitor of logs, which nobody would show.

    Raises:
        QuickStartError: instead of an error that may come from a replaced function.
    """

    def start_raylet(*args: Any, **named: Any) -> Any:
        """With any free port for its agent: for the usual one, the raylet waits for three seconds
        if another Ray of this machine has it."""
        return raylet(*args, **named | {"dashboard_agent_listen_port": 0})

    with ExitStack() as stack:
        with suppress(ImportError, AttributeError):
            from ray._private import node, ray_constants, services

            if is_warm:
                script = str(Path(worker_setup.__file__).resolve())
                _replace(stack, ray_constants, "SETUP_WORKER_FILENAME", script)
            raylet = services.start_raylet
            _replace(stack, services, "start_raylet", start_raylet)
            if not has_dashboard:
                # No address, and no process: what Ray itself returns without a dashboard.
                _replace(stack, services, "start_api_server", lambda *_, **__: ("", None))
                _replace(stack, node.Node, "start_monitor", lambda _: None)
                _replace(stack, node.Node, "start_log_monitor", lambda _: None)
        try:
            yield
        except (AttributeError, ValueError, TypeError) as error:
            raise QuickStartError(str(error)) from error


def _replace(stack: ExitStack, owner: object, name: str, value: object) -> None:
    """Replaces an attribute until the stack is left.

    Raises:
        AttributeError: there is none.
    """
    stack.callback(setattr, owner, name, getattr(owner, name))
    setattr(owner, name, value)
