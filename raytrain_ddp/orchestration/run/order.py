"""What `run` is asked for: its flags, and the user's command line behind them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from raytrain_ddp.errors import ConfigError, did_you_mean
from raytrain_ddp.rules import require

# Names that are filled in within the arguments of a script; all other braces stay as they are.
PLACEHOLDERS = ("rank", "local_rank", "world_size", "node_rank", "master_addr", "master_port")
INIT_METHOD = "init_method"


@dataclass(frozen=True)
class Flags:
    """The flags of `run`; how each reads on the command line."""

    num_workers: int | None = None
    """How many processes in all. Default: one per GPU (--use-gpu), or per node (--per node)."""
    use_gpu: bool = False
    """A GPU for each worker. Those of all its node's are visible, so cuda:LOCAL_RANK is its own.
    Without it no GPU is visible: Ray may have given them to others."""
    cpus_per_worker: float | None = None
    """CPUs to reserve for each; also its OMP_NUM_THREADS. Default: 1 (and as torchrun)."""
    gpus_per_worker: int | None = None
    """GPUs to reserve for each, with --use-gpu. Default: 1, with --per node all of the node."""
    per: Literal["worker", "node"] = "worker"
    """node: one process on each node, for scripts that spawn the others themselves."""
    max_restarts: int = 0
    """How many times all workers are started again after one of them has failed."""
    env: Literal["torchrun", "slurm"] = "torchrun"
    """Which variables the script reads: RANK, LOCAL_RANK ... or SLURM_PROCID, SLURM_LOCALID ..."""
    legacy_local_rank: bool = False
    """Pass --local_rank=N to the script, as torch.distributed.launch did; or --local-rank=N, as it
    does since torch 2.0, to a script in whose text there is this spelling only."""
    no_python: bool = False
    """The program is not a Python script: run it itself."""
    tee: str = "all"
    """Ranks whose output is shown: all, none, or 0,2,5."""
    log_dir: str | None = None
    """Write each rank's output to LOG_DIR/RUN/attempt_N/RANK/stdout.log and stderr.log."""
    grace_s: float = 30.0
    """Time to end after SIGINT or SIGTERM until SIGKILL. A second Ctrl-C ends all at once."""
    wait_s: float = 60.0
    """How long a running cluster may lack room, at the start and when a node is lost."""
    ship: Literal["auto", "always", "never"] = "auto"
    """Copy the current folder to other machines; auto: to those that have not the same files there
    (of other files than *.py, those that both have)."""
    export: str = ""
    """NAME,NAME: variables with this shell's value on all machines. Without it, another machine has
    those of its `ray start`, and of this shell's what is not set there and does not concern this
    machine only (PATH, HOME, LD_*, CONDA_*, SLURM_*, CUDA_VISIBLE_DEVICES ... stay here)."""
    address: str | None = None
    """A running Ray cluster (auto: on this machine). Default: RAY_ADDRESS, else an embedded Ray."""
    dry_run: bool = False
    """Print each worker's environment and command, and do nothing else."""

    def __post_init__(self) -> None:
        _from(1, "--num-workers", self.num_workers)
        _from(1, "--gpus-per-worker", self.gpus_per_worker)
        _from(0, "--max-restarts", self.max_restarts)
        _from(0, "--grace-s", self.grace_s)
        _from(0, "--wait-s", self.wait_s)
        cpus = self.cpus_per_worker
        require(cpus is None or cpus > 0, "--cpus-per-worker", cpus, "must be above 0")
        if self.gpus_per_worker is not None and not self.use_gpu:
            raise ConfigError("--gpus-per-worker is for --use-gpu: add it.")
        self.shown(0)

    @property
    def exported(self) -> list[str]:
        """The names in --export."""
        return [name for each in self.export.split(",") if (name := each.strip())]

    def shown(self, rank: int) -> bool:
        """Whether this rank's output goes to the console."""
        if self.tee in ("all", "none"):
            return self.tee == "all"
        ranks = self.tee.split(",")
        for each in ranks:
            require(each.strip().isdigit(), "--tee", self.tee, "must be all, none, or like 0,2,5")
        return rank in map(int, ranks)


@dataclass(frozen=True)
class Order:
    """One call of `run`.

    Args:
        program: the script, or with `module` the name of one; `args` follow it untouched.
    """

    flags: Flags
    program: str
    args: Sequence[str] = ()
    module: bool = False

    def __post_init__(self) -> None:
        if self.flags.no_python:
            require(not self.module, "-m", self.program, "is not for --no-python")
            require(
                not self.flags.legacy_local_rank,
                *("--legacy-local-rank", True),
                "is for Python scripts; write --local_rank={local_rank} behind the program",
            )

    def require_script(self, folder: Path) -> None:
        """Raises ConfigError if there is no such script in the folder."""
        if self.module or self.flags.no_python or (folder / self.program).is_file():
            return
        hint = did_you_mean(self.program, (p.name for p in folder.glob("*.py")))
        raise ConfigError(f"there is no script {self.program!r} in {folder}.{hint}")

    def command(
        self, python: str, values: Mapping[str, str], moved: Callable[[str], str] = str
    ) -> list[str]:
        """What one worker runs: as torchrun, with the placeholders filled in from `values`.

        Args:
            moved: the script's path as it is there.
        """
        head = [] if self.flags.no_python else [python, "-u"]
        head += ["-m", self.program] if self.module else [moved(self.program)]
        if self.flags.legacy_local_rank:
            head.append(f"{self._local_rank_flag()}={values['local_rank']}")
        return head + [fill(arg, values) for arg in self.args]

    def _local_rank_flag(self) -> str:
        """Old scripts read the one, new ones the other or both."""
        try:
            text = Path(self.program).read_text(encoding="utf-8", errors="replace")
        except OSError:  # a module
            text = ""
        dashed_only = "--local-rank" in text and "--local_rank" not in text
        return "--local-rank" if dashed_only else "--local_rank"


def fill(text: str, values: Mapping[str, str]) -> str:
    """``{rank}`` and the other placeholders by their values; other braces stay."""
    for name in (*PLACEHOLDERS, INIT_METHOD):
        text = text.replace(f"{{{name}}}", values[name])
    return text


def _from(least: float, flag: str, value: float | None) -> None:
    require(value is None or value >= least, flag, value, f"must be {least:g} or more")
