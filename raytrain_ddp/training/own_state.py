"""The state of a loop of one's own: what it registers, and where it is."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from raytrain_ddp.checkpoint.manifest import Manifest
from raytrain_ddp.checkpoint.run_folder import STATE_FILE
from raytrain_ddp.checkpoint.snapshot import (
    HostSnapshot,
    Snapshot,
    flatten_state,
    unflatten_state,
    unstorable,
)
from raytrain_ddp.checkpoint.store import Checkpoint
from raytrain_ddp.errors import CheckpointError, TaskError, first_names
from raytrain_ddp.events import LogRecord
from raytrain_ddp.training.optimizer.task_optimizer import load_optimizer, parameters_of
from raytrain_ddp.training.state.shared_checkpoint import fill


@dataclass
class Position:
    """Where a loop is: `step` steps in all, `of_epoch` of them in this `epoch`.

    Args:
        is_over: all epochs are done, or `OwnRun.stop` has ended the run.
        data: what the order of the epoch's samples depends on.
    """

    step: int = 0
    epoch: int = 0
    of_epoch: int = 0
    is_over: bool = False
    data: str = ""


class Registered:
    """Objects with a state, by name; each is restored when it is added.

    Args:
        checkpoint: has the states to be restored, if any.
    """

    def __init__(self, checkpoint: Checkpoint | None) -> None:
        self.position, self._saved, self._checkpoint = Position(), dict[str, Any](), checkpoint
        self._objects: dict[str, Any] = {}
        if checkpoint is not None:
            found = json.loads(checkpoint.read(STATE_FILE))
            self.position, self._saved = Position(**found["position"]), found["objects"]

    def add(self, name: str, given: Any) -> None:
        """Raises TaskError, CheckpointError or ConfigError: it has no state that can be stored, or
        another one than the checkpoint."""
        each, where = unwrapped(given), f"run.register({name}=...)"
        if name in self._objects:
            raise TaskError(f"{where}: this name is taken.")
        if not all(hasattr(each, method) for method in ("state_dict", "load_state_dict")):
            kind = type(each).__name__
            raise TaskError(f"{where}: a {kind} has no state_dict() and load_state_dict().")
        try:
            tensors, _ = flatten_state(each.state_dict())
        except CheckpointError as error:
            raise TaskError(f"{where}: {error}") from error
        if kinds := unstorable(tensors):
            raise TaskError(f"{where}: {kinds} cannot be stored in a checkpoint.")
        self._objects[name] = each
        if self._checkpoint is None:
            return
        if name not in self._saved:
            raise CheckpointError(
                f"{where}: {self._checkpoint.name} has no such state, but that of "
                f"{first_names([*self._saved])}. Restore the code, or start a new run."
            )
        tensors = self._checkpoint.tensors(f"{name}.safetensors")
        state = unflatten_state(tensors, self._saved[name])
        if isinstance(each, nn.Module):
            fill(each, state)
        elif isinstance(each, Optimizer):
            load_optimizer(each, state)
        else:
            each.load_state_dict(state)

    def require_all(self, nets: Sequence[nn.Module]) -> None:
        """Raises TaskError or CheckpointError if a loop would lack state when it is resumed.

        Args:
            nets: the prepared models.
        """
        if lacking := {*self._saved} - {*self._objects}:
            raise CheckpointError(
                f"the checkpoint has the state of {first_names(sorted(lacking))}, which the train "
                "function does not register: restore the code, or start a new run."
            )
        prepared = {id(parameter) for net in nets for parameter in net.parameters()}
        modules = self.of_kind(nn.Module)
        if not nets or not all(any(unwrapped(net) is each for each in modules) for net in nets):
            raise TaskError(
                "each model must be prepared and registered: model = run.prepare(model), "
                "run.register(model=model)."
            )
        for optimizer in self.of_kind(Optimizer):
            kind = type(optimizer).__name__
            if not {*map(id, parameters_of(optimizer))} <= prepared:
                raise TaskError(
                    f"{kind} updates parameters outside of the models that run.prepare() returned: "
                    "prepare and register them, and make the optimizer afterward."
                )
            followed = [getattr(each, "optimizer", None) for each in self._objects.values()]
            is_scheduled = hasattr(optimizer.step, "_wrapped_by_lr_sched")
            if is_scheduled and not any(each is optimizer for each in followed):
                raise TaskError(
                    f"{kind} has a learning rate scheduler that is not registered: "
                    "run.register(scheduler=scheduler)."
                )
        self._checkpoint = None  # frees its memory

    def of_kind(self, kind: type) -> list[Any]:
        return [each for each in self._objects.values() if isinstance(each, kind)]

    def numbers(self) -> str:
        """What is not a tensor, but of models: such as learning rates and counts of schedulers."""
        others = {n: e for n, e in self._objects.items() if not isinstance(e, nn.Module)}
        return json.dumps({n: flatten_state(e.state_dict())[1] for n, e in others.items()})

    def snapshot(
        self, manifest: Manifest, log: Sequence[LogRecord], memory: HostSnapshot
    ) -> Snapshot:
        """Copies all states to the host; the copy is valid until `memory` is used again."""
        states = {name: flatten_state(each.state_dict()) for name, each in self._objects.items()}
        named: Mapping[str, Tensor] = {
            f"{stem}/{name}": tensor
            for stem, (tensors, _) in states.items()
            for name, tensor in tensors.items()
        }
        copies = memory.take(named)
        return Snapshot(
            manifest=manifest,
            tensors={
                stem: {name: copies[f"{stem}/{name}"] for name in tensors}
                for stem, (tensors, _) in states.items()
            },
            documents={
                STATE_FILE: {
                    "position": asdict(self.position),
                    "objects": {name: structure for name, (_, structure) in states.items()},
                }
            },
            log=list(log),
        )


def unwrapped(given: Any) -> Any:
    """The module that is wrapped in DDP, or the object itself."""
    return given.module if isinstance(given, DistributedDataParallel) else given
