"""The training state after a step, except what can be computed from (config, step)."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from raytrain_ddp.checkpoint.manifest import ALL_OPTIONS, BRANCHED_AT, RENEWED, Manifest
from raytrain_ddp.checkpoint.run_folder import LOG_FILE, STATE_FILE
from raytrain_ddp.checkpoint.snapshot import (
    HostSnapshot,
    encode_tensors,
    flatten_state,
    unflatten_state,
)
from raytrain_ddp.checkpoint.store import Checkpoint
from raytrain_ddp.checkpoint.streams import Content
from raytrain_ddp.checkpoint.tensor_places import Existing
from raytrain_ddp.events import Eval, LogRecord
from raytrain_ddp.records import log_records, to_record
from raytrain_ddp.training.gradients.gradient_compression import Compression
from raytrain_ddp.training.optimizer.optimizer_shares import Shares, WholeState
from raytrain_ddp.training.optimizer.optimizer_state import kept_options, load_optimizer, options_of
from raytrain_ddp.training.optimizer.weight_average import Average
from raytrain_ddp.training.runtime.world import World
from raytrain_ddp.training.session import Snapshot
from raytrain_ddp.training.state.checkpoint_parts import (
    OPTIMIZER,
    OPTIMIZER_STEMS,
    Names,
    divided,
    stems_of,
)
from raytrain_ddp.training.state.shared_checkpoint import fill, load_model

_PIECE = 500  # log records per chunk
# The fields that a checkpoint has under their names.
_STORED = [
    *("step", "best", "best_step", "evaluated_step", "skipped", "nonfinite", "awaited"),
    BRANCHED_AT,
]
_COMPRESSION, _TRAINED = "compression", "trained"  # stems of files, if they exist


@dataclass(frozen=True)
class Gathered:
    """What a checkpoint has of all ranks' states; complete on rank 0 only."""

    compression: Mapping[str, Tensor]
    optimizer: WholeState


@dataclass
class TrainState:
    """Model, optimizer and scaler after `step` optimizer steps, and the best evaluation so far.

    Args:
        shares: of the optimizer's state; None: it is not divided.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    scaler: torch.amp.GradScaler
    compression: Compression = field(default_factory=Compression)
    average: Average | None = None
    shares: Shares = None  # type: ignore[assignment]  # made at birth
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
    awaited: list[int] = field(default_factory=list)  # steps that are evaluated elsewhere
    _host: HostSnapshot = field(default_factory=HostSnapshot, repr=False)
    _backup: HostSnapshot = field(default_factory=HostSnapshot, repr=False)

    def __post_init__(self) -> None:
        self.shares = self.shares or Shares(self.optimizer)

    @property
    def is_own(self) -> bool:
        """Whether each rank keeps another state, so that none could continue without another."""
        return self.compression.is_own or self.shares.is_divided

    @property
    def is_needed(self) -> bool:
        """Whether the evaluation of this state is the best so far, or is yet to be done."""
        return self.step in (self.best_step, *self.awaited)

    def gather(self) -> Gathered:
        """All ranks take part; see `snapshot`."""
        return Gathered(self.compression.gather(), self.shares.whole(self.optimizer))

    def snapshot(
        self,
        manifest: Manifest,
        log: Sequence[LogRecord],
        gathered: Gathered | None = None,
        files: Sequence[Names] = (),
        is_backup: bool = False,
    ) -> Snapshot:
        """Copies the state to the host; the copy is valid until the next snapshot is taken.

        Args:
            gathered: the result of `gather`; None only if no rank keeps another state.
            files: of the optimizer, by the rank that writes them; empty: one.
            is_backup: the copy is valid until the next backup.
        """
        whole = (gathered or self.gather()).optimizer
        own = files[0] if files else {OPTIMIZER: [*whole.tensors]}
        here = {name for names in own.values() for name in names}
        optimizer = {k: v for k, v in whole.tensors.items() if k in here}
        named = self._named({k: v for k, v in optimizer.items() if k not in whole.received})
        copies = (self._backup if is_backup else self._host).take(named)
        progress = {name: getattr(self, name) for name in _STORED}
        progress |= {"scaler": self.scaler.state_dict(), "optimizer": whole.rest}
        optimizer |= _below(OPTIMIZER, copies)  # in their order
        tensors: dict[str, Mapping[str, Tensor]] = {"model": _below("model", copies)}
        tensors |= {stem: {n: optimizer[n] for n in names} for stem, names in own.items()}
        if self.average is not None:
            tensors[_TRAINED] = _below(_TRAINED, copies)
        if gathered and gathered.compression:
            tensors[_COMPRESSION] = dict(gathered.compression)
        return Snapshot(
            manifest=manifest,
            tensors=tensors,
            documents={STATE_FILE: progress},
            log=list(log),
            awaited=tuple(self.awaited),
            elsewhere=tuple(stem for each in files[1:] for stem in each),
        )

    def part(self, gathered: Gathered, files: Names) -> dict[str, dict[str, Tensor]]:
        """As `snapshot`, of some files of the optimizer's state: stem -> name -> tensor."""
        copies = _below(OPTIMIZER, self._host.take(_above(_picked(gathered, files))))
        return {stem: {n: copies[n] for n in names} for stem, names in files.items()}

    def files(self, world: World, hosts: Sequence[str], gathered: Gathered) -> Sequence[Names]:
        """By rank, the files of the optimizer's state that it writes; equal on all ranks."""
        if self.shares.is_divided:
            return [stems_of(gathered.optimizer.tensors), *([{}] * (world.size - 1))]
        model = [*self.model.state_dict().values()] * (1 if self.average is None else 2)
        return divided(gathered.optimizer.tensors, model, hosts, world.size)

    def is_backed_up(self, files: Sequence[Names]) -> bool:
        """Whether a second rank keeps a copy of the checkpoint of this step until the next one: it
        is needed even if rank 0 dies before it is committed. A large state is not copied."""
        return self.is_needed and not self.is_own and not any(files[1:])

    def reserve(self, world: World, hosts: Sequence[str]) -> None:
        """Allocates the memory for `snapshot` or `part` in the background; to be called once the
        optimizer has a state. Further calls do nothing."""
        if self._host.is_reserved:
            return
        optimizer: dict[str, Tensor] = {}
        if not self.shares.is_divided:
            gathered = Gathered({}, self.shares.whole(self.optimizer))
            optimizer = _picked(gathered, self.files(world, hosts, gathered)[world.rank])
        self._host.reserve(self._named(optimizer) if world.is_main else _above(optimizer))

    def _named(self, optimizer: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """What a snapshot copies."""
        states = {"model": self.model.state_dict(), "optimizer": optimizer}
        if self.average is not None:
            states = {**states, "model": self.average.state_dict(), _TRAINED: states["model"]}
        return {f"{stem}/{k}": v for stem, state in states.items() for k, v in state.items()}

    def existing(self) -> Existing:
        """The memory that a checkpoint may be read into, by the names of its files."""
        optimizer, _ = flatten_state(self.optimizer.state_dict())
        found: dict[str, Mapping[str, Tensor]] = {"model.safetensors": self.model.state_dict()}
        return found | {f"{stem}.safetensors": optimizer for stem in OPTIMIZER_STEMS}

    def load(self, checkpoint: Checkpoint) -> list[LogRecord]:
        """Loads the state in `checkpoint`; returns the log up to it."""
        load_model(self.model, checkpoint)
        if self.average is not None:
            self.average.restart()
        if checkpoint.has(f"{_TRAINED}.safetensors"):  # the other is the average
            fill(self.model, checkpoint.tensors(f"{_TRAINED}.safetensors"))
        progress = json.loads(checkpoint.read(STATE_FILE))
        tensors: dict[str, Tensor] = {}
        for filename in (f"{stem}.safetensors" for stem in OPTIMIZER_STEMS):
            if checkpoint.has(filename):
                tensors |= checkpoint.tensors(filename)
        saved = unflatten_state(tensors, progress["optimizer"])
        renewed = {*progress.get(RENEWED, ())}  # at the first start of a branch: see branching.py
        renewed |= options_of(self.optimizer) if ALL_OPTIONS in renewed else set()
        for group in saved["param_groups"]:
            for name in renewed:
                group.pop(name, None)
        self.kept_options = kept_options(self.optimizer, saved["param_groups"])
        load_optimizer(self.optimizer, self.shares.own(self.optimizer, saved))
        if progress["scaler"]:
            self.scaler.load_state_dict(progress["scaler"])
        if checkpoint.has(f"{_COMPRESSION}.safetensors"):
            self.compression.load(checkpoint.tensors(f"{_COMPRESSION}.safetensors"))
        # Older checkpoints lack these; there, a due evaluation preceded the checkpoint.
        older = {"nonfinite": 0, "evaluated_step": progress["step"], "awaited": [], BRANCHED_AT: 0}
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


def loss_of(metrics: Mapping[str, float]) -> float:
    """The evaluation's metric "loss"; inf if there is none or it is nan."""
    loss = metrics.get("loss", math.inf)
    return math.inf if loss is None or math.isnan(loss) else loss


def encode(snapshot: Snapshot) -> dict[str, Content]:
    """The files of a checkpoint except its manifest. Tensors are views of the snapshot.

    Each file can be written only once.
    """
    files: dict[str, Content] = {
        f"{stem}.safetensors": encode_tensors(t) for stem, t in snapshot.tensors.items()
    }
    for name, value in snapshot.documents.items():
        files[name] = json.dumps(value).encode()
    files[LOG_FILE] = _encode_log(snapshot.log)
    return files


def _encode_log(log: Sequence[LogRecord]) -> Iterator[bytes]:
    """The bytes of `json.dumps`, in chunks: it holds the GIL until it returns, and the log grows
    as long as the run."""
    yield b"["
    for start in range(0, len(log), _PIECE):
        piece = json.dumps([to_record(each) for each in log[start : start + _PIECE]])
        yield (", " if start else "").encode() + piece[1:-1].encode()
    yield b"]"


def _picked(gathered: Gathered, files: Names) -> dict[str, Tensor]:
    return {n: gathered.optimizer.tensors[n] for names in files.values() for n in names}


def _above(optimizer: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {f"{OPTIMIZER}/{name}": tensor for name, tensor in optimizer.items()}


def _below(stem: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    prefix = stem + "/"
    return {k.removeprefix(prefix): v for k, v in tensors.items() if k.startswith(prefix)}
