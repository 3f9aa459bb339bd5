"""Notices that a machine will end, from metadata services on loopback; `ray` is a stand-in."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from http.client import HTTPException
from pathlib import Path

import metadata_server as service
import pytest
from metadata_server import ACTION, EVENTS, MAINTENANCE, PREEMPTED, Server, aws_action, azure_events

from raytrain_ddp.tools.spot import CLOUDS, Notice, asks, drain, main


@pytest.fixture
def server() -> Iterator[Server]:
    with service.serve() as server:
        yield server


def looked(name: str, page: str, text: str) -> Notice | None:
    with service.serve() as server:
        server.texts[page] = text
        return CLOUDS[name][0](asks(server.url))


def test_fault_60_the_notices_of_clouds_are_read_without_a_proxy(monkeypatch: pytest.MonkeyPatch):
    """Also with a wrong clock, which does not shift the end far, and for machines in a set."""
    for proxy in ("http_proxy", "HTTP_PROXY", "all_proxy"):
        monkeypatch.setenv(proxy, "http://127.0.0.1:9")
    for name, page, text, s in (
        *(("aws", ACTION, aws_action(what, in_s=90), 90) for what in ("terminate", "stop")),
        ("aws", ACTION, aws_action(in_s=-7200), 1),
        ("aws", ACTION, aws_action(in_s=7200), 120),
        ("azure", EVENTS, azure_events("Preempt"), 30),
        ("azure", EVENTS, azure_events("Terminate", in_s=600), 600),
        ("azure", EVENTS, azure_events("Preempt", machine="WORKER_0", in_s=None), 1),
        ("azure", EVENTS, azure_events("Preempt", machine="worker_01"), None),
        *(("azure", EVENTS, azure_events(kind), None) for kind in ("Freeze", "Reboot", "Unheard")),
        ("gcp", PREEMPTED, "TRUE", 30),
        ("gcp", MAINTENANCE, "TERMINATE_ON_HOST_MAINTENANCE", 60),
        ("gcp", MAINTENANCE, "MIGRATE_ON_HOST_MAINTENANCE", None),
        *((cloud, "/other", "", None) for cloud in CLOUDS),
    ):
        notice = looked(name, page, text)
        assert (notice and notice.left_s) == (
            s if s in (1, 120) else s and pytest.approx(s, abs=20)
        )


# Responses that resemble a notice: none of these may drain a node.
GARBLED = [
    *(("aws", ACTION, text) for text in ("", "{", "[]", "null", "TRUE", '{"action": "terminate"}')),
    ("aws", ACTION, '{"action": "nothing", "time": "2026-11-23T08:22:00Z"}'),
    ("aws", ACTION, '{"action": "terminate", "time": "soon"}'),
    ("aws", ACTION, '{"action": ["terminate"], "time": "2026-11-23T08:22:00Z"}'),
    *(("azure", EVENTS, text) for text in ("", "{", "[]", "{}", '{"Events": {}}')),
    ("azure", EVENTS, '{"Events": ["Preempt"]}'),
    ("azure", EVENTS, '{"Events": [{"EventType": "Preempt", "Resources": "worker_0"}]}'),
    ("azure", EVENTS, azure_events("Preempt").replace('"NotBefore": "', '"NotBefore": "soon ')),
    *(("gcp", PREEMPTED, text) for text in ("", "true", "1", "<html>TRUE</html>")),
]


def test_an_unreadable_response_is_an_error_and_not_a_notice():
    for garbled in GARBLED:
        with pytest.raises(ValueError, match=r"\S"):
            looked(*garbled)


def test_a_failing_service_is_an_error_within_the_time_limit(server: Server):
    server.texts.update({ACTION: aws_action(), EVENTS: azure_events("Preempt"), PREEMPTED: "TRUE"})
    begun = time.monotonic()
    for server.fault in ("500", "breaks off", "hangs"):
        for look, _ in CLOUDS.values():
            with pytest.raises((OSError, ValueError, HTTPException)):
                look(asks(server.url))
    assert time.monotonic() - begun < 30
    server.fault, server.flavor = "", "nginx"
    with pytest.raises(ValueError, match="not Google's metadata service"):
        CLOUDS["gcp"][0](asks(server.url))


# ------------------------------------------------------------------ waiting and draining

RAY = """#!/bin/sh
notes=$(dirname "$0")/asked
printf '%s\\t' "$RAY_ADDRESS" "$@" >> "$notes"
echo >> "$notes"
[ $(wc -l < "$notes") -gt ${FAKE_FAILURES:-0} ] && exit 0
echo "Traceback" >&2
echo "Error: The drain request is not accepted: later" >&2
exit 1
"""


@pytest.fixture
def ray(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a fake `ray` that records its calls."""
    (tmp_path / "ray").write_text(RAY)
    (tmp_path / "ray").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("RAY_ADDRESS", "")
    return tmp_path


def asked(ray: Path) -> list[list[str]]:
    return [line.split("\t")[:-1] for line in (ray / "asked").read_text().splitlines()]


def test_fault_60_a_node_is_drained_as_preempted_and_asked_again_until_the_machine_ends(
    ray: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setenv("FAKE_FAILURES", "1")
    assert drain(Notice("AWS: terminate", 120.0), "0af5")
    assert len(asked(ray)) == 2
    assert "drain-node: Error: The drain request is not accepted: later" in capsys.readouterr().out
    words = asked(ray)[0]
    assert words[1:4] == ["drain-node", "--reason", "DRAIN_NODE_REASON_PREEMPTION"]
    given = dict(zip(words[2::2], words[3::2], strict=True))
    assert (given["--reason-message"], given["--node-id"]) == ("AWS: terminate", "0af5")
    assert 105 <= int(given["--deadline-remaining-seconds"]) <= 115  # counted from when it runs
    monkeypatch.setenv("FAKE_FAILURES", "99")
    begun = time.monotonic()
    assert not drain(Notice("x", 1.0), None)
    assert not drain(Notice("x", 600.0), None, try_s=1.0)
    assert time.monotonic() - begun < 10


def test_now_drains_and_waits_for_the_pods_end(ray: Path):
    begun = time.monotonic()
    assert main(["now", "--seconds", "3", "--address", "head:6379"]) == 0
    assert time.monotonic() - begun >= 3
    assert asked(ray)[0][0] == "head:6379"


def watcher(*words: str) -> subprocess.Popen[str]:
    """The watch, started as a file of clusters/ starts it."""
    command = [sys.executable, "-m", "raytrain_ddp.tools.spot", *words]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def said(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline()


def test_fault_60_one_small_process_per_node_drains_it_once(ray: Path, server: Server):
    words = ("gcp", "--metadata", server.url, "--address", server.url[7:], "--every-s", "0.1")
    server.fault = "500"
    with watcher(*words) as first:
        assert "looks for notices of gcp" in said(first)
        assert "no notice can be read (HTTPError: " in said(first)
        server.fault = ""
        with watcher(*words) as second:
            assert "another process watches" in said(second)
            assert second.wait(30) == 0
        with watcher(*words[:4], f"{server.url[7:]}-c") as other:
            assert "looks for notices" in said(other)
            other.send_signal(signal.SIGINT)
            assert (other.wait(30), said(other)) == (130, "")
        status = Path(f"/proc/{first.pid}/status").read_text()
        (resident,) = [line for line in status.splitlines() if line.startswith("VmRSS")]
        assert int(resident.split()[1]) < 40 * 1024
        assert not (ray / "asked").exists()
        server.texts[PREEMPTED] = "TRUE"
        assert "Google Cloud: preempted" in said(first)
        assert "this node is drained and ends in 2" in said(first)
        assert first.wait(30) == 0
        assert len(asked(ray)) == 1


def test_invalid_arguments_are_refused_at_once(ray: Path, capsys, monkeypatch):
    seconds = ("-1", "nan", "inf", "soon")
    for line, why in (
        ("aws", "give --address"),
        ("now --address a:1", "needs --seconds"),
        ("gcp --seconds 5 --address a:1", "needs --seconds"),
        ("elsewhere --address a:1", "invalid choice"),
        *((f"now --address a:1 --seconds={word}", word) for word in seconds),
        *((f"aws --address a:1 --every-s={word}", word) for word in seconds),
        ("aws --address a:1", "no `ray` on the PATH"),
    ):
        if "PATH" in why:
            monkeypatch.setenv("PATH", "/nowhere")
        with pytest.raises(SystemExit) as ended:
            main(line.split())
        assert ended.value.code == 2
        assert why in capsys.readouterr().err
