"""A cluster of one-worker nodes on this machine whose nodes can be killed."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from raytrain_ddp.ray_backend.auth_token import use_token
from raytrain_ddp.ray_backend.ray_settings import SETTINGS


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
