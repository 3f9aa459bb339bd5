"""Checkpoints in a bucket over a network that drops, cuts, hangs, or is slow: moto behind a
proxy."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace

import pytest
from faulty_storage import commit, content, payload
from s3 import HANG_S, S3, Proxy

from raytrain_ddp.checkpoint.storage import open_storage
from raytrain_ddp.checkpoint.store import CheckpointStore


@pytest.fixture
def proxy(s3: S3) -> Iterator[Proxy]:
    proxy = Proxy(s3.port)
    yield proxy
    proxy.close()


def store_through(proxy: Proxy, s3: S3, folder: str) -> CheckpointStore:
    behind = replace(s3, port=proxy.port)
    return CheckpointStore(open_storage(behind.uri(folder).replace("s3://", "s3://test:test@")))


@pytest.mark.parametrize(
    ("fault", "methods"),
    [("drops", "PUT GET HEAD"), ("cuts", "PUT GET HEAD"), ("hangs", "PUT"), ("slow", "PUT GET")],
)
def test_a_checkpoint_is_complete_despite_network_failures(
    s3: S3, proxy: Proxy, fault: str, methods: str
):
    begun, store = time.monotonic(), store_through(proxy, s3, fault)
    for step, method in enumerate(methods.split()):
        proxy.arm(fault, method, 1 if fault == "hangs" else 2)
        commit(store, step)
        newest = store_through(proxy, s3, fault).latest(pytest.fail)
        assert newest is not None
        assert newest.name.step == step
        assert content(newest) == payload(step)
        assert proxy.left == 0, "the fault was there"
    assert time.monotonic() - begun < HANG_S
