"""Number and resources of workers: pure functions of a config and the nodes' resources."""

from __future__ import annotations

import os
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch

from raytrain_ddp.config.recipe import changed_fields, to_dict
from raytrain_ddp.config.scaling_section import ScalingConfig, cpus_of_process, usable_cpus
from raytrain_ddp.config.sections import DdpConfig
from raytrain_ddp.config.train_config import TrainConfig
from raytrain_ddp.driver.machine_types import machines
from raytrain_ddp.errors import ConfigError
from raytrain_ddp.ray_backend import cluster
from raytrain_ddp.ray_backend.placement import Layout, choose_layout, workers_that_fit
from raytrain_ddp.training.recording import local_session
from raytrain_ddp.training.recording.local_session import idle_gpus_note, join_world
from raytrain_ddp.training.runtime.world import World

DGX = {"CPU": 224.0, "GPU": 8.0}


def config(batch: int = 1024, micro: Any = 32, exact: bool = False, **scaling: object):
    section = ScalingConfig(**scaling)  # type: ignore[arg-type]
    return TrainConfig(batch_size=batch, micro_batch=micro, exact=exact, scaling=section)


def layout_on(*nodes: dict[str, float], **scaling: object) -> Layout:
    have = {name: sum(node.get(name, 0) for node in nodes) for name in ("CPU", "GPU")}
    return choose_layout(config(**scaling), have, nodes)


# ------------------------------------------------------------------ CPUs of a worker


@pytest.mark.parametrize(
    ("nodes", "scaling", "cpus", "workers"),
    [
        ([DGX], {}, 28, 8),
        ([DGX, {"CPU": 30, "GPU": 4}], {}, 7, 12),  # the node with the fewest decides
        ([DGX, {"CPU": 64}], {}, 28, 8),  # a node without GPUs has no worker
        ([{"CPU": 26, "GPU": 4}], {}, 6, 4),
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
    ("micro", "scaling", "why"),
    [
        (128, {}, ""),  # 8 slots for 8 GPUs
        ("auto", {}, ""),  # chosen for them
        ("auto", {"num_workers": 4}, ""),
        ("auto", {"num_workers": 3}, "3 workers, and micro_batch = auto of batch_size = 1024"),
        (1024, {"num_workers": 1, "use_gpu": False}, ""),
        (64, {}, "8 workers, and micro_batch = 64 of"),
        (128, {"num_workers": 4}, "4 workers, and micro_batch = 128 of"),
        (128, {"num_workers": "4:8"}, "4 to 8 workers"),
        (128, {"num_workers": "1:8"}, "1 to 8 workers"),
        ("auto", {"num_workers": "4:8"}, "4 to 8 workers"),
        (512, {"num_workers": 2, "use_gpu": False}, "2 workers on CPUs"),
    ],
)
def test_workers_that_cannot_synchronize_batch_norm_are_refused(
    micro: Any, scaling: dict[str, object], why: str
):
    """At once if the config gives their number."""
    with pytest.raises(ConfigError, match=why) if why else nullcontext():
        synced = replace(config(1024, micro, **scaling), ddp=DdpConfig(sync_batchnorm=True))
        layout = choose_layout(synced, DGX)
        synced.require_synced(layout.least, layout.most, layout.use_gpu)


@pytest.mark.parametrize("placement", ["STRICT_PACK", "STRICT_SPREAD"])
def test_a_strict_placement_needs_a_fixed_number_of_workers(placement: str):
    with pytest.raises(ConfigError, match=rf"scaling\.placement = '{placement}': needs a fixed"):
        layout_on(DGX, num_workers="2:4", placement=placement)
    assert layout_on(DGX, num_workers=4, placement=placement).most == 4
    assert layout_on(DGX, placement=placement).most == 8


def test_nodes_that_join_while_the_run_waits_determine_the_cpus(monkeypatch: pytest.MonkeyPatch):
    asked: list[list[dict[str, float]]] = []
    nodes: list[dict[str, float]] = [{"CPU": 4.0}]

    def request(bundles: list[dict[str, float]]) -> None:
        asked.append(bundles)
        nodes[:] = [{"CPU": 4.0}, DGX]

    monkeypatch.setattr("ray.autoscaler.sdk.request_resources", request)
    have = lambda: {n: sum(node.get(n, 0) for node in nodes) for n in ("CPU", "GPU")}  # noqa: E731
    wanted = config(num_workers=8, use_gpu=True, wait_s=10.0)
    layout = cluster.wait_for_room(wanted, have, lambda: nodes, lambda text: None)
    assert dict(layout.per_worker) == {"CPU": 28, "GPU": 1}
    assert asked == [[{"CPU": 1.0, "GPU": 1.0}] * 8, []]


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


@pytest.mark.parametrize(
    ("gpus", "cpus", "exact", "expected"),
    [
        *((1, "auto", False, 6), (1, "auto", True, 6), (1, 3.0, False, 3), (1, 0.5, True, 1)),
        *((0, "auto", False, 2), (0, "auto", True, 1), (0, 3.0, False, 3), (0, 3.0, True, 3)),
    ],
)
def test_a_process_without_ray_uses_the_given_number_of_threads(
    gpus: int,
    cpus: float,
    exact: bool,
    expected: int,
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(local_session, "cpus_of_process", lambda: 6)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    monkeypatch.delenv("RANK", raising=False)
    world = join_world(ScalingConfig(cpus_per_worker=cpus), exact)
    assert world.threads == expected


@pytest.mark.parametrize("value", [0.0, -1.0, "many"])
def test_invalid_cpus_per_worker_are_refused(value: float):
    rule = r"scaling\.cpus_per_worker = .*(0\.0001 or more, or auto|a number or auto)"
    with pytest.raises(ConfigError, match=rule):
        ScalingConfig(cpus_per_worker=value)


def test_auto_resumes_an_exact_run_begun_with_one_cpu_per_worker():
    begun = to_dict(config(exact=True, cpus_per_worker=1.0))
    assert changed_fields(begun, config(exact=True)) == []
    assert (
        changed_fields(to_dict(config(exact=True)), config(exact=True, cpus_per_worker=1.0)) == []
    )
    assert changed_fields(begun, config(exact=True, cpus_per_worker=2.0)) != []


@pytest.mark.parametrize(
    ("scaling", "cpus"),
    [
        ({"use_gpu": True}, 32),
        ({"use_gpu": True, "cpus_per_worker": 3.0}, 12),
        ({"use_gpu": True, "gpus_per_worker": 0.5}, 16),  # two workers on each GPU
        ({"use_gpu": False}, 4),
    ],
)
def test_a_cluster_file_asks_for_eight_cpus_for_each_gpu(scaling: dict[str, object], cpus: int):
    assert machines(config(num_workers=4, **scaling), most_per_node=4).cpus == cpus


# ------------------------------------------------------------------ GPUs that stay idle


@pytest.mark.parametrize(
    ("batch", "micro", "scaling", "workers", "reported"),
    [
        (64, 16, {}, 4, ("4 of 8 GPUs", "--micro-batch 8 (", "--batch-size 128 (")),
        (60, 20, {}, 3, ("3 of 8 GPUs", "--micro-batch 6 (", "--batch-size 160 (")),
        (7, 7, {}, 1, ("1 of 8 GPUs", "For all of them: --batch-size 56 (")),
        (64, 8, {}, 8, ()),
        (64, 16, {"num_workers": 4}, 4, ()),  # as asked
        (64, 16, {"use_gpu": False}, 2, ()),
    ],
)
def test_the_reason_for_idle_gpus_is_reported(
    batch: int, micro: int, scaling: dict[str, object], workers: int, reported: tuple[str, ...]
):
    layout = layout_on(DGX, batch=batch, micro=micro, **scaling)
    assert layout.most == workers
    assert bool(layout.note) == bool(reported)
    assert all(text in layout.note for text in reported)
    for flag, field in (("--micro-batch ", "micro_batch"), ("--batch-size ", "batch_size")):
        if flag in layout.note:  # its proposal is accepted, and uses all of them
            number = int(layout.note.partition(flag)[2].partition(" ")[0])
            proposed = replace(config(batch, micro, **scaling), **{field: number})
            again = choose_layout(proposed, DGX)
            assert (again.most, again.note) == (8, "")


def test_a_single_process_reports_that_it_uses_one_of_several_gpus(monkeypatch: pytest.MonkeyPatch):
    alone = World(0, 1, 0, torch.device("cuda", 0), 1)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    assert "1 of 8 GPUs is used" in idle_gpus_note(alone)
    assert idle_gpus_note(replace(alone, size=8)) == ""
    assert idle_gpus_note(replace(alone, device=torch.device("cpu"))) == ""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert idle_gpus_note(alone) == ""
