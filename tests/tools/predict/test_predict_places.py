"""`predict` on a cluster, without Ray: placement of workers, and a node that sees other files."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest

from raytrain_ddp.checkpoint.run_folder import find_checkpoint
from raytrain_ddp.errors import DataError, PreflightError
from raytrain_ddp.tools.predict.__main__ import PredictArgs
from raytrain_ddp.tools.predict.cluster_workers import PartActor, Places, places_for
from raytrain_ddp.tools.predict.part_maker import PartMaker

GPU_NODE, CPU_NODE, HEAD = {"GPU": 4.0, "CPU": 32.0}, {"CPU": 16.0}, {"memory": 1e9}


@pytest.mark.parametrize(
    ("nodes", "workers", "device", "wanted"),
    [
        ([GPU_NODE, GPU_NODE, HEAD], None, "auto", Places(8, "cuda", 8.0, 1.0)),
        ([GPU_NODE, CPU_NODE], 3, "cuda", Places(3, "cuda", 8.0, 1.0)),
        ([{"GPU": 4.0, "CPU": 2.0}], None, "auto", Places(4, "cuda", 0.5, 1.0)),
        ([GPU_NODE, HEAD], None, "cpu", Places(1, "cpu", 32.0, 0.0)),
        ([CPU_NODE, {"CPU": 8.0}], None, "auto", Places(2, "cpu", 8.0, 0.0)),
        ([CPU_NODE, CPU_NODE], 5, "auto", Places(5, "cpu", 5.0, 0.0)),
        ([{"CPU": 1.0}] * 3, 3, "auto", Places(3, "cpu", 1.0, 0.0)),
        ([CPU_NODE], None, "cuda", "--device cuda"),
        ([GPU_NODE], 5, "auto", "--workers 5: .* 4 GPUs"),
        ([HEAD], None, "auto", "neither a GPU nor a CPU"),
    ],
)
def test_one_worker_is_placed_per_gpu_or_per_node_without_gpus(
    nodes: Sequence[dict[str, float]], workers: int | None, device: str, wanted: Places | str
):
    if isinstance(wanted, str):
        with pytest.raises(PreflightError, match=wanted):
            places_for(nodes, workers, device)
    else:
        assert places_for(nodes, workers, device) == wanted


def test_a_node_that_sees_other_files_is_named(photos: tuple[str, Path], tmp_path: Path):
    import torch

    folder, out = tmp_path / "in", str(tmp_path / "p.csv")
    shutil.copytree(photos[1], folder)
    job = PredictArgs(str(find_checkpoint(photos[0], None)), (str(folder),), out)
    threads = torch.get_num_threads()
    plan = PartMaker(job, torch.device("cpu"), threads).plan()
    given = job, plan, Places(1, "cpu", float(threads), 0.0), str(tmp_path), ()
    actor = PartActor(*given)
    actor.open()
    assert [len(table) for table in actor.made([0])] == [18]
    next(folder.rglob("*.jpg")).unlink()
    with pytest.raises(DataError, match=r"node \S+ sees other files .*rows 17, was 18"):
        PartActor(*given).open()
    shutil.rmtree(folder)
    with pytest.raises(DataError, match=r"node \S+: .*no such file.* use a shared folder or URIs"):
        PartActor(*given).open()
