"""Finds Ray's dashboard, which shows a run as a job with its workers and their logs."""

from __future__ import annotations

import socket
from contextlib import suppress

from raytrain_ddp.events import Note


def dashboard_note() -> Note | None:
    """The address of the run's page in the dashboard of the connected Ray; None if it has none."""
    import ray

    # For a connected Ray, this only returns its address.
    ray_context = ray.init(ignore_reinit_error=True, configure_logging=False, logging_level="ERROR")
    host, _, port = (ray_context.dashboard_url or "").rpartition(":")
    context = ray.get_runtime_context()
    head = context.gcs_address.rpartition(":")[0]
    is_here = head == ray.util.get_node_ip_address()
    if not port.isdigit() or (is_here and not _listens(host, int(port))):
        return None  # Ray gives an address also if it runs none
    text = f"dashboard: http://{host}:{port}/#/jobs/{context.get_job_id()}"
    if not is_here and host in ("127.0.0.1", "localhost", "::1"):
        text += f", after ssh -NL {port}:{host}:{port} {head}"
    return Note(text)


def _listens(host: str, port: int) -> bool:
    with suppress(OSError), socket.create_connection((host, port), timeout=1.0):
        return True
    return False
