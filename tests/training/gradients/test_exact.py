"""`exact = true`: the result does not depend on the number of workers, not even in the last bit."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from processes import Group, WorkerError
from tiny import CLASSES, EPOCHS, TinyTask, bits, log_of, plain, run_tiny, tiny_config
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from raytrain_ddp.config.sections import AugmentConfig, ComputeConfig, DataConfig, OptimConfig
from raytrain_ddp.config.train_config import TrainConfig
from raytrain_ddp.data.loading.loader import Slot
from raytrain_ddp.data.order import items_of_rank
from raytrain_ddp.training.gradients.reduction import ExactReduction
from raytrain_ddp.training.gradients.tree_sum import TreeSum, subtrees
from raytrain_ddp.training.monitoring.step_timing import Clock
from raytrain_ddp.training.runtime.world import World

VARIANTS: dict[str, dict[str, Any]] = {
    "sgd": {},
    "adamw-clip-bf16": {
        "optim": OptimConfig(name="adamw", lr=0.01, clip_norm=0.5),
        "compute": ComputeConfig(precision="bf16"),
    },
    "fp16": {"compute": ComputeConfig(precision="fp16")},
    "seven-slots": {"batch_size": 28, "micro_batch": 4},
    "larger-than-the-data": {"batch_size": 320, "micro_batch": 40},
    "spread-repeats": {"augment": AugmentConfig(repeats=3, spread_repeats=True)},
}
CPU = torch.device("cpu")


# ------------------------------------------------------------------ the tree


def test_any_distribution_of_slots_is_covered_by_few_subtrees_per_worker():
    """By one, if it is even and the number of workers a power of two."""
    for slots in (1, 5, 8, 12, 31, 64):
        for workers in range(1, slots + 1):
            for rank in range(workers):
                mine = items_of_rank(slots, workers, rank)
                found = subtrees(slots, mine)
                assert [leaf for span in found for leaf in range(*span)] == list(mine)
                assert len(found) <= 2 * len(mine).bit_length()
                if slots % workers == 0 and workers.bit_count() == slots.bit_count() == 1:
                    assert len(found) == 1


def tree_sums(rank: int, size: int, slots: int, length: int, missing: list[int]) -> list[float]:
    """The sum of the vectors of all slots but `missing`; computed twice, as buffers are reused."""
    world = World(rank, size, rank, CPU, 1)
    total = TreeSum(slots, length, torch.float32, world)
    for _ in range(2):
        total.begin()
        for slot in items_of_rank(slots, size, rank):
            if slot not in missing:
                vector = total.take()
                vector.copy_(torch.randn(length, generator=torch.Generator().manual_seed(slot)))
                total.add(slot, vector)
        total.start()
        total.share()
        found = total.finish()
    return found.tolist()


@pytest.mark.parametrize(
    ("slots", "missing"), [(7, []), (8, [0, 5]), (8, [6, 7]), (9, [*range(9)])]
)
def test_sums_have_the_same_bits_on_any_number_of_workers(
    slots: int, missing: list[int], workers: Group
):
    length = 1001
    (alone,) = workers(1, tree_sums, slots, length, missing)
    for size in (2, 3, 4):
        assert workers(size, tree_sums, slots, length, missing) == [alone] * size
    true = torch.zeros(length, dtype=torch.float64)
    for slot in {*range(slots)} - {*missing}:
        true += torch.randn(length, generator=torch.Generator().manual_seed(slot))
    assert torch.allclose(torch.tensor(alone).double(), true, atol=1e-5)


# ------------------------------------------------------------------ buckets


class Tied(nn.Module):
    """One weight is used twice; only even slots use `spare`."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.tied = nn.Linear(6, 6, bias=False)
        self.spare = nn.Linear(6, 6)
        self.fine = nn.Linear(6, 6, dtype=torch.float64)
        self.last = nn.Linear(6, 1)

    def forward(self, x: Tensor, slot: int) -> Tensor:
        x = self.tied(self.tied(self.first(x).tanh()).tanh())
        x = self.spare(x) if slot % 2 == 0 else x
        loss: Tensor = self.last(self.fine(x.double()).float()).square().mean()
        return loss


def gradients_in_buckets(
    rank: int, size: int, slots: int, empty: list[int], buckets_mib: list[float]
) -> list[tuple[list[bytes], list[str]]]:
    """For each bucket size: (gradients of two steps, events of the second step)."""
    events: list[str] = []
    exchange = dist.all_to_all_single

    def reported(*args: Any, **options: Any) -> Any:
        events.append("exchange")
        return exchange(*args, **options)

    dist.all_to_all_single = reported
    results = []
    for bucket_mib in buckets_mib:
        torch.manual_seed(0)
        model, world = Tied(), World(rank, size, rank, CPU, 1)
        reduction = ExactReduction(model, slots, world, bucket_mib, Clock(CPU))
        model.first.weight.register_hook(lambda _: events.append("backward"))
        found = []
        for step in range(2):
            events.clear()
            reduction.begin()
            dealt = [
                Slot(step, n, 1, int(n not in empty), {}) for n in items_of_rank(slots, size, rank)
            ]
            working = reduction.working(dealt)
            for slot in working:
                seed = torch.Generator().manual_seed(100 * step + slot.index)
                with reduction.passing(slot, slot is working[-1]):
                    model(torch.randn(3, 6, generator=seed), slot.index).backward()
            reduction.finish()
            found += [p.grad.numpy().tobytes() for p in model.parameters() if p.grad is not None]
        results.append((found, list(events)))
    dist.all_to_all_single = exchange
    return results


@pytest.mark.parametrize(("slots", "empty"), [(7, [6]), (8, [0, 5, 7]), (4, [0, 1, 2, 3])])
def test_buckets_change_no_gradient_and_are_exchanged_during_the_backward_pass(
    slots: int, empty: list[int], workers: Group
):
    sizes = [25.0, 300 / 2**20, 1 / 2**20]  # MiB: 2 buckets, 3, and 9 of one parameter each
    ((alone, _),) = workers(1, gradients_in_buckets, slots, empty, sizes[:1])[0]
    for size in (2, 3, 4):
        for rank, results in enumerate(workers(size, gradients_in_buckets, slots, empty, sizes)):
            assert [found for found, _ in results] == [alone] * 3
            assert [events.count("exchange") for _, events in results] == [2, 3, 9]
            working = [slot for slot in items_of_rank(slots, size, rank) if slot not in empty]
            for (_, events), least in zip(results, [0, 2, 7], strict=True):
                if working:
                    while events.pop() != "backward":
                        pass
                    uses_all = working[-1] % 2 == 0  # odd slots do not use `spare`
                    assert events.count("exchange") >= (least if uses_all else (least + 1) // 2)


# ------------------------------------------------------------------ whole runs


Alone = Callable[[str], TrainConfig]


@pytest.fixture(scope="module")
def alone(workers: Group, tmp_path_factory: pytest.TempPathFactory) -> Alone:
    """Undisturbed runs on one worker; each variant is run once."""

    @functools.cache
    def run(variant: str) -> TrainConfig:
        folder = tmp_path_factory.mktemp("alone")
        config = tiny_config(folder, variant, exact=True, **VARIANTS[variant])
        workers(1, run_tiny, plain(config))
        return config

    return run


SIZES = dict(zip(VARIANTS, (4, 3, 2, 3, 4, 2), strict=True))


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_bits_do_not_depend_on_the_number_of_workers(
    variant: str, alone: Alone, workers: Group, tmp_path: Path
):
    config = tiny_config(tmp_path, "other", exact=True, **VARIANTS[variant])
    workers(SIZES[variant], run_tiny, plain(config))
    assert bits(config) == bits(alone(variant))
    assert log_of(config) == log_of(alone(variant)), "losses and metrics, too"


def test_a_stopped_killed_and_resized_run_has_the_bits_of_one_undisturbed_worker(
    alone: Alone, workers: Group, tmp_path: Path
):
    """It resumes at the last step of an epoch, in whose slots 0, 1, 1 and 1 rows are."""
    variant = "adamw-clip-bf16"
    config = tiny_config(tmp_path, "disturbed", exact=True, **VARIANTS[variant])
    workers(4, run_tiny, plain(config), None, 9)
    with pytest.raises(WorkerError):
        workers(4, run_tiny, plain(config), None, 0, 14)
    workers(3, run_tiny, plain(config), None, 23)
    workers(2, run_tiny, plain(config))
    assert bits(config) == bits(alone(variant))
    assert log_of(config) == log_of(alone(variant))


def test_with_bad_records_and_skipped_steps_the_bits_do_not_depend_on_the_workers(
    workers: Group, tmp_path: Path
):
    changes: dict[str, Any] = {
        "optim": OptimConfig(lr=0.05, nonfinite="skip"),
        "data": DataConfig(workers=1, prefetch=2, bad_records="skip"),
        "compute": ComputeConfig(channels_last=True),
    }
    options = {"bad_rows": [0, 1, 2, 3, 17], "nan_row": 5}
    found = []
    for size in (1, 3):
        config = tiny_config(tmp_path, f"on-{size}", exact=True, **changes)
        workers(size, run_tiny, plain(config), options)
        found.append((bits(config), log_of(config)))
    assert found[0] == found[1]
    last = [record for record in found[0][1] if record["kind"] == "train"][-1]
    assert (last["skipped"], last["nonfinite"]) == (5, EPOCHS)


class Mixed(nn.Module):
    """Parameters of all kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Conv2d(1, 8, 3, padding=1).requires_grad_(False)
        self.norm = nn.BatchNorm2d(8)
        self.tied, self.again = nn.Linear(128, 128), nn.Linear(128, 128, bias=False)
        self.again.weight = self.tied.weight
        self.words = nn.Embedding(8, 128, sparse=True)
        self.gaps = nn.Parameter(0.1 * torch.randn(128, 40))
        self.gaps.data = self.gaps.data[:, :16]
        self.rough = nn.Linear(16, 16).bfloat16()
        self.head = nn.Linear(16, CLASSES).double()

    def forward(self, x: Tensor) -> Tensor:
        features = self.norm(self.frozen(x)).relu().flatten(1)
        features = self.again(self.tied(features).relu())
        features = features + self.words((x[:, 0, 0, 0] > 0).long())
        outputs: Tensor = self.head(self.rough((features @ self.gaps).bfloat16()).double())
        return outputs.float()


class Centered(nn.Module):
    """Subtracts a running mean that each pass replaces by a new tensor, like the center of DINO;
    wrongly, evaluations replace it, too."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.dropout = nn.Linear(16, 32), nn.Dropout(0.3)
        self.head = nn.Linear(32, CLASSES)
        self.register_buffer("centre", torch.zeros(32))

    def forward(self, x: Tensor) -> Tensor:
        features = self.hidden(x.flatten(1))
        self.centre = 0.9 * self.centre + 0.1 * features.detach().mean(0)
        outputs: Tensor = self.head(self.dropout((features - self.centre).relu()))
        return outputs


class OddTask(TinyTask):
    """Mixes samples and evaluates on noisy ones, with random numbers of all kinds."""

    def __init__(self, config: TrainConfig, kind: type[nn.Module], **options: Any) -> None:
        super().__init__(config, **options)
        self._kind = kind

    def model(self) -> nn.Module:
        self.made = self._kind()  # type: ignore[assignment]
        return self.made

    def loss(self, model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
        share, other = random.random(), np.random.permutation(len(batch["x"]))
        outputs = model(torch.lerp(batch["x"][other], batch["x"], share))
        own, others = (cross_entropy(outputs, y) for y in (batch["y"], batch["y"][other]))
        return torch.lerp(others, own, share)

    def evaluate(
        self, model: nn.Module, batch: Mapping[str, Tensor], metrics: Mapping[str, Any]
    ) -> None:
        level = random.random() * np.random.rand()
        noisy = batch["x"] + level * torch.randn_like(batch["x"])
        super().evaluate(model, {**batch, "x": noisy}, metrics)


ODD: dict[str, tuple[type[nn.Module], dict[str, Any]]] = {
    "parameters of all kinds": (Mixed, {"optim": OptimConfig(name="adamw", clip_norm=0.5)}),
    "a buffer that is replaced": (Centered, {"optim": OptimConfig(clip_norm=0.5)}),
}


@pytest.mark.parametrize("name", ODD)
def test_with_unusual_models_and_random_numbers_the_bits_do_not_depend_on_the_workers(
    name: str, workers: Group, tmp_path: Path
):
    kind, changes = ODD[name]
    found = []
    for size in (1, 3):
        config = tiny_config(tmp_path, f"on-{size}", exact=True, **{**changes, "epochs": 1})
        ran = workers(size, run_tiny, plain(config), {"kind": kind}, 0, 0, None, OddTask)
        assert len({worker.digest for worker in ran}) == 1
        found.append((bits(config), log_of(config)))
    assert found[0] == found[1]


def test_parameters_of_all_memory_layouts_have_the_gradients_of_autograd():
    model = Mixed()
    reduction = ExactReduction(model, 1, World(0, 1, 0, CPU, 1), 25.0, Clock(CPU))
    batch = torch.randn(4, 1, 4, 4)
    reduction.begin()
    with reduction.passing(Slot(0, 0, 4, 4, {}), True):
        model(batch).square().sum().backward()
    reduction.finish()
    trained = [p for p in model.parameters() if p.requires_grad]
    model.norm.reset_running_stats()
    for parameter, true in zip(
        trained, torch.autograd.grad(model(batch).square().sum(), trained), strict=True
    ):
        assert torch.equal(parameter.grad, true.to_dense())
