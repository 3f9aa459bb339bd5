"""What happened to a run: ``events.jsonl``, written by the process that drives it.

    {"kind": "plan", "time": "2026-11-20T18:05:31Z", "start_step": 40, "world_size": 3, ...}
    {"kind": "checkpoint", "time": ..., "step": 60, "seconds": 0.2, "size_bytes": 1234}

metrics.jsonl is the same whatever happened; this file is not. It also proves, when all checkpoints
are gone, that there were some.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from raytrain_ddp.checkpoint.layout import EVENTS_FILE, read_history
from raytrain_ddp.checkpoint.storage import Storage

Event = Mapping[str, Any]

_KINDS = {
    *("plan", "checkpoint", "checkpoint_failed", "interval", "failed", "preempted", "note", "end"),
}
_PUT_EVERY_S = 30.0  # an object store cannot append: the file is put again


class Journal:
    """Writes the events of a run down, and hands all of them on.

    A journal that cannot be written is no reason to end a run.
    """

    def __init__(self, run: Storage, show: Callable[[Event], None]) -> None:
        self._run, self._show = run, show
        self._lines: list[str] | None = None  # all of the file, where it cannot be appended to
        self._put_at = 0.0

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, *_: object) -> None:
        if self._lines is not None:
            self._put()

    def __call__(self, event: Event) -> None:
        if event["kind"] in _KINDS:
            now = datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
            line = json.dumps({"kind": event["kind"], "time": now, **event}) + "\n"
            with suppress(OSError):
                self._append(line)
        self._show(event)

    def _append(self, line: str) -> None:
        if self._run.is_local:
            with Path(self._run.path, EVENTS_FILE).open("ab+") as file:
                file.seek(max(0, file.tell() - 1))
                torn = file.read(1) not in (b"", b"\n")  # by a kill
                file.write((b"\n" if torn else b"") + line.encode())
            return
        if self._lines is None:
            before = read_history(self._run, EVENTS_FILE)
            self._lines = [json.dumps(event) + "\n" for event in before]
        self._lines.append(line)
        if time.monotonic() - self._put_at >= _PUT_EVERY_S:
            self._put()

    def _put(self) -> None:
        self._put_at = time.monotonic()
        with suppress(OSError):
            self._run.write_atomic(EVENTS_FILE, "".join(self._lines or ()).encode())
