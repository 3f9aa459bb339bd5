"""The training state after a step, except what can be computed from (config, step)."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from raytrain_ddp.checkpoint.manifest import BRANCHED_AT, RENEWED, Manifest
from raytrain_ddp.checkpoint.run_folder import LOG_FILE, STATE_FILE
from raytrain_ddp.checkpoint.snapshot import (
    HostSnapshot,
    Snapshot,
    flatten_state,
    loss_of,
    unflatten_state,
)
from raytrain_ddp.checkpoint.store import Checkpoint
from raytrain_ddp.checkpoint.tensor_places import Existing
from raytrain_ddp.events import Eval, LogRecord
from raytrain_ddp.records import log_records
from raytrain_ddp.training.optimizer.task_optimizer import kept_options, load_optimizer, options_of
from raytrain_ddp.training.optimizer.weight_average import Average
from raytrain_ddp.training.state.shared_checkpoint import fill, load_model

# The fields that a checkpoint has under their names.
_STORED = [
    *("step", "best", "best_step", "evaluated_step", "skipped", "nonfinite"),
    BRANCHED_AT,
]
_OPTIMIZER, _TRAINED = "optimizer", "trained"  # stems of files; the second one, if it exists
# Earlier versions stored a large optimizer's state in up to eight files.
_OPTIMIZER_FILES = [
    f"{stem}.safetensors" for stem in (_OPTIMIZER, *(f"{_OPTIMIZER}-{n}" for n in range(8)))
]


@dataclass
class TrainState:
    """Model, optimizer and scaler after `step` optimizer steps, and the best evaluation so far."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    scaler: torch.amp.GradScaler
    average: Average | None = None
    step: int = 0
    best: float | None = None
    best_step: int = 0
    best_loss: float = math.inf  # of that evaluation, as logged; inf if it has none
    evaluated_step: int = 0  # step of the last evaluation; 0: none
    skipped: int = 0  # bad records so far in this epoch
    skipped_before: int = 0  # `counted_step`
    counted_step: int = 0  # the last one whose bad records are counted
    nonfinite: int = 0  # non-finite steps so far, whose updates were skipped
    kept_options: list[str] = field(default_factory=list)  # by `load`, though the code has others
    branched_at: int = 0  # the step that the run has from another one, see branching.py
    _host: HostSnapshot = field(default_factory=HostSnapshot, repr=False)
    _spare: HostSnapshot = field(default_factory=HostSnapshot, repr=False)

    def snapshot(
        self, manifest: Manifest, log: Sequence[LogRecord], to_spare: bool = False
    ) -> Snapshot:
        """Copies the state to the host; the copy is valid until the next snapshot is taken.

        Args:
            to_spare: whether to copy into other memory, as the last snapshot is still being
                committed.
        """
        optimizer, rest = flatten_state(self.optimizer.state_dict())
        copies = (self._spare if to_spare else self._host).take(self._named(optimizer))
        progress = {name: getattr(self, name) for name in _STORED}
        progress |= {"scaler": self.scaler.state_dict(), "optimizer": rest}
        stems = ["model", _OPTIMIZER, *([_TRAINED] if self.average is not None else [])]
        return Snapshot(
            manifest=manifest,
            tensors={stem: _below(stem, copies) for stem in stems},
            documents={STATE_FILE: progress},
            log=list(log),
        )

    def reserve(self) -> None:
        """Allocates the memory for `snapshot` in the background, on the rank that takes
        snapshots. Call it once the optimizer has a state; further calls do nothing."""
        if not self._host.is_reserved:
            self._host.reserve(self._named(flatten_state(self.optimizer.state_dict())[0]))

    def _named(self, optimizer: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The tensors that a snapshot copies, by name."""
        states = {"model": self.model.state_dict(), _OPTIMIZER: optimizer}
        if self.average is not None:
            states = {**states, "model": self.average.state_dict(), _TRAINED: states["model"]}
        return {f"{stem}/{k}": v for stem, state in states.items() for k, v in state.items()}

    def existing(self) -> Existing:
        """The memory that a checkpoint may be read into, by the names of its files."""
        optimizer, _ = flatten_state(self.optimizer.state_dict())
        found: dict[str, Mapping[str, Tensor]] = {"model.safetensors": self.model.state_dict()}
        return found | dict.fromkeys(_OPTIMIZER_FILES, optimizer)

    def load(self, checkpoint: Checkpoint) -> list[LogRecord]:
        """Loads the state in `checkpoint`; returns the log up to it."""
        load_model(self.model, checkpoint)
        if self.average is not None:
            self.average.restart()
        if checkpoint.has(f"{_TRAINED}.safetensors"):  # the other is the average
            fill(self.model, checkpoint.tensors(f"{_TRAINED}.safetensors"))
        progress = json.loads(checkpoint.read(STATE_FILE))
        tensors: dict[str, Tensor] = {}
        for filename in _OPTIMIZER_FILES:
            if checkpoint.has(filename):
                tensors |= checkpoint.tensors(filename)
        saved = unflatten_state(tensors, progress["optimizer"])
        if progress.get(RENEWED):  # at the first start of a branch: see branching.py
            for group in saved["param_groups"]:
                for name in options_of(self.optimizer):
                    group.pop(name, None)
        self.kept_options = kept_options(self.optimizer, saved["param_groups"])
        load_optimizer(self.optimizer, saved)
        if progress["scaler"]:
            self.scaler.load_state_dict(progress["scaler"])
        # Older checkpoints lack these; there, a due evaluation preceded the checkpoint.
        older = {"nonfinite": 0, "evaluated_step": progress["step"], BRANCHED_AT: 0}
        for name in _STORED:
            setattr(self, name, {**older, **progress}[name])
        log = log_records(json.loads(checkpoint.read(LOG_FILE)))
        evals = (r for r in log if isinstance(r, Eval) and r.step == self.best_step)
        self.best_loss = next((loss_of(record.metrics) for record in evals), math.inf)
        return log

    def evaluated(self) -> AbstractContextManager[None]:
        """The model with the weights that are evaluated: their average, if there is one."""
        return nullcontext() if self.average is None else self.average.in_place()

    def improve(self, step: int, metrics: Mapping[str, float], monitor: str, goal: str) -> bool:
        """Records the evaluation after `step`; returns whether it is the best so far.

        Of equal ones the one with the lower loss is better, then the earlier one.
        """
        value, loss = metrics[monitor], loss_of(metrics)
        if math.isnan(value):
            return False
        better = self.best is None or (value > self.best if goal == "max" else value < self.best)
        better = better or (value == self.best and loss < self.best_loss)
        if better:
            self.best, self.best_step, self.best_loss = value, step, loss
        return better


def _below(stem: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    prefix = stem + "/"
    return {k.removeprefix(prefix): v for k, v in tensors.items() if k.startswith(prefix)}
