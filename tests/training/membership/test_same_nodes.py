"""Ranks whose software, code, or hardware differs from rank 0's; three processes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from processes import Group, Raised

from raytrain_ddp import events
from raytrain_ddp.errors import PreflightError
from raytrain_ddp.training.membership import same_nodes
from raytrain_ddp.training.runtime.world import World

HOST = {"host": "host-b"}


class FakeSession:
    """Keeps the events that a session gets."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.notes: list[str] = []

    def tell(self, event: object) -> None:
        assert isinstance(event, events.Note)
        if self.world.is_main:
            self.notes.append(event.text)


def compare_nodes(rank: int, size: int, others: dict[int, dict[str, Any]]) -> list[str]:
    """The notes of a rank; the nodes of the ranks in `others` differ in these fields."""
    before = same_nodes.Node.here
    usual = replace(before(torch.device("cpu")), host="host-a", code={})

    def here(device: torch.device) -> same_nodes.Node:
        return replace(usual, **others.get(rank, {}))

    same_nodes.Node.here = here  # type: ignore[method-assign]
    session = FakeSession(
        World(rank, size, rank, torch.device("cpu"), 1, tuple(range(5, 5 + size)))
    )
    try:
        same_nodes.require_same_nodes(session)  # type: ignore[arg-type]
    finally:
        same_nodes.Node.here = before  # type: ignore[method-assign]
    return session.notes


def test_equal_nodes_pass(workers: Group) -> None:
    assert workers(3, compare_nodes, {}) == [[], [], []]
    assert workers(3, compare_nodes, {1: {"versions": {}}}) == [
        [],
        [],
        [],
    ]  # no package is known there


def test_different_software_is_refused(workers: Group) -> None:
    differs = {**HOST, "versions": {"raytrain_ddp": "0.1.0", "torch": "2.9.0"}}
    first, second, third = workers.outcomes(3, compare_nodes, {1: differs})
    assert isinstance(second, Raised)
    assert second.name == PreflightError.__name__
    for named in ("rank 6 (host host-b)", "torch 2.9.0", "rank 5 (host host-a)"):
        assert named in second.text
    assert [first, third] == [[], []]


def test_different_hardware_is_noted_once(workers: Group) -> None:
    ((note,), *others) = workers(3, compare_nodes, {1: {"device": "NVIDIA A100"}})
    assert others == [[], []]
    assert "CPU with" in note
    assert ": ranks 5, 7; NVIDIA A100: rank 6)" in note
