"""An S3-compatible server on loopback that counts its requests and can be made to fail.

It runs in a separate process so that its imports do not share the tests' interpreter and warnings.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote

METHODS = (b"GET ", b"PUT ", b"POST", b"HEAD", b"DELE")
HANG_S = 60.0
CREDENTIALS = {
    "AWS_ACCESS_KEY_ID": "test",
    "AWS_SECRET_ACCESS_KEY": "test",
    "AWS_EC2_METADATA_DISABLED": "true",
}


@dataclass(frozen=True)
class Request:
    """A request received by the server: the object (``bucket/key``) and the range of bytes."""

    method: str
    path: str
    range: str
    query: str


@dataclass
class S3:
    """The running server and its one bucket."""

    port: int
    process: subprocess.Popen[str]
    bucket: str = "bucket"
    _kept: list[Request] = field(default_factory=list)

    def uri(self, path: str = "") -> str:
        """``s3://`` URI of a path in the bucket."""
        endpoint = quote(f"http://127.0.0.1:{self.port}", safe="")
        return f"s3://{self.bucket}/{path}?endpoint_override={endpoint}&region=us-east-1"

    def put(self, path: str, content: bytes) -> None:
        self._send("PUT", f"{self.bucket}/{quote(path)}", content)

    def put_folder(self, folder: Path, prefix: str) -> None:
        """Uploads all files below a folder."""
        for file in folder.rglob("*"):
            if file.is_file():
                self.put(f"{prefix}/{file.relative_to(folder)}", file.read_bytes())

    def delete(self, path: str) -> None:
        self._send("DELETE", f"{self.bucket}/{quote(path)}")

    def requests(self) -> list[Request]:
        """All requests since the last call."""
        return [Request(*fields) for fields in json.loads(self._send("GET", "-/requests"))]

    def gets(self) -> list[Request]:
        """Reads of objects since the last call."""
        return [r for r in self.requests() if r.method == "GET" and "list-type" not in r.query]

    def fail(self, times: int, method: str = "GET") -> None:
        """Responds with 500 to that many of the next reads (GET) or writes (PUT) of objects."""
        self._send("PUT", f"-/fail/{method}/{times}")

    def failing(self) -> dict[str, int]:
        """The number of reads and writes that will still fail."""
        failing: dict[str, int] = json.loads(self._send("GET", "-/failing"))
        return failing

    def most_at_once(self, delay_s: float) -> int:
        """The highest number of concurrent reads since the last call; delays each later response by
        this time."""
        return int(self._send("GET", f"-/most/{delay_s}"))

    def _send(self, method: str, path: str, content: bytes | None = None) -> bytes:
        url = f"http://127.0.0.1:{self.port}/{path}"
        signed = "AWS4-HMAC-SHA256 Credential=test/20260101/us-east-1/s3/aws4_request"
        headers = {"Content-Type": "application/octet-stream", "Authorization": signed}
        request = urllib.request.Request(url, data=content, method=method, headers=headers)
        with urllib.request.urlopen(request, timeout=30) as answer:
            return bytes(answer.read())


@contextmanager
def s3_server() -> Iterator[S3]:
    """Starts the server; credentials for it are in the environment meanwhile."""
    before = {name: os.environ.get(name) for name in CREDENTIALS}
    os.environ.update(CREDENTIALS)
    command = [sys.executable, "-W", "ignore", __file__]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            server = S3(int(process.stdout.readline()), process)
            server._send("PUT", server.bucket)
            yield server
        finally:
            process.kill()
            for name, value in before.items():
                os.environ.pop(name, None)
                if value is not None:
                    os.environ[name] = value


class Proxy:
    """Forwards connections; the next `left` requests with a given method fail.

    drops: the connection ends and the server never sees the request. cuts: the server has done
    what was asked, and its answer is lost. hangs: nothing happens for HANG_S. slow: half a second
    before the request is passed on.
    """

    def __init__(self, port: int) -> None:
        self._to = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self.fault, self.method, self.left = "", b"", 0
        self._over = threading.Event()
        threading.Thread(target=self._serve, daemon=True).start()

    def arm(self, fault: str, method: str, times: int) -> None:
        self.fault, self.method, self.left = fault, method.encode(), times

    def close(self) -> None:
        self._over.set()
        self._listener.close()

    def _serve(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                threading.Thread(target=self._forward, args=(client,), daemon=True).start()

    def _forward(self, client: socket.socket) -> None:
        server = socket.create_connection(("127.0.0.1", self._to))
        cut = threading.Event()
        back = threading.Thread(target=self._back, args=(server, client, cut), daemon=True)
        back.start()
        with client, server, suppress(OSError):
            while data := client.recv(1 << 16):
                if data[:4] in METHODS and data.startswith(self.method) and self.left > 0:
                    self.left -= 1
                    if self.fault == "drops":
                        break
                    if self.fault == "hangs":
                        self._over.wait(HANG_S)
                        break
                    if self.fault == "slow":
                        time.sleep(0.5)
                    if self.fault == "cuts":
                        cut.set()
                server.sendall(data)
            for each in (client, server):
                each.shutdown(socket.SHUT_RDWR)

    @staticmethod
    def _back(server: socket.socket, client: socket.socket, cut: threading.Event) -> None:
        with suppress(OSError):
            while data := server.recv(1 << 16):
                if cut.is_set() and not data.startswith(b"HTTP/1.1 100"):
                    break
                client.sendall(data)
            for each in (client, server):
                each.shutdown(socket.SHUT_RDWR)


def _serve() -> None:
    import logging
    from http import HTTPStatus

    from moto.server import DomainDispatcherApplication, create_backend_app
    from werkzeug.serving import make_server

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    store = DomainDispatcherApplication(create_backend_app)
    requests: list[list[str]] = []
    failing = {"GET": 0, "PUT": 0}
    delay_s, at_once, most = 0.0, 0, 0

    def answer(environ: dict[str, Any], start: Callable[..., Any]) -> Iterable[bytes]:
        nonlocal delay_s, at_once, most
        method, path = environ["REQUEST_METHOD"], environ["PATH_INFO"]
        if path.startswith("/-/"):
            content = json.dumps(requests).encode()
            requests.clear()
            if path.startswith("/-/fail/"):
                failing[path.split("/")[3]] = int(path.rpartition("/")[2])
            if path == "/-/failing":
                content = json.dumps(failing).encode()
            if path.startswith("/-/most/"):
                delay_s, content, most = float(path.rpartition("/")[2]), str(most).encode(), 0
            start(f"200 {HTTPStatus.OK.phrase}", [("Content-Length", str(len(content)))])
            return [content]
        range_, query = environ.get("HTTP_RANGE", ""), environ.get("QUERY_STRING", "")
        requests.append([method, path.lstrip("/"), range_, query])
        if method == "GET" and "list-type" not in query:
            at_once += 1
            most = max(most, at_once)
            time.sleep(delay_s)
            at_once -= 1
        if failing.get(method) and "list-type" not in query:
            failing[method] -= 1
            start("500 Internal Server Error", [("Content-Length", "0")])
            return []
        return store(environ, start)  # type: ignore[no-any-return]

    server = make_server("127.0.0.1", 0, answer, threaded=True)
    print(server.port, flush=True)
    server.serve_forever()


if __name__ == "__main__":
    _serve()
