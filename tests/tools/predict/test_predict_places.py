"""`predict` on a cluster, without Ray: placement of workers, and a node that sees other files."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest

from raytrain_ddp.checkpoint.run_folder import find_checkpoint
from raytrain_ddp.errors import DataError, PreflightError
from raytrain_ddp.tools.predict.__main__ import PredictArgs
from raytrain_ddp.tools.predict.result_file import PartActor, PartMaker, Places, places_for

GPU_NODE, CPU_NODE, HEAD = {"GPU": 4.0, "CPU": 32.0}, {"CPU": 16.0}, {"memory": 1e9}


@pytest.mark.parametrize(
    ("nodes", "workers", "device", "wanted"),
    [
        ([GPU_NODE, GPU_NODE, HEAD], None, "auto", Places(8, 8, "cuda")),
        ([GPU_NODE, CPU_NODE], 3, "cuda", Places(3, 8, "cuda")),
        ([{"GPU": 4.0, "CPU": 2.0}], None, "auto", Places(4, 0, "cuda")),
        ([GPU_NODE, HEAD], None, "cpu", Places(1, 32, "cpu")),
        ([CPU_NODE, {"CPU": 8.0}], None, "auto", Places(2, 8, "cpu")),
        ([CPU_NODE, CPU_NODE], 5, "auto", Places(5, 5, "cpu")),
        ([{"CPU": 1.0}] * 3, 9, "auto", Places(9, 1, "cpu")),
        ([CPU_NODE], None, "cuda", "--device cuda"),
        ([HEAD], None, "auto", "--device auto"),
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
    given = job, plan, Places(1, threads, "cpu"), str(tmp_path), ()
    actor = PartActor(*given)
    assert [len(table) for _, table in actor.made([0])] == [18]
    next(folder.rglob("*.jpg")).unlink()
    with pytest.raises(DataError, match=r"node \S+ sees different files .*rows 17, was 18"):
        PartActor(*given).made([])
    shutil.rmtree(folder)
    with pytest.raises(DataError, match=r"node \S+: .*no such file.* use a shared folder or URIs"):
        PartActor(*given).made([])
