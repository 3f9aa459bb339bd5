"""The report: one HTML file about runs, whatever their folders contain."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from html import unescape
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from processes import run_cli

import raytrain_ddp
from raytrain_ddp.checkpoint.lease import Lease
from raytrain_ddp.checkpoint.manifest import Manifest
from raytrain_ddp.checkpoint.run_folder import CHECKPOINTS
from raytrain_ddp.checkpoint.storage import open_storage
from raytrain_ddp.checkpoint.store import CheckpointStore
from raytrain_ddp.config.recipe import dumps, to_dict
from raytrain_ddp.config.sections import DataConfig, OptimConfig
from raytrain_ddp.config.train_config import TrainConfig
from raytrain_ddp.errors import ConfigError
from raytrain_ddp.tools.report.charts import PHASES
from raytrain_ddp.tools.report.predictions import classes
from raytrain_ddp.tools.report.run_files import Happening, State, happenings, read_run, state_of
from raytrain_ddp.tools.report.write import report

NASTY = "<script>alert(1)</script>&\"'"
PER_EPOCH = 23


def train(step: int, seconds: float, total: float | None = None, **changes: Any) -> dict[str, Any]:
    slowest = {"rank": 1, "phase": "data", "ratio": 1.4}
    split = {"data": 0.01, "compute": 0.03, "communication": 0.01, "evaluation": 0.005}
    timing = {"step_s": 0.05, "split_s": split, "slowest": slowest, "peak_memory_bytes": 2**30}
    known = {"kind": "train", "step": step, "epoch": (step - 1) // PER_EPOCH, "lr": 0.1}
    clock = {"seconds": seconds, "seconds_total": seconds if total is None else total}
    figures = {"loss": 2.0 / step, "samples_per_s": 1000.0 + step, "timing": timing}
    return {**known, **clock, **figures, **changes}


def evaluation(step: int, top1: float, best: bool, name: str = "top1") -> dict[str, Any]:
    fields = {"metrics": {"loss": 1.0 - top1, name: top1}, "monitor": name, "best": best}
    return {"kind": "eval", "step": step, "epoch": step // PER_EPOCH, "seconds": 1.0, **fields}


def plan(time: str, start_step: int, workers: int, **changes: Any) -> dict[str, Any]:
    steps = {"total_steps": 230, "steps_per_epoch": PER_EPOCH, "world_size": workers}
    data = {"train_samples": 1437, "eval_samples": 360, "unit": "images", "parameters": 131754}
    known = {"kind": "plan", "time": time, "run": "r", "start_step": start_step, "device": "cpu"}
    return {**known, **steps, **data, **changes}


def end(time: str, status: int, **fields: Any) -> dict[str, Any]:
    return {"kind": "end", "time": time, "status": status, **fields}


def write(
    folder: Path,
    records: Sequence[dict[str, Any]] = (),
    events: Sequence[dict[str, Any]] = (),
    config: TrainConfig | None = None,
) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, each in {"metrics.jsonl": records, "events.jsonl": events}.items():
        (folder / name).write_text("".join(json.dumps(one) + "\n" for one in each))
    (folder / "config.toml").write_text(dumps(config or TrainConfig(name=folder.name)))
    return folder


def page_of(*places: Path, out: Path | None = None, **options: Any) -> str:
    return report(*places, out=out, predict=False, **options).path.read_text(encoding="utf-8")


def state_at(run: Path) -> State:
    return state_of(read_run(str(run)))


def happened(run: Path) -> list[Happening]:
    return [*happenings(read_run(str(run)))]


@pytest.fixture
def troubled(tmp_path: Path) -> Path:
    """Two workers, one of them killed at step 57 after a checkpoint at 46; a night later, three
    resume."""
    killed = "crashed, or was killed, on n2 at step 57; resuming from step 46"
    events = [
        plan("2026-11-20T20:00:00Z", 0, 2),
        {"kind": "checkpoint", "time": "2026-11-20T20:00:46Z", "step": 46, "name": "x"},
        {"kind": "failed", "time": "2026-11-20T20:00:57Z", "rank": 1, "step": 57}
        | {"node": "n2", "error": "the end of rank 1", "message": killed},
        plan("2026-11-20T20:01:07Z", 46, 2, resumed_from="step-00000046-a0001"),
        end("2026-11-20T20:01:40Z", 130, step=69),
        plan("2026-11-21T08:00:00Z", 69, 3, hosts=["a", "a", "b"], versions={"torch": "9.9"}),
        end("2026-11-21T08:01:00Z", 0, step=115),
    ]
    records = [train(step, float(step)) for step in range(5, 50, 5)]
    records += [train(step, step - 46.0, float(step)) for step in range(50, 70, 5)]
    records += [train(step, step - 69.0, float(step)) for step in range(70, 116, 5)]
    evals = [evaluation(step, 0.5 + step / 300, step <= 92) for step in range(23, 116, 23)]
    records = sorted([*records, *evals], key=lambda record: record["step"])
    return write(tmp_path / "troubled", records, events, TrainConfig(name="troubled", epochs=5))


class _Seen(HTMLParser):
    """Tags and attributes."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str]] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(name, value or "") for name, value in attrs]


def hovers(page: str) -> Iterator[str]:
    for text in re.findall(r'<script type="application/json">(.*?)</script>', page):
        for _, lines in json.loads(text):
            yield "\n".join(line for _, line in lines)


# ------------------------------------------------------------------ the file


def test_the_report_is_one_file_that_loads_no_other_resource(troubled: Path):
    page = page_of(troubled)
    seen = _Seen(page)
    assert not {"link", "iframe", "object", "base", "form"} & set(seen.tags)
    for name, value in seen.attributes:
        assert name not in ("src", "href", "srcset", "action") or value.startswith(("data:", "#"))
        assert not name.startswith("on")
    assert not re.search(r"url\((?!#)|@import|fetch\(|XMLHttp", page)
    assert "default-src 'none'" in page
    assert "refresh" not in page
    assert len(page) < 200_000


def test_content_from_a_run_is_escaped_as_text(tmp_path: Path):
    folder = tmp_path / "<b>run<img src=x onerror=alert(1)>"
    failed = {"kind": "failed", "time": "2026-11-20T20:00:57Z", "rank": 0, "step": 2}
    events = [
        plan("2026-11-20T20:00:00Z", 0, 2, device=NASTY, unit=NASTY, hosts=[NASTY]),
        {**failed, "message": NASTY},
        end("2026-11-20T20:01:00Z", 1, message=f"{NASTY}\nTraceback\n{NASTY}"),
    ]
    records = [train(1, 1.0, scalars={NASTY: 1.0}), evaluation(1, 0.5, True, name=NASTY)]
    records[0]["timing"]["slowest"]["phase"] = NASTY
    config = TrainConfig(name="x", task_options={NASTY: "</script><b>"}, storage=NASTY)
    run = write(folder, records, events, config)
    for page in (page_of(run), page_of(run, run, out=tmp_path / "two.html")):
        seen = _Seen(page)
        assert not {"img", "b>run<img"} & set(seen.tags)
        assert not [name for name, _ in seen.attributes if name.startswith("on")]
        assert seen.tags.count("script") == page.count('<div class="plot">') + 1
        assert "<script>alert" not in page
        assert any("alert(1)" in text for text in hovers(page))


def test_a_report_is_written_to_the_run_the_working_folder_or_the_given_path(
    troubled: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    two = shutil.copytree(troubled, tmp_path / "two")
    assert report(troubled, predict=False).path == troubled / "report.html"
    assert report(str(troubled), two).path == Path("report.html")
    assert report(tmp_path).path == tmp_path / "report.html"
    made = raytrain_ddp.report(troubled, out="new/a.html", predict=False)
    assert made.path == Path("new/a.html")
    assert "srcdoc=" in made._repr_html_()
    assert [path.name for path in tmp_path.glob("new/*")] == ["a.html"]
    Path("a.html").touch()
    with pytest.raises(ConfigError, match=r"cannot be written .* --out"):
        report(troubled, out="a.html/b.html", predict=False)


@pytest.mark.parametrize("out", [".", "", "new", "new/", "{run}", "{run}/config.toml"])
def test_a_report_overwrites_only_an_html_page(out: str, troubled: Path):
    before = (troubled / "config.toml").read_text()
    with pytest.raises(ConfigError, match="--out"):
        report(troubled, out=out.format(run=troubled), predict=False)
    assert (troubled / "config.toml").read_text() == before


def test_a_notebook_shows_the_curves_of_a_run(troubled: Path):
    assert raytrain_ddp.plot(troubled)._repr_png_().startswith(b"\x89PNG")


# ------------------------------------------------------------------ one run


def test_the_report_shows_a_killed_and_resized_run(troubled: Path):
    texts, page = [one.text for one in happened(troubled)], unescape(page_of(troubled))
    assert texts[1].startswith("Rank 1 crashed, or was killed, on n2 at step 57")
    assert "11 steps repeated; 10 s without training" in texts[2]
    assert texts[3] == "Interrupted by Ctrl-C (SIGINT)"
    assert "with 3 workers on cpu (before: 2)" in texts[4]
    for text in (*texts, "Finished at step 115 of 230", "2→3", "3 starts", "torch 9.9", "80.67"):
        assert text in page
    assert "11 steps repeated" in "\n".join(hovers(page))
    assert "1m55s" in page  # at work: not the night, nor what was repeated


def test_the_report_counts_no_repeated_steps_for_a_replaced_worker(tmp_path: Path):
    events = [
        plan("2026-11-20T20:00:00Z", 0, 2),
        {"kind": "failed", "time": "2026-11-20T20:00:57Z", "rank": 1, "step": 57, "message": "m"},
        plan("2026-11-20T20:01:07Z", 56, 2, replaced=[1]),
        plan("2026-11-20T20:01:08Z", 56, 1, replaced=[]),
        plan("2026-11-20T20:01:20Z", 60, 3, replaced=[1, 2]),
        end("2026-11-20T20:02:00Z", 0, step=115),
    ]
    found = happened(write(tmp_path / "run", [], events))
    assert [one.text for one in found[2:5]] == [
        "Rank 1 replaced; the others kept their state of step 56; 10 s without training",
        "Continuing with 1 worker; the others kept their state of step 56",
        "Grew from 1 to 3 workers, nothing repeated; the others kept their state of step 60",
    ]
    assert [one.flag for one in found[2:5]] == ["↻", "2→1", "1→3"]


def test_a_run_that_failed_before_its_first_step_has_a_report(tmp_path: Path):
    message = "the task failed while starting on n1, rank 2:\nTraceback\n  x\nValueError: no <data>"
    cause = {"rank": 2, "node": "n1", "step": None, "error": "ValueError"}
    run = write(tmp_path / "r", [], [end("2026-11-20T20:00:00Z", 1, message=message, **cause)])
    state = state_at(run)
    assert (state.name, state.summary) == (
        "failed",
        "Failed before its first step, first on rank 2 of node n1.",
    )
    assert state.cause.endswith("on n1, rank 2: ValueError: no <data>")
    assert "ValueError: no &lt;data&gt;" in page_of(run)


def test_a_log_with_few_records_or_without_times_gives_a_report(tmp_path: Path):
    begun = [plan("2026-11-20T20:00:00Z", 0, 2)]
    bare = [{"kind": "train", "step": n, "loss": 1.0, "lr": 0.1, "epoch": 0} for n in (1, 2, 3)]
    assert "<svg" in page_of(write(tmp_path / "one", [train(1, 0.5)], begun))
    assert "Throughput" not in page_of(write(tmp_path / "bare", bare))
    assert "is not finite" in page_of(write(tmp_path / "lost", [train(1, 0.5, loss=None)], begun))
    none = page_of(write(tmp_path / "none"))
    assert "<svg" not in none
    assert "Disappeared before its first step" in none


def test_a_long_and_often_restarted_run_has_a_small_page(tmp_path: Path):
    records, events = [], []
    for start in range(0, 20_000, 50):
        at = f"2026-11-20T{20 + start // 7200:02d}:{start // 120 % 60:02d}:{start // 2 % 60:02d}Z"
        events.append(plan(at, start, 2))
        records += [train(start + n, n / 2, (start + n) / 2) for n in range(1, 51)]
    assert len(page_of(write(tmp_path / "r", records, events))) < 500_000


@pytest.mark.parametrize("apart", [1e-12, 3e-16])
def test_nearly_equal_values_still_get_an_axis(tmp_path: Path, apart: float):
    records = [train(n, float(n), loss=0.7 + n * apart) for n in range(1, 9)]
    records.append(evaluation(8, 0.5 + apart, True))
    assert "<svg" in page_of(write(tmp_path / "r", records, [plan("2026-11-20T20:00:00Z", 0, 2)]))


def test_a_running_run_is_distinguished_from_a_dead_one(tmp_path: Path):
    records, events = [train(10, 5.0)], [plan("2026-11-20T20:00:00Z", 0, 2)]
    run = write(tmp_path / "r", records, events)
    assert state_at(run).name == "gone"
    with Lease.take(open_storage(str(run))):
        state = state_at(run)
        assert state == ("running", "Running: step 10 of 230, about 1m50s left.", "")
    write(run, records, [*events, end("2026-11-20T21:00:00Z", 143, step=10)])
    assert state_at(run).name == "interrupted"
    assert "SIGTERM" in state_at(run).summary


def test_the_config_shows_what_differs_from_its_defaults(troubled: Path):
    page = page_of(troubled)
    assert ">optim.lr " not in page
    assert re.search(r">epochs .*?>5 .*?>12 ", page, re.S)


def test_every_step_phase_is_drawn():
    from raytrain_ddp.training.monitoring import step_timing

    assert set(PHASES) == set(step_timing.PHASES)


# ------------------------------------------------------------------ several runs


@pytest.fixture
def storage(troubled: Path) -> Path:
    """`troubled`, one that is ahead, and a sweep of two trials."""
    records = [train(n, float(n)) for n in range(10, 116, 10)]
    records.append(evaluation(115, 0.9, True))
    events = [plan("2026-11-20T20:00:00Z", 0, 4)]
    write(troubled.parent / "other", records, events, TrainConfig(name="other", seed=7))
    for n, (lr, status) in enumerate([(0.1, 143), (0.01, 0)]):
        kind = {"kind": "sweep_stop", "time": "2026-11-20T21:00:00Z"}
        done = [*events, *[kind] * (status > 0), end("2026-11-20T21:00:00Z", status, step=230)]
        config = TrainConfig(name=f"trial-{n:04d}", optim=OptimConfig(lr=lr))
        records = [train(230, 9.0), evaluation(230, 0.5 + 0.4 * n, True)]
        write(troubled.parent / "sweep" / f"trial-{n:04d}", records, done, config)
    (troubled.parent / "sweep" / "sweep.json").write_text("{}")
    return troubled.parent


def test_several_runs_are_shown_together_with_where_their_configs_differ(storage: Path):
    page = page_of(storage / "troubled", storage / "other", out=storage / "both.html")
    for text in ("80.67", "90.00", "top1 (evaluation)", ">seed ", ">epochs "):
        assert text in page
    assert ">storage " not in page
    assert any("troubled" in text and "other" in text for text in hovers(page))
    (storage / "other" / "config.toml").unlink()
    page = page_of(storage / "troubled", storage / "other", out=storage / "both.html")
    assert ">seed " not in page


def test_the_page_of_a_storage_has_all_runs_running_ones_first(storage: Path):
    with Lease.take(open_storage(str(storage / "other"))):
        page = page_of(storage)
    assert "4 runs" in page
    names = re.findall(r'<input type="checkbox" name="run\d+" value="([^"]*)" checked>', page)
    assert names[0] == "other"
    assert {*names} == {"other", "troubled", "sweep/trial-0000", "sweep/trial-0001"}
    assert "Running: step 115 of 230, about 2m00s left." in page
    assert 'style="--share: 50.0%"' in page
    assert 'id="run0"' in page, "the curves of a run can be hidden"


def test_a_page_that_is_written_again_shows_what_is_new_and_reloads_itself(storage: Path):
    assert "2 running" not in page_of(storage, every_s=30)
    with Lease.take(open_storage(str(storage / "other"))):
        page = page_of(storage, every_s=30)
    assert "1 running" in page
    assert '<meta http-equiv="refresh" content="30">' in page
    with (storage / "other" / "events.jsonl").open("a") as file:
        file.write(json.dumps(end("2026-11-20T21:00:00Z", 0, step=230)) + "\n")
    assert "Finished at step 230 of 230" in page_of(storage, every_s=30)


def test_an_unreadable_run_does_not_hide_the_others(storage: Path):
    (storage / "other" / "lease.json").symlink_to("..")
    page = page_of(storage)
    assert "other cannot be read" in page
    assert "3 runs" in page


def test_damaged_files_of_a_run_are_named_and_the_rest_is_shown(storage: Path):
    run = storage / "troubled"
    lines = (run / "metrics.jsonl").read_text().splitlines()
    (run / "metrics.jsonl").write_text("\n".join(["\0" * 9, *lines[1:9], "[", *lines[9:]]))
    (run / "events.jsonl").write_bytes((run / "events.jsonl").read_bytes() + b'{"kind": "no')
    (run / "config.toml").write_text("epochs = [")
    for page in (page_of(run), page_of(storage)):
        assert "metrics.jsonl: 2 lines cannot be read\n" in page
        assert "config.toml cannot be read" in page
        assert "events.jsonl: 1 line cannot be read" in page
        assert "80.67" in page
    with Lease.take(open_storage(str(run))):
        assert "events.jsonl:" not in page_of(run), "its last line may be on its way"


def test_the_page_of_a_sweep_has_its_trials_the_best_first(storage: Path):
    page = page_of(storage / "sweep")
    rows = [page.index(text) for text in (">trial-0001 ", ">trial-0000 ")]
    assert rows == sorted(rows)
    assert "<th>optim.lr" in page
    assert "optim.lr 0.1\ntop1 50.00 %" in [*hovers(page)]
    assert "2 runs, 1 stopped, 1 finished" in page
    assert "Stopped by the sweep at step 230 of 230" in page


def test_the_command_of_a_page_names_the_same_runs(tmp_path: Path):
    runs = [write(tmp_path / name / "r", [train(1, 1.0)], []) for name in ("a b", "c&d")]
    page = page_of(*runs, out=tmp_path / "both.html")
    assert "a b/r · " in page
    command = re.findall(r"report ([^<]*)</code>", page)[-1]
    assert shlex.split(unescape(command)) == [str(run) for run in runs]


# ------------------------------------------------------------------ mispredicted samples


@pytest.fixture(scope="module")
def untrained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose checkpoint has untrained weights, which are wrong about most digits."""
    config = TrainConfig(name="untrained", micro_batch=64, batch_size=64)
    run = write(tmp_path_factory.mktemp("runs") / "untrained", config=config)
    import torch

    from raytrain_ddp.checkpoint.snapshot import encode_tensors
    from raytrain_ddp.tasks.small_networks import DigitsCNN

    torch.manual_seed(0)
    manifest = Manifest(5, 0, 1, 2, to_dict(config), "x", metrics={"top1": 0.1})
    files = {"model.safetensors": encode_tensors(DigitsCNN(10).state_dict())}
    CheckpointStore(open_storage(str(run)).join(CHECKPOINTS)).commit(manifest, files)
    return run


def test_the_worst_mistakes_are_shown_with_metrics_by_class(untrained: Path, tmp_path: Path):
    page = report(untrained, out=tmp_path / "r.html").path.read_text()
    assert page.count('<img src="data:image/png') == 24
    assert "360 of 360 samples" in page
    assert len(re.findall(r">\d taken for \d <small>\d+% sure, .*, row \d+<", page)) == 24


def test_failed_predictions_do_not_fail_the_report(untrained: Path, tmp_path: Path):
    run = shutil.copytree(untrained, tmp_path / "moved")
    store = CheckpointStore(open_storage(str(run)).join(CHECKPOINTS))
    config = TrainConfig(name="moved", data=DataConfig(source="torchvision:CIFAR10", root="none"))
    store.commit(Manifest(6, 0, 1, 2, to_dict(config), "x"), {"model.safetensors": b""})
    page = report(run).path.read_text()
    assert "None: torchvision:CIFAR10 is not in none/ here." in page


def test_classes_are_shown_with_what_they_are_taken_for_the_worst_first():
    matrix = np.diag([50] * 100)
    matrix[7, 8], matrix[7, 2], matrix[90, 7] = 20, 5, 5
    rows = classes([f"k{n}" for n in range(100)], matrix).rows
    assert rows[0] == ("k7", 75, "66.7%", "90.9%", "k8 (20), k2 (5)")
    assert rows[1] == ("k90", 55, "90.9%", "100.0%", "k7 (5)")
    assert (len(rows), rows[-1][-1]) == (100, "")


# ------------------------------------------------------------------ the command


@pytest.mark.parametrize(
    ("argv", "line"),
    [
        ((), "runs: no run there"),
        (("nothing",), r"nothing: no run there"),
        (("kept/digit",), r"digit: no run there"),
        (("kept/digits", "--every", "-1"), "--every = -1"),
    ],
)
def test_an_argument_that_is_not_a_run_is_refused_in_one_line(
    argv: tuple[str, ...], line: str, tmp_path: Path
):
    write(tmp_path / "kept" / "digits")
    answer = run_cli("report", *argv, cwd=tmp_path)
    assert (answer.status, answer.heavy) == (2, [])
    assert re.match(rf"error: .*{line}", answer.err)
    assert answer.err.count("\n") == 1


def test_every_writes_again_until_it_is_interrupted(storage: Path):
    page = storage / "report.html"
    command = [sys.executable, "-m", "raytrain_ddp", "report", str(storage), "--every", "1"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline().strip() == str(page)
        assert "refresh" in page.read_text()
        first = page.stat().st_ino
        while page.stat().st_ino == first:
            assert process.poll() is None
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0
    assert "refresh" not in page.read_text()


@pytest.mark.browser
@pytest.mark.parametrize("width", [1280, 390])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_browser_shows_the_pages_without_errors(
    untrained: Path, storage: Path, tmp_path: Path, width: int, scheme: str
):
    api = pytest.importorskip("playwright.sync_api")
    chromium = shutil.which("chromium") or shutil.which("chromium-browser")
    if chromium is None:
        pytest.skip("there is no chromium")
    paths = [
        report(untrained, out=tmp_path / "a.html").path,
        report(storage / "troubled", out=tmp_path / "b.html", predict=False).path,
        report(storage / "sweep", out=tmp_path / "c.html").path,
        report(storage, out=tmp_path / "d.html").path,
    ]
    complaints: list[str] = []
    with api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
        page.on("console", lambda message: complaints.append(message.text))
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("request", lambda one: complaints.append(one.url[:80]))
        for path in paths:
            page.goto(path.resolve().as_uri())
            wide = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
            assert page.evaluate(wide) == 0, path
            for plot in page.query_selector_all(".plot")[:2]:
                plot.hover()
                assert plot.query_selector(".tip").inner_text()
        box = page.query_selector("input[value=other]")
        box.uncheck()
        page.reload()
        assert not page.query_selector("input[value=other]").is_checked()
        browser.close()
    assert not [each for each in complaints if not each.startswith(("file:", "data:"))]
