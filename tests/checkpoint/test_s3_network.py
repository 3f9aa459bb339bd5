"""Checkpoints in a bucket over a network that drops, cuts, hangs, or is slow: moto behind a
proxy."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace

import pyarrow.fs as pafs
import pytest
from faulty_storage import commit, content, payload
from s3 import S3, s3_server

from raytrain_ddp.checkpoint.storage import open_storage
from raytrain_ddp.checkpoint.store import CheckpointStore

HANG_S = 60.0  # Arrow times out after seconds and retries: this test must be shorter
METHODS = (b"GET ", b"PUT ", b"POST", b"HEAD", b"DELE")


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


@pytest.fixture(scope="module")
def server() -> Iterator[S3]:
    with s3_server() as running:
        yield running


@pytest.fixture
def proxy(server: S3) -> Iterator[Proxy]:
    proxy = Proxy(server.port)
    yield proxy
    proxy.close()


def store_through(proxy: Proxy, server: S3, folder: str) -> CheckpointStore:
    behind = replace(server, port=proxy.port)
    return CheckpointStore(open_storage(behind.uri(folder).replace("s3://", "s3://test:test@")))


@pytest.mark.parametrize("fault", ["drops", "cuts", "hangs", "slow"])
@pytest.mark.parametrize("method", ["PUT", "GET", "HEAD"])
def test_a_checkpoint_is_complete_despite_network_failures(
    server: S3, proxy: Proxy, fault: str, method: str
):
    store = store_through(proxy, server, f"{fault}-{method}")
    commit(store, 1)
    proxy.arm(fault, method, 1 if fault == "hangs" else 2)
    begun = time.monotonic()
    commit(store, 2)
    newest = store_through(proxy, server, f"{fault}-{method}").latest(pytest.fail)
    assert newest is not None
    assert newest.name.step == 2
    assert content(newest) == payload(2)
    assert proxy.left == 0, "the fault was there"
    assert time.monotonic() - begun < HANG_S


def heads_of_a_write() -> list[str]:
    """The requests of Arrow's S3 client for a write to a server that then closes the connection."""
    heads = []
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            with suppress(OSError):
                while True:
                    client, _ = listener.accept()
                    with client:
                        heads.append(
                            client.recv(1 << 16).partition(b"\r\n\r\n")[0].decode().lower()
                        )

        threading.Thread(target=serve, daemon=True).start()
        once = pafs.AwsStandardS3RetryStrategy(max_attempts=1)
        place = f"127.0.0.1:{listener.getsockname()[1]}"
        store = pafs.S3FileSystem(
            **{"access_key": "a", "secret_key": "b", "scheme": "http", "region": "us-east-1"},
            **{"endpoint_override": place, "retry_strategy": once, "allow_delayed_open": True},
        )
        with suppress(OSError), store.open_output_stream("bucket/x") as stream:
            stream.write(b"hello")
        listener.shutdown(socket.SHUT_RDWR)
    return heads


def test_an_environment_variable_turns_off_aws_chunked_uploads(
    monkeypatch: pytest.MonkeyPatch,
):
    """The variable is in docs/troubleshooting.md."""
    monkeypatch.delenv("AWS_REQUEST_CHECKSUM_CALCULATION", raising=False)
    if not any("aws-chunked" in head for head in heads_of_a_write()):
        pytest.skip("this pyarrow does not send it")
    monkeypatch.setenv("AWS_REQUEST_CHECKSUM_CALCULATION", "when_required")
    heads = heads_of_a_write()
    assert any(head.startswith("put ") for head in heads)
    assert not any("aws-chunked" in head or "trailer" in head for head in heads)
