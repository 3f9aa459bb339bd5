"""A sweep continues where it was killed, whatever the cluster did: simulated processes, no Ray."""

from __future__ import annotations

import json
import math
import random
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from raytrain_ddp.checkpoint.storage import open_storage
from raytrain_ddp.config.recipe import to_dict
from raytrain_ddp.config.train_config import TrainConfig
from raytrain_ddp.errors import CheckpointError, ConfigError
from raytrain_ddp.tools.sweep.conductor import MOST_DEATHS, Conductor, Ended, Evaluation
from raytrain_ddp.tools.sweep.run_sweep import found, settings_of
from raytrain_ddp.tools.sweep.space import Point, parse_space
from raytrain_ddp.tools.sweep.sweep_state import (
    SWEEP_FILE,
    Evaluated,
    Settings,
    Sweep,
    Trial,
    differences,
    load_sweep,
    save,
)

EPOCHS = 9
BASE = TrainConfig(name="s", epochs=EPOCHS)
SPACE = parse_space(["optim.lr=log:1e-3:1", "augment.policy=none,trivial"])


@pytest.fixture(autouse=True)
def _fast_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Skips fsync: nothing here dies except in the simulation."""
    monkeypatch.setattr("raytrain_ddp.checkpoint.storage.fsync", lambda path: None)


def settings(trials: int = 8, **changes: Any) -> Settings:
    return settings_of(BASE, **{"space": SPACE, "trials": trials, **changes})


def value_of(trial: Trial, epoch: int) -> float:
    """The result of a trial: a function of its config, as in an exact run."""
    numbers = random.Random(f"{sorted(trial.point.items())} {trial.seed} {epoch}")
    return numbers.random() * (0.5 + epoch / EPOCHS)


class Cluster:
    """Processes that train trials; what a trial has committed survives them.

    Attributes:
        trained: how often each epoch of each run was trained.
    """

    def __init__(self, folder: Path, **changes: Any) -> None:
        self.storage = open_storage(str(folder))
        self.folder, self.wanted = folder, settings(**changes)
        self.trained: Counter[tuple[str, int]] = Counter()
        self.committed: dict[str, int] = {}
        self.order = random.Random(3)
        self.origins: dict[str, tuple[str, int]] = {}

    def command(self, parallel: int, kill_after: int = 10**6, most_dead: int = 0) -> Sweep:
        """Runs the command to its end, or for this many events before it kills everything."""
        folder = self.storage
        folder.mkdir()
        sweep = found(folder, self.wanted) or Sweep(self.wanted)
        conductor = Conductor(sweep, BASE, folder, branch=self.branch)
        conductor.take_up()
        running: dict[int, int] = {}  # trial -> start
        for _ in range(kill_after):
            if conductor.is_over:
                assert not running
                break
            trial = conductor.next(parallel)
            if trial is not None:
                assert trial.number not in running
                running[trial.number] = trial.starts
            assert len(running) <= parallel
            number = self.order.choice([*running])
            if most_dead and self.order.random() < 0.1:
                most_dead -= 1
                del running[number]
                conductor.ended(number, Ended("lost", "its process died"))
            elif self.goes_on(conductor, sweep.trials[number]):
                del running[number]
        saved = load_sweep(folder)
        assert saved is not None
        return saved

    def branch(self, config: TrainConfig, origin: str) -> None:
        """Copies what the other trial has committed; once, as a run begins once."""
        assert config.name is not None
        self.committed.setdefault(config.name, self.committed[origin])
        self.origins.setdefault(config.name, (origin, self.committed[origin]))

    def goes_on(self, conductor: Conductor, trial: Trial) -> bool:
        """Trains the next epoch of a trial; returns whether the trial has then ended."""
        epoch = self.committed.get(trial.name, 0) + 1
        if epoch <= EPOCHS:
            self.trained[trial.name, epoch] += 1
            self.committed[trial.name] = epoch
            log = self.log(trial, epoch)
            if conductor.evaluated(trial.number, Evaluation("top1", "max", log)):
                conductor.ended(trial.number, Ended("interrupted", evaluations=log))
                return True
        if epoch >= EPOCHS:
            log = self.log(trial, EPOCHS)
            conductor.ended(trial.number, Ended("finished", evaluations=log))
            return True
        return False

    def log(self, trial: Trial, epochs: int) -> list[Evaluated]:
        return [Evaluated(10 * n, float(n), value_of(trial, n)) for n in range(1, epochs + 1)]


def result(sweep: Sweep) -> list[Any]:
    return [
        (t.name, dict(t.point), t.seed, t.status, [e.value for e in t.evaluations])
        for t in sweep.trials
    ]


@pytest.mark.parametrize("scheduler", ["none", "halving", "pbt"])
def test_the_trials_do_not_depend_on_parallelism_kills_or_deaths(tmp_path: Path, scheduler: Any):
    expected = Cluster(tmp_path / "alone", scheduler=scheduler).command(1)
    assert {t.status for t in expected.trials} <= {"finished", "stopped"}
    killed = 0
    for number in range(1, 11):
        cluster = Cluster(tmp_path / str(number), scheduler=scheduler)
        cluster.order.seed(number)
        while True:
            parallel, events = cluster.order.randint(1, 5), cluster.order.randint(1, 30)
            sweep = cluster.command(parallel, events, most_dead=2)
            if not sweep.count("waiting", "running", "paused"):
                break
            killed += 1
        assert [each[:4] for each in result(sweep)] == [each[:4] for each in result(expected)]
        assert [t.origin for t in sweep.trials] == [t.origin for t in expected.trials]
        if scheduler == "pbt":
            assert len(sweep.trials) > 8  # each starts from where the other had paused
            names = {t.name: t for t in sweep.trials}
            for name, (origin, epoch) in cluster.origins.items():
                assert names[name].origin == origin
                assert epoch in range(1, EPOCHS)
        # Nothing is trained twice: what a process has committed is not trained again.
        assert max(cluster.trained.values()) == 1
        for ours, theirs in zip(sweep.trials, expected.trials, strict=True):
            # (An epoch may be committed after the order to pause, and not be seen by it.)
            values = [e.value for e in ours.evaluations]
            assert values[: len(theirs.evaluations)] == [e.value for e in theirs.evaluations]
    assert killed > 5


@pytest.mark.parametrize("parallel", [1, 4])
def test_a_killed_asha_sweep_loses_no_trial(tmp_path: Path, parallel: int):
    cluster = Cluster(tmp_path, scheduler="asha", trials=12)
    for _ in range(100):
        sweep = cluster.command(parallel, cluster.order.randint(1, 20))
        if not sweep.count("waiting", "running", "paused"):
            break
    assert {t.status for t in sweep.trials} == {"finished", "stopped"}
    assert len(sweep.trials) == 12
    assert max(cluster.trained.values()) == 1
    assert sweep.count("stopped") > 3


def test_seeds_repeat_a_point_and_a_sweep_can_be_extended(tmp_path: Path):
    cluster = Cluster(tmp_path, trials=2, seeds=3)
    sweep = cluster.command(2)
    assert [t.name for t in sweep.trials[:4]] == [
        *("trial-0000-seed-0", "trial-0000-seed-1", "trial-0000-seed-2"),
        "trial-0001-seed-0",
    ]
    assert [t.seed for t in sweep.of_point(sweep.trials[4])] == [0, 1, 2]
    before, trained = result(sweep), dict(cluster.trained)
    cluster.wanted = replace(cluster.wanted, trials=3)
    sweep = cluster.command(2)
    assert result(sweep)[:6] == before
    assert sweep.count("finished") == 9
    assert {key: cluster.trained[key] for key in trained} == trained


def test_a_repeatedly_dying_trial_fails_and_the_others_continue(tmp_path: Path):
    sweep = Sweep(settings(2))
    reported: list[str] = []
    conductor = Conductor(
        sweep, BASE, open_storage(str(tmp_path)), lambda t: reported.append(t.status)
    )
    conductor.take_up()
    for _ in range(MOST_DEATHS):
        trial = conductor.next(1)
        assert trial is not None
        assert trial.number == 0
        conductor.ended(0, Ended("lost", "out of memory"))
        conductor.ended(0, Ended("lost", "Ray Tune says it again"))
    assert reported == ["waiting", "waiting", "failed"]
    assert sweep.trials[0].message == "lost 3 times: out of memory"
    assert conductor.next(1) is sweep.trials[1]
    conductor.ended(1, Ended("failed", "the loss is not finite"))
    assert conductor.is_over


@pytest.mark.parametrize("scheduler", ["halving", "pbt", "asha"])
@pytest.mark.parametrize("there", [True, False])
@pytest.mark.parametrize("way", ["lost", "killed"])
def test_a_trial_is_paused_only_once_a_checkpoint_follows_its_evaluation(
    tmp_path: Path, scheduler: Any, there: bool, way: str
):
    folder = open_storage(str(tmp_path))
    sweep = Sweep(settings(2, scheduler=scheduler))
    conductor = Conductor(sweep, BASE, folder, stopped=lambda config, step: there and step == 10)
    conductor.take_up()
    trial = conductor.next(1)
    assert trial is not None
    log = [Evaluated(10, 1.0, math.nan)]
    assert conductor.evaluated(0, Evaluation("top1", "max", log))  # it is asked to stop
    if way == "lost":
        conductor.ended(0, Ended("lost", "its process died"))
    else:
        conductor.release()
    if scheduler == "asha":
        assert trial.status == "stopped"
    elif there:
        assert trial.status == "paused"
    else:
        assert (trial.status, trial.message) == ("waiting", "")
        assert conductor.next(1) is trial
        # It says so again when it resumes, and is asked again.
        assert conductor.evaluated(0, Evaluation("top1", "max", log))


def test_asha_decides_once_at_a_rung(tmp_path: Path):
    """Values reported again after a resumption are not compared with later ones."""
    sweep = Sweep(settings(3, scheduler="asha"))
    conductor = Conductor(sweep, BASE, open_storage(str(tmp_path)))
    conductor.take_up()
    for _ in range(3):
        conductor.next(3)
    first = Evaluation("top1", "max", [Evaluated(10, 1.0, 0.3)])
    assert conductor.evaluated(0, first) == ""
    for number in (1, 2):
        better = Evaluation("top1", "max", [Evaluated(10, 1.0, 0.5 + number / 10)])
        assert conductor.evaluated(number, better) == ""
    assert conductor.evaluated(0, first) == ""


def test_a_signal_leaves_trials_waiting_for_the_next_command(tmp_path: Path):
    sweep = Sweep(settings(3))
    conductor = Conductor(sweep, BASE, open_storage(str(tmp_path)))
    conductor.take_up()
    first, second = conductor.next(2), conductor.next(2)
    assert conductor.next(2) is None
    assert first is not None
    assert second is not None
    conductor.stopping = 2
    conductor.ended(first.number, Ended("interrupted"))
    conductor.ended(second.number, Ended("lost", "killed"))
    assert conductor.next(2) is None
    assert conductor.is_over
    assert [t.status for t in sweep.trials] == ["waiting"] * 3
    assert second.deaths == 0  # caused by the signal


def test_points_are_ranked_by_the_mean_of_their_seeds():
    """Not by one lucky seed; a point that lacks a seed's result ranks below those with all."""
    sweep = Sweep(settings(3, seeds=2))
    for number, value in enumerate((0.99, 0.5, 0.8, 0.9, 0.95, None)):
        log = [] if value is None else [Evaluated(10, 1.0, value)]
        name = f"trial-{number // 2:04}-seed-{number % 2}"
        sweep.trials.append(Trial(number, name, {}, number % 2, evaluations=log))
    assert [trial.number for trial in sweep.ranked()] == [3, 2, 0, 1, 4]


def test_the_sweep_file_preserves_the_whole_sweep(tmp_path: Path):
    folder = open_storage(str(tmp_path))
    sweep = Sweep(settings(2, scheduler="asha"), monitor="loss", goal="min")
    point = {"optim.lr": 0.1234567890123, "augment.policy": "none", "epochs": 3, "flip": True}
    scores = [Evaluated(23, 1.0, 0.25), Evaluated(46, 2.0, math.nan)]
    sweep.trials = [Trial(0, "trial-0000", point, 7, "stopped", 3, 2, 1, 4.5, "why", scores)]
    save(sweep, folder)
    again = load_sweep(folder)
    assert again is not None
    assert repr(again.trials) == repr(sweep.trials)  # NaN is not equal to itself
    assert differences(again.settings, sweep.settings) == []
    assert [type(v) for v in again.trials[0].point.values()] == [float, str, int, bool]
    assert again.best_of(again.trials[0]) == 0.25  # not the one that is not finite
    assert load_sweep(folder.join("nothing")) is None


def test_a_folder_with_another_sweep_or_a_run_is_refused(tmp_path: Path):
    folder = open_storage(str(tmp_path / "s"))
    Cluster(tmp_path / "s", trials=4).command(1)
    assert found(folder, settings(4)) is not None
    more = found(folder, settings(9))
    assert more is not None
    assert more.settings.trials == 9
    other = settings(4, space=parse_space(["optim.lr=log:1e-3:2", "augment.policy=none,trivial"]))
    for wanted, text in (
        (settings(3), r"--trials: 4 -> 3"),
        (settings(4, seeds=2), r"--seeds: 1 -> 2"),
        (settings(4, scheduler="asha"), r"--scheduler: 'none' -> 'asha'"),
        (other, r"--space: optim.lr differs"),
        (settings_of(replace(BASE, batch_size=32), space=SPACE, trials=4), "batch_size: 64 -> 32"),
        (settings_of(replace(BASE, seed=1), space=SPACE, trials=4), "seed: 0 -> 1"),
    ):
        with pytest.raises(ConfigError, match=text):
            found(folder, wanted)
    begun = open_storage(str(tmp_path / "begun"))
    begun.mkdir()
    point: Point = {"optim.lr": 0.1, "augment.policy": "none"}
    waiting = Sweep(settings(4), trials=[Trial(0, "trial-0000", point, 0)])
    save(waiting, begun)
    assert found(begun, settings(3)) is None  # it could not start: the name is free
    waiting.trials[0].starts = 1  # it was interrupted
    save(waiting, begun)
    with pytest.raises(ConfigError, match="--trials: 4 -> 3"):
        found(begun, settings(3))
    run = open_storage(str(tmp_path / "run"))
    run.mkdir()
    run.write_atomic("config.toml", b"")
    with pytest.raises(ConfigError, match="is a run: give the sweep another --name"):
        found(run, settings(4))
    assert found(open_storage(str(tmp_path / "new")), settings(4)) is None


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "[" * 100_000, '{"schema": 1}', '{"schema": 1, "settings": 3}']
)
def test_a_damaged_file_is_named(tmp_path: Path, text: str):
    (tmp_path / SWEEP_FILE).write_text(text)
    with pytest.raises(CheckpointError, match=r"sweep.json is damaged"):
        load_sweep(open_storage(str(tmp_path)))


@pytest.mark.parametrize(
    ("old", "new", "named"),
    [
        ('"seeds": 1', '"seeds": 0', "its seeds"),
        ('"number": 0', '"number": 3', "the numbers of its trials"),
        ('"optim.lr": 0.01', '"optim.rate": 0.01', "trial-0000"),
        ('"optim.lr": 0.01', '"optim.lr": "0.01"', "trial-0000"),
        ('"augment.policy": "none"', '"augment.policy": "all"', "trial-0000"),
        ('"low": ', '"low": -', "trial-0000"),
    ],
)
def test_an_inconsistent_sweep_file_counts_as_damaged(
    tmp_path: Path, old: str, new: str, named: str
):
    point: Point = {"optim.lr": 0.01, "augment.policy": "none"}
    sweep = Sweep(settings(1), trials=[Trial(0, "trial-0000", point, 0)])
    save(sweep, open_storage(str(tmp_path)))
    path = tmp_path / SWEEP_FILE
    assert old in path.read_text()
    path.write_text(path.read_text().replace(old, new, 1))
    with pytest.raises(CheckpointError, match=rf"is damaged \(.*{named}"):
        load_sweep(open_storage(str(tmp_path)))


def test_a_file_of_a_newer_version_is_refused(tmp_path: Path):
    save(Sweep(settings(1)), open_storage(str(tmp_path)))
    path = tmp_path / SWEEP_FILE
    path.write_text(json.dumps({**json.loads(path.read_text()), "schema": 99}))
    with pytest.raises(ConfigError, match="a newer version"):
        load_sweep(open_storage(str(tmp_path)))


def test_a_trial_is_a_run_in_the_folder_of_the_sweep(tmp_path: Path):
    sweep, base = Sweep(settings(1, seeds=2)), replace(BASE, storage=str(tmp_path), seed=5)
    conductor = Conductor(sweep, base, open_storage(str(tmp_path / "s")))
    conductor.take_up()
    config, storage = conductor.config_of(sweep.trials[1]), str(tmp_path / "s")
    assert (config.name, config.storage, config.seed) == ("trial-0000-seed-6", storage, 6)
    assert config.optim.lr == sweep.trials[1].point["optim.lr"]
    expected = to_dict(replace(BASE, name=config.name, storage=storage, seed=6))
    differing = {key for key, value in to_dict(config).items() if value != expected[key]}
    assert differing <= {"optim", "augment"}
    bucket = "s3://bucket/runs?endpoint_override=127.0.0.1:9000&scheme=http"
    conductor.base = replace(base, storage=bucket)
    expected_uri = bucket.replace("/runs?", "/runs/s?")
    assert conductor.config_of(sweep.trials[0]).storage == expected_uri


optuna = pytest.mark.skipif(
    not __import__("importlib").util.find_spec("optuna"), reason="needs optuna"
)


@optuna
def test_optuna_learns_and_suggests_the_same_points_after_a_kill(tmp_path: Path):
    """With one trial at a time: its points are a function of the seed and of what has ended."""

    class Bowl(Cluster):
        def log(self, trial: Trial, epochs: int) -> list[Evaluated]:
            lr = trial.point["optim.lr"]
            assert isinstance(lr, float)
            score = -abs(math.log10(lr) + 1.5)
            return [Evaluated(10 * n, float(n), score) for n in range(1, epochs + 1)]

    expected = Bowl(tmp_path / "a", search="optuna", trials=30).command(1)
    cluster = Bowl(tmp_path / "b", search="optuna", trials=30)
    for events in (7, 31, 64, 10**6):
        sweep = cluster.command(1, events)
    assert result(sweep) == result(expected)
    assert max(cluster.trained.values()) == 1
    late = [-(sweep.best_of(trial) or 0.0) for trial in sweep.trials[15:]]
    assert sum(late) / 15 < 0.6  # at random: 0.75


@optuna
def test_a_suggestion_refused_by_the_config_fails_and_another_is_drawn(tmp_path: Path):
    space = parse_space(["batch_size=32:40"])
    wanted = settings_of(BASE, space=space, trials=10, search="optuna")
    sweep = Sweep(wanted)
    conductor = Conductor(sweep, BASE, open_storage(str(tmp_path)))
    conductor.take_up()
    while (trial := conductor.next(1)) is not None:
        assert trial.point["batch_size"] == 32
        conductor.ended(trial.number, Ended("finished", evaluations=[Evaluated(1, 1.0, 0.5)]))
    assert conductor.is_over
    refused = [trial for trial in sweep.trials if trial.status == "failed"]
    assert refused
    assert all("refused: batch_size" in trial.message for trial in refused)
    assert len(sweep.trials) == 10
