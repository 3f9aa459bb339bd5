"""The live page: it shows what runs write as text, and only its reader may act."""

from __future__ import annotations

import html
import http.client
import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from html.parser import HTMLParser
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from processes import run_cli

from raytrain_ddp.checkpoint import growing_file
from raytrain_ddp.checkpoint.growing_file import GrowingFile
from raytrain_ddp.checkpoint.lease import LEASE_FILE, Lease, Owner
from raytrain_ddp.checkpoint.storage import Storage, open_storage
from raytrain_ddp.command_line import parse_fit
from raytrain_ddp.config.recipe import dumps, load
from raytrain_ddp.config.train_config import TrainConfig
from raytrain_ddp.errors import ConfigError, PreflightError
from raytrain_ddp.events import Plan, Train
from raytrain_ddp.tools.report import predictions
from raytrain_ddp.tools.report.history import history_of
from raytrain_ddp.tools.report.predictions import Predictor
from raytrain_ddp.tools.report.run_files import read_run
from raytrain_ddp.tools.watch.http_server import WatchServer
from raytrain_ddp.tools.watch.live_log import LiveLog, picked
from raytrain_ddp.tools.watch.watched_runs import WatchedRun, WatchedRuns, can_stop, stop_run

NASTY = "<script>alert(1)</script>&\"'><img src=x onerror=alert(1)>"


def train(step: int, loss: float | None = None, **changes: Any) -> dict[str, Any]:
    timing = {"step_s": 0.05, "split_s": {"data": 0.01, "compute": 0.04}, "peak_memory_bytes": 9}
    known = {"kind": "train", "step": step, "loss": 2.0 / step if loss is None else loss, "lr": 0.1}
    return {**known, "samples_per_s": 1000.0, "seconds": step / 20, "timing": timing, **changes}


def evaluation(step: int, value: float, name: str = "top1") -> dict[str, Any]:
    fields = {"metrics": {"loss": 0.5, name: value}, "monitor": name, "best": True}
    return {"kind": "eval", "step": step, **fields}


def plan(**changes: Any) -> dict[str, Any]:
    known = {"kind": "plan", "time": "2026-11-20T20:00:00Z", "total_steps": 100, "world_size": 2}
    return {**known, "device": "cpu", "unit": "images", **changes}


def end(status: int, **fields: Any) -> dict[str, Any]:
    return {"kind": "end", "time": "2026-11-20T20:05:00Z", "status": status, **fields}


def append(folder: Path, *records: dict[str, Any], file: str = "metrics.jsonl") -> None:
    with (folder / file).open("a") as opened:
        opened.write("".join(json.dumps(each) + "\n" for each in records))


def write(folder: Path, records: Sequence[Any] = (), events: Sequence[Any] = ()) -> Path:
    folder.mkdir(parents=True)
    config = TrainConfig(name=folder.name, storage=str(folder.parent), epochs=5)
    (folder / "config.toml").write_text(dumps(config))
    append(folder, *records)
    append(folder, *events, file="events.jsonl")
    return folder


@pytest.fixture
def place(tmp_path: Path) -> Path:
    steps = [train(step) for step in range(1, 31)]
    write(tmp_path / "runs" / "live", [*steps, evaluation(30, 0.9)], [plan()])
    write(tmp_path / "runs" / "done", [*steps, evaluation(30, 0.8)], [plan(), end(0, step=100)])
    wrong = {"kind": "failed", "time": "2026-11-20T20:01:00Z", "step": 3, "message": NASTY}
    nasty = plan(run=NASTY, unit=NASTY, device=NASTY, hosts=[NASTY] * 2, versions={NASTY: NASTY})
    records = [*(train(n, scalars={NASTY: 1.0}) for n in range(1, 9)), evaluation(8, 0.5, NASTY)]
    last = [nasty, wrong, {**plan(), "time": "2026-11-20T20:02:00Z"}, end(1, message=NASTY)]
    failed = write(tmp_path / "runs" / "failed", records, last)
    (failed / "config.toml").write_text(f"name = 'failed'\ntask = '''{NASTY}'''\n")
    (tmp_path / "runs" / "<b>no run has this name").mkdir()
    (tmp_path / "secret.txt").write_text("secret")
    return tmp_path / "runs"


class Site:
    """A server, and a browser's requests to it."""

    def __init__(self, place: Path, host: str = "127.0.0.1") -> None:
        self.runs = WatchedRuns(str(place))
        self.runs.look()
        self.runs.every_s = 0.0  # each request reads new content
        self.server = WatchServer(self.runs, host, 0, [("Grafana", "http://g/?a=1&b=2")])
        self.port = int(self.server.server_address[1])
        self.cookie = {"Cookie": f"{self.server.cookie}={self.server.token}"}
        Thread(target=self.server.serve_forever, args=(0.02,), daemon=True).start()

    def ask(self, path: str, method: str = "GET", **headers: str) -> tuple[int, str, Any]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        given = {name.replace("_", "-"): value for name, value in headers.items()}
        connection.request(method, path, headers=given)
        answer = connection.getresponse()
        text = answer.read().decode()
        connection.close()
        return answer.status, text, answer.headers

    def page(self, path: str, **headers: str) -> str:
        status, text, _ = self.ask(path, **headers)
        assert status == 200, text
        Parsed().feed(text)
        return text

    def act(self, action: str, name: str, **changes: str) -> int:
        own = {"Origin": f"http://127.0.0.1:{self.port}", "X-Confirm": action, **self.cookie}
        return self.ask(f"/{action}/{name}", "POST", **{**own, **changes})[0]

    def stop(self, name: str, **changes: str) -> int:
        return self.act("stop", name, **changes)

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()


def wait_for(is_done: Callable[[], bool], seconds: float) -> None:
    until = time.monotonic() + seconds
    while not is_done():
        assert time.monotonic() < until
        time.sleep(0.05)


class Parsed(HTMLParser):
    """Fails on scripts that are not ours, and on tags that are not closed in order."""

    EMPTY = ("meta", "img", "br", "link", "input")

    def __init__(self) -> None:
        super().__init__()
        self._open: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        assert not [name for name in given if name.startswith("on")]
        assert "javascript" not in (given.get("href") or "")
        assert tag != "img" or (given.get("src") or "").startswith("data:image/")
        assert tag != "script" or given.get("type") == "application/json" or "src" in given
        if tag not in self.EMPTY:
            self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag


@pytest.fixture
def site(place: Path) -> Iterator[Site]:
    opened = Site(place)
    yield opened
    opened.close()


@pytest.fixture
def driver(place: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A process that holds the lease of the run "live" and does nothing."""
    code = "import sys, time; sys.stdin.read()"
    process = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE)
    here = Owner.here()
    stat = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
    fields = {**vars(here), "pid": process.pid, "born": int(stat[19])}
    (place / "live" / LEASE_FILE).write_text(json.dumps(fields))
    yield process
    process.kill()
    process.communicate()


# ------------------------------------------------------------------ pages


def test_the_list_shows_each_run_with_its_state_running_ones_first(site: Site, driver: object):
    site.runs.look()
    page = site.page("/")
    assert re.findall(r'<a href="/run/(\w+)">', page) == ["live", "done", "failed"]
    assert re.findall(r'<small class="(\w+)">', page) == ["running", "finished", "failed"]
    assert "1 running, 1 failed, 1 finished" in page
    assert 'style="width:30.0%"' in page
    assert "Running: step 30 of 100, about" in page
    assert "top1 90.00 % at step 30" in page
    assert page.count('<svg class="spark"') == 3
    assert "no run has this name" not in page
    assert '<a href="http://g/?a=1&amp;b=2">Grafana</a>' in page


def test_a_run_page_has_the_sections_of_the_report_and_valid_commands(site: Site, place: Path):
    page = site.page("/run/live")
    titles = re.findall("<h2>([^<]+)</h2>", page)
    expected = ["Curves", "Speed", "What happened", "Checkpoints", "Config", "Environment"]
    assert titles == [*expected, "Commands"]
    assert "Disappeared after step 30 of 100" in page
    commands = re.findall(r"<code>python -m raytrain_ddp\.(\w+) ([^<]+)</code>", page)
    assert [name for name, _ in commands] == ["fit", "fit", "report"]
    made = parse_fit(shlex.split(html.unescape(commands[0][1]))).config
    assert made == load(str(place / "live" / "config.toml"))
    assert commands[1][1].endswith("live/config.toml")


def test_several_runs_are_overlaid(site: Site):
    page = site.page("/compare?run=live&run=done&run=nothing")
    assert "Where their configs differ" in page
    assert "Loss, smoothed" in page or "Loss (logarithmic), smoothed" in page
    assert "There is no run nothing." in page
    assert "Tick two runs or more" in site.page("/compare?run=live")


def test_runs_beyond_the_comparison_limit_are_reported(tmp_path: Path):
    for n in range(14):
        write(tmp_path / f"r{n:02}", [train(1)], [plan()])
    many = Site(tmp_path)
    page = many.page("/compare?" + "&".join(f"run=r{n:02}" for n in range(14)))
    many.close()
    assert "The first 12 of 14 runs; report shows all of them." in page
    assert ("What happened: r11" in page, "What happened: r12" in page) == (True, False)


def test_an_invalid_address_gets_status_400(site: Site):
    assert site.ask("x://[")[0] == 400


def test_an_update_contains_only_changes(site: Site, place: Path):
    for path in ("/", "/run/live", "/compare?run=live&run=done"):
        mark = "&" if "?" in path else "?"
        version = re.search(r'data-version="([^"]+)"', site.page(path))
        assert version
        assert site.ask(f"{path}{mark}update={version[1]}")[0] == 204
        before = site.page(path)
        append(place / "live", train(31 + len(path), 0.01))
        site.runs.look()
        status, content, headers = site.ask(f"{path}{mark}update={version[1]}")
        assert (status, headers["X-Version"] != version[1]) == (200, True)
        assert "<html" not in content
        assert content not in before


def test_an_empty_storage_waits_for_its_first_run_and_a_single_run_can_be_watched(tmp_path: Path):
    (tmp_path / "none").mkdir()
    site = Site(tmp_path / "none")
    assert "There is no run here yet" in site.page("/")
    write(tmp_path / "none" / "first", [train(1)], [plan()])
    site.runs.look()
    assert "1 run</h1>" in site.page("/")
    shutil.rmtree(tmp_path / "none" / "first")
    site.runs.look()
    assert site.ask("/run/first")[0] == 404
    site.close()
    alone = WatchedRuns(str(write(tmp_path / "alone", [train(1)])))
    alone.look()
    assert [*alone.runs] == ["alone"]


def test_a_failing_storage_is_named_and_the_list_remains(
    site: Site, monkeypatch: pytest.MonkeyPatch
):
    def broken(self: Storage) -> list[str]:
        raise OSError(f"out of order {NASTY}\nmore")

    with monkeypatch.context() as patch:
        patch.setattr(Storage, "names", broken)
        site.runs.look()
    page = site.page("/")
    assert "Not everything can be read</b><br>The storage: out of order" in page
    assert page.count("<tr>") == 1 + 3
    site.runs.look()
    assert "can be read" not in site.page("/")


def test_an_unreadable_run_does_not_hide_the_others(place: Path, monkeypatch: pytest.MonkeyPatch):
    once: Callable[[WatchedRun], None] = WatchedRun.read

    def read(run: WatchedRun) -> None:
        if run.name in ("done", "failed"):  # as root may read all files
            raise PermissionError(f"{run.name} is private")
        once(run)

    monkeypatch.setattr(WatchedRun, "read", read)
    os.mkdir(os.fsencode(place) + b"/\xffbad")
    (place / "two words").mkdir()
    runs = WatchedRuns(str(place))
    runs.look()
    assert [*runs.runs] == ["live"]
    assert (runs.is_complete, runs.trouble) == (True, "done: done is private (and 1 more)")


# ------------------------------------------------------------------ access


def test_content_of_runs_is_escaped_and_no_script_of_theirs_runs(site: Site):
    """`page` checks each answer for tags and handlers."""
    for path in ("/", "/run/failed", "/compare?run=failed&run=live"):
        assert "&lt;script&gt;alert(1)" in site.page(path)
        policy = site.ask(path)[2]["Content-Security-Policy"]
        assert "default-src 'none'; script-src 'self';" in policy
        assert "frame-ancestors 'none'" in policy
    assert site.ask("/")[2]["X-Content-Type-Options"] == "nosniff"


@pytest.mark.parametrize(
    "path",
    [
        *("/run/../secret.txt", "/run/..%2fsecret.txt", "/run/live/../../../secret.txt", "/run/"),
        *("/../secret.txt", "/secret.txt", "//etc/passwd", "/run/%00", "/live/config.toml"),
        *("/style.css/../../__main__.py", "/stop/live", f"/run/{'x' * 5000}", "/run/%ff%fe"),
    ],
)
def test_no_request_path_leaves_the_storage(site: Site, path: str):
    status, text, _ = site.ask(path)
    assert status == 404
    assert "secret" not in text.replace(path, "")
    HTMLParser().feed(text)


@pytest.mark.parametrize(
    ("host", "status"),
    [
        *[("localhost:9", 200), ("127.0.0.1", 200), ("[::1]:80", 200), (socket.gethostname(), 200)],
        *[("evil.example", 421), ("localhost.evil.example:80", 421), ("", 421), ("[bad", 421)],
    ],
)
def test_a_request_must_name_this_machine(site: Site, host: str, status: int):
    assert site.ask("/run/live", Host=host)[0] == status


def test_other_machines_need_the_token_which_the_link_contains(place: Path):
    site = Site(place, "0.0.0.0")
    for path in ("/", "/run/live", "/watch.js", "/?token=wrong"):
        status, text, _ = site.ask(path)
        assert (status, "live</a>" in text) == (403, False)
    status, text, headers = site.ask(f"/run/live?token={site.server.token}")
    assert (status, text, headers["Location"]) == (303, "", "/run/live")
    cookie = headers["Set-Cookie"]
    assert "HttpOnly; SameSite=Strict" in cookie
    assert site.ask("/run/live", Cookie=cookie.partition(";")[0])[0] == 200
    assert site.ask("/", Cookie=f"{site.server.cookie}=wrong")[0] == 403
    assert f":{site.port}/?token={site.server.token}" in site.server.url
    site.close()


def test_trials_of_sweeps_in_a_storage_are_listed_as_runs(site: Site, place: Path):
    steps = [train(step) for step in range(1, 4)]
    write(place / "tried" / "trial-0001", steps, [plan(), end(0, step=3)])
    (place / "tried" / "sweep.json").write_text("{}")
    site.runs.look()
    assert '<a href="/run/tried/trial-0001">tried/trial-0001</a>' in site.page("/")
    assert "<h1>tried/trial-0001" in site.page("/run/tried/trial-0001")
    assert "tried/trial-0001" in site.page("/compare?run=tried%2Ftrial-0001&run=done")
    assert site.stop("tried/trial-0001") == 409
    assert site.stop("tried/trial-0002") == 404


def test_a_trial_stopped_by_its_sweep_does_not_mention_a_signal(site: Site, place: Path):
    stop = {"kind": "sweep_stop", "time": "2026-11-20T20:04:00Z"}
    append(place / "done", plan(), stop, end(143, step=30), file="events.jsonl")
    page = site.page("/run/done")
    assert "Stopped by the sweep at step 30 of 100." in page
    assert "SIGTERM" not in page
    append(place / "done", plan(start_step=30), end(143, step=40), file="events.jsonl")
    assert "Interrupted by SIGTERM at step 40 of 100" in site.page("/run/done")


# ------------------------------------------------------------------ stopping


def test_the_button_stops_the_process_that_drives_the_run(
    site: Site, driver: subprocess.Popen[bytes]
):
    site.runs.look()
    assert "data-address" not in site.page("/run/live")  # without the token
    assert 'data-address="/stop/live"' in site.page("/run/live", **site.cookie)
    assert f"<code>kill -TERM {driver.pid}</code>" in site.page("/run/live")
    assert site.stop("live", Cookie="") == 403
    assert site.stop("live", Origin="http://evil.example") == 403
    assert site.stop("live", Origin="http://[") == 403
    assert site.stop("live", X_Confirm="") == 403
    assert site.stop("live", Host="evil.example") == 421
    assert site.stop("other") == 404
    assert site.stop("done") == 409
    assert driver.poll() is None
    assert site.stop("live") == 200
    assert driver.wait(20) == -15
    assert site.stop("live") == 409


@pytest.mark.parametrize("field", ["host", "machine", "born"])
def test_only_the_driver_of_the_run_is_stopped(
    place: Path, driver: subprocess.Popen[bytes], field: str
):
    """Not a process of another machine, or one with a reused PID."""
    owner = Owner.parse((place / "live" / LEASE_FILE).read_bytes())
    assert owner is not None
    assert can_stop(owner)
    other = Owner(**{**vars(owner), field: 7 if field == "born" else "other"})
    assert not can_stop(other)
    (place / "live" / LEASE_FILE).write_text(json.dumps(vars(other)))
    with pytest.raises(PreflightError, match="no process of this machine"):
        stop_run(history_of(read_run(str(place / "live"))))
    assert driver.poll() is None


# ------------------------------------------------------------------ mispredicted samples


def test_mispredicted_samples_are_shown_on_request(site: Site, place: Path):
    from tiny import commit_untrained_digits

    config = TrainConfig(name="done", micro_batch=64, batch_size=64)
    commit_untrained_digits(place / "done", config)
    assert "data-address" not in site.page("/run/done")  # without the token
    assert "Show wrong samples" not in site.page("/run/live", **site.cookie)  # no checkpoint
    page = site.page("/run/done", **site.cookie)
    assert 'data-address="/predict/done">Show wrong samples' in page
    assert site.act("predict", "done", Cookie="") == 403
    assert site.act("predict", "done", Origin="http://evil.example") == 403
    assert site.act("predict", "done", X_Confirm="stop") == 403
    assert site.act("predict", "other") == 404
    assert not site.server.predictor.found
    assert site.act("predict", "done") == 200
    assert site.act("predict", "done") == 409  # one at a time
    assert "is being evaluated" in site.page("/run/done")
    wait_for(lambda: "correct, with" in site.page("/run/done"), 120.0)
    page = site.page("/run/done", **site.cookie)
    assert "360 samples are correct" in page
    assert page.count('<img src="data:image/png;base64,') == 24
    assert "Evaluate again" in page


@pytest.mark.parametrize(
    ("code", "shown"),
    [
        (f"raise ValueError({NASTY!r})", f"ValueError: {NASTY}"),
        ("print('<b>'); print('<p>fine</p>')", None),
        ("import os; os.kill(os.getpid(), 9)", "its process was killed."),
        ("import time; time.sleep(60)", "it took over 1 s."),
    ],
)
def test_a_sample_process_without_a_result_reports_the_reason(
    place: Path, monkeypatch: pytest.MonkeyPatch, code: str, shown: str | None
):
    """Its message is escaped as text; what a task prints is not shown."""
    predictor, made = Predictor(), subprocess.Popen
    child = [sys.executable, "-c", code]
    monkeypatch.setattr(predictions, "_MOST_S", 1.0 if "sleep" in code else 60.0)
    monkeypatch.setattr(subprocess, "Popen", lambda command, **given: made(child, **given))
    predictor.start(history_of(read_run(str(place / "done"))))
    wait_for(lambda: predictor.found["done"][1] != "", 60.0)
    found = predictor.found["done"][1]
    assert found == (
        "<p>fine</p>" if shown is None else f"<p class=note>None: {html.escape(shown)}</p>"
    )


def test_the_sample_process_ends_with_the_server(place: Path, monkeypatch: pytest.MonkeyPatch):
    started = []

    def start(command: Sequence[str], **given: Any) -> Any:
        started.append(made([sys.executable, "-c", "import time; time.sleep(60)"], **given))
        return started[0]

    made = subprocess.Popen
    monkeypatch.setattr(subprocess, "Popen", start)
    site = Site(place)
    site.server.predictor.start(history_of(read_run(str(place / "done"))))
    site.close()
    assert started[0].wait(20) == -signal.SIGKILL


# ------------------------------------------------------------------ reading


def test_a_file_is_read_incrementally(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(growing_file, "PIECE_BYTES", 8)
    path, file = tmp_path / "a", GrowingFile(open_storage(str(tmp_path)), "a")

    def new() -> tuple[bool, list[bytes]]:
        is_new = file.is_new()
        return is_new, [line for lines in file.lines() for line in lines]

    def put(text: str) -> None:
        before = path.stat().st_mtime_ns if path.exists() else 0
        while not path.exists() or path.stat().st_mtime_ns == before:
            path.write_text(text)

    assert new() == (False, [])
    put("one\ntwo\nthr")
    assert new() == (True, [b"one", b"two"])
    assert new() == (False, [])
    put("one\ntwo\nthree\nfour\n")  # replaced by the same content and more, as on an object store
    assert new() == (True, [b"three", b"four"])
    put("one\ntwo\nthree\nsix\n")
    assert new() == (True, [b"one", b"two", b"three", b"six"])
    put("")
    assert new() == (True, [])
    path.unlink()
    assert new() == (True, [])


def test_a_long_log_keeps_the_extremes_and_the_last_records(tmp_path: Path):
    run = write(tmp_path / "long", [], [plan(), *({"kind": "checkpoint"} | plan() for _ in "ab")])
    losses = {500: 99.0, 1700: None, 2500: -5.0}
    records = [train(n, 1.0 + n / 1e4) for n in range(1, 3001)]
    for step, loss in losses.items():
        records[step - 1]["loss"] = loss
    append(run, *records, evaluation(3000, 0.5), {"kind": "audit", "step": 1, "sha256": "0"})
    log = LiveLog(open_storage(str(run)), 100)
    assert log.read()
    steps = [record.step for record in log.train]
    assert len(steps) <= 202
    assert steps == sorted({*steps})
    assert {500, 1700, 2500, 3000} <= {*steps}
    assert len(log.evals) == 1
    for step in range(3001, 3201):
        append(run, train(step))
        assert log.read()
        assert log.train[-1].step == step
    assert len(log.train) <= 202
    note = {"kind": "note", "time": "2026-11-20T20:01:00Z", "text": "n"}
    append(run, *[note] * 500, file="events.jsonl")
    log.read()
    assert len(log.events) <= 201
    assert isinstance(log.events[0].event, Plan)
    assert not log.read()


def test_the_kept_records_do_not_depend_on_the_number_of_reads():
    records = [Train(step=n, loss=float(n * 7919 % 1000)) for n in range(1, 400)]
    kept = picked(records, lambda record: record.loss, 40)
    assert len(kept) <= 41
    worst = {max(records, key=lambda r: r.loss).step, min(records, key=lambda r: r.loss).step}
    assert worst <= {record.step for record in kept}
    assert picked(records[:40], lambda record: record.loss, 40) == records[:40]


def test_a_resumed_run_has_no_duplicate_steps(place: Path):
    log = LiveLog(open_storage(str(place / "live")), 100)
    log.read()
    rest = [train(step) for step in range(1, 21)] + [train(21, 7.0)]
    text = "".join(json.dumps(each) + "\n" for each in rest)
    open_storage(str(place / "live")).write_atomic("metrics.jsonl", text.encode())
    assert log.read()
    assert [record.step for record in log.train] == [*range(1, 22)]
    assert (log.train[-1].loss, log.evals) == (7.0, [])


def test_a_lease_that_is_taken_and_released_changes_the_state(site: Site, place: Path):
    with Lease.take(open_storage(str(place / "done"))):
        site.runs.look()
        assert "1 running" in site.page("/")
    site.runs.look()
    assert "running" not in site.page("/").partition("<table")[0]


def test_an_fsspec_store_can_be_watched(place: Path):
    """Without times of its files, and by ranges."""
    fsspec = pytest.importorskip("fsspec")
    memory = fsspec.filesystem("memory")
    memory.put(str(place / "live"), "/watched/live", recursive=True)
    runs = WatchedRuns("memory://watched")
    runs.look()
    assert (runs.trouble, [*runs.runs]) == ("", ["live"])
    line = json.dumps(train(77)) + "\n"
    with memory.open("/watched/live/metrics.jsonl", "ab") as file:
        file.write(line.encode())
    runs.look()
    history = runs.runs["live"].history
    assert history is not None
    assert (runs.trouble, history.files.last_step) == ("", 77)
    memory.rm("/watched", recursive=True)


def test_ended_runs_in_a_bucket_are_read_less_often(
    place: Path, driver: object, monkeypatch: pytest.MonkeyPatch
):
    read: list[str] = []
    once: Callable[[WatchedRun], None] = WatchedRun.read
    monkeypatch.setattr(WatchedRun, "read", lambda run: (read.append(run.name), once(run)))
    runs = WatchedRuns(place.as_uri())
    object.__setattr__(runs.storage, "is_local", False)
    for number in range(6):
        runs.look(number)
    assert not runs.trouble
    assert (read.count("live"), read.count("done"), read.count("failed")) == (6, 1, 1)


# ------------------------------------------------------------------ the command


def test_help_answers_at_once(tmp_path: Path):
    answer = run_cli("watch", "--help-all", cwd=tmp_path)
    assert (answer.status, answer.heavy) == (0, [])
    assert "--host" in answer.out
    assert answer.cpu_s < 1.0


@pytest.mark.parametrize(
    ("argv", "line"),
    [
        (("nothing",), "nothing: there is no such storage.*"),
        (("runs", "--port", "70000"), "port = 70000: must be from 0 to 65535"),
        (("runs", "--host", "192.0.2.1"), "cannot listen on 192.0.2.1 port 8275: .*"),
        (("runs", "--grafana", "javascript:alert(1)"), "grafana = .* must be an http"),
        (("runs", "--grafana", "http://"), "grafana = 'http://': must be an http"),
    ],
)
def test_an_invalid_argument_is_refused_in_one_line(
    argv: tuple[str, ...], line: str, tmp_path: Path
):
    write(tmp_path / "runs" / "digits")
    answer = run_cli("watch", *argv, cwd=tmp_path)
    assert (answer.status, answer.heavy, answer.err.count("\n")) == (2, [], 1)
    assert re.match(f"error: {line}", answer.err)


def test_a_port_in_use_is_named(site: Site):
    with pytest.raises(ConfigError, match=rf"port {site.port}: Address already in use: give an"):
        WatchServer(site.runs, "127.0.0.1", site.port, [])


def test_the_command_serves_until_it_is_interrupted(place: Path):
    # A background job of a shell, as these tests may be, ignores it, and so would its child.
    obeys = "import runpy, signal; signal.signal(signal.SIGINT, signal.default_int_handler)"
    code = f"{obeys}; runpy.run_module('raytrain_ddp.tools.watch', run_name='__main__')"
    command = [sys.executable, "-c", code, str(place), "--port", "0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    link = re.search(r"127\.0\.0\.1:(\d+)/\?token=[\w-]+$", process.stdout.readline().strip())
    assert link, process.stderr
    connection = http.client.HTTPConnection("127.0.0.1", int(link[1]), timeout=30)
    until = time.monotonic() + 30
    text = ""
    while "3 runs" not in text and time.monotonic() < until:
        connection.request("GET", "/")
        text = connection.getresponse().read().decode()
    connection.close()
    assert "3 runs" in text
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=30)
    assert (process.returncode, errors) == (0, "")


@pytest.mark.browser
@pytest.mark.parametrize("width", [1280, 390])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_browser_shows_and_updates_the_page_without_errors(
    site: Site, driver: object, place: Path, width: int, scheme: str
):
    api = pytest.importorskip("playwright.sync_api")
    chromium = shutil.which("chromium") or shutil.which("chromium-browser")
    if chromium is None:
        pytest.skip("there is no chromium")
    from tiny import commit_untrained_digits

    commit_untrained_digits(place / "done", TrainConfig(name="done", micro_batch=64, batch_size=64))
    site.runs.look()
    base, complaints = f"http://127.0.0.1:{site.port}", []
    with api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
        page.on("console", lambda message: complaints.append(message.text))
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("request", lambda one: None if one.url.startswith(base) else asked.append(one.url))
        asked: list[str] = []
        page.goto(f"{base}/?token={site.server.token}")
        page.check("input[value=live]")
        page.fill("#filter", "i")
        assert page.locator("tbody tr:visible").count() == 2  # live, failed
        append(place / "live", train(60))
        site.runs.look()
        page.wait_for_selector("text=step 60 of 100", timeout=20000)
        assert page.is_checked("input[value=live]")
        assert page.locator("tbody tr:visible").count() == 2
        page.check("input[value=failed]")
        page.click("text=Compare the ticked runs")
        page.wait_for_selector("text=Where their configs differ")
        for path in ("/run/live", "/run/failed", "/compare?run=live&run=done"):
            page.goto(base + path)
            wide = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
            assert page.evaluate(wide) == 0, path
            plot = page.query_selector(".plot")
            plot.hover()
            assert plot.query_selector(".tip").inner_text()
        page.goto(f"{base}/run/live")
        page.click("summary")
        append(place / "live", train(61))
        page.wait_for_selector("text=step 61 of 100", timeout=20000)
        assert page.evaluate("document.querySelector('details').open")
        page.on("dialog", lambda dialog: dialog.accept())
        page.click(".stop")
        page.wait_for_selector("text=It ends after the current step", timeout=20000)
        page.goto(f"{base}/run/done")
        page.click("text=Show wrong samples")
        page.wait_for_selector("text=is being evaluated", timeout=20000)
        page.wait_for_selector(".gallery img", timeout=120000)
        assert page.evaluate(wide) == 0
        assert page.evaluate("document.querySelector('.gallery img').naturalWidth") > 0
        browser.close()
    assert [url for url in asked if not url.startswith("data:")] == []
    assert complaints == []
