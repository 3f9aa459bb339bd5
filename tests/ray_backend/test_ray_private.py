"""What is used of Ray although it is not public is still there, in the installed version."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest

pytest.importorskip("ray")
import ray

from raytrain_ddp.ray_backend import ray_private

pytestmark = pytest.mark.filterwarnings("ignore")  # of Ray's import


def source(module: str) -> str:
    return (Path(ray.__file__).parent / module).read_text(encoding="utf-8")


def test_ray_still_has_what_is_not_public_and_used() -> None:
    from ray._private import node, ray_constants, services, state
    from ray.train.backend import Backend
    from ray.train.torch import TorchTrainer

    assert callable(state.state.get_draining_nodes)
    assert Backend.has_replica_groups is False
    for replaces in (True, False):
        assert ray_private.torch_config(replaces).backend_cls.has_replica_groups is replaces
    created = inspect.getsource(TorchTrainer._create_default_callbacks)
    assert "self._create_default_callbacks()" in source("train/v2/api/data_parallel_trainer.py")
    assert all(name in created for name in ("DatasetsCallback", "PlacementGroupCleanerCallback"))
    assert "self.health_check_failure" in source("train/v2/_internal/exceptions.py")
    assert ray_constants.SETUP_WORKER_FILENAME
    assert "dashboard_agent_listen_port" in inspect.signature(services.start_raylet).parameters
    assert inspect.signature(services.start_api_server).return_annotation
    assert callable(node.Node.start_monitor)
    assert callable(node.Node.start_log_monitor)
    assert "RAY_RAYLET_PID" in source("_private/ray_constants.py")
