"""`exact = true`: the number of workers leaves no trace, not even in the last bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from processes import Group, WorkerError
from test_training import log_of
from tiny import EPOCHS, TOTAL_STEPS, bits, plain, run_tiny, tiny_config

from raytrain_ddp.config import TrainConfig
from raytrain_ddp.data.plan import deal
from raytrain_ddp.errors import ConfigError
from raytrain_ddp.sections import ComputeConfig, DdpConfig, OptimConfig
from raytrain_ddp.training.tree import TreeSum, nodes, subtrees
from raytrain_ddp.training.world import World

VARIANTS: dict[str, dict[str, Any]] = {
    "sgd": {},
    "adamw-clip-bf16": {
        "optim": OptimConfig(name="adamw", lr=0.01, clip_norm=0.5),
        "compute": ComputeConfig(precision="bf16"),
    },
    "fp16": {"compute": ComputeConfig(precision="fp16")},
    "seven-slots": {"batch_size": 28, "micro_batch": 4},
    "larger-than-the-data": {"batch_size": 320, "micro_batch": 40},
}
CPU = torch.device("cpu")


# ------------------------------------------------------------------ the tree


@pytest.mark.parametrize("leaves", [1, 2, 3, 4, 5, 7, 8, 13, 64])
def test_the_tree_has_each_leaf_once_and_two_branches_at_each_node(leaves: int):
    found = nodes(leaves)
    assert len(found) == 2 * leaves - 1
    assert {(leaf, leaf + 1) for leaf in range(leaves)} <= found
    for start, stop in found:
        if stop - start > 1:
            halves = [m for m in range(start + 1, stop) if {(start, m), (m, stop)} <= found]
            assert len(halves) == 1
            middle = halves[0]
            assert (middle - start).bit_count() == 1
            assert middle - start >= stop - middle


@pytest.mark.parametrize(("slots", "workers"), [(8, 2), (8, 4), (8, 8), (64, 16), (6, 1)])
def test_an_even_deal_gives_each_worker_one_subtree(slots: int, workers: int):
    for rank in range(workers):
        mine = deal(slots, workers, rank)
        assert subtrees(slots, mine) == [(mine.start, mine.stop)]


@pytest.mark.parametrize("slots", [5, 8, 12, 31])
def test_any_deal_gives_subtrees_that_are_few_and_cover_it(slots: int):
    for workers in range(1, slots + 1):
        for rank in range(workers):
            mine = deal(slots, workers, rank)
            found = subtrees(slots, mine)
            assert [leaf for span in found for leaf in range(*span)] == list(mine)
            assert len(found) <= 2 * len(mine).bit_length()


def in_any_deal(rank: int, size: int, slots: int, length: int, missing: list[int]) -> list[float]:
    """Sums of vectors of which some slots have none; twice, as buffers are used again."""
    world = World(rank, size, rank, CPU, 1)
    total = TreeSum(slots, length, torch.float32, world)
    for _ in range(2):
        total.begin()
        for slot in deal(slots, size, rank):
            if slot not in missing:
                vector = total.take()
                vector.copy_(torch.randn(length, generator=torch.Generator().manual_seed(slot)))
                total.add(slot, vector)
        found = total.finish()
    return found.tolist()


@pytest.mark.parametrize(
    ("slots", "missing"), [(4, []), (7, []), (8, [0, 5]), (8, [6, 7]), (9, [*range(9)])]
)
def test_sums_have_the_same_bits_on_any_number_of_workers(
    slots: int, missing: list[int], workers: Group
):
    length = 1001
    (alone,) = workers(1, in_any_deal, slots, length, missing)
    for size in (2, 3, 4):
        assert workers(size, in_any_deal, slots, length, missing) == [alone] * size
    true = torch.zeros(length, dtype=torch.float64)
    for slot in {*range(slots)} - {*missing}:
        true += torch.randn(length, generator=torch.Generator().manual_seed(slot))
    assert torch.allclose(torch.tensor(alone).double(), true, atol=1e-5)


# ------------------------------------------------------------------ whole runs


class Alone:
    """Undisturbed runs on one worker; each variant is run once."""

    def __init__(self, workers: Group, folder: Path) -> None:
        self._workers, self._folder = workers, folder
        self._done: dict[str, TrainConfig] = {}

    def __call__(self, variant: str) -> TrainConfig:
        if variant not in self._done:
            config = tiny_config(self._folder, variant, exact=True, **VARIANTS[variant])
            self._workers(1, run_tiny, plain(config))
            self._done[variant] = config
        return self._done[variant]


@pytest.fixture(scope="module")
def alone(workers: Group, tmp_path_factory: pytest.TempPathFactory) -> Alone:
    return Alone(workers, tmp_path_factory.mktemp("alone"))


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("size", [2, 3, 4])
def test_the_number_of_workers_leaves_no_trace(
    variant: str, size: int, alone: Alone, workers: Group, tmp_path: Path
):
    config = tiny_config(tmp_path, "other", exact=True, **VARIANTS[variant])
    workers(size, run_tiny, plain(config))
    assert bits(config) == bits(alone(variant))
    assert log_of(config) == log_of(alone(variant)), "losses and metrics, too"


@pytest.mark.parametrize("variant", ["sgd", "fp16"])
def test_kills_and_resizes_leave_no_trace(
    variant: str, alone: Alone, workers: Group, tmp_path: Path
):
    config = tiny_config(tmp_path, "disturbed", exact=True, **VARIANTS[variant])
    workers(4, run_tiny, plain(config), None, 6)
    with pytest.raises(WorkerError):
        workers(2, run_tiny, plain(config), None, 0, 14)
    workers(3, run_tiny, plain(config), None, 23)
    workers(1, run_tiny, plain(config))
    assert bits(config) == bits(alone(variant))
    assert log_of(config) == log_of(alone(variant))


def test_without_it_the_last_bits_tell_the_number_of_workers(workers: Group, tmp_path: Path):
    """Else the tests above would show nothing."""
    found = []
    for size in (1, 3):
        config = tiny_config(tmp_path, f"on-{size}")
        workers(size, run_tiny, plain(config))
        found.append(bits(config))
    assert found[0] != found[1]


def test_it_learns_what_the_default_learns(alone: Alone, workers: Group, tmp_path: Path):
    config = tiny_config(tmp_path, "default")
    workers(3, run_tiny, plain(config))
    exact, default = (
        [r["loss"] for r in log_of(c) if r["kind"] == "train"] for c in (alone("sgd"), config)
    )
    assert len(exact) == TOTAL_STEPS == EPOCHS * 10
    assert exact[:5] == pytest.approx(default[:5], rel=1e-4)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"ddp": DdpConfig(compression="bf16")}, "ddp.compression"),
        ({"ddp": DdpConfig(sync_batchnorm=True)}, "ddp.sync_batchnorm"),
        ({"compute": ComputeConfig(deterministic=False)}, "compute.deterministic"),
    ],
)
def test_what_cannot_be_exact_is_refused(changes: dict[str, Any], named: str):
    with pytest.raises(ConfigError, match=named):
        TrainConfig(exact=True, **changes)
