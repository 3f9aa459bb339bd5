"""A real Slurm on the hosts of a lab: one controller and two nodes, with Debian's packages."""

from __future__ import annotations

import os
import re
import secrets
import shutil
import subprocess
import sys
import time
from collections.abc import Collection
from pathlib import Path

from lab import ROOT, Lab, wait_until

CONTROLLER, NODES = "ctl", ("n1", "n2")
DAEMONS = ("munged", "slurmctld", "slurmd")
_ADMIN_PATH = "/usr/local/sbin:/usr/sbin:/sbin:/usr/local/bin:/usr/bin:/bin"
_START_S = 30.0

# Nodes have the CPUs, memory and GPUs that two jobs of slurm.sbatch ask for at once; Slurm does not
# look for them.
_CONFIG = """\
ClusterName=lab
SlurmctldHost={controller}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={munge}/socket
StateSaveLocation=/tmp/slurmctld
SlurmdSpoolDir=/tmp/slurmd
SlurmctldPidFile=/tmp/slurmctld.pid
SlurmdPidFile=/tmp/slurmd.pid
SlurmctldLogFile=/var/log/slurmctld.log
SlurmdLogFile=/var/log/slurmd.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SwitchType=switch/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU_Memory
SlurmdParameters=config_overrides
GresTypes=gpu
SchedulerParameters=bf_interval=5,sched_interval=5,batch_sched_delay=1
ReturnToService=2
SlurmdTimeout=15
KillWait=10
NodeName={nodes} CPUs=32 RealMemory=160000 Gres=gpu:8 State=UNKNOWN
PartitionName=main Nodes={nodes} Default=YES MaxTime=INFINITE State=UP
"""


def lacking_slurm() -> str:
    """What this machine lacks for a Slurm; "" if nothing."""
    absent = [name for name in DAEMONS if shutil.which(name, path=_ADMIN_PATH) is None]
    return f"{', '.join(absent)}: apt-get install slurm-wlm munge" if absent else ""


class SlurmCluster:
    """A running cluster. Jobs are submitted on the controller, in `folder`, which is inside
    `shared`; all hosts see `shared`."""

    def __init__(self, folder: Path, shared: Path) -> None:
        self.folder = folder
        self._munge = Path(f"/run/rtslurm-{os.getpid()}")  # a short path: it has a socket
        self._munged: subprocess.Popen[bytes] | None = None
        self.lab = Lab([shared, ROOT], (CONTROLLER, *NODES))
        try:
            self._start_munge()
            config = {"controller": CONTROLLER, "munge": self._munge, "nodes": ",".join(NODES)}
            (folder / "slurm.conf").write_text(_CONFIG.format(**config))
            for number in range(8):  # no devices
                (folder / f"gpu{number}").touch()
            (folder / "gres.conf").write_text(f"Name=gpu File={folder}/gpu[0-7]\n")
            self.lab.run(
                CONTROLLER, f"mkdir -p /tmp/slurmctld; slurmctld -f {folder}/slurm.conf -c"
            )
            for node in NODES:
                self.start_node(node)
            wait_until(self.is_ready, _START_S, self)
        except BaseException:
            self.down()
            raise

    def _start_munge(self) -> None:
        """One munge for all hosts, which share its socket."""
        self._munge.mkdir(mode=0o755)
        key = self._munge / "key"
        key.touch(0o600)
        key.write_bytes(secrets.token_bytes(128))
        files = [f"--{name}-file={self._munge}/{name}" for name in ("key", "pid", "log", "seed")]
        command = ["munged", "--foreground", "--force", f"--socket={self._munge}/socket", *files]
        path = {**os.environ, "PATH": _ADMIN_PATH}
        nothing = subprocess.DEVNULL
        self._munged = subprocess.Popen(command, env=path, stdin=nothing, stderr=nothing)
        wait_until((self._munge / "socket").exists, _START_S, "munged's socket")

    def start_node(self, node: str) -> None:
        self.lab.run(node, f"slurmd -f {self.folder}/slurm.conf -N {node}")

    def __str__(self) -> str:
        """Where its hosts are, and the ends of the logs of its daemons."""
        logs = {CONTROLLER: "slurmctld", **dict.fromkeys(NODES, "slurmd")}
        ends = [self.lab.run(h, f"tail -n 8 /var/log/{log}.log") for h, log in logs.items()]
        return "\n".join([self.sh("sinfo --Node --long"), *ends])

    def is_ready(self) -> bool:
        """Whether both nodes are up and have no job."""
        return {*self.sh("sinfo --Node --noheader --format=%T").split()} == {"idle"}

    def down(self) -> None:
        """Ends all of it; nothing of it stays on this machine."""
        self.lab.down()
        if self._munged is not None:
            self._munged.terminate()
            self._munged.wait(10)
        shutil.rmtree(self._munge, ignore_errors=True)

    def sh(self, command: str, timeout_s: float = 60) -> str:
        """Runs a command on the controller, with the project's environment active."""
        active = f"export PATH={sys.prefix}/bin:$PATH SLURM_CONF={self.folder}/slurm.conf"
        return self.lab.run(CONTROLLER, f"{active}; cd {self.folder}; {command}", timeout_s)

    def submit(self, words: str, **variables: object) -> Job:
        """`sbatch WORDS`, with these environment variables."""
        given = " ".join(f"{name}={value}" for name, value in variables.items())
        output = self.sh(f"{given} sbatch {words}")
        (number,) = re.findall(r"Submitted batch job (\d+)", output)
        return Job(self, int(number))

    def left_on_nodes(self) -> list[str]:
        """Files and processes of jobs left on any node or in the shared folder."""
        found = [path.name for path in self.folder.glob(".raytrain-*")]
        for node in NODES:
            names = self.lab.run(node, "ls -d /tmp/ray* 2> /dev/null; true").split()
            found += [f"{node}: {name}" for name in names]
            lines = [line.split(maxsplit=1)[1] for line in self.lab.processes(node)]
            found += [f"{node}: {line[:100]}" for line in lines if "slurmd -f" not in line]
        return found


class LeftOn:
    """Leftovers, for messages."""

    def __init__(self, cluster: SlurmCluster) -> None:
        self._cluster = cluster

    def __str__(self) -> str:
        return "\n".join(self._cluster.left_on_nodes())


class Job:
    """A job by its number."""

    def __init__(self, cluster: SlurmCluster, number: int) -> None:
        self.cluster, self.number = cluster, number

    def facts(self) -> dict[str, str]:
        """The fields of `scontrol show job`."""
        text = self.cluster.sh(f"scontrol --oneliner show job {self.number}")
        return dict(word.split("=", 1) for word in text.split() if "=" in word)

    @property
    def state(self) -> str:
        return self.facts()["JobState"]

    @property
    def output(self) -> str:
        path = self.cluster.folder / f"slurm-{self.number}.out"
        return path.read_text(errors="replace") if path.exists() else ""

    def wait(self, states: Collection[str], timeout_s: float) -> str:
        """Waits for one of these states; returns it."""
        deadline = time.time() + timeout_s
        while (state := self.state) not in states:
            over = state in {"FAILED", "CANCELLED", "COMPLETED", "TIMEOUT", "NODE_FAIL"}
            assert not over, f"{state}: {self.output[-4000:]}"
            assert time.time() < deadline, f"{state} after {timeout_s:g} s: {self.output[-4000:]}"
            time.sleep(0.5)
        return state

    def update(self, change: str) -> None:
        self.cluster.sh(f"scontrol update JobId={self.number} {change}")

    def warn(self) -> None:
        """Sets a time limit that is reached in one to two minutes; Slurm checks every 30 s."""
        hours, minutes, _ = self.facts()["RunTime"].split(":")
        self.update(f"TimeLimit={60 * int(hours) + int(minutes) + 2}")

    def begin_again(self, timeout_s: float = 60) -> None:
        """Starts a requeued job after some seconds, instead of Slurm's hold of two minutes.

        It does wait, because a slurmd does not launch a job that it has just ended.
        """
        time.sleep(3)
        deadline = time.time() + timeout_s
        while self.state != "RUNNING":
            assert time.time() < deadline, f"{self.facts()}: {self.output[-4000:]}\n{self.cluster}"
            self.cluster.sh(f"scontrol update JobId={self.number} StartTime=now || true")
            time.sleep(1)
