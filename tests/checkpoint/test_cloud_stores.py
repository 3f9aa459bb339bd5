"""Runs in Google Cloud Storage: a local emulator."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
from old_launchers import free_port
from processes import wait_until
from tiny import bits, kept_steps, plain, run_tiny, tiny_config

from raytrain_ddp.checkpoint.lease import Lease
from raytrain_ddp.checkpoint.run_folder import run_storage
from raytrain_ddp.errors import RunLockedError

EMULATOR = "import sys; from gcp_storage_emulator.__main__ import main; main(sys.argv[1:])"


@pytest.fixture(scope="module")
def gcs() -> Iterator[str]:
    pytest.importorskip("gcp_storage_emulator")
    port, nothing = free_port(), subprocess.DEVNULL
    words = ["start", "--host=127.0.0.1", f"--port={port}", "--in-memory"]
    command = [sys.executable, "-W", "ignore", "-c", EMULATOR, *words, "--default-bucket=bucket"]

    def responds() -> bool:
        with suppress(OSError), socket.create_connection(("127.0.0.1", int(port)), 1):
            return True
        return False

    with subprocess.Popen(command, stdin=nothing, stdout=nothing, stderr=nothing) as process:
        wait_until(lambda: process.poll() is not None or responds(), 60)
        if process.poll() is not None:
            pytest.skip("the emulator cannot be started here")
        yield f"gs://anonymous@bucket/PLACE?scheme=http&endpoint_override=127.0.0.1:{port}"
        process.kill()


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
