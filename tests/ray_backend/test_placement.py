"""Number and resources of workers: pure functions of a config and the nodes' resources."""

from __future__ import annotations

import os
from typing import Any

import pytest

from raytrain_ddp.config.process import cpus_of_process, usable_cpus
from raytrain_ddp.config.sections import ScalingConfig
from raytrain_ddp.config.train_config import TrainConfig
from raytrain_ddp.ray_backend.placement import Layout, choose_layout, workers_that_fit

DGX = {"CPU": 224.0, "GPU": 8.0}


def config(batch: int = 1024, micro: Any = 32, exact: bool = False, **scaling: object):
    section = ScalingConfig(**scaling)  # type: ignore[arg-type]
    return TrainConfig(batch_size=batch, micro_batch=micro, exact=exact, scaling=section)


def layout_on(*nodes: dict[str, float], **scaling: object) -> Layout:
    have = {name: sum(node.get(name, 0) for node in nodes) for name in ("CPU", "GPU")}
    return choose_layout(config(**scaling), have, nodes)


@pytest.mark.parametrize(
    ("nodes", "scaling", "cpus", "workers"),
    [
        ([DGX], {}, 28, 8),
        ([DGX, {"CPU": 30, "GPU": 4}], {}, 7, 12),  # the node with the fewest decides
        ([DGX, {"CPU": 64}], {}, 28, 8),  # a node without GPUs has no worker
        ([{"CPU": 26, "GPU": 4}], {}, 6, 4),
        ([DGX], {"batch": 64, "micro": 16}, 28, 4),  # as many slots
        ([DGX], {"num_workers": 4}, 28, 4),  # another run may take the other half
        ([DGX], {"gpus_per_worker": 0.5}, 14, 16),
        ([{"CPU": 3, "GPU": 4}], {}, 0.75, 4),  # a GPU with less than one CPU is used, too
        ([DGX], {"cpus_per_worker": 3.0}, 3, 8),
        ([{"CPU": 8}], {"num_workers": 4, "use_gpu": True}, 1, 4),  # no node with a GPU yet
        ([{"CPU": 64}], {}, 1, 2),  # the threads of a CPU worker affect its sums
    ],
)
def test_a_worker_gets_its_gpus_share_of_the_nodes_cpus(
    nodes: list[dict[str, float]], scaling: dict[str, object], cpus: float, workers: int
):
    layout = layout_on(*nodes, **scaling)
    assert (layout.per_worker["CPU"], layout.most) == (cpus, workers)
    if any("GPU" in node for node in nodes):
        assert workers_that_fit(layout, nodes) >= workers


@pytest.mark.parametrize(
    ("mask", "environ", "usable", "of_process"),
    [
        (64, {}, 64, 64),
        (64, {"LOCAL_WORLD_SIZE": "8", "OMP_NUM_THREADS": "1"}, 64, 8),  # torchrun
        (4, {"LOCAL_WORLD_SIZE": "8"}, 4, 1),
        # A task of Slurm's that is not bound to its CPUs; torchrun in a task.
        (64, {"SLURM_STEP_ID": "0", "SLURM_CPUS_PER_TASK": "16"}, 16, 16),
        (64, {"SLURM_STEP_ID": "0", "SLURM_CPUS_PER_TASK": "16", "LOCAL_WORLD_SIZE": "4"}, 16, 4),
        # A job's script may use all the CPUs of the job on the node, whatever one task has.
        (64, {"SLURM_CPUS_ON_NODE": "32", "SLURM_CPUS_PER_TASK": "8"}, 32, 32),
        (64, {"SLURM_STEP_ID": "0"}, 64, 64),
    ],
)
def test_cpus_are_counted_by_affinity_mask_and_slurm_variables(
    mask: int,
    environ: dict[str, str],
    usable: int,
    of_process: int,
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(mask)))
    assert usable_cpus(environ) == usable
    assert cpus_of_process(environ) == of_process
