"""One process drives a run: a second one is refused, the successor of a dead one resumes."""

from __future__ import annotations

import json
import signal
import subprocess
import threading
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from processes import wait_until
from warm_python import fit

from raytrain_ddp.checkpoint.lease import LEASE_FILE, Lease, Owner, holder, is_seen
from raytrain_ddp.checkpoint.run_folder import EVENTS_FILE, read_history
from raytrain_ddp.checkpoint.storage import Storage, open_storage

FIT = ["--local", "--name", "run", "--epochs", "500", "--checkpoint.every-steps", "20"]
FIT += ["--eval.every-epochs", "0"]


def starts(run: Storage) -> list[int]:
    """The first step of each start of the run."""
    events = read_history(run, EVENTS_FILE)
    return [event["start_step"] for event in events if event["kind"] == "plan"]


def wait_for(process: subprocess.Popen[str], holds: Callable[[], bool]) -> None:
    wait_until(lambda: holds() or process.poll() is not None, 100)
    assert process.poll() is None, process.communicate()


def test_fault_31_a_second_run_of_one_name_is_refused_and_a_killed_run_is_resumed(tmp_path: Path):
    run = open_storage(str(tmp_path / "runs" / "run"))
    first = fit(tmp_path, *FIT)
    wait_for(first, lambda: len(read_history(run)) > 8)
    second = fit(tmp_path, *FIT)
    out, _ = second.communicate(timeout=60)
    assert second.returncode == 8, out
    assert f"pid {first.pid}" in out
    assert "loading torch" not in out  # before anything expensive is started
    assert first.poll() is None

    first.kill()
    first.communicate()
    third = fit(tmp_path, *FIT)
    wait_for(third, lambda: starts(run)[1:] != [])
    third.send_signal(signal.SIGTERM)
    out, _ = third.communicate(timeout=60)
    assert third.returncode == 143, out
    assert "taken over from a dead process (host" in out
    assert not run.exists(LEASE_FILE)
    assert starts(run)[0] == 0
    assert starts(run)[1] >= 20
    end = read_history(run, EVENTS_FILE)[-1]
    assert (end["kind"], end["status"]) == ("end", 143)


def test_an_old_copy_of_a_runs_folder_is_not_mistaken_for_the_active_one(tmp_path: Path):
    """As on a host without the shared storage that once ran a run of the same name."""
    run, other = open_storage(str(tmp_path / "run")), open_storage(str(tmp_path / "other host"))
    other.mkdir()
    with Lease.take(run):
        token = holder(run)
        assert token
        assert is_seen(run, token, 0.1)
        assert not is_seen(other, token, 0.1)  # no lease
        other.write_atomic(LEASE_FILE, json.dumps(asdict(Owner.here())).encode())
        assert not is_seen(other, token, 0.1)  # the lease of an older start
        late = threading.Timer(0.3, other.write_atomic, (LEASE_FILE, run.read(LEASE_FILE)))
        late.start()
        assert is_seen(other, token, 20.0)  # NFS shows it after a delay
        late.join()
