"""The exceptions of raytrain_ddp, the exit status that each stands for, and what is tried again.

    RaytrainError            1
    ├── TaskError            1   the user's code raised or returned an invalid value, or is invalid
    ├── ConfigError          2   a flag, field or name is invalid; also a changed config on resume
    ├── PreflightError       3   the environment cannot run this: resources, storage, versions
    ├── DataError            4   the data are missing, damaged or not what the config says
    ├── CheckpointError      5   no usable checkpoint where there must be one
    ├── DivergedError        6   the loss or a gradient is not finite
    ├── RetriesExhausted     7   more failures in a row than `scaling.max_failures`
    └── RunLockedError       8   another process owns this run

A run that is stopped by a signal ends with 128 + signal (129 for SIGHUP, 130 for Ctrl-C, 143 for
SIGTERM) after its checkpoint is committed. A user-defined subclass inherits the status of its base
class, or defines its own from 1 to 125. Each exception is built from its message alone, so that it
survives pickling on its way from a worker to the driver.
"""

from __future__ import annotations

import difflib
import errno
import math
import random
import signal
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import TypeVar

T = TypeVar("T")
Pause = Callable[[float, OSError], bool]

TRIES = 5
OUTAGE_S = 600.0
"""How long training waits for a failed storage when it would otherwise lose steps."""

_MAX_SHOWN = 240  # characters of a value or path
_LAST_STATUS = 125  # shells reserve higher numbers
_FULL = {errno.ENOSPC, errno.EDQUOT}
# errno of failing disks and networks, and of file systems that depend on a network.
_PASSING = {
    *(errno.EIO, errno.ESTALE, errno.EBUSY, errno.EAGAIN, errno.EINTR),
    *(errno.ENETDOWN, errno.ENETUNREACH, errno.EHOSTDOWN, errno.EHOSTUNREACH, errno.ENOTCONN),
    *(errno.ETIMEDOUT, errno.EREMOTEIO),
}
# pyarrow's errors of object stores have no errno.
_OF_STORES = ("AWS Error", "google::cloud", "Azure")
_LASTING_OF_STORES = ("ACCESS_DENIED", "NO_SUCH", "NOT_FOUND", "INVALID", "PERMISSION_DENIED")
# Errors of other clients are recognized by their names, or by an HTTP status.
_OF_CLIENTS = ("Connect", "Timeout", "Disconnected")
_PASSING_STATUSES = {408, 425, 429, *range(500, 600)}
_LATER_S = 15.0
_LONGEST_S = 60.0  # for all attempts together, as far as we control it


class RaytrainError(Exception):
    """One line that says what is wrong, where, and what to do about it."""

    exit_status = 1
    cause: Mapping[str, object] = MappingProxyType({})
    """The worker that failed first, as the driver knows it: rank, node, step, error."""


class TaskError(RaytrainError):
    exit_status = 1


class ConfigError(RaytrainError, ValueError):
    exit_status = 2


class PreflightError(RaytrainError):
    exit_status = 3


class UnreachableError(PreflightError, ConnectionError):
    """A storage does not respond now; it may later."""


class DataError(RaytrainError):
    exit_status = 4

    def __str__(self) -> str:  # names of files may have any characters
        return printable(super().__str__())


class CheckpointError(RaytrainError):
    exit_status = 5


class DivergedError(RaytrainError):
    exit_status = 6


class RetriesExhausted(RaytrainError):
    exit_status = 7


class LoaderDied(RetriesExhausted, ConnectionError):
    """A loader process was killed or crashed; on Ray, the workers restart, as after a worker's
    death."""


class RunLockedError(RaytrainError):
    exit_status = 8


class RemoteTraceback(Exception):
    """The cause of an exception raised in a loader process: its traceback in that process."""


def is_passing(error: BaseException, if_full: bool = True) -> bool:
    """Whether a retry may succeed later, or on another machine. All retries use this list.

    Args:
        if_full: the answer for a full disk, on which someone may have to free space.
    """
    if isinstance(error, OSError) and error.errno in _FULL:
        return if_full
    if isinstance(error, (ConnectionError, TimeoutError)):
        return True
    if isinstance(error, OSError) and error.errno in _PASSING:
        return True
    status = getattr(error, "status", getattr(getattr(error, "response", None), "status_code", 0))
    if isinstance(status, int) and status:
        return status in _PASSING_STATUSES
    if any(word in type(error).__name__ for word in _OF_CLIENTS):
        return True
    text = str(error)
    of_store = any(pattern in text for pattern in _OF_STORES)
    return of_store and not any(pattern in text for pattern in _LASTING_OF_STORES)


def retry_pauses() -> Iterator[float]:
    """Seconds to wait before each retry: doubled each time, with jitter to avoid synchronized
    retries against an overloaded store."""
    jitter = random.Random()  # the global one may have the same seed on all machines
    for n in range(TRIES - 1):
        yield 2**n * jitter.uniform(0.5, 1)  # at most 15 s in total


def with_backoff(act: Callable[[int], T], pause: Pause, outage_s: float = 0.0) -> T:
    """Calls act(0), act(1), ... until one raises no transient OSError, at most `TRIES` times.

    Args:
        pause: waits the given seconds; returns whether to continue.
        outage_s: keep trying for this long, regardless of the number of tries, even if a disk is
            full.
    """
    failed: float | None = None  # time of the first failure
    pauses, number = retry_pauses(), 0
    while True:
        try:
            return act(number)
        except OSError as error:
            failed, number = failed or time.monotonic(), number + 1
            wait_s = next(pauses, _LATER_S if outage_s else math.inf)
            late = time.monotonic() - failed + wait_s > max(_LONGEST_S, outage_s)
            passes = is_passing(error, if_full=outage_s > 0)
            if not passes or late or not pause(wait_s, error):
                raise


def printable(text: str) -> str:
    """Returns the text in one line: characters that are not printable are escaped as in Python."""
    return "".join(char if char.isprintable() else repr(char)[1:-1] for char in text)


def first_line(error: BaseException) -> str:
    """The first line of the error's message, without the final period."""
    return next(iter(str(error).splitlines()), "").rstrip(".")


def first_names(names: Sequence[str], most: int = 10, last: str = " and ", by: str = ", ") -> str:
    """``a, b and 3 more``: the first names, each `in_one_line`, and the number of the others."""
    more = f"{last}{len(names) - most} more" if len(names) > most else ""
    return by.join(map(in_one_line, names[:most])) + more


def in_one_line(text: object, most: int = _MAX_SHOWN) -> str:
    """Formats a user's value for a message: escapes control characters, and drops the middle of
    text with more than `most` characters."""
    shown = str(text)
    if len(shown) > most:
        shown = f"{shown[: most // 2]}...{shown[-most // 4 :]}"
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in shown)


def quoted(value: object) -> str:
    """Returns the `repr` of a value, `in_one_line`."""
    return in_one_line(repr(value))


def status_of(error: RaytrainError) -> int:
    """The exit status. A user-defined class may set one from 1 to 125; for any other value, the
    status of its base class here is used."""
    own: object = error.exit_status
    if type(own) is int and 1 <= own <= _LAST_STATUS:
        return own
    base: type[RaytrainError] = next(k for k in type(error).__mro__ if k.__module__ == __name__)
    return base.exit_status


def signal_name(number: int) -> str:
    """``SIGKILL`` for 9; the number if it has no name."""
    return next((each.name for each in signal.Signals if each == number), f"signal {number}")


def did_you_mean(wrong: str, known: Iterable[str]) -> str:
    """``" Did you mean 'resnet18'?"``, or nothing when no known name is close."""
    close = difflib.get_close_matches(wrong, list(known), n=3, cutoff=0.6)
    return f" Did you mean {' or '.join(repr(name) for name in close)}?" if close else ""
