"""What is tried again after an error: what may pass, and nothing else."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from raytrain_ddp.config.train_config import TrainConfig
from raytrain_ddp.data.formats import shard
from raytrain_ddp.driver import preflight
from raytrain_ddp.errors import RaytrainError, with_backoff


def os_error(number: int) -> OSError:
    return OSError(number, os.strerror(number))


class HttpError(Exception):
    """As those of aiohttp, which are no OSErrors."""

    def __init__(self, status: int) -> None:
        super().__init__(status)
        self.response = SimpleNamespace(status_code=status)


PERMANENT = [
    *map(os_error, (errno.ENOENT, errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR)),
    *map(os_error, (errno.EISDIR, errno.ENAMETOOLONG, errno.EINVAL, errno.EFBIG, errno.ELOOP)),
    OSError("AWS Error ACCESS_DENIED during PutObject operation"),
]
PASSING = [
    *map(os_error, (errno.EIO, errno.ESTALE, errno.EBUSY, errno.ETIMEDOUT, errno.ECONNRESET)),
    *map(os_error, (errno.ENETUNREACH, errno.EHOSTUNREACH)),
    OSError("AWS Error SLOW_DOWN during PutObject operation"),
]


def of_a_commit(ask: Callable[[], Any]) -> None:
    with_backoff(lambda _: ask(), lambda seconds, error: True)


def of_an_outage(ask: Callable[[], Any]) -> None:
    with_backoff(lambda _: ask(), lambda seconds, error: True, 600.0)


def of_a_preflight(ask: Callable[[], Any]) -> None:
    preflight.answered(TrainConfig(), ask)


def of_a_shard(ask: Callable[[], Any]) -> None:
    answer = shard.with_retries(ask, is_local=False)
    if isinstance(answer, Exception):
        raise answer


QUICK = SimpleNamespace(sleep=lambda _: None, monotonic=lambda: 0.0)


def calls_until_the_end(retry: Callable[[Callable[[], Any]], None], error: Exception) -> int:
    """How often something was tried that fails twice."""
    calls = 0

    def ask() -> None:
        nonlocal calls
        calls += 1
        if calls < 3:
            raise error

    with pytest.MonkeyPatch.context() as patch:
        for module in (preflight, shard):
            patch.setattr(module, "time", QUICK)
        try:
            retry(ask)
        except (OSError, RaytrainError, type(error)):
            assert calls < 3
    return calls


@pytest.mark.parametrize(
    "retry", [of_a_commit, of_an_outage, of_a_preflight, of_a_shard], ids=lambda each: each.__name__
)
def test_what_lasts_is_tried_once_and_what_may_pass_again(
    retry: Callable[[Callable[[], Any]], None],
):
    assert [error for error in PERMANENT if calls_until_the_end(retry, error) != 1] == []
    assert [error for error in PASSING if calls_until_the_end(retry, error) != 3] == []


def test_a_busy_store_is_asked_again_and_a_full_disk_is_waited_for_only_in_an_outage():
    not_found = [ValueError("Parquet magic bytes not found"), KeyError("x"), HttpError(404)]
    assert [calls_until_the_end(of_a_shard, each) for each in not_found] == [1, 1, 1]
    busy = [HttpError(503), HttpError(429)]
    assert [calls_until_the_end(of_a_shard, each) for each in busy] == [3, 3]
    full = os_error(errno.ENOSPC)
    assert calls_until_the_end(of_a_commit, full) == 1
    assert calls_until_the_end(of_an_outage, full) == 3
