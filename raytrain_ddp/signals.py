"""Signals that end a run, and handlers for them."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import FrameType

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)

Handler = Callable[[int, FrameType | None], None]


def heeded(numbers: Iterable[int] = STOP_SIGNALS) -> list[int]:
    """These signals, except SIGHUP if it is ignored, as after `nohup`. By default, those that
    request a checkpoint and a stop."""
    hung_up = signal.getsignal(signal.SIGHUP)
    return [n for n in numbers if n != signal.SIGHUP or hung_up != signal.SIG_IGN]


@contextmanager
def handling(numbers: Iterable[int], handler: Handler) -> Iterator[None]:
    """Handles these signals within this context, if it is in the main thread: Python runs handlers
    there only."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old or signal.SIG_DFL)  # None: set by C code
