"""Fixtures for the checkpoint store tests."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

STORE_TESTS = {"test_store", "test_damage", "test_claims", "test_store_interleavings"}
STORE_TESTS |= {"test_golden_checkpoints", "test_storage"}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "run" / "checkpoints"


@pytest.fixture(autouse=True)
def _no_waiting_for_the_disk(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Skips fsync: no test cuts the power. Tests that need the calls count them."""
    if request.path.stem in STORE_TESTS:
        monkeypatch.setattr(os, "fsync", lambda fd: None)
