"""Notices that a machine will end, from metadata services on loopback; `ray` is a stand-in."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from http.client import HTTPException
from pathlib import Path

import pytest
from metadata_server import (
    ACTION,
    EVENTS,
    MAINTENANCE,
    PREEMPTED,
    REBALANCE,
    Server,
    aws_action,
    azure_events,
    serve,
)

from raytrain_ddp.tools.spot import cloud_notices
from raytrain_ddp.tools.spot.__main__ import await_notice, drain, main
from raytrain_ddp.tools.spot.cloud_notices import Aws, Azure, Cloud, Gcp, Metadata, Notice

Make = Callable[[Metadata], Cloud]
CLOUDS: dict[str, Make] = {"aws": Aws, "azure": Azure, "gcp": lambda m: Gcp(m, has_gpu=True)}
NO_SECONDS = ("-1", "nan", "inf", "soon")
UNREADABLE = (OSError, ValueError, HTTPException)


@pytest.fixture
def server() -> Iterator[Server]:
    with serve() as server:
        yield server


def ends(cloud: Cloud) -> list[float]:
    """The end times of the notices that have one, in whole seconds."""
    return [round(left) for _, left in cloud.look() if left is not None]


def texts(cloud: Cloud) -> list[str]:
    return [text for text, left in cloud.look() if left is None]


@pytest.mark.parametrize("name", CLOUDS)
def test_without_a_notice_none_is_reported(server: Server, name: str):
    cloud = CLOUDS[name](Metadata(server.url))
    assert cloud.look() == cloud.look() == []


def test_aws_announces_an_end_to_requests_with_a_session_token(server: Server):
    cloud = Aws(Metadata(server.url))
    assert cloud.look() == []
    assert server.asked[:2] == ["PUT /latest/api/token", f"GET {ACTION}"]
    for action in ("terminate", "stop", "hibernate"):
        server.texts[ACTION] = aws_action(action, in_s=90)
        ((text, left_s),) = cloud.look()
        assert text.startswith(f"AWS: {action} at 20")
        assert left_s == pytest.approx(90, abs=3)
    assert server.asked.count("PUT /latest/api/token") == 1


def test_an_expired_aws_token_is_replaced(server: Server):
    cloud = Aws(Metadata(server.url))
    cloud.look()
    server.tokens.clear()
    server.texts[ACTION] = aws_action()
    assert ends(cloud) == [pytest.approx(120, abs=3)]


@pytest.mark.parametrize(("in_s", "left_s"), [(-7200, 1), (7200, 120)])
def test_fault_60_a_wrong_clock_does_not_shift_the_end_far(
    server: Server, in_s: float, left_s: float
):
    server.texts[ACTION] = aws_action(in_s=in_s)
    assert ends(Aws(Metadata(server.url))) == [left_s]


def test_an_aws_rebalance_recommendation_is_ignored(server: Server):
    server.texts[REBALANCE] = '{"noticeTime": "2026-10-27T08:22:00Z"}'
    cloud = Aws(Metadata(server.url))
    assert ends(cloud) == []
    assert texts(cloud) == ["AWS: rebalance recommendation, a risk but no date"]


@pytest.mark.parametrize(("kind", "most_s"), [("Preempt", 30), ("Terminate", 600)])
def test_azure_announces_the_end_of_this_machine(server: Server, kind: str, most_s: float):
    cloud = Azure(Metadata(server.url))
    server.texts[EVENTS] = azure_events(kind, in_s=most_s)
    assert ends(cloud) == [pytest.approx(most_s, abs=3)]
    server.texts[EVENTS] = azure_events(kind, machine="WORKER_0", in_s=None)  # it has begun
    assert ends(cloud) == [1]


def test_azure_events_for_other_machines_and_of_other_kinds_are_ignored(server: Server):
    cloud = Azure(Metadata(server.url))
    server.texts[EVENTS] = azure_events("Preempt", machine="worker_01")
    assert cloud.look() == []
    for kind in ("Freeze", "Reboot", "Redeploy", "Unheard"):
        server.texts[EVENTS] = azure_events(kind)
        assert ends(cloud) == []
        assert texts(cloud)[0].startswith(f"Azure: {kind} of this machine")


def test_google_cloud_announces_a_preemption(server: Server):
    cloud = Gcp(Metadata(server.url))
    assert cloud.look() == []
    server.texts[PREEMPTED] = "TRUE"
    assert ends(cloud) == [30]


@pytest.mark.parametrize(("gpu", "left_s"), [(True, 3600), (False, 60)])
def test_google_cloud_maintenance_ends_a_gpu_machine_within_an_hour(
    server: Server, gpu: bool, left_s: float
):
    cloud = Gcp(Metadata(server.url), has_gpu=gpu)
    assert cloud.look() == []
    server.texts[MAINTENANCE] = "TERMINATE_ON_HOST_MAINTENANCE"
    assert ends(cloud) == [left_s]
    assert ends(Gcp(Metadata(server.url), has_gpu=gpu)) == [60]  # at its maximum age
    server.texts[MAINTENANCE] = "MIGRATE_ON_HOST_MAINTENANCE"
    assert ends(cloud) == []
    assert texts(cloud) == ["Google Cloud: MIGRATE_ON_HOST_MAINTENANCE"]


# Responses that resemble a notice: none of these may drain a node.
GARBLED = [
    *(("aws", ACTION, text) for text in ("", "{", "[]", "null", "TRUE", '{"action": "terminate"}')),
    ("aws", ACTION, '{"action": "nothing", "time": "2026-11-23T08:22:00Z"}'),
    ("aws", ACTION, '{"action": "terminate", "time": "soon"}'),
    ("aws", ACTION, '{"action": "terminate", "time": 5}'),
    ("aws", ACTION, '{"action": ["terminate"], "time": "2026-11-23T08:22:00Z"}'),
    *(("azure", EVENTS, text) for text in ("", "{", "[]", "{}", '{"Events": {}}')),
    ("azure", EVENTS, '{"Events": ["Preempt"]}'),
    ("azure", EVENTS, '{"Events": [{"EventType": "Preempt"}]}'),
    ("azure", EVENTS, '{"Events": [{"EventType": "Preempt", "Resources": "worker_0"}]}'),
    (
        "azure",
        EVENTS,
        '{"Events": [{"EventType": "Preempt", "Resources": ["worker_0"], "NotBefore": "soon"}]}',
    ),
    *(("gcp", PREEMPTED, text) for text in ("", "true", "1", "<html>TRUE</html>")),
]


@pytest.mark.parametrize(("name", "path", "text"), GARBLED)
def test_an_unreadable_response_is_an_error_and_not_a_notice(
    server: Server, name: str, path: str, text: str
):
    server.texts[path] = text
    with pytest.raises(ValueError, match=r"\S"):
        CLOUDS[name](Metadata(server.url)).look()


@pytest.mark.parametrize("fault", ["500", "hangs", "breaks off"])
@pytest.mark.parametrize("name", CLOUDS)
def test_a_failing_service_is_an_error_within_the_time_limit(
    server: Server, name: str, fault: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(cloud_notices, "ANSWER_S", 0.2)
    server.texts.update({ACTION: aws_action(), EVENTS: azure_events("Preempt"), PREEMPTED: "TRUE"})
    server.fault = fault
    begun = time.monotonic()
    with pytest.raises(UNREADABLE):
        CLOUDS[name](Metadata(server.url)).look()
    assert time.monotonic() - begun < 10


def test_a_response_without_googles_header_is_rejected(server: Server):
    server.texts[PREEMPTED], server.flavor = "TRUE", "nginx"
    with pytest.raises(ValueError, match="not Google's metadata service"):
        Gcp(Metadata(server.url)).look()


def test_proxies_are_not_used(server: Server, monkeypatch: pytest.MonkeyPatch):
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    server.texts[PREEMPTED] = "TRUE"
    assert ends(Gcp(Metadata(server.url))) == [30]


# ------------------------------------------------------------------ waiting and draining


class Script:
    """A cloud that returns these notices, or raises these errors, in order."""

    def __init__(self, *looks: list[Notice] | Exception) -> None:
        self._looks = [*looks]

    def look(self) -> list[Notice]:
        look = self._looks.pop(0)
        if isinstance(look, Exception):
            raise look
        return look


def test_the_watch_reports_each_event_once_and_returns_at_the_first_end(
    capsys: pytest.CaptureFixture[str],
):
    risk, end = Notice("a risk", None), Notice("an end", 30.0)
    cloud = Script(
        [],
        ConnectionRefusedError("gone"),
        TimeoutError("hangs"),
        ValueError("garbled"),
        [risk],
        [risk],
        [risk, end],
    )
    assert await_notice(cloud, 0.0) == end
    lines = [line.partition(" spot: ")[2] for line in capsys.readouterr().out.splitlines()]
    assert lines == [
        "no notice can be read (ConnectionRefusedError: gone); asking again",
        "the metadata service answers again",
        "a risk: nothing is drained",
        "an end",
    ]


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
    program = tmp_path / "ray"
    program.write_text(RAY)
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    return tmp_path


def asked(ray: Path) -> list[list[str]]:
    notes = ray / "asked"
    return (
        [line.split("\t")[:-1] for line in notes.read_text().splitlines()] if notes.exists() else []
    )


def test_a_node_is_drained_as_preempted_with_rays_command(ray: Path):
    assert drain(Notice("AWS: terminate", 120.0), "head:6379", None)
    ((address, *words),) = asked(ray)
    assert address == "head:6379"
    assert words[:5] == [
        *("drain-node", "--reason", "DRAIN_NODE_REASON_PREEMPTION"),
        *("--reason-message", "AWS: terminate"),
    ]
    assert words[5] == "--deadline-remaining-seconds"
    assert 110 <= int(words[6]) <= 115  # counted from when it runs
    assert drain(Notice("x", 30.0), "head:6379", "0af5")
    assert asked(ray)[-1][-4:-2] == ["--node-id", "0af5"]


def test_fault_60_a_failed_drain_is_retried_until_the_machine_ends(
    ray: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setenv("FAKE_FAILURES", "1")
    assert drain(Notice("x", 30.0), "head:6379", None)
    assert len(asked(ray)) == 2
    assert "ray drain-node: Error: The drain request is not accepted: later" in (
        capsys.readouterr().out
    )
    monkeypatch.setenv("FAKE_FAILURES", "99")
    begun = time.monotonic()
    assert not drain(Notice("x", 1.0), "head:6379", None)
    assert not drain(Notice("x", 600.0), "head:6379", None, try_s=1.0)
    assert time.monotonic() - begun < 10


def test_now_drains_and_waits_for_the_pods_end_unless_the_head_is_unreachable(
    ray: Path, monkeypatch: pytest.MonkeyPatch
):
    begun = time.monotonic()
    assert main(["now", "--seconds", "4", "--address", "head:6379"]) == 0
    assert time.monotonic() - begun >= 4
    monkeypatch.setenv("FAKE_FAILURES", "99")
    monkeypatch.setattr("raytrain_ddp.tools.spot.__main__._TRY_S", 0.5)
    assert main(["now", "--seconds", "600", "--address", "head:6379"]) == 1
    assert time.monotonic() - begun < 30


def watcher(*words: str) -> subprocess.Popen[str]:
    """The watch, started as a file of clusters/ starts it."""
    command = [sys.executable, "-m", "raytrain_ddp.tools.spot", *words]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def said(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline()


def resident_mib(pid: int) -> float:
    status = Path(f"/proc/{pid}/status").read_text()
    (line,) = [line for line in status.splitlines() if line.startswith("VmRSS")]
    return int(line.split()[1]) / 1024


def test_fault_60_one_small_process_per_node_drains_it_once(ray: Path, server: Server):
    words = ("gcp", "--metadata", server.url, "--address", f"{server.url[7:]}", "--every-s", "0.1")
    first = watcher(*words)
    assert "looks for notices of gcp" in said(first)
    second = watcher(*words)
    assert "another process watches" in said(second)
    assert second.wait(30) == 0
    assert first.poll() is None
    assert resident_mib(first.pid) < 40
    assert asked(ray) == []
    server.texts[PREEMPTED] = "TRUE"
    assert "Google Cloud: preempted" in said(first)
    assert "this node is drained and ends in 2" in said(first)
    assert first.wait(30) == 0
    assert len(asked(ray)) == 1
    for process in (first, second):
        process.communicate()


def test_ctrl_c_ends_the_watch_without_a_traceback(ray: Path, server: Server):
    watch = watcher("gcp", "--metadata", server.url, "--address", f"{server.url[7:]}-c")
    assert "looks for notices" in said(watch)
    watch.send_signal(signal.SIGINT)
    out, _ = watch.communicate(timeout=30)
    assert (watch.returncode, out) == (130, "")


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["aws"], "give --address"),
        (["now", "--address", "a:1"], "needs --seconds"),
        (["gcp", "--seconds", "5", "--address", "a:1"], "needs --seconds"),
        (["gcp", "--metadata", "169.254.169.254", "--address", "a:1"], "want http://HOST"),
        (["gcp", "--metadata", "http://", "--address", "a:1"], "want http://HOST"),
        (["gcp", "--metadata", "http://h/x", "--address", "a:1"], "want http://HOST"),
        (["elsewhere", "--address", "a:1"], "invalid choice"),
        *((["now", "--address", "a:1", f"--seconds={word}"], word) for word in NO_SECONDS),
        *((["aws", "--address", "a:1", f"--every-s={word}"], word) for word in NO_SECONDS),
    ],
)
def test_a_watch_with_invalid_arguments_is_refused_at_once(
    ray: Path, words: list[str], why: str, capsys: pytest.CaptureFixture[str]
):
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 2
    assert why in capsys.readouterr().err


def test_a_watch_without_ray_is_refused_at_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SystemExit):
        main(["aws", "--address", "a:1"])
    assert "no `ray` on the PATH" in capsys.readouterr().err
