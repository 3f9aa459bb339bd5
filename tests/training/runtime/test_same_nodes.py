"""Ranks whose software differs from rank 0's; three processes."""

from __future__ import annotations

import pytest
import torch
from processes import Group, Raised

from raytrain_ddp.errors import PreflightError
from raytrain_ddp.training.runtime import world as worlds
from raytrain_ddp.training.runtime.world import World


def compare_nodes(rank: int, size: int, others: dict[int, dict[str, str]]) -> None:
    """The ranks in `others` have these versions."""
    world = World(rank, size, rank, torch.device("cpu"), 1, tuple(range(5, 5 + size)))
    with pytest.MonkeyPatch.context() as patch:
        if rank in others:
            patch.setattr(worlds, "versions_here", lambda: others[rank])
        worlds.require_same_software(world)


def test_different_software_is_refused(workers: Group) -> None:
    assert workers(3, compare_nodes, {}) == [None] * 3
    assert workers(3, compare_nodes, {1: {}}) == [None] * 3  # no package is known there
    first, second, third = workers.outcomes(3, compare_nodes, {1: {"torch": "2.9.0"}})
    assert isinstance(second, Raised)
    assert second.name == PreflightError.__name__
    for named in ("rank 6 (host", "torch 2.9.0", "rank 5 (host"):
        assert named in second.text
    assert [first, third] == [None, None]
