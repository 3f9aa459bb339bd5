"""Finds Ray's dashboard, and lists the run in it."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from raytrain_ddp.events import Note
from raytrain_ddp.ray_backend.ray_settings import applied_settings

_LISTED = {"RAY_TRAIN_ENABLE_STATE_TRACKING": "1"}  # costs an additional actor process


def dashboard_address() -> tuple[str, int] | None:
    """The address of Ray's dashboard; None if it has none."""
    import ray

    # For a connected Ray, this only returns its address.
    context = ray.init(ignore_reinit_error=True, configure_logging=False, logging_level="ERROR")
    host, _, port = (context.dashboard_url or "").rpartition(":")
    return (host, int(port)) if port.isdigit() else None


@contextmanager
def listed_in_dashboard(tell: Callable[[Note], None]) -> Iterator[None]:
    """Lists the trainings started in this context in the dashboard, if any; reports its address.

    The open-source dashboard shows them as a job with its workers and their logs. Name, state
    and attempts are only in its API, `/api/train/v2/runs/v1`; the page for them is not open source.

    Args:
        tell: receives a note.
    """
    found = dashboard_address()
    if found is None:
        yield
        return
    import ray

    context = ray.get_runtime_context()
    head = context.gcs_address.rpartition(":")[0]
    away = head if head != ray.util.get_node_ip_address() else ""
    if not away and not _listens(*found):  # Ray gives an address also if it runs none
        yield
        return
    tell(Note(describe_dashboard(*found, context.get_job_id(), away)))
    with applied_settings(_LISTED):
        yield


def _listens(host: str, port: int) -> bool:
    with suppress(OSError), socket.create_connection((host, port), timeout=1.0):
        return True
    return False


def describe_dashboard(host: str, port: int, job: str, away: str = "") -> str:
    """The dashboard's address, for a person.

    Args:
        away: the head node, if it is another machine.
    """
    page = f"http://{host}:{port}/#/jobs/{job}"
    if away and host in ("127.0.0.1", "localhost", "::1"):
        return f"dashboard: {page}, after ssh -NL {port}:{host}:{port} {away}"
    return f"dashboard: {page}"
