"""Ranks whose software, code, or hardware differs from rank 0's; three processes."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from processes import Group, Raised

from raytrain_ddp import events
from raytrain_ddp.errors import PreflightError
from raytrain_ddp.training.membership import same_nodes
from raytrain_ddp.training.runtime.world import World
from raytrain_ddp.user_code import UserCode

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
    same_nodes.user_code._digests.clear()  # other tests have used this process
    usual = replace(before(torch.device("cpu")), host="host-a")

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


@pytest.mark.parametrize(
    ("differs", "text"),
    [
        (
            {"versions": {"raytrain_ddp": "0.1.0", "torch": "2.9.0"}},
            r"rank 6 \(host host-b\) has torch 2.9.0, rank 5 \(host host-a\) has .*: install the "
            "same version on all nodes",
        ),
        ({"versions": {"raytrain_ddp": "9.9"}}, "has raytrain_ddp 9.9, "),
        (
            {"code": {__name__: ("/b/tiny.py", "0" * 64), "only_here": ("/b/only_here.py", "")}},
            r"/b/tiny.py differs between rank 6 \(host host-b\) and rank 5 \(host host-a\): copy",
        ),
    ],
)
def test_different_software_or_code_is_refused(
    workers: Group, differs: dict[str, Any], text: str
) -> None:
    first, second, third = workers.outcomes(3, compare_nodes, {1: {**HOST, **differs}})
    assert isinstance(second, Raised)
    assert second.name == PreflightError.__name__
    assert re.search(text, second.text)
    assert [first, third] == [[], []]


def test_different_hardware_is_noted_once(workers: Group) -> None:
    ((note,), *others) = workers(3, compare_nodes, {1: {"device": "NVIDIA A100"}})
    assert others == [[], []]
    assert "CPU with" in note
    assert ": ranks 5, 7; NVIDIA A100: rank 6)" in note


def test_the_compared_code_is_the_loaded_code_not_the_files(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    same_nodes.user_code._digests.clear()
    before = same_nodes.Node.here(torch.device("cpu"))
    assert any(path == __file__ for path, _ in before.code.values())
    sources = {name: (path, b"edited") for name, (path, _) in before.code.items()}
    monkeypatch.setattr(same_nodes.user_code, "loaded", lambda: UserCode(sources))
    assert same_nodes.Node.here(torch.device("cpu")).code == before.code
