"""Ray's dashboard: where it is, and that it knows of the run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from raytrain_ddp.events import Note
from raytrain_ddp.ray_backend.ray_settings import settled

_LISTED = {"RAY_TRAIN_ENABLE_STATE_TRACKING": "1"}  # an actor more, and its process


def dashboard_address() -> tuple[str, int] | None:
    """Where Ray says that its dashboard is; None: it has none."""
    import ray

    # Of a Ray that is connected already, this only tells.
    told = ray.init(ignore_reinit_error=True, configure_logging=False, logging_level="ERROR")
    host, _, port = (told.dashboard_url or "").rpartition(":")
    return (host, int(port)) if port.isdigit() else None


@contextmanager
def listed(tell: Callable[[Note], None]) -> Iterator[None]:
    """The dashboard knows the trainings that start meanwhile, if there is one; tells where it is.

    The open dashboard shows them as a job with its workers and their logs. Only its API has their
    name, state and attempts: `/api/train/v2/runs/v1`; the page that shows those is not open.

    Args:
        tell: is given a note.
    """
    found = dashboard_address()
    if found is None:
        yield
        return
    import ray

    context = ray.get_runtime_context()
    head = context.gcs_address.rpartition(":")[0]
    away = head if head != ray.util.get_node_ip_address() else ""
    tell(Note(said(*found, context.get_job_id(), away)))
    with settled(_LISTED):
        yield


def said(host: str, port: int, job: str, away: str = "") -> str:
    """Where to look, for a person.

    Args:
        away: the head, if this is another machine.
    """
    page = f"http://{host}:{port}/#/jobs/{job}"
    if away and host in ("127.0.0.1", "localhost", "::1"):
        return f"dashboard: {page}, after ssh -NL {port}:{host}:{port} {away}"
    return f"dashboard: {page}"
