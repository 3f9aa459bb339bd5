"""Evaluation of checkpoints by a separate worker: the metrics are those of all workers.

Here, that worker is a thread of the test. With a real Ray: test_fit_on_ray.py.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from logs import log_of
from processes import Died, Group
from tiny import (
    STEPS_PER_EPOCH,
    TOTAL_STEPS,
    TinyTask,
    bits,
    kept_steps,
    newest,
    plain,
    run_tiny,
    tiny_config,
)

from raytrain_ddp.checkpoint.evaluation_file import (
    EVALUATION_FILE,
    Evaluation,
    read_evaluation,
    write_evaluation,
)
from raytrain_ddp.checkpoint.manifest import Manifest
from raytrain_ddp.checkpoint.run_folder import checkpoint_store, run_storage
from raytrain_ddp.checkpoint.storage import open_storage
from raytrain_ddp.checkpoint.store import CheckpointName, CheckpointStore
from raytrain_ddp.config.sections import (
    CheckpointConfig,
    EmaConfig,
    EvalConfig,
    ScalingConfig,
    StopConfig,
)
from raytrain_ddp.config.train_config import TrainConfig
from raytrain_ddp.driver.fit_driver import fit_locally
from raytrain_ddp.errors import CheckpointError, ConfigError, PreflightError
from raytrain_ddp.ray_backend.placement import (
    choose_layout,
    missing_resources,
    require_capacity,
    workers_that_fit,
)
from raytrain_ddp.training.async_evaluation import evaluate_checkpoint
from raytrain_ddp.training.recording.recorder import Best
from raytrain_ddp.training.runtime.world import World

ASYNCHRONOUS = EvalConfig(asynchronous=True)
AVERAGED = {"ema": EmaConfig(decay=0.9)}


@contextmanager
def evaluator(config: TrainConfig, only: frozenset[int] | None = None) -> Iterator[set[int]]:
    """Evaluates each checkpoint whose evaluation is awaited, or only those of the steps `only`."""
    over, done = threading.Event(), set[int]()
    task, store = TinyTask(config), checkpoint_store(run_storage(config))
    alone = World(0, 1, 0, torch.device("cpu"), threads=1)

    def work() -> None:
        while not over.wait(0.05):
            with suppress(CheckpointError, FileNotFoundError):  # pruned in the meantime
                for name in reversed(store.names()):
                    checkpoint = store.open(name)
                    wanted = name.step in json.loads(checkpoint.read("state.json"))["awaited"]
                    chosen = only is None or name.step in only
                    if wanted and chosen and read_evaluation(checkpoint.storage) is None:
                        args = config, task, task.eval_data(), checkpoint, alone
                        write_evaluation(checkpoint.storage, evaluate_checkpoint(*args))
                        done.add(name.step)

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield done
    finally:
        over.set()
        thread.join()


def evaluations(config: TrainConfig) -> list[dict[str, Any]]:
    return [record for record in log_of(config) if record["kind"] == "eval"]


def training(config: TrainConfig) -> list[dict[str, Any]]:
    return [record for record in log_of(config) if record["kind"] == "train"]


def require_same(config: TrainConfig, reference: TrainConfig) -> None:
    assert bits(config) == bits(reference)
    assert training(config) == training(reference)
    assert evaluations(config) == evaluations(reference)  # in this order
    ours, theirs = (json.loads(newest(c).read("state.json")) for c in (config, reference))
    for each in (ours, theirs):
        del each["code"]  # these processes have imported other tests
    assert ours == theirs  # including the best metric
    assert newest(config).manifest.metrics == newest(reference).manifest.metrics
    assert newest(config).manifest.finished


@pytest.fixture(scope="module")
def reference(workers: Group, tmp_path_factory: pytest.TempPathFactory) -> TrainConfig:
    config = tiny_config(tmp_path_factory.mktemp("reference"), "whole", **AVERAGED)
    workers(3, run_tiny, plain(config))
    return config


def test_metrics_order_and_bits_equal_those_of_evaluations_by_all_workers(
    reference: TrainConfig, workers: Group, tmp_path: Path
):
    config = tiny_config(tmp_path, "elsewhere", eval=ASYNCHRONOUS, **AVERAGED)
    with evaluator(config) as done:
        workers(3, run_tiny, plain(config))
    assert done == {10, 20}  # all workers run the last one
    require_same(config, reference)


@pytest.mark.parametrize("only", [frozenset(), frozenset({10}), frozenset({20})])
def test_evaluations_that_are_missing_when_a_rank_dies_are_run_after_the_restart(
    only: frozenset[int], reference: TrainConfig, workers: Group, tmp_path: Path
):
    """No evaluation is lost or logged twice, and they are logged in order."""
    often = CheckpointConfig(every_steps=4, every_s=0.0)
    config = tiny_config(tmp_path, "killed", eval=ASYNCHRONOUS, checkpoint=often, **AVERAGED)
    with evaluator(config, only):
        assert workers.outcomes(3, run_tiny, plain(config), None, 0, 26)[-1] == Died(9)
    assert {10, 20} - only <= {*kept_steps(config)}  # although only the last two should be kept
    assert [r["step"] for r in evaluations(config)] in ([], [10])
    with evaluator(config):
        workers(3, run_tiny, plain(config))
    require_same(config, reference)


def test_rank_0_runs_missing_evaluations_if_the_run_resumes_without_the_evaluator(
    reference: TrainConfig, workers: Group, tmp_path: Path
):
    config = tiny_config(tmp_path, "resumed", eval=ASYNCHRONOUS, **AVERAGED)
    workers(3, run_tiny, plain(config), None, 24)
    assert evaluations(config) == []
    workers(2, run_tiny, plain(replace(config, eval=EvalConfig())), None, TOTAL_STEPS - 1)
    workers(3, run_tiny, plain(replace(config, eval=EvalConfig())))
    assert [r["step"] for r in evaluations(config)] == [10, 20, 30]
    ours, theirs = evaluations(config)[:2], evaluations(reference)[:2]
    assert ours == theirs


def test_a_damaged_checkpoint_that_rank_0_should_evaluate_does_not_end_the_run(
    workers: Group, tmp_path: Path
):
    config = tiny_config(tmp_path, "resumed", eval=ASYNCHRONOUS)
    workers(3, run_tiny, plain(config), None, 24)
    (name,) = (n for n in checkpoint_store(run_storage(config)).names() if n.step == 10)
    (tmp_path / "resumed" / "checkpoints" / str(name) / "manifest.json").write_text("{")
    ran = workers(3, run_tiny, plain(replace(config, eval=EvalConfig())))
    assert [r["step"] for r in evaluations(config)] == [20, 30]
    assert any("step 10 is not evaluated" in str(event) for event in ran[0].events)


def test_a_stop_ends_the_wait_for_evaluations_and_the_resume_waits_for_them_again(
    reference: TrainConfig, workers: Group, tmp_path: Path
):
    config = tiny_config(tmp_path, "waiting", eval=ASYNCHRONOUS, **AVERAGED)
    ran = workers(3, run_tiny, plain(config), None, 0, 0, stop_while_waiting)
    assert {(r.outcome.step, r.outcome.signal) for r in ran} == {(TOTAL_STEPS, 15)}
    assert any("waiting for the evaluation of step 10, 20" in str(e) for e in ran[0].events)
    assert not newest(config).manifest.finished
    with evaluator(config):
        ran = workers(3, run_tiny, plain(config))
    assert [worker.seen for worker in ran] == [[], [], []]  # no step is repeated
    require_same(config, reference)


def stop_while_waiting(session: Any) -> None:
    """The last rank is asked to stop while it waits for evaluations."""
    usual = session.requests_in_evaluation
    last = session.world.rank == session.world.size - 1
    session.requests_in_evaluation = lambda: usual()._replace(stop=15 if last else 0)


def test_an_evaluation_whose_checkpoint_was_not_saved_is_skipped_with_a_note(
    workers: Group, tmp_path: Path
):
    config = tiny_config(tmp_path, "full", eval=ASYNCHRONOUS)
    with evaluator(config):
        ran = workers(3, run_tiny, plain(config), None, 0, 0, fail_second_commit)
    assert [r["step"] for r in evaluations(config)] == [10, 30]
    assert any("step 20 is not evaluated" in str(event) for event in ran[0].events)


def fail_second_commit(session: Any) -> None:
    """The storage is full at the checkpoint of step 20."""
    if session.recorder is None:
        return
    usual = session.recorder.store.commit

    def commit(manifest: Manifest, files: Any) -> Any:
        if manifest.step == 2 * STEPS_PER_EPOCH:
            raise OSError(28, "No space left on device")
        return usual(manifest, files)

    session.recorder.store.commit = commit


def test_a_damaged_checkpoint_is_not_evaluated_and_does_not_end_the_run(
    workers: Group, tmp_path: Path
):
    """It does not block later evaluations, either."""
    config = tiny_config(tmp_path, "damaged", eval=ASYNCHRONOUS)
    workers(3, run_tiny, plain(config), None, 24)
    store = checkpoint_store(run_storage(config))
    (name,) = [name for name in store.names() if name.step == 10]
    folder = tmp_path / "damaged" / "checkpoints" / str(name)
    (folder / "model.safetensors").write_bytes(b"?" * (folder / "model.safetensors").stat().st_size)
    with evaluator(config):
        ran = workers(3, run_tiny, plain(config))
    assert [r["step"] for r in evaluations(config)] == [20, 30]
    notes = [event["text"] for event in ran[0].events if event["kind"] == "note"]
    assert any("step 10 is not evaluated" in text and "is damaged" in text for text in notes)


# ------------------------------------------------------------------ evaluation files


def test_a_checkpoint_has_the_metrics_of_a_later_evaluation(tmp_path: Path):
    store = CheckpointStore(open_storage(str(tmp_path)))
    store.claim(None, {})
    manifest = Manifest(4, 0, 1, 1, {}, "data")
    made = store.commit(manifest, {"a.txt": b"a"})
    assert store.open(made.name).manifest.metrics == {}
    write_evaluation(made.storage, Evaluation({"top1": 0.5}, {"table": [[1, 2]]}, 3.0))
    assert store.open(made.name).manifest.metrics == {"top1": 0.5}
    assert read_evaluation(made.storage) == Evaluation({"top1": 0.5}, {"table": [[1, 2]]}, 3.0)
    found = store.latest()
    assert found is not None
    assert found.manifest.files.keys() == {"a.txt"}
    for damaged in (b"{", b"[]", b'{"metrics": 1}', b'{"metrics": {"a": "b"}}', b"\xff"):
        made.storage.write_atomic(EVALUATION_FILE, damaged)
        assert read_evaluation(made.storage) is None
        assert store.open(made.name).manifest.metrics == {}
    with pytest.raises(ValueError, match="cannot be the name"):
        store.commit(replace(manifest, step=5), {EVALUATION_FILE: b""})


def test_metrics_in_the_manifest_are_not_replaced_by_a_later_evaluation(tmp_path: Path):
    store = CheckpointStore(open_storage(str(tmp_path)))
    store.claim(None, {})
    made = store.commit(Manifest(4, 0, 1, 1, {}, "data", metrics={"top1": 0.25}), {})
    write_evaluation(made.storage, Evaluation({"top1": 0.5}, {}, 3.0))
    assert store.open(made.name).manifest.metrics == {"top1": 0.25}


def test_pruning_keeps_unevaluated_checkpoints_and_removes_evaluation_files(tmp_path: Path):
    store = CheckpointStore(open_storage(str(tmp_path)))
    store.claim(None, {})
    for step in range(1, 6):
        store.commit(Manifest(step, 0, 1, 1, {}, "data"), {})
    store.prune(2, awaited=[1, 3])
    assert [name.step for name in store.names()] == [5, 4, 3, 1]
    write_evaluation(store.open(store.names()[-1]).storage, Evaluation({}, {}, 0.0))
    store.prune(2, awaited=[3])
    assert [name.step for name in store.names()] == [5, 4, 3]
    assert not list(tmp_path.glob("step-00000001*"))


def test_an_unevaluated_checkpoint_is_not_chosen_as_the_best(tmp_path: Path):
    """Its evaluation may be written but not logged: the log names another one as the best."""
    store = CheckpointStore(open_storage(str(tmp_path)))
    for step, top1 in ((1, 0.5), (2, 0.75), (3, 0.25)):
        made = store.commit(Manifest(step, 0, 1, 1, {}, "data"), {})
        write_evaluation(made.storage, Evaluation({"top1": top1}))
    best = Best("top1", "max")
    assert best.among(store) == CheckpointName(2, 1)
    assert best.among(store, leaving_out=[2, 3]) == CheckpointName(1, 1)


# ------------------------------------------------------------------ resources


def test_the_evaluator_has_its_own_resources_in_the_layout():
    config = TrainConfig(eval=ASYNCHRONOUS, batch_size=128)
    layout = choose_layout(config, {"CPU": 32, "GPU": 4})
    assert (layout.least, layout.most, layout.evaluators) == (3, 3, 1)
    assert layout.least_needed() == {"CPU": 32.0, "GPU": 4.0}
    assert workers_that_fit(layout, [{"CPU": 32, "GPU": 4}]) == 3
    assert missing_resources(layout, {"CPU": 32, "GPU": 4}) == ""
    one = {"CPU": 8, "GPU": 1}
    layout = choose_layout(config, one)
    with pytest.raises(PreflightError, match=r"GPU: want 2 \(1 \+ 1 that evaluates x 1\), have 1"):
        require_capacity(layout, one, "this machine")
    elastic = TrainConfig(eval=ASYNCHRONOUS, scaling=ScalingConfig(num_workers="1:4"))
    layout = choose_layout(elastic, {"CPU": 4})
    assert (layout.workers, layout.least_needed()) == ((1, 4), {"CPU": 2.0})
    assert workers_that_fit(layout, [{"CPU": 2}, {"CPU": 2}]) == 3


def test_asynchronous_evaluation_is_refused_with_patience_and_without_ray(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"stop\.patience"):
        TrainConfig(eval=ASYNCHRONOUS, stop=StopConfig(patience=2))
    with pytest.raises(ConfigError, match="needs a Ray worker"):
        fit_locally(TrainConfig(eval=ASYNCHRONOUS, storage=str(tmp_path)))
    assert not list(tmp_path.iterdir())
