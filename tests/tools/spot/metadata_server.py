"""The metadata services of three clouds on loopback, with their documented answers."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime, timedelta, timezone
from email.utils import format_datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

ACTION = "/latest/meta-data/spot/instance-action"
REBALANCE = "/latest/meta-data/events/recommendations/rebalance"
EVENTS = "/metadata/scheduledevents"
PREEMPTED = "/computeMetadata/v1/instance/preempted"
MAINTENANCE = "/computeMetadata/v1/instance/maintenance-event"


class Server:
    """The responses of the service, which a test can change; `tokens` are IMDSv2's."""

    def __init__(self) -> None:
        self.texts: dict[str, str] = {
            EVENTS: json.dumps({"DocumentIncarnation": 1, "Events": []}),
            "/metadata/instance/compute/name": "worker_0",
            PREEMPTED: "FALSE",
            MAINTENANCE: "NONE",
        }
        self.tokens: list[str] = []
        self.asked: list[str] = []
        self.fault = ""
        self.flavor = "Google"
        self.url = ""
        self.over = threading.Event()

    def answer(self, request: BaseHTTPRequestHandler) -> None:
        path = request.path.partition("?")[0]
        self.asked.append(f"{request.command} {path}")
        if self.fault == "hangs":
            self.over.wait(30)
            return
        if self.fault == "breaks off":
            request.wfile.write(b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n{")
            return
        status, text = (500, "oh") if self.fault == "500" else self._page(request, path)
        request.send_response(status)
        if path.startswith("/computeMetadata"):
            request.send_header("Metadata-Flavor", self.flavor)
        body = text.encode()
        request.send_header("Content-Length", str(len(body)))
        request.end_headers()
        request.wfile.write(body)

    def _page(self, request: BaseHTTPRequestHandler, path: str) -> tuple[int, str]:
        if path == "/latest/api/token":
            seconds = request.headers.get("X-aws-ec2-metadata-token-ttl-seconds", "")
            if request.command != "PUT" or not 1 <= int(seconds) <= 21600:
                return 400, ""
            self.tokens.append(f"token{len(self.asked)}")
            return 200, self.tokens[-1]
        if path.startswith("/latest/"):
            allowed = request.headers.get("X-aws-ec2-metadata-token") in self.tokens
            refused = 401, "Unauthorized"
        elif path.startswith("/metadata/"):
            allowed = request.headers.get("Metadata") == "true" and "?api-version=" in request.path
            refused = 400, '{"error": "Bad request. Required metadata header not specified"}'
        else:
            allowed = request.headers.get("Metadata-Flavor") == "Google"
            refused = 403, "Forbidden"
        if not allowed:
            return refused
        return (200, self.texts[path]) if path in self.texts else (404, "<html>Not Found</html>")


@contextmanager
def serve() -> Iterator[Server]:
    server = Server()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            server.answer(self)

        do_PUT = do_GET  # noqa: N815 (http.server's name)

        def log_message(self, *_: Any) -> None:
            """Silence."""

    listener = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    listener.daemon_threads = True
    server.url = f"http://127.0.0.1:{listener.server_port}"
    thread = threading.Thread(target=listener.serve_forever, args=(0.02,))
    thread.start()
    try:
        yield server
    finally:
        server.over.set()
        listener.shutdown()
        listener.server_close()
        thread.join()


def aws_action(action: str = "terminate", in_s: float = 120) -> str:
    at = datetime.fromtimestamp(time.time() + in_s, timezone.utc)
    return json.dumps({"action": action, "time": f"{at:%Y-%m-%dT%H:%M:%SZ}"})


def azure_events(kind: str, *, machine: str = "worker_0", in_s: float | None = 30) -> str:
    """The document of learn.microsoft.com; `in_s` None: the event has started."""
    at = datetime.now(timezone.utc) + timedelta(seconds=in_s or 0)
    event = {
        "EventId": "C7061BAC-AFDC-4513-B24B-AA5F13A16123",
        "EventStatus": "Scheduled" if in_s is not None else "Started",
        "EventType": kind,
        "ResourceType": "VirtualMachine",
        "Resources": ["other_7", machine],
        "NotBefore": format_datetime(at, usegmt=True) if in_s is not None else "",
        "Description": "",
        "EventSource": "Platform",
        "DurationInSeconds": -1,
    }
    return json.dumps({"DocumentIncarnation": 2, "Events": [event]})
