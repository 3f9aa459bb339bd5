"""The section of a config that says where a run takes place: its workers and their resources."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from raytrain_ddp.config.field_types import Section
from raytrain_ddp.config.validation import FREE, LEAST_OF_RESOURCE


@dataclass(frozen=True)
class ScalingConfig(Section, name="scaling"):
    """The number of workers and their resources. They do not change the mathematics of the
    result."""

    num_workers: int | str = field(default="auto", metadata={**FREE, "metavar": "N|MIN:MAX|auto"})
    """Number, MIN:MAX (elastic), or auto. auto: all GPUs of the cluster, or two CPU workers if it
    has none."""
    use_gpu: bool | Literal["auto"] = field(default="auto", metadata=FREE)
    """Train on GPUs: true, false, or auto. auto: if the cluster has any."""
    cpus_per_worker: float | Literal["auto"] = field(default="auto", metadata=FREE)
    """CPUs per worker, for its loader threads and, without a GPU, its compute threads. auto: with
    GPUs, each has its share of its node's CPUs; without, 1 (with --local and without --exact, as
    many compute threads as torch takes)."""
    gpus_per_worker: float = field(default=1.0, metadata=FREE)
    """GPUs per worker, at most 1. Below 1, several workers share a GPU (over Gloo)."""
    backend: Literal["auto", "nccl", "gloo"] = field(default="auto", metadata=FREE)
    """Communication backend. auto: nccl if each worker has a whole GPU, else gloo. Variables of
    NCCL and torch that the environment sets are kept."""
    placement: Literal["PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"] = field(
        default="PACK", metadata=FREE
    )
    """How Ray places the workers on nodes (its placement group strategy)."""
    max_failures: int = field(default=3, metadata=FREE)
    """How many times in a row failed workers are replaced before the run ends (exit status 7). A
    new checkpoint resets the count: a long run survives many failures, and a broken one ends."""
    replace_workers: bool | Literal["auto"] = field(default="auto", metadata=FREE)
    """A worker that dies is replaced while the others keep their state: no step is repeated. With
    exact, or MIN:MAX workers, the others continue meanwhile. false: all workers restart from the
    newest checkpoint. auto: true, except over NCCL, where it has not been tested on real GPUs; with
    true, each step there waits for its last collective before its update."""
    warm_processes: bool | Literal["auto"] = field(default="auto", metadata=FREE)
    """Start Ray's processes as forks of a process per node that has torch loaded, on Linux. auto:
    on machines without a GPU. That process stays on a running cluster for an hour after its last
    fork."""
    max_preemptions: int = field(default=-1, metadata=FREE)
    """How many times workers are replaced after a preemption notice for their node. -1: no
    limit."""
    wait_s: float = field(default=60.0, metadata=FREE)
    """Seconds to wait while a running cluster lacks resources for the workers, at the start and
    after nodes are lost (autoscaling). Also the time limit for the start of Ray, but at least 300
    s."""
    resize_s: float = field(default=30.0, metadata=FREE)
    """With MIN:MAX workers: seconds between checks if more fit; growing costs a restart from the
    newest checkpoint. Where dead workers are replaced (replace_workers), others join between two
    steps once they fit, without a restart."""
    start_timeout_s: float | Literal["auto"] = field(default="auto", metadata=FREE)
    """Seconds to request the same number of workers from Ray before requesting as many as fit. Ray
    still counts a lost node as alive for some seconds. Loading torch is not included. auto: 5 with
    MIN:MAX, else 120."""
    hang_s: float | Literal["auto"] = field(default="auto", metadata=FREE)
    """Seconds without a finished step, and at least 10 times the median step, after which workers
    count as hung. The rank that keeps the others waiting is named, the stacks of all ranks are
    saved, and the workers are replaced. The limit is 10 times as long for a batch of data, and 60
    times for startup, evaluation, and checkpoints. auto: 30. 0: never."""
    check_every_steps: int = field(default=100, metadata=FREE)
    """Compare the weights of all workers every this many steps, and before each checkpoint. They
    are bitwise identical unless a device or its memory fails; then the run ends with exit status 6.
    0: never."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.worker_range()
        self.above_zero("start_timeout_s")
        self.at_least(LEAST_OF_RESOURCE, "gpus_per_worker", "cpus_per_worker")
        self.at_least(0, "max_failures", "wait_s", "check_every_steps", "hang_s")
        self.at_least(-1, "max_preemptions")
        self.at_least(1, "resize_s")
        gpus = self.gpus_per_worker
        rule = "must be 1 or less: DDP drives one GPU per worker"
        self.require("gpus_per_worker", gpus <= 1, rule)
        rule = "must be 1 with NCCL, which needs a GPU per worker; set --scaling.backend gloo"
        self.require("gpus_per_worker", gpus == 1 or self.backend != "nccl", rule)

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
        if self.num_workers == "auto":
            return 0, 0
        low, _, high = str(self.num_workers).partition(":")
        ends = (low, high or low)
        rule = "must be a number of 1 or more, MIN:MAX or auto"
        self.require("num_workers", all(e.isdecimal() and len(e) < 10 for e in ends), rule)
        least, most = map(int, ends)
        self.require("num_workers", 1 <= least <= most, rule)
        return least, most


def usable_cpus(environ: Mapping[str, str] = os.environ) -> int:
    """The CPUs that this process may use: those of its affinity mask, and, within a Slurm job, no
    more than those of its task."""
    affinity = getattr(os, "sched_getaffinity", None)
    cpus = len(affinity(0)) if affinity else os.cpu_count() or 1
    in_step = "SLURM_STEP_ID" in environ  # else the job's script, which may use what the node gave
    given = environ.get("SLURM_CPUS_PER_TASK" if in_step else "SLURM_CPUS_ON_NODE", "")
    return min(cpus, int(given)) if given.isdecimal() and int(given) else cpus


def cpus_of_process(environ: Mapping[str, str] = os.environ) -> int:
    """This process's share of the CPUs, whatever OMP_NUM_THREADS says (torchrun sets 1)."""
    local = environ.get("LOCAL_WORLD_SIZE", "1")
    return max(1, usable_cpus(environ) // max(1, int(local) if local.isdecimal() else 1))
