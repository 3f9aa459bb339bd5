"""Rehearses a run before its first step: two steps with a checkpoint between them, an evaluation.

What a step, a checkpoint or an evaluation shows is not predicted elsewhere. Each rank rehearses on
its own, before the model is wrapped in DDP, and the run does not depend on it: weights, buffers and
generators are restored, the optimizer is made anew, and log, clock and failpoints see nothing.
"""

from __future__ import annotations

import gc
import math
import reprlib
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from raytrain_ddp.checkpoint.manifest import Manifest
from raytrain_ddp.checkpoint.run_folder import run_storage
from raytrain_ddp.checkpoint.snapshot import encode
from raytrain_ddp.checkpoint.store import CheckpointName
from raytrain_ddp.checkpoint.streams import joined
from raytrain_ddp.checkpoint.tensor_places import TensorPlaces
from raytrain_ddp.config.recipe import settled
from raytrain_ddp.config.train_config import TrainConfig
from raytrain_ddp.data.loading.loader import tried
from raytrain_ddp.data.loading.nested import bytes_of, to_device
from raytrain_ddp.data.loading.sources import Batch
from raytrain_ddp.data.order import Draws
from raytrain_ddp.errors import (
    CheckpointError,
    ConfigError,
    PreflightError,
    TaskError,
    first_line,
    first_names,
)
from raytrain_ddp.events import Event, Note, Phase
from raytrain_ddp.tasks.model_parts import evaluating
from raytrain_ddp.tasks.task_check import metrics_of, place_of, refused
from raytrain_ddp.training.build import Build
from raytrain_ddp.training.evaluation import State, TreeMetrics, require_monitor
from raytrain_ddp.training.gradients.buffer_sync import SavedBuffers
from raytrain_ddp.training.optimizer.task_optimizer import unfit
from raytrain_ddp.training.runtime.world import (
    World,
    autocast,
    device_name,
    from_all_ranks,
    has_bf16,
    keeping_generators,
    seed_slot,
    set_up,
)
from raytrain_ddp.training.state.shared_checkpoint import ReceivedCheckpoint
from raytrain_ddp.training.steps.replica_check import fingerprints
from raytrain_ddp.training.steps.warm_up import loss_without_backward, naming_remedy

_MAX_BAD = 4096  # rows searched for a readable one
_COPIES = 8  # of the weights on the host: checkpoints, with two moments, and their bytes


def rehearse(build: Build, tell: Callable[[Event], None], most: int | None = None) -> int:
    """Takes two steps of a new run, and the second one again from a checkpoint of the first. If its
    bits differ then, those of a resumed run would, too. `Task.after_step` is not called.

    All ranks agree whether to rehearse; there are no other collectives.

    Args:
        most: the most samples in a batch; None: as many as a slot has.

    Returns:
        The size of a checkpoint in bytes; 0 if there was no rehearsal, because the run is not new
        or the hosts lack the memory.

    Raises:
        TaskError: the task or its optimizer keeps state that checkpoints lack; its state cannot be
            stored; or its optimizer cannot take a step.
    """
    model, world, config = build.model, build.world, build.config
    needed_bytes = _COPIES * bytes_of(model.state_dict()) * world.size
    is_new = build.is_new and build.warmed_up is None
    votes = from_all_ranks((is_new, needed_bytes < _available_bytes() / 4), world)
    if not all(new for new, _ in votes):
        return 0
    if not all(fits for _, fits in votes):
        tell(Note(f"no rehearsal: it may need {needed_bytes / 2**30:.1f} GiB of host memory."))
        return 0
    tell(Phase("rehearsing two steps"))
    began, buffers = time.monotonic(), SavedBuffers(model)
    with _without_trace(build):
        size = min(most or build.plan.micro_batch, build.plan.micro_batch)
        batch = build.loader.any_batch(size, config.data.grow_epochs)
        # A first pass may make buffers, which checkpoints contain.
        seed_slot(world.device, config.seed, 0, 0)
        loss_without_backward(build, model, batch)
        buffers.restore()
        buffers = SavedBuffers(model)
        start = _stored(build)
        take_step(build, batch, 0)
        buffers.restore()  # unless one has another size now
        checkpoint = _stored(build)
        size_bytes = bytes_of([model.state_dict(), build.optimizer.state_dict()])
        passed, weights = take_step(build, batch, 1), _hash(model.parameters())
        build.renew_optimizer()
        build.state.load(checkpoint)
        again = take_step(build, batch, 1)
    if not config.compute.deterministic and not torch.equal(passed, again):
        tell(Note("nondeterministic kernels: state that checkpoints lack was not looked for."))
    elif not torch.equal(passed, again):
        raise _forgotten(build, batch, buffers)
    elif not torch.equal(weights, _hash(model.parameters())):
        problem = "keeps state outside its state_dict(), so a resumed run would differ"
        raise unfit(build.task.optimizer or build.task.model, build.optimizer, problem)
    buffers.restore()
    build.state.load(start)
    build.renew_optimizer()
    tell(Phase(f"warming up (the rehearsal took {time.monotonic() - began:.1f} s)"))
    return size_bytes


def _available_bytes() -> int:
    """The host's memory that is free or can be freed."""
    with open("/proc/meminfo", encoding="ascii") as lines:
        return next(1024 * int(line.split()[1]) for line in lines if "MemAvailable" in line)


@contextmanager
def _without_trace(build: Build) -> Iterator[None]:
    """Keeps the generators, and turns torch.compile off: it would compile other code outside of
    DDP."""
    eager = torch.compiler.set_stance("force_eager")
    with eager, keeping_generators(build.world.device), naming_remedy():
        yield


def take_step(build: Build, batch: Batch, number: int) -> Tensor:
    """Takes a step of one micro-batch with the learning rates of the first step, without
    collectives. A gradient that is not finite is not applied.

    Returns:
        A hash of the loss and of each gradient, shape (1 + parameters,).

    Raises:
        TaskError: the task's optimizer fails.
    """
    model, optimizer = build.model, build.optimizer
    trained = [each for each in model.parameters() if each.requires_grad]
    for group, rate in zip(optimizer.param_groups, build.rates(0), strict=True):
        group["lr"] = rate
    seed_slot(build.world.device, build.config.seed, number, 0)
    loss, _ = loss_without_backward(build, model, batch)
    for parameter in trained:  # dense and complete, as sums of gradients are
        parameter.grad = torch.zeros_like(parameter)
    loss.backward()
    hashes = _hash([loss, *(p.grad for p in trained if p.grad is not None)])
    norm = nn.utils.clip_grad_norm_(trained, build.config.optim.clip_norm or math.inf)
    try:
        if norm.isfinite():
            optimizer.step()
    except Exception as error:
        if build.task.optimizer is None or isinstance(error, torch.OutOfMemoryError):
            raise
        problem = f"cannot take a step: {first_line(error)} (closures are not supported)"
        raise unfit(build.task.optimizer, optimizer, problem) from error
    model.zero_grad()
    return hashes


def _hash(tensors: Iterable[Tensor]) -> Tensor:
    """A hash of each tensor, shape (tensors,). All NaNs have the same hash, whatever their bits."""
    held = (each.detach() for each in tensors)
    real = (x.nan_to_num() if x.is_floating_point() and x.itemsize > 1 else x for x in held)
    return torch.cat([fingerprints([each]) for each in real])


def _stored(build: Build) -> ReceivedCheckpoint:
    """The state, to be loaded once from the bytes of a checkpoint."""
    manifest = Manifest(1, 0, 1, build.world.size, config={}, data_fingerprint="")
    kept: dict[str, memoryview | TensorPlaces] = {}
    try:
        for name, content in encode(build.state.snapshot(manifest, ())).items():
            kept[name] = joined([content] if isinstance(content, bytes) else [*content])
    except CheckpointError as error:
        where = place_of(build.task.optimizer or build.task.model)
        raise TaskError(f"{where}: no checkpoint can be made: {error}") from error
    storage = run_storage(build.config)
    return ReceivedCheckpoint(CheckpointName(1, 1), manifest, storage, kept, {})


def _forgotten(build: Build, batch: Batch, buffers: SavedBuffers) -> TaskError:
    """The error for a loss that depends on what checkpoints lack: names what a pass changes."""
    before, stored = _attributes(build), build.model.state_dict().keys()
    with _without_trace(build):
        take_step(build, batch, 2)
    after = _attributes(build)
    names = [name for name in {**before, **after} if before.get(name) != after.get(name)]
    names += [f"the buffer {name}" for name in buffers.changed() if name not in stored]
    names += [name for name, _ in build.model.named_parameters() if name not in stored]
    where = first_names(names) if names else "a global variable, an object or a generator"
    return TaskError(
        f"{place_of(build.task.loss)}: a batch has another loss or gradient when a step is "
        f"repeated from a checkpoint, because of what passes keep in {where}. Checkpoints do not "
        "contain it: keep it in a persistent buffer of the model (register_buffer), and draw "
        "random numbers from torch's, numpy's or Python's global generators."
    )


def _attributes(build: Build) -> dict[str, str]:
    """The attributes of the task and of the model's modules by name, as text."""
    short = reprlib.Repr()
    short.maxother = 10_000  # of a tensor
    modules = {f"model.{name}".rstrip("."): each for name, each in build.model.named_modules()}
    return {
        f"{name}.{key}": short.repr(value)
        for name, owner in {"task": build.task, **modules}.items()
        for key, value in getattr(owner, "__dict__", {}).items()
        if key not in ("_parameters", "_buffers", "_modules")
    }


# ------------------------------------------------------------------ the evaluation


def rehearse_evaluation(
    build: Build, tell: Callable[[Event], None], most: int | None = None
) -> None:
    """Evaluates the first chunk with a readable record, if there is evaluation data; the metrics
    must be the same once their states are merged into new ones. Each rank does this on its own.

    Args:
        most: the most samples in the chunk; None: as many as the config says.

    Raises:
        TaskError: states cannot be merged, or the task's monitor is not an updated metric.
    """
    config, task, model, device = build.config, build.task, build.model, build.world.device
    batch = _eval_batch(build, min(most or config.eval_micro_batch, config.eval_micro_batch))
    if batch is None:
        return  # there are none, or all are bad: the evaluation will count them
    scores, buffers = TreeMetrics(task, metrics_of(task), device), SavedBuffers(model)
    precision = autocast(device, config.compute.precision)
    with _without_trace(build), evaluating(model), torch.no_grad(), precision:
        scores.reset()
        seed_slot(device, 0, 0, 0)
        returned: Any = task.evaluate(model, to_device(batch, device), scores.given)  # type: ignore[func-returns-value]
        if returned is not None:
            hint = " It must update the metrics that it receives: metrics['name'].update(...)."
            raise refused(task.evaluate, returned, "None", hint)
        buffers.restore()
        untouched = scores.untouched()
        if task.monitor.partition("/")[0] in untouched:
            text = f"did not update the metric {task.monitor!r}, which is the task's monitor"
            raise TaskError(f"{place_of(task.evaluate)}: {text}: call its update().")
        state, values = scores.state(), scores.computed()
    require_monitor(task, values)
    _require_merging(build, state, values)
    better = getattr(scores.metric(task.monitor), "higher_is_better", None)
    if better is not None and better != (task.goal == "max"):
        what = f"the metric says that a {'higher' if better else 'lower'} {task.monitor} is better"
        text = f"goal = {task.goal!r}, but {what} (see its higher_is_better)."
        tell(Note(f"{place_of(task.metrics)}: {text}"))
    for name in untouched:
        tell(Note(f"{place_of(task.evaluate)}: did not update the metric {name!r}."))


def _eval_batch(build: Build, size: int) -> Batch | None:
    """The first chunk of this size with a readable record; None: there is none."""
    if (data := build.eval_data) is None:
        return None
    for start in range(0, min(data.rows, _MAX_BAD), size):
        rows = np.arange(start, min(start + size, data.rows), dtype=np.int64)
        batch = tried(data, Draws(0, 0, rows))
        if data.checked_samples(batch, len(rows), build.config.data.may_skip):
            return batch
    return None


def _require_merging(build: Build, state: State, values: dict[str, Tensor]) -> None:
    """Raises TaskError unless new metrics have the values of a state that is merged into them, and
    states of several chunks can be merged."""
    task, world = build.task, replace(build.world, rank=0, size=1)
    try:
        for chunks in (3, 1):
            fresh = TreeMetrics(task, metrics_of(task), world.device)
            for chunk in range(chunks):
                fresh.take(chunk, state)
            merged = fresh.values(world)
        torch.testing.assert_close(
            merged, values, rtol=1e-4, atol=1e-6, equal_nan=True, check_dtype=False
        )
    except TaskError:
        raise
    except Exception as error:
        raise TaskError(
            f"{place_of(task.metrics)}: metrics have other values once their states are merged, as "
            f"over chunks of the data: {' '.join(str(error).split())} Everything that compute() "
            "needs must be a state (add_state); instead of a mean, store a sum and a count."
        ) from error


_MEMORY = 0.9  # of a GPU; the rest is for NCCL, the driver, and what fragments


def find_micro_batch(config: TrainConfig, workers: int) -> int:
    """The largest size that gives each of `workers` a slot and fits on this machine's first GPU.

    Raises:
        PreflightError: there is no GPU. ConfigError: no size fits its memory.
    """
    if not torch.cuda.is_available():
        raise PreflightError(
            "--find-micro-batch: this machine has no GPU. On CPUs, memory is not the limit."
        )
    world = World(0, workers, 0, torch.device("cuda", 0), 1)
    config = settled(config, has_bf16(world.device))
    torch.cuda.set_per_process_memory_fraction(_MEMORY * config.scaling.gpus_per_worker)
    try:
        size = largest_that_fits(config, world, config.micro_batches(workers))
    except torch.OutOfMemoryError:  # not even the model
        size = 0
    if not size:
        raise ConfigError(
            f"--find-micro-batch: no size fits the memory of {device_name(world.device)}: use a "
            "smaller model, smaller images, or --compute.precision bf16."
        )
    return size


def largest_that_fits(config: TrainConfig, world: World, sizes: Sequence[int]) -> int:
    """The first of the sizes, from large to small, whose passes fit this worker's memory; 0: none.

    Tries them with the task's own model, data and optimizer, which are then discarded. Does not
    compile the model: that needs no more memory, and would be repeated for each size.
    """
    if not sizes:
        return 0
    plain = replace(config.compute, compile=False)
    alone_here = replace(config.data, workers=0)
    tried = replace(config, micro_batch=sizes[0], compute=plain, data=alone_here)
    set_up(world, tried.compute)
    build = Build(tried, replace(world, rank=0, size=1))
    with closing(build.data):

        def fits(size: int) -> bool:
            try:
                batch = build.loader.any_batch(size, tried.data.grow_epochs)
                kept = _kept(tried, build.model, world, size)
                for number in range(2):  # the second has the state of the optimizer
                    take_step(build, batch, number)
                del kept, batch
            except torch.OutOfMemoryError:
                return False
            finally:
                gc.collect()
                torch.cuda.empty_cache()  # does nothing without a GPU
            return True

        with naming_remedy():
            return next(filter(fits, sizes), 0)


def _kept(config: TrainConfig, model: nn.Module, world: World, size: int) -> list[torch.Tensor]:
    """Memory that the run needs in addition, each as large as the gradients: the buckets of DDP;
    the average of the weights; compressed gradients; with exact, the partial sums of slots."""
    slots = -(-config.batch_size // size // max(1, world.size))
    copies = (world.size > 1) + (config.ema.decay > 0) + (config.ddp.compression != "none")
    copies += slots.bit_length() if config.exact else 0
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return [torch.empty_like(parameter) for parameter in trained for _ in range(copies)]
