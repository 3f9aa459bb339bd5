"""Assigns ranks to seats, and builds each rank's environment. Pure functions, without Ray."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import groupby

from raytrain_ddp.launcher.run_options import RunFlags

# Variables of the driver's environment that belong to its machine or shell and are not passed on,
# except for parts of PYTHONPATH.
_OF_THE_MACHINE = re.compile(
    r"(PATH|HOME|USER|LOGNAME|SHELL|SHLVL|PWD|OLDPWD|_|HOSTNAME|HOST|TERM|TMPDIR|TEMP|TMP|MAIL|LANG"
    r"|LD_.*|DYLD_.*|VIRTUAL_ENV.*|PYTHON(PATH|HOME|STARTUP|USERBASE|PYCACHEPREFIX|EXECUTABLE)|CONDA_.*|_CE_.*|SSH_.*|XDG_.*|DBUS_.*|DISPLAY|LC_.*"
    r"|LS_COLORS|SLURMD_.*|SLURM_(TMPDIR|CONF|(CPUS|GPUS|MEM)_(ON|PER)_NODE|(CPU|MEM|GPU)_BIND.*"
    r"|JOB_GPUS|TOPOLOGY.*|SRUN_.*)|CUDA_VISIBLE_DEVICES|NVIDIA_.*|KUBERNETES_.*|.*_SERVICE_(HOST|PORT).*)"
)
# Variables of `ray start` on the driver's machine that its shell may lack: cluster files set
# GLOO_SOCKET_IFNAME and the like there.
_OF_THE_NETWORK = re.compile(r"(GLOO|NCCL|TORCH_NCCL|TORCH_GLOO|UCX|FI)_.*")
# Variables that Ray sets for its own workers.
_OF_RAY = re.compile(r"RAY_.*|SPT_NOENV|OMP_NUM_THREADS|CUDA_VISIBLE_DEVICES|PYTHONBREAKPOINT")
# Variables that another launcher may have left in the driver's environment, or that are set anew: a
# script or library would take them for a rank of that group. No other variables of these prefixes.
_OF_A_LAUNCHER = re.compile(
    r"RANK|LOCAL_RANK|WORLD_SIZE|LOCAL_WORLD_SIZE|NODE_RANK|GROUP_(RANK|WORLD_SIZE)"
    r"|ROLE_(RANK|NAME|WORLD_SIZE)|MASTER_(ADDR|PORT)"
    r"|TORCHELASTIC_(RUN_ID|RESTART_COUNT|MAX_RESTARTS|USE_AGENT_STORE|ERROR_FILE"
    r"|SIGNALS_TO_HANDLE)|SLURMD_NODENAME"
    r"|SLURM_(PROCID|LOCALID|NODEID|GTIDS|NTASKS(_PER_\w+)?|NPROCS|NNODES|(JOB_)?NODELIST"
    r"|JOB_NUM_NODES|TASKS_PER_NODE|STEP_\w+|STEPID|LAUNCH_NODE_IPADDR|RESTART_COUNT)"
)


@dataclass(frozen=True)
class Placement:
    """A place that Ray has assigned: `number` of the worker, its location, and its GPUs.

    Args:
        environment: the variables of Ray's processes there; `python` is their interpreter.
    """

    number: int
    node: str
    ip: str
    host: str
    gpus: Sequence[str] = ()
    node_has_gpus: bool = False
    python: str = ""
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)  # each is itself, also as a key
class Worker:
    """A seat with its rank; `node_rank` counts nodes, `gpus` are all GPUs of the run on its
    node."""

    seat: Placement
    rank: int
    local_rank: int
    node_rank: int
    local_world_size: int
    gpus: Sequence[str]

    @property
    def where(self) -> str:
        return f"{self.seat.host} ({self.seat.ip})"


@dataclass(frozen=True)
class RankedGroup:
    """All workers of an attempt, and the port that rank 0 listens on."""

    workers: Sequence[Worker]
    master_port: int
    run_id: str
    attempt: int = 0

    @cached_property
    def nodes(self) -> list[Worker]:
        """The first worker of each node."""
        return [worker for worker in self.workers if worker.local_rank == 0]

    @property
    def master_addr(self) -> str:
        """The address of rank 0: loopback on a single node, which needs no network."""
        return "127.0.0.1" if len(self.nodes) == 1 else self.workers[0].seat.ip

    def placeholders(self, worker: Worker) -> dict[str, str]:
        """What ``{rank}`` and the like stand for in the arguments of one worker."""
        address = f"[{self.master_addr}]" if ":" in self.master_addr else self.master_addr
        return {
            "rank": str(worker.rank),
            "local_rank": str(worker.local_rank),
            "world_size": str(len(self.workers)),
            "node_rank": str(worker.node_rank),
            "master_addr": self.master_addr,
            "master_port": str(self.master_port),
            "init_method": f"tcp://{address}:{self.master_port}",
        }


def assign_ranks(seats: Sequence[Placement], first_node: str = "") -> list[Worker]:
    """Assigns ranks by node (`first_node` first, then by address), and within a node by GPU, 10
    after 9."""
    nodes = sorted({(s.node != first_node, len(s.ip), s.ip, s.node) for s in seats})
    workers: list[Worker] = []
    for node_rank, (*_, node) in enumerate(nodes):
        here = [seat for seat in seats if seat.node == node]
        here.sort(key=lambda s: ([(len(gpu), gpu) for gpu in s.gpus], s.number))
        gpus = [gpu for seat in here for gpu in seat.gpus]
        workers += [
            Worker(seat, len(workers) + i, i, node_rank, len(here), gpus)
            for i, seat in enumerate(here)
        ]
    return workers


def base_environment(
    driver: Mapping[str, str],
    node: Mapping[str, str],
    is_local: bool,
    moved: Callable[[str], str] = str,
) -> dict[str, str]:
    """A script's environment before the launcher's own variables are added.

    On the driver's machine it is the driver's environment, as under torchrun, with the network
    settings of the node's, i.e. those of `ray start`. On another machine it is the node's, plus
    those of the driver's variables that are not set there and not specific to its machine
    (WANDB_API_KEY, PYTHONHASHSEED ...); PYTHONPATH combines both.

    Args:
        moved: maps an entry of the driver's PYTHONPATH to its path there.
    """
    own = {k: v for k, v in driver.items() if not k.startswith("RAY_")}
    there = {k: v for k, v in node.items() if not _OF_RAY.fullmatch(k)}
    if is_local:
        own = {k: v for k, v in there.items() if _OF_THE_NETWORK.fullmatch(k)} | own
    else:
        own = {k: v for k, v in own.items() if not _OF_THE_MACHINE.fullmatch(k)} | there
        paths = [moved(each) for each in driver.get("PYTHONPATH", "").split(":") if each]
        paths += [each for each in there.get("PYTHONPATH", "").split(":") if each]
        own |= {"PYTHONPATH": ":".join(dict.fromkeys(paths))} if paths else {}
        own |= {k: v for k, v in driver.items() if k == "OMP_NUM_THREADS"}
    return {k: v for k, v in own.items() if not _OF_A_LAUNCHER.fullmatch(k)}


def rank_variables(
    flags: RunFlags, group: RankedGroup, worker: Worker, base: Mapping[str, str]
) -> dict[str, str]:
    """All variables of one worker: those of torchrun (torch.distributed.elastic's local agent), or
    those of srun and the surrounding sbatch script."""
    env = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "1", **base}
    if "OMP_NUM_THREADS" not in env:
        if flags.cpus_per_worker is not None and flags.cpus_per_worker >= 1:
            env["OMP_NUM_THREADS"] = str(int(flags.cpus_per_worker))
        elif worker.local_world_size > 1:
            env["OMP_NUM_THREADS"] = "1"
    visible = worker.seat.gpus if flags.virtual_local_rank else worker.gpus
    if visible or worker.seat.node_has_gpus:  # "": those of others; --use-gpu reserves some
        env["CUDA_VISIBLE_DEVICES"] = ",".join(visible)
    env |= {
        "WORLD_SIZE": str(len(group.workers)),
        "MASTER_ADDR": group.master_addr,
        "MASTER_PORT": str(group.master_port),
    }
    return env | (
        _slurm(group, worker, env) if flags.env == "slurm" else _torchrun(flags, group, worker)
    )


def _torchrun(flags: RunFlags, group: RankedGroup, worker: Worker) -> dict[str, str]:
    return {
        "RANK": str(worker.rank),
        "LOCAL_RANK": "0" if flags.virtual_local_rank else str(worker.local_rank),
        "GROUP_RANK": str(worker.node_rank),
        "ROLE_RANK": str(worker.rank),
        "ROLE_NAME": flags.role,
        "LOCAL_WORLD_SIZE": str(worker.local_world_size),
        "GROUP_WORLD_SIZE": str(len(group.nodes)),
        "ROLE_WORLD_SIZE": str(len(group.workers)),
        "TORCHELASTIC_RESTART_COUNT": str(group.attempt),
        "TORCHELASTIC_MAX_RESTARTS": str(flags.max_restarts),
        "TORCHELASTIC_RUN_ID": flags.rdzv_id or group.run_id,
        # torchrun's agent serves the store; here rank 0 itself does.
        "TORCHELASTIC_USE_AGENT_STORE": "False",
        "TORCHELASTIC_SIGNALS_TO_HANDLE": flags.signals_to_handle,
        "TORCHELASTIC_ERROR_FILE": "error.json",  # the agent adds the folder
    }


def _slurm(group: RankedGroup, worker: Worker, env: Mapping[str, str]) -> dict[str, str]:
    """The variables set by srun and slurmd, for the job that `env` describes, if any.

    Nodes are named by their addresses, which need no resolving, and are listed with commas, which
    is a valid hostlist that a simple ``split(",")`` can parse, too.
    """
    counts = [first.local_world_size for first in group.nodes]
    here = [w.rank for w in group.workers if w.node_rank == worker.node_rank]
    job = env.get("SLURM_JOB_ID") or env.get("SLURM_JOBID") or str(int(group.run_id[:7], 16))
    values = {
        "JOB_ID JOBID": job,
        "JOB_NAME": env.get("SLURM_JOB_NAME", "raytrain_ddp"),
        "PROCID": str(worker.rank),
        "LOCALID": str(worker.local_rank),
        "NODEID": str(worker.node_rank),
        "NTASKS NPROCS STEP_NUM_TASKS": str(len(group.workers)),
        "NNODES JOB_NUM_NODES STEP_NUM_NODES": str(len(counts)),
        "STEP_ID STEPID": "0",
        "NODELIST JOB_NODELIST STEP_NODELIST": ",".join(w.seat.ip for w in group.nodes),
        "NTASKS_PER_NODE": str(max(counts)),
        "TASKS_PER_NODE STEP_TASKS_PER_NODE": _counted(counts),
        "GTIDS": ",".join(map(str, here)),
        "LAUNCH_NODE_IPADDR": group.master_addr,
        "RESTART_COUNT": str(group.attempt),
        **({"GPUS_ON_NODE": str(len(worker.gpus))} if worker.gpus else {}),
    }
    named = {f"SLURM_{name}": value for names, value in values.items() for name in names.split()}
    return {**named, "SLURMD_NODENAME": worker.seat.ip}


def _counted(counts: Sequence[int]) -> str:
    """``2(x3),1`` for [2, 2, 2, 1], as Slurm writes it."""
    runs = [(count, len([*same])) for count, same in groupby(counts)]
    return ",".join(f"{count}(x{times})" if times > 1 else f"{count}" for count, times in runs)
