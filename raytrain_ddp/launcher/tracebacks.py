"""Finds the traceback that ended a rank in its output, with its time and error message."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Sequence

_HEAD_LINES, _TAIL_LINES = 20, 40  # kept of a traceback
_MESSAGE_LINES = 20  # kept of what follows the exception's first line
_GOES_ON_S = 0.5  # later output means that the process did not end by the traceback

_ANSI = re.compile(r"\x1b\[[0-9;]*m")
_PREFIX = re.compile(r"\[rank\d+\]: ?")  # torch's excepthook: it prints uncaught exceptions only
_HEADER = re.compile(r"Traceback \(most recent call last\)")
_CHAIN = re.compile(r"(During handling of the above|The above exception was the direct cause)")
# A message may quote the traceback of another process: of torch's spawn(), or of a DataLoader.
_QUOTES = re.compile(r"-- Process \d+ terminated with the following error|Original Traceback \(")
_FRAME = re.compile(r"""File "[^"]*", line \d+, in (.+)|^[│\s]*\S+:\d+ in ([\w<>.]+)""")
_BOXED = re.compile(r"│ (.*?)\s*│$")  # rich breaks the lines of frames, also within a path
_BOXED_FRAME = re.compile(r".*\S:\d+\s*in\s*([\w<>.]+)$")
# The outermost frame of an uncaught exception: a script's, that of `python -m`, or a thread's.
_OUTERMOST = {"<module>", "_run_module_as_main"}
_OF_A_THREAD = {"_bootstrap_inner", "_bootstrap"}
_INDENTED = tuple(" \t│╭╰|+>")
# Lines that an exiting interpreter, and its libraries, may still print.
_AT_THE_END = re.compile(
    r"\[?[IWEF]\d{4} |Exception ignored|Error in |sys:1|terminate called|Fatal Python error"
    r"|.*resource_tracker|\s|$"
)
_IGNORED = re.compile(r"Exception ignored|Error in ")
_OF_A_GROUP = re.compile(r"^\s*\|\s*(\w*Group\w*: .*)")
# Errors about a lost peer: they follow from the first error.
_FOLLOWS = re.compile(
    r"connection (was )?(reset|closed|refused|aborted)|broken pipe|recvvalue|sendbytes|recvbytes"
    r"|remote process exited|nccl communicator was aborted|socket ?timeout|has timed out"
    r"|timed out waiting|timed out after \d+ seconds waiting|wait timeout|pair closure"
    r"|watchdog caught|collective operation timeout|unhandled system error|monitoredbarrier",
    re.IGNORECASE,
)


class PrintedTraceback:
    """A traceback, including those it is chained to.

    Args:
        at: the time of its first line.
        is_ignored: the interpreter said so before it.
    """

    def __init__(self, at: float, is_ignored: bool = False) -> None:
        self.at = self.last_at = at
        self.is_ignored = is_ignored
        self.uncaught = False  # printed by the interpreter: the exception was uncaught
        self.surely = False  # and this is certain
        self.in_thread = False
        self.goes_on = False  # the process printed something else, much later
        self.error = ""  # ``ValueError: x``
        self._head: list[str] = []
        self._tail: deque[str] = deque(maxlen=_TAIL_LINES)
        self._left_out = 0
        self._frames = True
        self._first_frame = True
        self._wrapped = ""  # what of a frame in rich's box has been seen
        self._message = 0
        self._chained = False
        self._quoted = False  # a traceback of another process belongs to it

    @property
    def lines(self) -> Sequence[str]:
        """Its lines as printed; for a very long one, the first and the last lines."""
        left_out = [f"... {self._left_out} lines omitted ..."] if self._left_out else []
        return [*self._head, *left_out, *self._tail]

    @property
    def ending(self) -> bool:
        """Whether its process appears to be ending because of it."""
        return self.uncaught and (self.surely or not self.goes_on)

    def take(self, line: str, at: float) -> bool:
        """Adds a line of the same stream; returns whether it belongs to the traceback."""
        late = self._message >= _MESSAGE_LINES or at - self.last_at > _GOES_ON_S
        if late and not self._frames:
            return False
        self.last_at = at
        self._keep(line)
        plain, prefixed = _plain(line)
        if self._frames and self._first_frame and (boxed := _BOXED.match(plain)):
            self._wrapped += boxed[1]
        quotes = not self._frames and bool(_QUOTES.match(plain))
        self._quoted = self._quoted or quotes
        if _HEADER.search(plain):
            if self._chained or quotes:
                self._frames = self._first_frame = True
                self._message, self._chained, self.error = 0, False, ""
        elif (
            self._frames
            and self._first_frame
            and (frame := _BOXED_FRAME.match(self._wrapped) or _FRAME.search(plain))
        ):
            name = frame[1] or frame[2]
            self._first_frame, self._wrapped = False, ""
            self.surely = prefixed
            # Frames of another process say nothing of how this one ended.
            self.uncaught = prefixed or name in _OUTERMOST or (self._quoted and self.uncaught)
            self.in_thread = name in _OF_A_THREAD or (self._quoted and self.in_thread)
        elif self._frames and plain and not plain.startswith(_INDENTED):
            self._frames, self.error = False, plain
        elif self._frames and (group := _OF_A_GROUP.match(plain)):
            self.error = self.error or group[1]
        elif not self._frames:
            self._message += 1
            self._chained = self._chained or quotes or bool(_CHAIN.match(plain))
        return True

    def holds(self, header: str) -> bool:
        """Whether a traceback with this first line belongs to it, as part of a chain or a group."""
        nested = self._frames and not self._first_frame and header.startswith(_INDENTED)
        quoted = not self._frames and bool(_QUOTES.match(header))
        return self._chained or nested or quoted

    def _keep(self, line: str) -> None:
        if len(self._head) < _HEAD_LINES:
            self._head.append(line)
        else:
            self._left_out += len(self._tail) == _TAIL_LINES
            self._tail.append(line)


class TracebackFinder:
    """Finds the most informative traceback in the lines of one rank."""

    def __init__(self) -> None:
        self.raised: PrintedTraceback | None = None
        self._open: dict[str, PrintedTraceback] = {}  # by stream
        self._ignored = False

    def line(self, stream: str, line: str, at: float) -> None:
        """Handles a line printed at this time."""
        plain, _ = _plain(line)
        current = self._open.get(stream)
        header = _HEADER.search(plain)
        if header and not (current is not None and current.holds(plain)):
            self._note(at, new=not self._ignored)
            current = self._open[stream] = PrintedTraceback(at, self._ignored)
        if current is not None and current.take(line, at):
            # Lines printed while a process ends because of another traceback do not count.
            ends = current.uncaught and not current.is_ignored
            if self.raised is None or ends or not self.raised.ending:
                self.raised = current
        else:
            self._note(at, new=not _AT_THE_END.match(plain))
        self._ignored = bool(_IGNORED.match(plain))

    def _note(self, at: float, new: bool) -> None:
        if self.raised is not None and new and at - self.raised.last_at > _GOES_ON_S:
            self.raised.goes_on = True


def is_peer_error(text: str) -> bool:
    """Whether an error is about a lost peer, and so has a cause elsewhere."""
    return bool(_FOLLOWS.search(text))


def _plain(line: str) -> tuple[str, bool]:
    """The line without colors and torch's prefix, and whether it had the prefix."""
    text = _ANSI.sub("", line)
    match = _PREFIX.match(text)
    return (text[match.end() :], True) if match else (text, False)
