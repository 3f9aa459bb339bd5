"""Holds a run while a command works on it: the lease, the name of a new run, its event log."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, NoReturn

from raytrain_ddp.checkpoint.lease import Lease
from raytrain_ddp.checkpoint.run_folder import checkpoint_store
from raytrain_ddp.checkpoint.storage import Storage
from raytrain_ddp.driver.branching import Branch, begun_from
from raytrain_ddp.driver.event_log import EventLog
from raytrain_ddp.driver.preflight import is_complete
from raytrain_ddp.driver.run_naming import NamedRun, after_refusal, claimed, new_code_note
from raytrain_ddp.errors import RaytrainError, RunLockedError, status_of
from raytrain_ddp.events import End, Event, Note
from raytrain_ddp.ray_backend.failure_causes import failure_event, is_own_exit
from raytrain_ddp.signals import handling

Show = Callable[[Event], None]


@contextmanager
def driven(
    run: NamedRun, show: Show, branch: Branch | None = None
) -> Iterator[tuple[NamedRun, Show]]:
    """Holds the lease of the run unless it is complete; yields the run and the receiver of its
    events.

    Yields another run if this one is new and another command took its name in the meantime.

    Raises:
        RunLockedError: like `owned`.
    """
    with ExitStack() as stack:
        tell = show
        while not is_complete(run.config, run.manifest):
            try:
                tell = stack.enter_context(owned(run, show))
                break
            except RunLockedError:
                other = after_refusal(run)
                if other is None:
                    raise
                run = other
        for text in filter(None, (run.note, new_code_note(run))):
            tell(Note(text))
        if branch is not None and run.manifest is None:
            run = begun_from(run, branch)
            tell(Note(f"run {run.config.name} {branch}"))
        yield run, tell


@contextmanager
def owned(run: NamedRun, show: Show) -> Iterator[Show]:
    """Holds the run's lease, and keeps its event log; yields the receiver of events.

    If a run is refused before it begins, its folder is removed.

    Raises:
        RunLockedError: another process trains this run; also raised by the yielded function, if
            another process has taken the run over because this one was suspended for too long.
    """

    def note(text: str) -> None:
        show(Note(text))

    folder = run.folder
    with (
        _sigterm_as_ctrl_c(),
        _no_empty_folders(folder),
        Lease.take(folder, note) as lease,
        claimed(run),
        EventLog(folder, show) as event_log,
    ):
        with suppress(OSError):
            folder.sweep()

        def tell(event: Event) -> None:
            lease.require()
            event_log(event)

        try:
            yield tell
        except RaytrainError as error:
            cause: dict[str, Any] = {k: v for k, v in error.cause.items() if v is not None}
            event_log(End(status_of(error), message=str(error), **cause))
            raise
        except KeyboardInterrupt as stop:
            number = stop.args[0] if stop.args and isinstance(stop.args[0], int) else 2
            event_log(End(128 + number))
            if folder.is_local:  # others may be why it is stopped
                for newest in checkpoint_store(folder).names()[:1]:
                    note(f"run the same command again to continue after step {newest.step}.")
            raise
        except (Exception, SystemExit) as error:  # of the user's code, in this process
            if not isinstance(error, SystemExit) or is_own_exit(error):
                event_log(failure_event(error))
            raise


def require_free(run: Storage) -> None:
    """Takes the lease of a run, and gives it back; leaves nothing behind.

    Raises:
        RunLockedError, PreflightError: like `Lease.take`.
    """
    with _no_empty_folders(run), Lease.take(run, lambda _: None):
        pass


def _sigterm_as_ctrl_c() -> AbstractContextManager[None]:
    """Treats SIGTERM like Ctrl-C until a session handles both, so the lease is given back."""

    def stop(number: int, _: object) -> NoReturn:
        raise KeyboardInterrupt(number)

    is_unhandled = signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    return handling([signal.SIGTERM] if is_unhandled else [], stop)


@contextmanager
def _no_empty_folders(run: Storage) -> Iterator[None]:
    """Removes folders that are created for the run in this context, if they stay empty."""
    above = [Path(run.path), *Path(run.path).parents] if run.is_local else []
    made = [folder for folder in above if not folder.exists()]
    try:
        yield
    finally:
        with suppress(OSError):  # stops at the first one that is not empty
            for folder in made:
                folder.rmdir()
