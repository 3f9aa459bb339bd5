"""Runs in Google Cloud Storage: a local emulator."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from tiny import bits, kept_steps, plain, run_tiny, tiny_config

from raytrain_ddp.checkpoint.lease import Lease
from raytrain_ddp.checkpoint.run_folder import run_storage
from raytrain_ddp.errors import RunLockedError

EMULATOR = "import sys; from gcp_storage_emulator.__main__ import main; main(sys.argv[1:])"


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def serve(command: list[str], port: int) -> subprocess.Popen[bytes]:
    """A server that responds; skips the test if it cannot be started."""
    nothing = subprocess.DEVNULL
    process = subprocess.Popen(command, stdin=nothing, stdout=nothing, stderr=nothing)
    until = time.monotonic() + 60
    while time.monotonic() < until and process.poll() is None:
        try:
            socket.create_connection(("127.0.0.1", port), 1).close()
            return process
        except OSError:
            time.sleep(0.1)
    process.kill()
    process.wait()
    pytest.skip(f"{command[0]} cannot be started here")


@pytest.fixture(scope="module")
def gcs() -> Iterator[str]:
    pytest.importorskip("gcp_storage_emulator")
    port = free_port()
    words = [
        "start",
        "--host=127.0.0.1",
        f"--port={port}",
        "--in-memory",
        "--default-bucket=bucket",
    ]
    process = serve([sys.executable, "-W", "ignore", "-c", EMULATOR, *words], port)
    yield f"gs://anonymous@bucket/PLACE?scheme=http&endpoint_override=127.0.0.1:{port}"
    process.kill()
    process.wait()


@pytest.fixture
def place(gcs: str, tmp_path: Path) -> str:
    """A URI that no other test uses."""
    return gcs.replace("PLACE", tmp_path.name)


def test_a_stopped_run_resumes_with_the_same_bits(place: str, tmp_path: Path):
    alone = tiny_config(tmp_path, "alone")
    run_tiny(0, 1, plain(alone))
    config = replace(alone, name="run", storage=place)
    with Lease.take(run_storage(config)):
        with pytest.raises(RunLockedError):
            Lease.take(run_storage(config))
        stopped = run_tiny(0, 1, plain(config), stop_at=17)
    assert stopped.outcome.step == 17
    resumed = run_tiny(0, 1, plain(config))
    assert resumed.start_step == 17
    assert bits(config) == bits(alone)
    assert kept_steps(config) == kept_steps(alone)
