"""Signals that end a run, and handlers for them."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)

Handler = Callable[[int, FrameType | None], None]
_is_relayed = threading.Event()
_handlers: list[Handler] = []  # of relayed signals


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
    if relays := _is_relayed.is_set():
        _handlers.append(handler)
        handler = lambda *_: None  # noqa: E731
    before = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old or signal.SIG_DFL)  # None: set by C code
        if relays:
            _handlers.pop()


def relayed_by(receive: Callable[[], int]) -> None:
    """Makes `handling` handle the signals that `receive` returns instead of those that this process
    gets, as schedulers signal each process of a job. A signal without a handler acts like Ctrl-C.

    Args:
        receive: waits for a signal; raises EOFError or OSError when no more will come.
    """
    _is_relayed.set()

    def read() -> None:
        with suppress(EOFError, OSError):
            while True:
                number = receive()
                if _handlers:
                    _handlers[-1](number, None)
                else:
                    os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=read, name="signals", daemon=True).start()
