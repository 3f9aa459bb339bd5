"""Ranks whose models start with different weights train those of rank 0; three processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from processes import Group, Raised
from tiny import TinyNet, TinyTask, bits, plain, run_tiny, tiny_config
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from raytrain_ddp.config.sections import DdpConfig, EmaConfig, OptimConfig
from raytrain_ddp.data.loading.sources import Batch
from raytrain_ddp.errors import ConfigError

WAYS: dict[str, dict[str, Any]] = {
    "ddp": {"ddp": DdpConfig(bucket_cap_mb=0.001, static_graph=True)},
    "exact": {
        "exact": True,
        "ema": EmaConfig(decay=0.9),
        "optim": OptimConfig(name="adamw", lr=0.01),
    },
}


class Net(TinyNet):
    """Its output depends on a buffer that is not in checkpoints."""

    scale: Tensor

    def __init__(self, rank: int, wide: bool) -> None:
        super().__init__()
        self.register_buffer("scale", torch.full((2 if wide else 1,), 1.0 + rank), False)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * self.scale[0])


class DifferentModelTask(TinyTask):
    """A different model on each rank.

    Args:
        differs: whether the models differ.
        wide: the rank whose model has a larger buffer.
    """

    def __init__(self, config: Any, differs: bool, wide: int = -1) -> None:
        super().__init__(config)
        self.differs, self.wide = differs, wide

    def model(self) -> nn.Module:
        assert self.membership is not None
        rank = self.membership.world.rank
        torch.manual_seed(100 + rank * self.differs)
        self.made = Net(rank if self.differs else 0, rank == self.wide)
        return self.made

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        assert self.membership is not None
        assert isinstance(self.made, Net)
        if self.membership.step and model.training:
            self.seen.append((self.membership.step, [int(self.made.scale[0])]))
        return cross_entropy(model(batch["x"]), batch["y"])


def digest_of(rank: int, size: int, config: Any, options: Any, stop_at: int = 0) -> Any:
    ran = run_tiny(rank, size, config, options, stop_at, kind=DifferentModelTask)
    return ran.digest, ran.start_step, {scale for _, (scale,) in ran.seen}


@pytest.mark.parametrize("way", WAYS)
def test_all_ranks_train_the_weights_of_rank_0(workers: Group, tmp_path: Path, way: str) -> None:
    alike, differs, again = (
        tiny_config(tmp_path, name, epochs=1, **WAYS[way]) for name in ("alike", "differs", "again")
    )
    (digest, *rest), *others = workers(3, digest_of, plain(alike), {"differs": False})
    assert rest == [0, {1}]
    assert others == [(digest, *rest)] * 2
    assert workers(3, digest_of, plain(differs), {"differs": True}) == [(digest, 0, {1})] * 3
    assert bits(differs) == bits(alike)
    # A resumed run loads the weights and uses rank 0's buffers that were not stored.
    workers(3, digest_of, plain(again), {"differs": True}, 4)
    assert workers(3, digest_of, plain(again), {"differs": True}) == [(digest, 4, {1})] * 3
    assert bits(again) == bits(alike)


@pytest.mark.parametrize("way", WAYS)
def test_a_model_with_another_shape_on_one_rank_is_refused(
    workers: Group, tmp_path: Path, way: str
) -> None:
    config = tiny_config(tmp_path, "run", **WAYS[way])
    options = {"differs": True, "wide": 1}
    ends = workers.outcomes(3, digest_of, plain(config), options)
    assert isinstance(ends[1], Raised)
    assert ends[1].name == ConfigError.__name__
    assert "rank 1" in ends[1].text
    assert all(isinstance(end, Raised) for end in ends)
