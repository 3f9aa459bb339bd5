"""Fixtures for the checkpoint store tests."""

from __future__ import annotations

import os
from pathlib import Path

import pytest


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "run" / "checkpoints"


@pytest.fixture(autouse=True)
def _no_waiting_for_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Skips fsync: no test cuts the power. Tests that need the calls count them."""
    monkeypatch.setattr(os, "fsync", lambda fd: None)
