"""The layer between Ray Tune and the conductor, without starting Ray."""

from __future__ import annotations

import asyncio
import os
import pickle
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from raytrain_ddp.checkpoint.storage import open_storage
from raytrain_ddp.config.recipe import to_dict
from raytrain_ddp.config.train_config import TrainConfig
from raytrain_ddp.tools.sweep.conductor import Conductor, Ended, Evaluation
from raytrain_ddp.tools.sweep.run_sweep import settings_of
from raytrain_ddp.tools.sweep.space import parse_space
from raytrain_ddp.tools.sweep.sweep_state import Evaluated, Sweep
from raytrain_ddp.tools.sweep.trial_session import StopOrder

engine = pytest.importorskip("raytrain_ddp.tools.sweep.tune_engine")


def conductor_of(folder: Path, trials: int = 2) -> Conductor:
    base = replace(TrainConfig(name="s"), storage=str(folder))
    settings = settings_of(base, space=parse_space(["optim.lr=1:2"]), trials=trials)
    conductor = Conductor(Sweep(settings), base, open_storage(str(folder / "s")))
    conductor.take_up()
    return conductor


def test_a_stop_reaches_only_the_intended_start_of_a_trial():
    async def scenario() -> None:
        stops = engine.StopRequests()
        first, again = (asyncio.ensure_future(stops.wait(7, start)) for start in (1, 2))
        other = asyncio.ensure_future(stops.wait(8, 1))
        await stops.stop(7, 1, StopOrder(15, "not among the best"))
        await stops.stop(7, 1, StopOrder(15, "said twice"))
        assert (await first).why == "not among the best"
        await asyncio.sleep(0)
        assert not again.done()
        assert not other.done()
        await stops.stop_all(StopOrder(2, "Ctrl-C"))
        assert [(await each).signal for each in (again, other)] == [2, 2]
        late = await asyncio.wait_for(stops.wait(9, 1), 1)  # began in the meantime
        assert late.signal == 2

    asyncio.run(scenario())


def test_reporting_an_evaluation_returns_the_resulting_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Not a step later, when a poll notices it: other trials start from the state of that step."""
    stops, loop = engine.StopRequests(), asyncio.new_event_loop()

    def remote(method: Any) -> Any:
        def call(*args: Any) -> Any:
            if method.__name__ == "wait":
                return "not there yet"
            return loop.run_until_complete(method(*args))

        return SimpleNamespace(remote=call)

    actor = SimpleNamespace(given=remote(stops.given), wait=remote(stops.wait))

    def report(said: Any) -> None:
        if isinstance(said["said"], Evaluation):
            loop.run_until_complete(stops.stop(0, 1, StopOrder(15, "waits")))

    answers = []

    def train(config: TrainConfig, ties: Any) -> Ended:
        answers.append(loop.run_until_complete(stops.given(0, 1)))
        answers.append(ties.tell(Evaluation("top1", "max", [Evaluated(10, 1.0, 0.5)])))
        answers.append(ties.asked())
        return Ended("interrupted")

    monkeypatch.setattr(engine.tune, "report", report)
    monkeypatch.setattr(engine, "train_trial", train)
    monkeypatch.setattr(engine, "_bind_to_raylet", lambda: None)
    monkeypatch.setattr(engine.ray, "get", lambda given: given)
    monkeypatch.setattr(engine.ray, "wait", lambda refs, timeout: ([], refs))
    monkeypatch.chdir(tmp_path)
    config = to_dict(TrainConfig(name="t", storage=str(tmp_path)))
    here = engine.Here(str(tmp_path), (), "")
    engine._train(actor, {"trial": 0, "start": 1, "config": config}, here)
    loop.close()
    assert answers == [None, StopOrder(15, "waits"), None]


def test_ray_tune_gets_each_trial_once_and_then_the_end(tmp_path: Path):
    conductor, raised = conductor_of(tmp_path), list[BaseException]()
    points = engine._Points(conductor, 1, raised)
    first = points.suggest("a")
    assert (first["trial"], first["start"]) == (0, 1)
    assert first["config"]["storage"] == str(tmp_path / "s")
    assert points.suggest("b") is None  # only one at a time
    results = engine._Results(conductor, None, raised)
    trial = SimpleNamespace(config=first, get_error=lambda: "Traceback\n  x\nOSError: no room\n\n")
    for _ in range(3):
        results.on_trial_error(None, trial)
        if conductor.sweep.trials[0].status == "waiting":
            points.suggest("c")
    assert conductor.sweep.trials[0].message == "lost 3 times: OSError: no room"
    assert points.suggest("d")["trial"] == 1
    conductor.stopping = 2
    conductor.release()
    assert points.suggest("e") == engine.Searcher.FINISHED
    assert raised == []
    pickle.loads(pickle.dumps([points, results]))  # Ray Tune keeps copies of both


def test_a_storage_failure_ends_the_sweep_with_its_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    conductor, raised = conductor_of(tmp_path), list[BaseException]()

    def full(*_: Any) -> None:
        raise PermissionError("read-only")

    monkeypatch.setattr("raytrain_ddp.tools.sweep.conductor.save", full)
    points = engine._Points(conductor, 1, raised)
    assert points.suggest("a") == engine.Searcher.FINISHED
    (error,) = raised
    assert "run the same command again" in str(error)


def test_a_node_that_does_not_see_the_sweep_folder_reports_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "code"
    folder.mkdir()
    monkeypatch.setattr("sys.path", [*__import__("sys").path])
    assert engine.Here(str(folder), (str(tmp_path),), "").missing(str(tmp_path)) == ""
    assert Path.cwd() == folder
    assert __import__("sys").path[0] == str(tmp_path)
    monkeypatch.setattr(engine, "is_seen", lambda storage, token: token == "mine")
    assert engine.Here("/nowhere", (), "mine").missing(str(tmp_path)) == ""
    text = engine.Here("/nowhere", (), "other").missing(str(tmp_path))
    assert text.startswith(f"node {os.uname().nodename} does not see the folder of the sweep")
