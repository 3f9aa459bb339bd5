"""The options of `run`: its flags, and the user's command after them."""

from __future__ import annotations

import os
import re
import shutil
import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from raytrain_ddp.config.field_types import (
    ADDRESS,
    LEAST_OF_RESOURCE,
    MAY_BE_EMPTY,
    require,
    require_least,
)
from raytrain_ddp.errors import ConfigError, did_you_mean

_STREAMS = r"[0-3]|(\d+:[0-3],)*\d+:[0-3]"
_RANKS = r"all|none|\s*\d{1,5}\s*(,\s*\d{1,5}\s*)*"


@dataclass(frozen=True)
class RunFlags:
    """Run a distributed PyTorch script, unchanged, on Ray or on this machine.

    Each worker is a process of its own with torchrun's environment (RANK, LOCAL_RANK ...). Flags
    come before the script. Everything after it is passed on, with {rank} {local_rank} {world_size}
    {node_rank} {master_addr} {master_port} {init_method} replaced. All flags of torchrun are
    accepted.

      run --num-workers 8 --use-gpu train.py --lr 0.1
      run --nproc-per-node 8 --nnodes 4 train.py --lr 0.1
      run --num-workers 4 old.py --rank {rank} --world-size {world_size}

    Exit status: that of the first rank that fails, 128 + n after signal n, 2 for a wrong flag,
    3 without Ray or enough resources, 7 for a lost node. Ctrl-C ends all processes everywhere.
    """

    num_workers: int | None = None
    """Total number of processes. Default: one per GPU (--use-gpu), or per node (--per node)."""
    nproc_per_node: str | None = field(default=None, metadata={"metavar": "N|gpu|cpu|auto"})
    """Processes per node, or gpu, cpu, auto. As in torchrun. Replaces --num-workers. Each process
    gets a GPU if there are enough. If there are more processes than CPUs, they share CPUs."""
    nnodes: str | None = field(default=None, metadata={"metavar": "N|MIN:MAX"})
    """Number of nodes, or MIN:MAX. As in torchrun, with --nproc-per-node. Default: 1."""
    use_gpu: bool = False
    """Give each worker a GPU. All GPUs of the workers on its node are visible, so cuda:LOCAL_RANK
    is its own. Without this flag no GPU is visible, as Ray may have given them to others."""
    cpus_per_worker: float | None = None
    """CPUs to reserve per worker. Also sets its OMP_NUM_THREADS. Default: 1 (and as torchrun)."""
    gpus_per_worker: int | None = None
    """GPUs to reserve per worker, as with --use-gpu. Default: 1, or with --per node all."""
    per: Literal["worker", "node"] = "worker"
    """Start one process per worker, or per node for scripts that spawn the others themselves."""
    max_restarts: int = 0
    """Restarts of all workers after one has failed."""
    env: Literal["torchrun", "slurm"] = "torchrun"
    """Variables for the script: RANK, LOCAL_RANK and so on, or SLURM_PROCID and so on."""
    legacy_local_rank: bool = False
    """Pass --local_rank=N to the script, as torch.distributed.launch did. For --local-rank, write
    --local-rank {local_rank} after the script."""
    no_python: bool = False
    """Run the program itself; it is not a Python script."""
    show: str = "all"
    """Ranks whose output is shown: all, none, or 0,2,5."""
    log_dir: str | None = None
    """Folder for the output of each rank. It is written byte for byte to
    LOG_DIR/RUN/attempt_N/RANK/stdout.log and stderr.log."""
    redirects: str = "0"
    """As in torchrun (-r): streams that are written to files only. 1: stdout, 2: stderr, 3: both;
    or by local rank, such as 0:1,1:3."""
    tee: str = "0"
    """As in torchrun (-t): streams that are written to files and shown, as in --redirects."""
    local_ranks_filter: str = ""
    """As in torchrun: show only these local ranks, such as 0,1."""
    log_line_prefix_template: str = field(default="[rank ${rank}] ", metadata=MAY_BE_EMPTY)
    """As in torchrun: prefix of each line of output. May contain ${rank}, ${local_rank},
    ${role_name} and ${hostname}."""
    role: str = field(default="default", metadata=MAY_BE_EMPTY)
    """As in torchrun: value of ROLE_NAME."""
    rdzv_id: str | None = None
    """As in torchrun: TORCHELASTIC_RUN_ID, and first part of RUN in LOG_DIR. Default: random."""
    master_port: int | None = None
    """As in torchrun: port that rank 0 listens on. Default: a free port."""
    virtual_local_rank: bool = False
    """As in torchrun: LOCAL_RANK is 0 everywhere, and each rank sees only its own GPUs."""
    signals_to_handle: str = field(default="SIGTERM,SIGINT,SIGHUP,SIGQUIT", metadata=MAY_BE_EMPTY)
    """As in torchrun: signals that are forwarded to all ranks and end the run."""
    grace_s: float = 30.0
    """Seconds from SIGINT or SIGTERM to SIGKILL (torchrun's --shutdown-timeout). A second Ctrl-C
    kills all ranks immediately."""
    wait_s: float = 60.0
    """Seconds to wait while a running cluster lacks resources, also after a node is lost."""
    ship: Literal["auto", "always", "never"] = "auto"
    """Copy the current folder to other machines. auto: to those that do not share it."""
    address: str | None = field(default=None, metadata=ADDRESS)
    """Address of a running Ray cluster. auto: the one on this machine. Default: RAY_ADDRESS if set,
    else a Ray is started."""
    standalone: bool = False
    """Use only this machine, and ignore RAY_ADDRESS."""

    def __post_init__(self) -> None:
        require_least(self, num_workers=1, gpus_per_worker=1, max_restarts=0, grace_s=0, wait_s=0)
        require_least(self, cpus_per_worker=LEAST_OF_RESOURCE, master_port=0)
        counted = self.nproc_per_node is not None
        if self.num_workers is not None and (counted or self.nnodes is not None):
            raise ConfigError("--num-workers is the total: remove --nproc-per-node and --nnodes.")
        if counted and self.per == "node":
            raise ConfigError("--per node is one process on each: remove --nproc-per-node.")
        if self.standalone and self.address is not None:
            raise ConfigError("--standalone uses only this machine: remove it or --address.")
        streams = "must be 0 (none), 1 (stdout), 2 (stderr), 3 (both), or by local rank: 0:1,1:3"
        ranks = "must be all, none, or like 0,2,5"
        for name, pattern, rule in (
            ("nproc_per_node", r"[1-9]\d{0,3}|auto|cpu|gpu", "must be a number, auto, cpu or gpu"),
            ("nnodes", r"[1-9]\d{0,3}(:[1-9]\d{0,3})?", "must be like 2, or like 1:4"),
            ("tee", _STREAMS, streams),
            ("redirects", _STREAMS, streams),
            ("show", _RANKS, ranks),
            ("local_ranks_filter", f"{_RANKS}|", ranks),
        ):
            value = getattr(self, name)
            is_right = value is None or re.fullmatch(pattern, value) is not None
            require(is_right, f"--{name.replace('_', '-')}", value, rule)
        least, most = self.node_range or (1, 1)
        require(least <= most, "--nnodes", self.nnodes, "must be MIN:MAX, with MIN first")
        for name, limit in (("master_port", 1 << 16), ("num_workers", 100_000)):
            value = getattr(self, name) or 0
            require(value < limit, f"--{name.replace('_', '-')}", value, f"must be below {limit}")
        for name in self.signals:
            known = name in signal.Signals.__members__ and name not in ("SIGKILL", "SIGSTOP")
            require(known, "--signals-to-handle", name, "is not a signal that can be handled")

    @property
    def signals(self) -> list[str]:
        """The names in --signals-to-handle."""
        return [name for each in self.signals_to_handle.split(",") if (name := each.strip())]

    @property
    def by_node(self) -> bool:
        """Whether workers are counted per node, as in torchrun."""
        return self.per == "node" or (self.nproc_per_node or self.nnodes) is not None

    @property
    def node_range(self) -> tuple[int, int] | None:
        """The minimum and maximum number of nodes; None: all there are."""
        default = self.num_workers if self.per == "node" else 1
        least, _, most = (self.nnodes or str(default or "")).partition(":")
        return (int(least), int(most or least)) if least else None

    @property
    def files(self) -> bool:
        """Whether the ranks' output goes to files."""
        wanted = self.log_dir is not None or f"{self.tee}{self.redirects}".strip("0") != ""
        return wanted and self.log_dir != os.devnull

    def shown(self, rank: int, local_rank: int, stream: str) -> bool:
        """Whether this rank's stream (``stdout`` or ``stderr``) goes to the console."""
        if not (_is_in(self.show, rank) and _is_in(self.local_ranks_filter or "all", local_rank)):
            return False
        bit = 1 if stream == "stdout" else 2
        redirected, teed = (_streams(text, local_rank) for text in (self.redirects, self.tee))
        return not redirected & bit or bool(teed & bit)


@dataclass(frozen=True)
class RunOptions:
    """One invocation of `run`.

    Args:
        program: the script, or with `module` a module name; `args` follow it unchanged.
        notes: messages about the command line, shown before anything starts.
    """

    flags: RunFlags
    program: str
    args: Sequence[str] = ()
    module: bool = False
    notes: Sequence[str] = ()

    def __post_init__(self) -> None:
        is_both = self.module and self.flags.no_python
        require(not is_both, "-m", self.program, "does not work with --no-python")

    def require_script(self, folder: Path) -> None:
        """Raises ConfigError if the script is not in the folder."""
        path, program = folder / self.program, self.program
        is_elsewhere = "/" not in program or os.path.isabs(program)  # each machine looks for it
        if self.module or path.is_file() or (self.flags.no_python and is_elsewhere):
            return
        if not self.flags.no_python and (path / "__main__.py").is_file():
            return
        hint = did_you_mean(program, (p.name for p in folder.glob("*.py")))
        if program in ("torchrun", "python", "python3", "accelerate", "deepspeed"):
            hint = f" Leave {program} out: the command is `raytrain run script.py`."
        elif shutil.which(program) is not None:
            hint = " Programs that are not Python scripts need --no-python."
        raise ConfigError(f"there is no script {program!r} in {folder}.{hint}")

    def command(
        self, python: str, values: Mapping[str, str], moved: Callable[[str], str] = str
    ) -> list[str]:
        """The command of one worker: as in torchrun, with placeholders replaced from `values`.

        Args:
            moved: maps the script's path to its path there.
        """
        head = [] if self.flags.no_python else [python, "-u"]
        head += ["-m", self.program] if self.module else [moved(self.program)]
        if self.flags.legacy_local_rank:
            head.append(f"--local_rank={values['local_rank']}")
        return head + [_filled(arg, values) for arg in self.args]


def _filled(text: str, values: Mapping[str, str]) -> str:
    """Replaces ``{rank}`` and the other placeholders, and torchrun's ``${local_rank}``;
    other braces stay unchanged."""
    text = text.replace("${local_rank}", values["local_rank"])
    for name, value in values.items():
        text = text.replace(f"{{{name}}}", value)
    return text


def _is_in(ranks: str, rank: int) -> bool:
    return ranks == "all" or (ranks != "none" and rank in map(int, ranks.split(",")))


def _streams(text: str, local_rank: int) -> int:
    """The bits of --tee or --redirects for a local rank."""
    if ":" not in text:
        return int(text)
    pairs = dict(pair.split(":") for pair in text.split(","))
    return int(pairs.get(str(local_rank), "0"))
