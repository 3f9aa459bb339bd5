"""The section of a config that says where a run takes place: its workers and their resources."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from raytrain_ddp.config.field_types import Section, setting
from raytrain_ddp.config.validation import LEAST_OF_RESOURCE


def _range(given: int | str) -> tuple[int, int]:
    low, _, high = str(given).partition(":")
    return int(low), int(high or low)


def _is_count(given: int | str) -> bool:
    is_range = re.fullmatch(r"\d{1,9}(:\d{1,9})?", str(given)) is not None
    return given == "auto" or (is_range and 1 <= _range(given)[0] <= _range(given)[1])


_WORKERS = (_is_count, "must be a number of 1 or more, MIN:MAX or auto")
_ELASTIC = ("scaling.num_workers = MIN:MAX", lambda c: ":" in str(c.scaling.num_workers))


@dataclass(frozen=True)
class ScalingConfig(Section, name="scaling"):
    """The number of workers and their resources. They do not change the mathematics of the
    result."""

    num_workers: int | str = setting(
        "auto", free=True, metavar="N|MIN:MAX|auto", check=_WORKERS, on_ray=True
    )
    """Number, MIN:MAX (elastic), or auto. auto: all GPUs of the cluster, or two CPU workers if it
    has none."""
    use_gpu: bool | Literal["auto"] = setting("auto", free=True)
    """Train on GPUs: true, false, or auto. auto: if the cluster has any."""
    cpus_per_worker: float | Literal["auto"] = setting("auto", free=True, least=LEAST_OF_RESOURCE)
    """CPUs per worker, for its loader threads and, without a GPU, its compute threads. auto: with
    GPUs, each has its share of its node's CPUs; without, 1 (with --local and without --exact, as
    many compute threads as torch takes)."""
    gpus_per_worker: float = setting(
        1.0, free=True, least=LEAST_OF_RESOURCE, most=1, needs="scaling.use_gpu", on_ray=True
    )
    """GPUs per worker, at most 1. Below 1, several workers share a GPU (over Gloo)."""
    backend: Literal["auto", "nccl", "gloo"] = setting("auto", free=True)
    """Communication backend. auto: nccl if each worker has a whole GPU, else gloo. Variables of
    NCCL and torch that the environment sets are kept."""
    placement: Literal["PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"] = setting(
        "PACK", free=True, on_ray=True
    )
    """How Ray places the workers on nodes (its placement group strategy)."""
    max_failures: int = setting(3, free=True, least=0, on_ray=True)
    """How many times in a row failed workers are replaced before the run ends (exit status 7). A
    new checkpoint resets the count: a long run survives many failures, and a broken one ends."""
    replace_workers: bool | Literal["auto"] = setting("auto", free=True, on_ray=True)
    """A worker that dies is replaced while the others keep their state: no step is repeated. With
    exact, or MIN:MAX workers, the others continue meanwhile. false: all workers restart from the
    newest checkpoint. auto: true, except over NCCL, where it has never run on several GPUs; with
    true, each step there waits for its last collective before its update."""
    warm_processes: bool | Literal["auto"] = setting("auto", free=True, on_ray=True)
    """Start Ray's processes as forks of a process per node that has torch loaded, on Linux, with or
    without GPUs. auto: true. That process stays on a running cluster for an hour after its last
    fork."""
    max_preemptions: int = setting(-1, free=True, least=-1, on_ray=True)
    """How many times workers are replaced after a preemption notice for their node. -1: no
    limit."""
    wait_s: float = setting(60.0, free=True, least=0, on_ray=True)
    """Seconds to wait while a running cluster lacks resources for the workers, at the start and
    after nodes are lost (autoscaling). Also the time limit for the start of Ray, but at least 300
    s."""
    resize_s: float = setting(30.0, free=True, least=1, needs=_ELASTIC, on_ray=True)
    """With MIN:MAX workers: seconds between checks if more fit; growing costs a restart from the
    newest checkpoint. Where dead workers are replaced (replace_workers), others join between two
    steps once they fit, without a restart."""
    start_timeout_s: float | Literal["auto"] = setting("auto", free=True, above=0, on_ray=True)
    """Seconds to request the same number of workers from Ray before requesting as many as fit. Ray
    still counts a lost node as alive for some seconds. Loading torch is not included. auto: 5 with
    MIN:MAX, else 120."""
    hang_s: float | Literal["auto"] = setting("auto", free=True, least=0)
    """Seconds without a finished step, and at least 10 times the median step, after which workers
    count as hung. The rank that keeps the others waiting is named, the stacks of all ranks are
    saved, and the workers are replaced. The limit is 10 times as long for a batch of data, and 60
    times for startup, evaluation, and checkpoints. auto: 30. 0: never."""
    check_every_steps: int = setting(100, free=True, least=0)
    """Compare the weights of all workers every this many steps, and before each checkpoint. They
    are bitwise identical unless a device or its memory fails; then the run ends with exit status 6.
    0: never."""

    @property
    def cpus_without_gpu(self) -> float:
        """CPUs of a worker that trains on them; auto is fixed, as sums depend on the threads."""
        return 1.0 if isinstance(self.cpus_per_worker, str) else self.cpus_per_worker

    @property
    def threads(self) -> int:
        """For the arithmetic of a worker on CPUs."""
        return max(1, int(self.cpus_without_gpu))

    def worker_range(self) -> tuple[int, int]:
        """(least, most) workers; (0, 0) for auto."""
        return (0, 0) if self.num_workers == "auto" else _range(self.num_workers)
