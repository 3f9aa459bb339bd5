"""Runs a config in killable processes: without Ray, and on Ray.

Both start the same command repeatedly, as a person or a scheduler would.
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from raytrain_ddp import failpoints
from raytrain_ddp.config.recipe import dumps, to_dict
from raytrain_ddp.config.train_config import TrainConfig
from raytrain_ddp.errors import PreflightError
from raytrain_ddp.ray_backend.auth_token import use_token
from raytrain_ddp.ray_backend.ray_settings import SETTINGS
from raytrain_ddp.tools.chaos.fault_plan import Fault, armed

_POLL_S = 0.02
_ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")


class Zygote:
    """Forks workers with everything imported; see zygote.py."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "raytrain_ddp.tools.chaos.zygote"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**environment, **_ONE_THREAD},
            bufsize=0,
            start_new_session=True,  # Ctrl-C is for this process; they end when their input does
        )
        self.answer()  # wait until it is ready

    def __enter__(self) -> Zygote:
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()

    def order(self, order: Any) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(order).encode() + b"\n")

    def answer(self, wait_s: float | None = None) -> Any:
        """None after a timeout. Raises PreflightError if the process has ended."""
        assert self._process.stdout is not None
        ready, _, _ = select.select([self._process.stdout], [], [], wait_s)
        if not ready:
            return None
        line = self._process.stdout.readline()
        if not line:
            raise PreflightError("the process that forks the workers has ended; see above.")
        return json.loads(line)


class LocalRunner:
    """Workers forked by a zygote, connected by gloo. When one dies, all are restarted.

    Args:
        size: the number of workers of a start, counted from 1.

    Attributes:
        sizes: the number of workers of each start, if known.
    """

    def __init__(
        self,
        zygote: Zygote,
        config: TrainConfig,
        plan: Sequence[Fault],
        fired: Path,
        size: Callable[[int], int],
    ) -> None:
        self._zygote, self._size = zygote, size
        self._folder, self._name = Path(config.storage), config.name
        self.sizes: list[int] = []
        self._order = {
            "config": to_dict(config),
            "failpoints": armed(plan),
            "fired": str(fired),
            "folder": str(self._folder),
        }

    def start(self) -> None:
        """Starts the run, or resumes it."""
        self.sizes.append(self._size(len(self.sizes) + 1))
        rendezvous = str(self._folder / f"rendezvous-{self._name}-{len(self.sizes)}")
        self._zygote.order({**self._order, "size": self.sizes[-1], "rendezvous": rendezvous})

    def ended(self) -> Sequence[int] | None:
        """The exit statuses of its processes once all have ended; waits briefly for that."""
        statuses: Sequence[int] | None = self._zygote.answer(_POLL_S)
        return statuses

    def kill(self) -> None:
        """Sends SIGKILL to what drives the run."""
        self._zygote.order("kill")

    def words(self) -> str:
        """The last thing it printed."""
        return _last_error(self._folder.glob("rank-*.log"))

    def close(self) -> None:
        """Nothing to do: the zygote ends them when its input ends."""


class KillableNodes:
    """A head without CPUs and `count` nodes with `cpus` each; their processes get `environment`."""

    def __init__(self, count: int, cpus: int, environment: Mapping[str, str]) -> None:
        self._before, self._cpus = dict(os.environ), cpus
        self._cluster: Any = None
        os.environ.update(SETTINGS | dict(environment))  # inherited by Ray's processes
        try:
            use_token(embedded=False)
            from ray.cluster_utils import Cluster

            head = {"num_cpus": 0, "include_dashboard": False}
            self._cluster = Cluster(initialize_head=True, head_node_args=head)
            self._nodes = [self._cluster.add_node(num_cpus=cpus) for _ in range(count)]
        except BaseException:
            self.__exit__()
            raise
        self.address = str(self._cluster.address)

    def __enter__(self) -> KillableNodes:
        return self

    def __exit__(self, *_: object) -> None:
        if self._cluster is not None:
            self._cluster.shutdown()
        os.environ.clear()
        os.environ.update(self._before)

    def replace_dead(self) -> None:
        """Adds a new node for each whose raylet has died, and ends the rest of the old one."""
        for place, node in enumerate(self._nodes):
            if node.dead_processes():
                self._cluster.remove_node(node, allow_graceful=False)
                self._nodes[place] = self._cluster.add_node(num_cpus=self._cpus)


class RayRunner:
    """``python -m raytrain_ddp.fit`` in its own process; Ray replaces workers that die.

    Args:
        environment: of that process, and so of an embedded Ray and its workers.
    """

    def __init__(
        self,
        config: TrainConfig,
        environment: Mapping[str, str],
        nodes: KillableNodes | None = None,
    ) -> None:
        self._folder, self._nodes = Path(config.storage), nodes
        self.sizes: list[int] = []
        recipe = self._folder / f"{config.name}.toml"
        recipe.write_text(dumps(config), encoding="utf-8")
        address = ["--address", nodes.address] if nodes is not None else []
        self._command = [sys.executable, "-m", "raytrain_ddp.fit", str(recipe), *address]
        self._environment = environment
        self._output_path = self._folder / f"{config.name}.log"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        with self._output_path.open("ab") as output:
            self._process = subprocess.Popen(
                self._command, env=self._environment, stdout=output, stderr=subprocess.STDOUT
            )

    def ended(self) -> Sequence[int] | None:
        assert self._process is not None
        if self._nodes is not None:
            self._nodes.replace_dead()
        try:
            return [self._process.wait(_POLL_S)]
        except subprocess.TimeoutExpired:
            return None

    def kill(self) -> None:
        assert self._process is not None
        self._process.kill()

    def words(self) -> str:
        return _last_error([self._output_path])

    def close(self) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.kill()
            self._process.wait()


Runner = LocalRunner | RayRunner


def with_failpoints(
    environment: Mapping[str, str], plan: Sequence[Fault], fired: Path
) -> dict[str, str]:
    """The environment of a process with the plan's faults armed."""
    armed_by = {failpoints.VARIABLE: armed(plan), failpoints.FOLDER_VARIABLE: str(fired)}
    return {**environment, **armed_by}


def _last_error(files: Iterable[Path]) -> str:
    """The last line with an error in these files; a rank's own error before those about peers."""
    lines = [line for file in files for line in file.read_text(errors="replace").splitlines()]
    errors = [line for line in lines if "rror" in line]
    own = [line for line in errors if "gloo" not in line and "closed by peer" not in line]
    return (own or errors or lines or ["nothing"])[-1]
