"""Fixtures that several test files share."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings
from processes import Group

# Ray reads it when it is imported, which the first of many tests may do.
os.environ.setdefault("RAY_AUTH_MODE", "token")

# On a busy machine an example may take any time: slowness alone is no failure.
settings.register_profile("busy", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("busy")


@pytest.fixture(scope="session")
def workers() -> Iterator[Group]:
    """``workers(3, function, *args)``: function(rank, 3, *args) on each of three gloo workers."""
    group = Group()
    yield group
    group.end()
