"""Ray's dashboard: where it is, and that it lists the run on its Train page."""

from __future__ import annotations

import ipaddress
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from raytrain_ddp.orchestration.cluster import settled

_LISTED = {"RAY_TRAIN_ENABLE_STATE_TRACKING": "1"}  # an actor more, and its process


def dashboard_address() -> tuple[str, int] | None:
    """Where Ray says that its dashboard is; None: it has none."""
    import ray

    # Of a Ray that is connected already, this only tells.
    told = ray.init(ignore_reinit_error=True, configure_logging=False, logging_level="ERROR")
    host, _, port = (told.dashboard_url or "").rpartition(":")
    return (host, int(port)) if port.isdigit() else None


@contextmanager
def listed(tell: Callable[[Mapping[str, Any]], None]) -> Iterator[None]:
    """Trainings that start meanwhile are on the Train page, if there is a dashboard; tells where.

    Args:
        tell: is given a note.
    """
    found = dashboard_address()
    if found is None:
        yield
        return
    import ray

    head = ray.get_runtime_context().gcs_address.rpartition(":")[0]
    away = head if head != ray.util.get_node_ip_address() else ""
    tell({"kind": "note", "text": said(*found, away)})
    with settled(_LISTED):
        yield


def said(host: str, port: int, away: str = "") -> str:
    """Where to look, for a person.

    Args:
        away: the head, where the dashboard is, if this is another machine.
    """
    own = ipaddress.ip_address(host).is_loopback if host[-1:].isdigit() else host == "localhost"
    if own and away:
        return f"dashboard: ssh -NL {port}:{host}:{port} {away}, http://{host}:{port}/#/train"
    return f"dashboard: http://{host}:{port}/#/train"
