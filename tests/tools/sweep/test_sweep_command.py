"""The command: what it refuses before anything starts, what it displays, and its report."""

from __future__ import annotations

import io
import json
import math
import os
import signal
import subprocess
import sys
import time
from html import unescape
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from raytrain_ddp.checkpoint.run_folder import CONFIG_FILE
from raytrain_ddp.checkpoint.storage import Storage, open_storage
from raytrain_ddp.config.sections import OptimConfig
from raytrain_ddp.config.train_config import TrainConfig
from raytrain_ddp.errors import ConfigError, DataError, PreflightError, RaytrainError, TaskError
from raytrain_ddp.tools.report.sweep_page import importance, one_sweep
from raytrain_ddp.tools.report.write import write_report
from raytrain_ddp.tools.sweep.__main__ import main, parse
from raytrain_ddp.tools.sweep.conductor import Conductor, Ended, Evaluation
from raytrain_ddp.tools.sweep.run_sweep import SweepOrder, conclusion, run_sweep, settings_of
from raytrain_ddp.tools.sweep.space import parse_space
from raytrain_ddp.tools.sweep.sweep_display import SweepDisplay, spread
from raytrain_ddp.tools.sweep.sweep_state import Evaluated, Sweep, Trial, load_sweep, save
from raytrain_ddp.tools.sweep.trial_configs import require_valid, scaling_of_trial
from raytrain_ddp.uri import open_uri

LR = "optim.lr=log:1e-3:1"


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_all_points_of_a_small_space_are_tried(capsys: pytest.CaptureFixture[str]):
    assert main(["digits", "--space", "optim.nesterov=true,false", "--dry-run"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 2


@pytest.mark.parametrize(
    ("words", "kind", "message"),
    [
        ([], ConfigError, "give the space to search"),
        (["--space", "optim.lrr=1:2"], ConfigError, "there is no field"),
        (["--space", "batch_size=32:256"], ConfigError, "the config refuses 19 of 20 trials"),
        (
            ["--space", "batch_size=32,64", "micro_batch=16,64", "--search", "grid"],
            ConfigError,
            "refuses 1 of 4 trials:\n  trial 1 .batch_size=32, micro_batch=64.: batch_size = 32",
        ),
        (
            ["--space", "micro_batch=8:17", "--search", "optuna"],
            ConfigError,
            r"refuses 1 of 2 corners of the space:\n  the corner \(micro_batch=17\)",
        ),
        (["--space", LR, "optim.gamma=1:2"], ConfigError, "no field optim.gamma"),
        (["--space", LR, "--space", "model.dropout=0:0.5"], ConfigError, "--space is given twice"),
        (["--space", "model.name=resnet18,resnet1888", "--trials", "2"], ConfigError, "resnet1888"),
        (["--space", "data.source=digits,/nowhere", "--trials", "2"], DataError, "/nowhere"),
        (
            ["--space", "optim.betas=1,2"],
            ConfigError,
            "takes several values",
        ),
        (
            ["--space", "optim.momentum=0:0.9", "--optim.name", "adamw"],
            ConfigError,
            "optim.momentum has no effect in any trial: it needs optim.name = sgd",
        ),
        (
            ["--space", "task-options.width=1,2"],
            ConfigError,
            "task_options.width has no effect in any trial: it needs a task of your own",
        ),
        (
            ["--space", LR, "--augment.magnitude", "5"],
            ConfigError,
            "augment.magnitude has no effect in any trial",
        ),
        (
            ["--space", "optim.name=sgd,adamw", "--trials", "3"],
            ConfigError,
            "has 2 points, fewer than --trials 3",
        ),
        (["--space", LR, "--trials", "0"], ConfigError, "--trials = 0: must be 1 or more"),
        (["--space", LR, "--seeds", "0"], ConfigError, "--seeds = 0"),
        (["--space", LR, "--parallel", "-1"], ConfigError, "--parallel = -1"),
        (["--space", LR, "--search", "grid"], ConfigError, "optim.lr has a range"),
        (
            ["--space", "optim.lr=1,2", "--search", "grid", "--trials", "2"],
            ConfigError,
            "--trials has no effect with --search grid",
        ),
        (["--space", LR, "--factor", "2"], ConfigError, "--factor = 2: has no effect"),
        (["--space", LR, "--scheduler", "asha", "--factor", "1"], ConfigError, "must be 2 or"),
        (["--space", LR, "--scheduler", "asha", "--first-rung", "12"], ConfigError, "below epochs"),
        (["--space", LR, "--scheduler", "asha", "--seeds", "2"], ConfigError, "--seeds = 2"),
        (["--space", LR, "--scheduler", "asha", "--steps", "9"], ConfigError, "equal epochs"),
        (["--space", "epochs=2:9", "--scheduler", "asha"], ConfigError, "equal epochs"),
        (["--space", LR, "--scheduler", "bohb"], ConfigError, "takes none, asha, halving or pbt"),
        (
            ["--space", LR, "--scheduler", "halving", "--search", "optuna"],
            ConfigError,
            "needs all points",
        ),
        (["--space", LR, "--scaling.num-workers", "2"], ConfigError, "a trial is one process"),
        (["--space", LR, "--per-trial", "gpus=2"], ConfigError, "one GPU at most"),
        (["--space", LR, "--per-trial", "cpus=0"], ConfigError, "must be a number above 0"),
        (["--space", LR, "--per-trial", "gpus=inf"], ConfigError, "must be a number of 0 or more"),
        (["--space", LR, "--per-trial"], ConfigError, "give cpus=N, gpus=N or both"),
        (["--space", LR, "--trials", "10001"], ConfigError, "has at most 10,000 trials"),
        (["--space", f"epochs=1:1{'0' * 400}"], ConfigError, "ends of the range must be integers"),
        (["--space", LR, "--per-trial", "cpus=x"], ConfigError, "must be a number"),
        (["--space", LR, "--per-trial", "workers=2"], ConfigError, "one process"),
        (["--space", LR, "--per-trial", "memory=2"], ConfigError, "are cpus and gpus"),
        (["--space", LR, "--task", "nothing.py:Task"], ConfigError, "there is no file"),
        (["--space", LR, "--optim.lr", "0.5"], ConfigError, "--space varies it"),
        (["--space", LR, "--seed", str(2**63 - 1), "--seeds", "2"], ConfigError, "below 2\\*\\*63"),
        (["--space", LR, "--data.eval-split", "none"], ConfigError, "no trial would be evaluated"),
    ],
)
def test_an_invalid_sweep_is_refused_before_anything_starts(
    words: list[str], kind: type[RaytrainError], message: str, tmp_path: Path
):
    with pytest.raises(kind, match=message):
        main(["digits", *words])
    assert [*tmp_path.iterdir()] == []


def test_a_field_that_has_an_effect_in_some_trials_is_accepted():
    space = parse_space(["optim.name=sgd,adamw", "optim.momentum=0.5,0.9"])
    points = [
        {"optim.name": "sgd", "optim.momentum": 0.5},
        {"optim.name": "adamw", "optim.momentum": 0.9},
    ]
    require_valid(TrainConfig(), space, points, ["optim.momentum"])
    require_valid(TrainConfig(), space, points[1:], ["optim.momentum"])  # other draws have it
    adamw = TrainConfig(optim=OptimConfig(name="adamw"))
    with pytest.raises(ConfigError, match="has no effect in any trial"):
        require_valid(adamw, parse_space(["optim.momentum=0.5,0.9"]), [{"optim.momentum": 0.5}])


def test_a_missing_optuna_is_reported_before_anything_starts(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(PreflightError, match=r"pip install 'raytrain_ddp\[sweep\]'"):
        main(["digits", "--space", LR, "--search", "optuna"])


def test_a_dry_run_prints_the_trials_and_writes_nothing(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
):
    words = ["digits", "--space", LR, "augment.policy=none,trivial", "--trials", "2", "--dry-run"]
    assert main(words) == 0
    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith("trial-0000  optim.lr=0.02492, augment.policy=")
    assert second.startswith("trial-0001  optim.lr=")
    assert [*tmp_path.iterdir()] == []
    Path("runs/digits-sweep").mkdir(parents=True)
    storage = open_storage("runs").join("digits-sweep")
    save(made(tmp_path / "another"), storage)
    with pytest.raises(ConfigError, match="contains a different sweep"):
        main(words)


def test_a_sweep_is_named_after_its_task():
    Path("runs/TinyTask-sweep").mkdir(parents=True)
    save(made(Path("another")), open_storage("runs").join("TinyTask-sweep"))
    task = f"{Path(__file__).parents[2] / 'tiny.py'}:TinyTask"
    with pytest.raises(ConfigError, match="/TinyTask-sweep contains a different sweep"):
        main(["--task", task, "--space", LR, "--trials", "2", "--dry-run"])


def test_per_trial_resources_set_the_scaling_of_a_trial():
    base = TrainConfig().scaling
    alone = scaling_of_trial(base, {})
    assert (alone.num_workers, alone.cpus_per_worker, alone.use_gpu) == (1, "auto", "auto")
    shared = scaling_of_trial(base, {"cpus": "3", "gpus": "0.5"})
    assert (shared.cpus_per_worker, shared.gpus_per_worker, shared.use_gpu) == (3.0, 0.5, True)
    assert scaling_of_trial(base, {"gpus": "0"}).use_gpu is False


@pytest.mark.parametrize("resources", ["cpus=999", "gpus=1"])
def test_a_trial_that_fits_on_no_node_is_refused_before_ray_starts(
    resources: str, monkeypatch: pytest.MonkeyPatch
):
    have = {"CPU": 2.0, "GPU": 0.0}
    monkeypatch.setattr("raytrain_ddp.ray_backend.cluster.local_resources", lambda: dict(have))
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr("raytrain_ddp.ray_backend.cluster.is_connected", lambda: False)
    with pytest.raises(PreflightError, match="a trial does not fit on this machine:") as caught:
        main(["digits", "--space", LR, "--trials", "2", "--per-trial", resources])
    assert str(caught.value).endswith("\nAsk for less with --per-trial cpus=N gpus=N.")


def test_a_command_with_all_main_flags_is_accepted():
    words = (
        "--space optim.lr=log:1e-3:1 model.dropout=0:0.5 augment.policy=none,trivial --trials 40 "
        "--scheduler asha --search optuna --per-trial gpus=0.5"
    )
    args = parse(["digits", *words.split()])
    assert (args.trials, args.scheduler, args.search) == (40, "asha", "optuna")
    assert args.per_trial == {"gpus": "0.5"}


# ------------------------------------------------------------------ what is shown


def made(folder: Path, trials: int = 12, **settings: Any) -> Sweep:
    """A finished sweep: the learning rate determines the result, the dropout has no effect."""
    space = parse_space([LR, "model.dropout=0:0.5", "augment.policy=none,trivial"])
    base = TrainConfig(epochs=9)
    sweep = Sweep(settings_of(base, space=space, trials=trials, **settings))
    storage = open_storage(str(folder))
    conductor = Conductor(sweep, base, storage)
    conductor.take_up()
    while (trial := conductor.next(1)) is not None:
        lr = trial.point["optim.lr"]
        assert isinstance(lr, float)
        top1 = 1 - abs(math.log10(lr) + 1) / 4
        values = [top1 * epoch / 9 for epoch in range(1, 10)]
        if trial.number == 3:
            conductor.ended(3, Ended("failed", "<b>the loss</b> is not finite\nin step 7"))
            continue
        log = [Evaluated(23 * n, float(n), value) for n, value in enumerate(values, 1)]
        conductor.evaluated(trial.number, Evaluation("top1", "max", log))
        conductor.ended(trial.number, Ended("finished", evaluations=log))
    return sweep


class Balanced(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        if tag not in ("meta", "br", "path", "rect"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in ("meta", "br", "path", "rect"):
            assert self.open.pop() == tag


def test_the_report_of_a_sweep_is_one_page(tmp_path: Path):
    made(tmp_path / "s", 30)
    path = write_report([str(tmp_path / "s")], None, True, "auto")
    page = path.read_text()
    assert path == tmp_path / "s" / "report.html"
    parser = Balanced()
    parser.feed(page)
    assert parser.open == []
    for title in ("Parallel coordinates", "Importance", "Learning curves", "Trials"):
        assert f"<h2>{title}</h2>" in page
    assert "Epsilon squared of Kruskal and Wallis" in page
    assert "&lt;b&gt;the loss&lt;/b&gt; is not finite" in page
    assert "<b>the loss" not in page
    assert "python -m raytrain_ddp.fit --epochs 9" in page
    assert "train it further" not in page  # it has finished
    assert "29 finished, 1 failed" in page


def test_the_commands_of_a_report_open_the_store_of_the_sweep(tmp_path: Path):
    sweep = made(tmp_path / "s", 3)
    uri = "s3://b/s?region=r&endpoint_override=localhost:9000&scheme=http"
    store = Storage(open_uri(uri)[0], "b/s", False, uri)
    page = unescape(one_sweep(store, sweep))
    best = sweep.ranked()[0].name
    for command in (f"'{uri}'", f"'{uri.replace('?', f'/{best}?')}'"):
        assert f"raytrain report {command}" in page


def test_a_deleted_best_run_is_reported_as_deleted(tmp_path: Path):
    sweep, folder = made(tmp_path / "s", 3), open_storage(str(tmp_path / "s"))
    best = sweep.ranked()[0]
    best.status = "stopped"
    order = SweepOrder(TrainConfig(), sweep.settings)
    run = folder.join(best.name)
    run.mkdir()
    run.write_atomic(CONFIG_FILE, b"")
    rows = dict(conclusion(order, folder, sweep))
    assert (rows["best run"], "train it further" in rows) == (str(run), True)
    assert f"raytrain_ddp.tools.report {run}" in one_sweep(folder, sweep)
    (tmp_path / "s" / best.name / CONFIG_FILE).unlink()
    rows = dict(conclusion(order, folder, sweep))
    assert (rows["best run"], "train it further" in rows) == (f"{run} (deleted)", False)
    page = one_sweep(folder, sweep)
    assert f"{best.name} (deleted)" in page
    assert f"raytrain_ddp.tools.report {run}" not in page


def test_importance_finds_the_field_that_decides(tmp_path: Path):
    sweep = made(tmp_path / "s", 60)
    found = importance(sweep)
    assert found[0].dimension.field == "optim.lr"
    assert found[0].share > 0.4
    assert all(each.share < 0.15 for each in found[1:])
    low, _, high = found[0].best.partition(" to ")
    assert 0.01 < float(low) < 0.1 < float(high) < 1  # 0.1 is the best of all
    assert importance(made(tmp_path / "few", 5)) == []


def test_a_report_works_before_the_first_evaluation_and_with_several_seeds(tmp_path: Path):
    save(
        Sweep(settings_of(TrainConfig(), space=parse_space([LR]), trials=2)),
        open_storage(str(tmp_path)),
    )
    assert "2 not done" in write_report([str(tmp_path)], None, True, "auto").read_text()
    made(tmp_path / "seeds", 3, seeds=3)
    page = write_report([str(tmp_path / "seeds")], str(tmp_path / "x.html"), True, "auto")
    assert "<h2>Points</h2>" in page.read_text()
    assert spread("top1", [0.9, 0.92, 0.94]) == "92.00 % ± 2.000 %"


def test_a_sweep_has_its_own_report(tmp_path: Path):
    made(tmp_path / "a", 2)
    with pytest.raises(ConfigError, match="is a sweep: it has a report of its own"):
        write_report([str(tmp_path / "a"), str(tmp_path / "a")], None, True, "auto")
    with pytest.raises(ConfigError, match="--device has no effect on the report of a sweep"):
        write_report([str(tmp_path / "a")], None, True, "cpu")


def test_the_table_fits_the_terminal_and_marks_the_best_trial(tmp_path: Path):
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=80, color_system=None)
    display = SweepDisplay(console, live=True)
    sweep = made(tmp_path / "s", 12)
    conductor = Conductor(sweep, TrainConfig(), open_storage(str(tmp_path / "s")))
    display.begin("digits-sweep", conductor)
    display.running(2)
    sweep.trials[5].status = "running"
    lines = display.__rich__().plain.split("\n")
    assert all(len(line) <= 80 for line in lines)
    assert lines[1].startswith("10 of 12 finished, 1 failed, 1 running, about ")
    assert lines[2].startswith(f"best     {sweep.ranked()[0].name}  top1 ")
    assert lines[-1].startswith("running  trial-0005  epoch 9  top1 ")


def test_lines_report_the_outcome_of_each_trial(tmp_path: Path):
    out = io.StringIO()
    display = SweepDisplay(Console(file=out, width=80), live=False)
    sweep = made(tmp_path / "s", 4)
    display.begin("s", Conductor(sweep, TrainConfig(), open_storage(str(tmp_path / "s"))))
    display.ended(sweep.trials[3])
    display.ended(Trial(0, "t", {}, 0, "paused"))  # not worth a line
    display.summary(sweep, [("report", "a command")])
    text = out.getvalue()
    assert "trial-0003  failed" in text
    assert "<b>the loss</b> is not finite" in text
    assert "in step 7" not in text
    assert "s: 3 of 4 finished, 1 failed" in text
    assert "paused" not in text


def test_a_sweep_whose_trials_all_failed_exits_with_their_status(tmp_path: Path):
    space, base = parse_space([LR]), TrainConfig(name="s", storage=str(tmp_path))
    settings = settings_of(base, space=space, trials=2)
    sweep = Sweep(settings)
    folder = open_storage(str(tmp_path / "s"))
    conductor = Conductor(sweep, base, folder)
    conductor.take_up()
    for _ in range(2):
        trial = conductor.next(1)
        assert trial is not None
        conductor.ended(trial.number, Ended("failed", "no luck\nin detail"))
    display = SweepDisplay(Console(file=io.StringIO()), live=False)
    with pytest.raises(TaskError, match=r"the first: no luck\. .*give another --name\.$"):
        run_sweep(SweepOrder(base, settings), display)  # continues, and finds nothing to do


# ------------------------------------------------------------------ with a real Ray

FEW = "--limit-train-batches 3 --limit-eval-batches 4 --log.no-tensorboard --checkpoint.every-s 0"


def command(folder: Path, *words: str) -> subprocess.Popen[str]:
    line = [sys.executable, "-m", "raytrain_ddp.tools.sweep", "digits", *FEW.split(), *words]
    return subprocess.Popen(
        line, cwd=folder, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )


@pytest.mark.ray
def test_a_killed_sweep_continues_on_ray_and_its_trials_are_runs(tmp_path: Path):
    """SIGKILL of the driver in the middle, then the same command, then fit, report, and watch."""
    words = ["--space", LR, "--trials", "4", "--epochs", "3", "--scheduler", "halving"]
    folder = open_storage(str(tmp_path / "runs" / "digits-sweep"))
    with command(tmp_path, *words) as driver:
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline:
            sweep = load_sweep(folder)
            if sweep is not None and any(trial.evaluations for trial in sweep.trials):
                break
            assert driver.poll() is None, driver.stdout and driver.stdout.read()
            time.sleep(0.1)
        os.kill(driver.pid, signal.SIGKILL)
    with command(tmp_path, *words) as driver:
        out, _ = driver.communicate(timeout=200)
    assert driver.returncode == 0, out
    sweep = load_sweep(folder)
    assert sweep is not None
    assert sweep.count("finished") == 1
    assert sweep.count("stopped") == 3
    stopped = next(trial for trial in sweep.trials if trial.status == "stopped")
    config = tmp_path / "runs" / "digits-sweep" / stopped.name / "config.toml"
    line = [sys.executable, "-m", "raytrain_ddp.fit", str(config), "--local"]
    done = subprocess.run(line, cwd=tmp_path, text=True, capture_output=True, check=True)
    assert f"{stopped.name}: finished at step 9 of 9" in done.stdout
    events = (config.parent / "events.jsonl").read_text().splitlines()
    plans = [json.loads(each) for each in events if json.loads(each)["kind"] == "plan"]
    assert plans[-1]["start_step"] >= 3  # not from the beginning
    page = write_report([str(tmp_path / "runs" / "digits-sweep")], None, True, "auto").read_text()
    assert "1 finished, 3 stopped" in page
