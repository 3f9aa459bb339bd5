"""The report: one HTML file about a run, whatever its folder contains."""

from __future__ import annotations

import json
import math
import re
import shlex
import shutil
from collections.abc import Iterator, Sequence
from html import unescape
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from processes import run_cli

from raytrain_ddp.checkpoint.lease import Lease
from raytrain_ddp.checkpoint.manifest import Manifest
from raytrain_ddp.checkpoint.run_folder import CHECKPOINTS
from raytrain_ddp.checkpoint.storage import open_storage
from raytrain_ddp.checkpoint.store import CheckpointStore
from raytrain_ddp.config.input_sections import DataConfig
from raytrain_ddp.config.recipe import dumps, to_dict
from raytrain_ddp.config.train_config import TrainConfig
from raytrain_ddp.errors import ConfigError
from raytrain_ddp.tools.display import axes
from raytrain_ddp.tools.report import step_phases
from raytrain_ddp.tools.report.history import RunHistory, history_of
from raytrain_ddp.tools.report.run_files import read_run
from raytrain_ddp.tools.report.timeline import timeline_of
from raytrain_ddp.tools.report.write import write_report

NASTY = "<script>alert(1)</script>&\"'"
PER_EPOCH = 23


def train(step: int, seconds: float, **changes: Any) -> dict[str, Any]:
    slowest = {"rank": 1, "phase": "data", "ratio": 1.4}
    split = {"data": 0.01, "compute": 0.03, "communication": 0.01, "evaluation": 0.005}
    timing = {"step_s": 0.05, "split_s": split, "slowest": slowest, "peak_memory_bytes": 2**30}
    known = {"kind": "train", "step": step, "epoch": (step - 1) // PER_EPOCH, "lr": 0.1}
    figures = {"loss": 2.0 / step, "samples_per_s": 1000.0 + step, "seconds": seconds}
    return {**known, **figures, "timing": timing, **changes}


def evaluation(step: int, top1: float, best: bool, name: str = "top1") -> dict[str, Any]:
    fields = {"metrics": {"loss": 1.0 - top1, name: top1}, "monitor": name, "best": best}
    return {"kind": "eval", "step": step, "epoch": step // PER_EPOCH, "seconds": 1.0, **fields}


def plan(time: str, start_step: int, workers: int, **changes: Any) -> dict[str, Any]:
    sizes = {"batch_size": 64, "slots": 4, "micro_batch": 16, "world_size": workers}
    steps = {"total_steps": 230, "steps_per_epoch": PER_EPOCH, "epochs": 10}
    data = {"train_samples": 1437, "eval_samples": 360, "unit": "images", "parameters": 131754}
    known = {"kind": "plan", "time": time, "run": "r", "start_step": start_step, "device": "cpu"}
    resumed = {"resumed_from": f"step-{start_step:08d}-a0001" if start_step else None}
    return {**known, **sizes, **steps, **data, **resumed, **changes}


def end(time: str, status: int, **fields: Any) -> dict[str, Any]:
    return {"kind": "end", "time": time, "status": status, **fields}


def write(
    folder: Path,
    records: Sequence[dict[str, Any]] = (),
    events: Sequence[dict[str, Any]] = (),
    config: TrainConfig | None = None,
) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    lines = {"metrics.jsonl": records, "events.jsonl": events}
    for name, each in lines.items():
        (folder / name).write_text("".join(json.dumps(one) + "\n" for one in each))
    (folder / "config.toml").write_text(dumps(config or TrainConfig(name=folder.name)))
    return folder


def page_of(*runs: Path, out: Path | None = None) -> str:
    path = write_report([str(run) for run in runs], str(out) if out else None, False, "auto")
    return path.read_text(encoding="utf-8")


def history_at(run: Path) -> RunHistory:
    return history_of(read_run(str(run)))


@pytest.fixture
def troubled(tmp_path: Path) -> Path:
    """Two workers, one of them killed at step 57 after a checkpoint at 46; a night later, three
    resume."""
    killed = "crashed, or was killed, on n2 at step 57; resuming from step 46"
    rank = {"compute": 0.03, "data": 0.01}
    events = [
        plan("2026-11-20T20:00:00Z", 0, 2),
        {"kind": "ranks", "time": "2026-11-20T20:00:05Z", "step": 9, "split_s": [rank, rank]},
        {"kind": "checkpoint", "time": "2026-11-20T20:00:46Z", "step": 46, "seconds": 0.2}
        | {"name": "step-00000046-a0001", "size_bytes": 1000},
        {"kind": "failed", "time": "2026-11-20T20:00:57Z", "rank": 1, "step": 57}
        | {"node": "n2", "error": "the end of rank 1", "message": killed},
        plan("2026-11-20T20:01:07Z", 46, 2),
        end("2026-11-20T20:01:40Z", 130, step=69),
        plan("2026-11-21T08:00:00Z", 69, 3, hosts=["a", "a", "b"], versions={"torch": "9.9"}),
        end("2026-11-21T08:01:00Z", 0, step=115),
    ]
    records = [train(step, float(step)) for step in range(5, 50, 5)]
    records += [train(step, step - 46.0) for step in range(50, 70, 5)]
    records += [train(step, step - 69.0) for step in range(70, 116, 5)]
    evals = [evaluation(step, 0.5 + step / 300, step <= 92) for step in range(23, 116, 23)]
    records = sorted([*records, *evals], key=lambda record: record["step"])
    return write(tmp_path / "troubled", records, events, TrainConfig(name="troubled", epochs=5))


class _Seen(HTMLParser):
    """Tags and attributes, and whether all tags are closed in order."""

    EMPTY = ("meta", "img", "br")

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str]] = []
        self._open: list[str] = []
        self.feed(page)
        assert not self._open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(name, value or "") for name, value in attrs]
        if tag not in self.EMPTY:
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(name, value or "") for name, value in attrs]

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag


def hovers(page: str) -> Iterator[tuple[float, str]]:
    for text in re.findall(r'<script type="application/json">(.*?)</script>', page):
        yield from json.loads(text)


# ------------------------------------------------------------------ the file


def test_the_report_is_one_file_that_loads_no_other_resource(troubled: Path):
    page = page_of(troubled)
    seen = _Seen(page)
    assert not {"link", "iframe", "object", "base", "form"} & set(seen.tags)
    for name, value in seen.attributes:
        assert name not in ("src", "href", "srcset", "action") or value.startswith("data:")
        assert not name.startswith("on")
    assert not re.search(r"https?://|url\(|@import|fetch\(|XMLHttp", page)
    assert "default-src 'none'" in page
    assert len(page) < 200_000


def test_content_from_a_run_is_escaped_as_text(tmp_path: Path):
    folder = tmp_path / "<b>run<img src=x onerror=alert(1)>"
    failed = {"kind": "failed", "time": "2026-11-20T20:00:57Z", "rank": 0, "step": 2}
    events = [
        plan("2026-11-20T20:00:00Z", 0, 2, device=NASTY, unit=NASTY, hosts=[NASTY]),
        {**failed, "message": NASTY},
        end("2026-11-20T20:01:00Z", 1, message=f"{NASTY}\nTraceback\n{NASTY}"),
    ]
    records = [train(1, 1.0), evaluation(1, 0.5, True, name=NASTY)]
    records[0]["timing"]["split_s"][NASTY] = 0.1
    records[0]["timing"]["slowest"]["phase"] = NASTY
    config = TrainConfig(name="x", task_options={NASTY: "</script><b>"}, storage=NASTY)
    run = write(folder, records, events, config)
    for page in (page_of(run), page_of(run, run, out=tmp_path / "two.html")):
        seen = _Seen(page)
        assert not {"img", "b>run<img"} & set(seen.tags)
        assert not [name for name, _ in seen.attributes if name.startswith("on")]
        scripts = seen.tags.count("script")
        assert scripts == page.count('<div class="plot">') + 1
        assert "<script>alert" not in page
        assert any(NASTY in text for _, text in hovers(page))


def test_a_report_is_written_to_the_run_the_working_folder_or_the_given_path(
    troubled: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    one, two = str(troubled), str(shutil.copytree(troubled, tmp_path / "two"))
    assert write_report([one], None, False, "auto") == troubled / "report.html"
    assert write_report([one, two], None, False, "auto") == Path("report.html")
    assert write_report([one], "new/a.html", False, "auto") == Path("new/a.html")
    assert [path.name for path in tmp_path.glob("new/*")] == ["a.html"]
    Path("a.html").touch()
    with pytest.raises(ConfigError, match=r"cannot be written .* --out"):
        write_report([one], "a.html/b.html", False, "auto")


# ------------------------------------------------------------------ content


def test_the_report_shows_a_killed_and_resized_run(troubled: Path):
    history, page = history_at(troubled), page_of(troubled)
    texts = [one.text for one in history.happenings]
    assert texts[1].startswith("Rank 1 crashed, or was killed, on n2 at step 57")
    assert "11 steps repeated; 10 s without training" in texts[2]
    assert texts[3] == "Interrupted by Ctrl-C (SIGINT)"
    assert "with 3 workers on cpu (before: 2)" in texts[4]
    for text in (*texts, "Finished at step 115 of 230", "✂ 11h58m", "2→3", "a (2 workers)"):
        assert text in page
    assert "torch 9.9" in page
    assert "top1 80.67 %, " not in page  # a metric of a removed checkpoint
    assert "80.67" in page  # the best
    assert 'class="mark failure"' in page
    assert 'class="band down"' in page


def test_the_report_counts_no_repeated_steps_for_a_replaced_worker(tmp_path: Path):
    events = [
        plan("2026-11-20T20:00:00Z", 0, 2),
        {"kind": "failed", "time": "2026-11-20T20:00:57Z", "rank": 1, "step": 57}
        | {"node": "n2", "error": "the end of rank 1", "message": "crashed, or was killed"},
        plan("2026-11-20T20:01:07Z", 56, 2, replaced=[1]),
        plan("2026-11-20T20:01:08Z", 56, 1, replaced=[]),
        plan("2026-11-20T20:01:20Z", 60, 3, replaced=[1, 2]),
        end("2026-11-20T20:02:00Z", 0, step=115),
    ]
    records = [train(step, float(step % 57)) for step in (5, 55, 60, 115)]
    run = write(tmp_path / "run", records, events, TrainConfig(name="run", epochs=5))
    grown = history_at(run).happenings[4]
    assert grown.text.startswith(
        "Grew from 1 to 3 workers, nothing repeated; the others kept their"
    )
    assert (grown.kind, grown.detail) == ("resize", "")
    text = history_at(run).happenings[2].text
    assert text == "Rank 1 replaced; the others kept their state of step 56; 10 s without training"
    text = history_at(run).happenings[3].text
    assert text == "Continuing with 1 worker; the others kept their state of step 56"


def test_the_time_axis_continues_across_restarts_without_long_pauses(troubled: Path):
    files = read_run(str(troubled))
    line = timeline_of(files, is_running=False)
    assert [(attempt.start_step, attempt.world_size) for attempt in line.attempts] == [
        (0, 2),
        (46, 2),
        (69, 3),
    ]
    walls = line.walls(files.train)
    at = {record.step: line.at(wall) for record, wall in zip(files.train, walls, strict=True)}
    assert at[45] == 45
    assert at[50] == 67 + 4  # the second start, at 67 s, made the steps from 47 on
    assert at[65] == 67 + 19
    assert at[70] == pytest.approx(at[65] + 5, abs=5)  # a night is between them
    assert walls == sorted(walls)


def test_a_run_that_failed_before_its_first_step_has_a_report(tmp_path: Path):
    message = "the task failed while starting on n1, rank 2:\nTraceback\n  x\nValueError: no <data>"
    cause = {"rank": 2, "node": "n1", "step": None, "error": "ValueError"}
    run = write(tmp_path / "r", [], [end("2026-11-20T20:00:00Z", 1, message=message, **cause)])
    history, page = history_at(run), page_of(run)
    assert history.state == "failed"
    assert history.summary == "Failed before its first step."
    assert history.cause.endswith("on n1, rank 2: ValueError: no <data>")
    assert "ValueError: no &lt;data&gt;" in page


def test_a_log_with_one_or_no_record_gives_a_report(tmp_path: Path):
    one = page_of(write(tmp_path / "one", [train(1, 0.5)], [plan("2026-11-20T20:00:00Z", 0, 2)]))
    none = page_of(write(tmp_path / "none"))
    assert "<svg" in one
    assert "<svg" not in none
    assert "Disappeared before its first step" in none
    for page in (one, none):
        _Seen(page)


def test_a_loss_that_is_not_finite_is_marked(tmp_path: Path):
    records = [train(n, float(n), loss=None if n > 7 else 1.0) for n in range(1, 11)]
    page = page_of(write(tmp_path / "r", records, [plan("2026-11-20T20:00:00Z", 0, 2)]))
    assert "not finite (3)" in page
    assert "nan" not in re.sub(r"<style>.*?</style>|<script>.*?</script>", "", page)


def test_a_log_without_times_or_events_is_still_drawn(tmp_path: Path):
    bare = [{"kind": "train", "step": n, "loss": 1.0, "lr": 0.1, "epoch": 0} for n in (1, 2, 3)]
    page = page_of(write(tmp_path / "r", bare))
    assert "Loss" in page
    assert "Throughput" not in page


def test_a_long_log_is_thinned_with_a_note_and_keeps_its_outliers(tmp_path: Path):
    records = [train(n, n / 20, loss=1.0 + (n == 12345)) for n in range(1, 20_001)]
    page = page_of(write(tmp_path / "r", records, [plan("2026-11-20T20:00:00Z", 0, 2)]))
    assert len(page) < 500_000
    assert "thinned: 20,000 records" in page
    many = [(float(n), 1.0 + (n == 12345) - (n == 54321)) for n in range(100_000)]
    few = axes.thinned(many)
    assert len(few) <= axes.MOST_POINTS
    assert {(12345.0, 2.0), (54321.0, 0.0)} < set(few)
    assert few == sorted(few)


def test_many_restarts_do_not_make_the_page_large(tmp_path: Path):
    records, events = [], []
    for start in range(0, 20_000, 50):
        at = f"2026-11-20T{20 + start // 7200:02d}:{start // 120 % 60:02d}:{start // 2 % 60:02d}Z"
        events.append(plan(at, start, 2))
        records += [train(start + n, n / 2) for n in range(1, 51)]
    page = page_of(write(tmp_path / "r", records, events))
    assert len(history_at(tmp_path / "r").timeline.attempts) == 400
    assert len(page) < 500_000


@pytest.mark.parametrize("apart", [1e-12, 1e-9, 3e-16])
def test_nearly_equal_values_still_get_an_axis(tmp_path: Path, apart: float):
    records = [train(n, float(n), loss=0.7 + n * apart) for n in range(1, 9)]
    records.append(evaluation(8, 0.5 + apart, True))
    assert "<svg" in page_of(write(tmp_path / "r", records, [plan("2026-11-20T20:00:00Z", 0, 2)]))


def test_a_running_run_is_distinguished_from_a_dead_one(tmp_path: Path):
    records, events = [train(10, 5.0)], [plan("2026-11-20T20:00:00Z", 0, 2)]
    run = write(tmp_path / "r", records, events)
    assert history_at(run).state == "gone"
    with Lease.take(open_storage(str(run))):
        history = history_at(run)
        assert history.state == "running"
        assert re.match(r"Running: step 10 of 230, about \S+( \S+)? left\.", history.summary)
        assert "run the command again to update this" in page_of(run)
    write(run, records, [*events, end("2026-11-20T21:00:00Z", 143, step=10)])
    assert history_at(run).state == "interrupted"
    assert "SIGTERM" in history_at(run).summary


def test_several_runs_are_shown_side_by_side(troubled: Path, tmp_path: Path):
    records = [train(n, float(n)) for n in range(10, 231, 10)]
    records.insert(20, evaluation(200, 0.9, True))
    events = [plan("2026-11-20T20:00:00Z", 0, 4), end("2026-11-20T20:10:00Z", 0, step=230)]
    other = write(tmp_path / "other", records, events, TrainConfig(name="other", seed=7))
    page = page_of(troubled, other, out=tmp_path / "both.html")
    _Seen(page)
    for text in ("80.67", "90.00", "top1 (evaluation)", "<code>seed</code>", "<code>epochs</code>"):
        assert text in page
    assert "<code>storage</code>" not in page
    assert page.count("</i>troubled</span>") >= 3  # legends
    assert any("troubled" in text and "other" in text for _, text in hovers(page))


def test_the_command_of_a_page_names_the_same_runs(tmp_path: Path):
    runs = [write(tmp_path / name / "r", [train(1, 1.0)], []) for name in ("a b", "c&d")]
    command = re.findall(r"report ([^<]*)</code>\.", page_of(*runs, out=tmp_path / "both.html"))[-1]
    assert shlex.split(unescape(command)) == [str(run) for run in runs]


def test_a_run_without_a_config_is_not_compared_with_the_defaults(troubled: Path, tmp_path: Path):
    events = [plan("2026-11-20T20:00:00Z", 0, 4)]
    other = write(tmp_path / "other", [train(1, 1.0)], events, TrainConfig(name="other", seed=7))
    (other / "config.toml").unlink()
    page = page_of(troubled, other, out=tmp_path / "both.html")
    assert "other: no config.toml, or it cannot be read" in page
    assert "<code>seed</code>" not in page


@pytest.mark.parametrize("out", [".", "", "new", "new/", "{run}", "{run}/config.toml"])
def test_a_report_overwrites_only_an_html_page(out: str, troubled: Path):
    before = (troubled / "config.toml").read_text()
    with pytest.raises(ConfigError, match="set --out to"):
        write_report([str(troubled)], out.format(run=troubled), False, "auto")
    assert (troubled / "config.toml").read_text() == before


def test_runs_of_one_name_are_distinguished_by_their_folders(tmp_path: Path):
    events = [plan("2026-11-20T20:00:00Z", 0, 2, unit="images")]
    runs = [write(tmp_path / parent / "digits", [train(1, 1.0)], events) for parent in "ab"]
    events = [plan("2026-11-20T20:00:00Z", 0, 2, unit="words")]
    runs.append(write(tmp_path / "other", [train(1, 1.0)], events))
    page = page_of(*runs, out=tmp_path / "both.html")
    assert "<h1>a/digits · b/digits · other</h1>" in page
    assert "Throughput of all workers, samples/s" in page, "their units differ"
    assert "<h1>digits<" in page_of(runs[0])
    assert "digits · digits" in page_of(runs[0], runs[0], out=tmp_path / "same.html")


def test_the_config_shows_what_differs_from_its_defaults_first(troubled: Path):
    page = page_of(troubled)
    first = page.index("<code>epochs</code>")
    assert first < page.index("<code>optim.lr</code>")
    assert re.search(r"<code>epochs</code></td><td><code>5</code></td><td>.*?<code>12</code>", page)


# ------------------------------------------------------------------ mispredicted samples


@pytest.fixture(scope="module")
def untrained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose checkpoint has untrained weights, which are wrong about most digits."""
    config = TrainConfig(name="untrained", micro_batch=64, batch_size=64)
    run = write(tmp_path_factory.mktemp("runs") / "untrained", config=config)
    from tiny import commit_untrained_digits

    commit_untrained_digits(run, config)
    return run


@pytest.mark.parametrize(
    ("shape", "dtype", "is_shown"),
    [
        ((3, 8, 8), "uint8", True),
        ((1, 8, 8), "uint8", True),
        ((3, 200, 200), "uint8", True),
        ((4, 8, 8), "uint8", False),
        ((8, 8), "uint8", False),
        ((3, 8, 8), "float32", False),
    ],
)
def test_a_tensor_that_is_not_an_image_is_left_out(
    shape: tuple[int, ...], dtype: str, is_shown: bool
):
    import torch

    from raytrain_ddp.tools.report.mistakes import picture

    drawn = picture(torch.zeros(shape, dtype=getattr(torch, dtype)))
    assert drawn.startswith("data:image/") == is_shown


def test_the_worst_mistakes_are_shown_with_metrics_by_class(untrained: Path, tmp_path: Path):
    from raytrain_ddp.tools.report.mistakes import predict

    found = predict(read_run(str(untrained)), "cpu", is_running=False)
    assert (found.samples, found.rows) == (360, 360)
    assert sum(map(sum, found.matrix)) == 360
    losses = [one.loss for one in found.worst]
    assert losses == sorted(losses, reverse=True)
    assert all(one.truth != one.guess and one.loss > math.log(2) for one in found.worst)
    assert found.worst[0].picture.startswith("data:image/png;base64,")
    assert "row" in found.worst[0].where
    page = write_report([str(untrained)], str(tmp_path / "r.html"), True, "cpu").read_text()
    assert page.count('<img src="data:image/png') == len(losses)
    assert "360 samples are correct" in page
    _Seen(page)


def test_failed_predictions_do_not_fail_the_report(untrained: Path, tmp_path: Path):
    run = shutil.copytree(untrained, tmp_path / "moved")
    store = CheckpointStore(open_storage(str(run)).join(CHECKPOINTS))
    config = TrainConfig(name="moved", data=DataConfig(source="torchvision:CIFAR10", root="none"))
    store.commit(Manifest(6, 0, 1, 2, to_dict(config), "x"), {"model.safetensors": b""})
    page = write_report([str(run)], None, True, "cpu").read_text()
    assert "None: torchvision:CIFAR10 is not in none/ here." in page


def test_with_many_classes_the_most_confused_ones_are_shown():
    from raytrain_ddp.tools.report.class_tables import classes
    from raytrain_ddp.tools.report.mistakes import Predictions

    matrix = [[0] * 100 for _ in range(100)]
    for n in range(100):
        matrix[n][n] = 50
    matrix[7][8], matrix[90][7] = 20, 5
    page = classes(Predictions("step-1", [f"kind {n}" for n in range(100)], matrix, 5025, 6000, []))
    _Seen(page)
    assert "99.50% of 5,025 of 6,000 samples are correct" in page
    assert "3 of 100 classes" in page
    assert page.index(">kind 7<") < page.index("all 100 classes") < page.index(">kind 60<")
    assert 'title="kind 7 taken for kind 8: 20 of 70"' in page


# ------------------------------------------------------------------ axes


@pytest.mark.parametrize(
    ("made", "names"),
    [
        (axes.linear_scale(0, 1), ["0", "0.2", "0.4", "0.6", "0.8", "1"]),
        (axes.linear_scale(0, 0.1, ticks=4), ["0", "0.025", "0.05", "0.075", "0.1"]),
        (axes.linear_scale(0, 9, ticks=6, whole=True, snap=False), ["0", "2", "4", "6", "8"]),
        (axes.linear_scale(0, 1, ticks=6, whole=True), ["0", "1"]),
        (axes.linear_scale(3.0, 3.0), ["2.6", "2.8", "3", "3.2", "3.4"]),
        (axes.linear_scale(0, 250_000, ticks=3), ["0", "100,000", "200,000", "300,000"]),
        (axes.linear_scale(math.nan, math.nan, ticks=2), ["0", "0.5", "1"]),
        (axes.log_scale(0.05, 3), ["0.05", "0.1", "0.2", "0.5", "1", "2"]),
        (axes.log_scale(1e-6, 1e3), ["1e-06", "0.0001", "0.01", "1", "100"]),
        (axes.time_scale(100), ["0", "30 s", "1 min", "1 min 30"]),
        (axes.time_scale(7000), ["0", "30 min", "1 h", "1 h 30"]),
        (axes.time_scale(10 * 86400), ["0", "2 d", "4 d", "6 d", "8 d", "10 d"]),
    ],
    ids=lambda value: "" if isinstance(value, list) else f"{value.low:g}-{value.high:g}",
)
def test_ticks_are_round(made: axes.Scale, names: list[str]):
    assert [name for _, name in made.ticks] == names
    assert all(-1e-9 <= made.at(value) <= 1 + 1e-9 for value, _ in made.ticks)


def test_every_step_phase_has_a_name_and_a_color():
    from raytrain_ddp.training.monitoring.phase_clock import PHASES

    css = (Path(step_phases.__file__).parent / "style.css").read_text()
    assert set(step_phases.PHASES) == set(PHASES)
    for phase in PHASES:
        assert f"{step_phases.css(phase)} {{" in css
        assert css.count(f"--{phase}: #") == 2  # light and dark


# ------------------------------------------------------------------ the command


def test_help_answers_without_torch(tmp_path: Path):
    answer = run_cli("report", "--help-all", cwd=tmp_path)
    assert (answer.status, answer.heavy) == (0, [])
    assert "--no-predict" in answer.out


@pytest.mark.parametrize(
    ("argv", "line"),
    [
        ((), "give a run"),
        (("nothing",), r"nothing: no run there .* In runs there are: digits\."),
        (("digit",), r"digit: no run there .* Did you mean 'digits'\?"),
    ],
)
def test_an_argument_that_is_not_a_run_is_refused_in_one_line(
    argv: tuple[str, ...], line: str, tmp_path: Path
):
    write(tmp_path / "runs" / "digits")
    answer = run_cli("report", *argv, cwd=tmp_path)
    assert (answer.status, answer.heavy) == (2, [])
    assert re.match(rf"error: .*{line}", answer.err)
    assert answer.err.count("\n") == 1


@pytest.mark.browser
@pytest.mark.parametrize("width", [1280, 390])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_browser_shows_the_report_without_errors(
    untrained: Path, troubled: Path, tmp_path: Path, width: int, scheme: str
):
    api = pytest.importorskip("playwright.sync_api")
    chromium = shutil.which("chromium") or shutil.which("chromium-browser")
    if chromium is None:
        pytest.skip("there is no chromium")
    paths = [
        write_report([str(untrained)], str(tmp_path / "a.html"), True, "cpu"),
        write_report([str(troubled)], str(tmp_path / "b.html"), False, "auto"),
        write_report([str(troubled), str(untrained)], str(tmp_path / "c.html"), False, "auto"),
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
        browser.close()
    left = [c for c in complaints if not c.startswith(("file:", "data:"))]
    assert not left


def test_the_accuracy_axis_includes_the_first_point():
    from raytrain_ddp.tools.display.curves import _room

    axis = _room([0.4306, 0.88, 0.95, *[0.99] * 9, 1.0], floor=True)
    assert axis.at(0.4306) >= 0
    assert axis.high == 1


def test_each_additional_scalar_has_its_own_panel(tmp_path: Path):
    values = [{"kl": 1.0 / step, NASTY: math.nan if step == 3 else 2.0} for step in range(1, 9)]
    records = [train(n, float(n), scalars=each) for n, each in enumerate(values, 1)]
    records.append(train(9, 9.0))  # written by a version without scalars
    page = page_of(write(tmp_path / "scalars", records, [plan("2026-11-20T20:00:00Z", 0, 2)]))
    assert "kl (training)" in page
    assert "kl (training) 0.125" in "\n".join(text for _, text in hovers(page))
    assert "&lt;script&gt;alert(1)" in page
    assert NASTY not in page
    _Seen(page)
