"""Training in gloo processes without Ray: the promises of design.md section 2.

Most tests use three processes: with two, DDP has only one order of sums, which hides some errors.
"""

from __future__ import annotations

import dataclasses
import functools
import signal
import subprocess
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import warm_python
from processes import Died, Group, Raised, wait_until
from tiny import (
    EPOCHS,
    EVAL_ROWS,
    ROWS,
    STEPS_PER_EPOCH,
    TOTAL_STEPS,
    TinyNet,
    TinyTask,
    WorkerResult,
    bits,
    kept_steps,
    log_of,
    newest,
    plain,
    planned,
    run_tiny,
    tiny_arrays,
    tiny_config,
    weights,
)
from torch.nn.functional import cross_entropy

from raytrain_ddp.checkpoint.run_folder import METRICS_FILE, find_checkpoint
from raytrain_ddp.config.recipe import load
from raytrain_ddp.config.sections import (
    CheckpointConfig,
    ComputeConfig,
    DataConfig,
    OptimConfig,
    ScheduleConfig,
)
from raytrain_ddp.config.train_config import TrainConfig
from raytrain_ddp.data.loading.sources import ArraySource, Data
from raytrain_ddp.errors import DataError

VARIANTS: dict[str, dict[str, Any]] = {
    "sgd": {},
    "adamw-clip-bf16-block": {
        "optim": OptimConfig(name="adamw", lr=0.01, clip_norm=0.5),
        "compute": ComputeConfig(precision="bf16", channels_last=True),
        "data": DataConfig(workers=2, shuffle="block", shuffle_window=4),
    },
    "fp16": {"compute": ComputeConfig(precision="fp16")},
}


def losses_of(config: TrainConfig) -> list[float]:
    return [record["loss"] for record in log_of(config) if record["kind"] == "train"]


def rows_by_step(ran: list[WorkerResult]) -> dict[int, list[int]]:
    """The rows of each step in the order of the slots."""
    steps: dict[int, list[int]] = {}
    for worker in ran:  # slots are assigned in order
        for step, rows in worker.seen:
            steps.setdefault(step, []).extend(rows)
    return steps


Reference = Callable[[str], tuple[TrainConfig, list[WorkerResult]]]


@pytest.fixture(scope="module")
def reference(workers: Group, tmp_path_factory: pytest.TempPathFactory) -> Reference:
    """Uninterrupted runs on three workers; each variant is run once."""

    @functools.cache
    def run(variant: str) -> tuple[TrainConfig, list[WorkerResult]]:
        config = tiny_config(tmp_path_factory.mktemp("reference"), variant, **VARIANTS[variant])
        return config, workers(3, run_tiny, plain(config))

    return run


# ------------------------------------------------------------------ bitwise resume


def test_the_reference_uses_each_row_once_per_epoch_and_learns(reference: Reference):
    config, ran = reference("sgd")
    steps = rows_by_step(ran)
    assert sorted(steps) == list(range(1, TOTAL_STEPS + 1))
    for epoch in range(EPOCHS):
        first = epoch * STEPS_PER_EPOCH + 1
        rows = [row for step in range(first, first + STEPS_PER_EPOCH) for row in steps[step]]
        assert sorted(rows) == list(range(ROWS))
    assert len({worker.digest for worker in ran}) == 1  # all ranks end with the same model
    log = log_of(config)
    assert [r["step"] for r in log if r["kind"] == "train"] == list(range(1, TOTAL_STEPS + 1))
    assert [r["step"] for r in log if r["kind"] == "eval"] == [10, 20, 30]
    assert losses_of(config)[-1] < losses_of(config)[0]


@pytest.mark.parametrize(
    ("variant", "stops"),
    [
        ("sgd", (1, 5, STEPS_PER_EPOCH, TOTAL_STEPS - 1)),
        ("adamw-clip-bf16-block", (14,)),
        ("fp16", (24,)),  # after the scaler found an infinity and halved the scale
    ],
)
def test_a_stopped_and_resumed_run_ends_with_the_same_bits(
    variant: str, stops: tuple[int, ...], reference: Reference, workers: Group, tmp_path: Path
):
    """Promise 3. Only one rank is asked to stop; all stop after that step."""
    whole, _ = reference(variant)
    config = tiny_config(tmp_path, "stopped", **VARIANTS[variant])
    start = 0
    for stop in stops:
        ran = workers(3, run_tiny, plain(config), None, stop)
        assert {(r.outcome.step, r.outcome.signal) for r in ran} == {(stop, 15)}
        assert (ran[0].start_step, newest(config).name.step) == (start, stop)
        start = stop
    ran = workers(3, run_tiny, plain(config))
    assert (ran[0].start_step, ran[0].outcome.step) == (start, ran[0].outcome.total_steps)
    assert bits(config) == bits(whole)
    assert newest(config).read("state.json") == newest(whole).read("state.json")  # scaler, best
    assert log_of(config) == log_of(whole)


@pytest.mark.parametrize(("variant", "die_at"), [("sgd", 17), ("adamw-clip-bf16-block", 26)])
def test_fault_01_a_killed_and_resumed_run_ends_with_the_same_bits(
    variant: str, die_at: int, reference: Reference, workers: Group, tmp_path: Path
):
    """The log is ahead of the checkpoint when a rank dies; in the end, it has no step twice."""
    whole, _ = reference(variant)
    often = CheckpointConfig(every_steps=4, every_s=0.0)
    config = tiny_config(tmp_path, "killed", **{**VARIANTS[variant], "checkpoint": often})
    *others, last = workers.outcomes(3, run_tiny, plain(config), None, 0, die_at)
    assert last == Died(9)
    assert all(isinstance(other, Raised) for other in others)
    with (tmp_path / "killed" / METRICS_FILE).open("a") as log:
        log.write('{"kind": "train", "step": 999, "lo')  # torn
    ran = workers(3, run_tiny, plain(config))
    assert 0 < ran[0].start_step < die_at
    assert bits(config) == bits(whole)
    assert log_of(config) == log_of(whole)
    assert newest(config).manifest.attempt == 2


def test_a_stop_at_an_evaluation_step_saves_at_once_and_the_resume_runs_the_evaluation(
    reference: Reference, workers: Group, tmp_path: Path
):
    """Also after the last step. A stopped run may have only a few seconds."""
    whole, _ = reference("sgd")
    config = tiny_config(tmp_path, "owing")
    for stop in (STEPS_PER_EPOCH, TOTAL_STEPS):
        ran = workers(3, run_tiny, plain(config), None, stop)
        assert {(r.outcome.step, r.outcome.signal) for r in ran} == {(stop, 15)}
        assert [r["step"] for r in log_of(config) if r["kind"] == "eval"] == [10, 20][: stop // 15]
        assert (newest(config).name.step, newest(config).manifest.finished) == (stop, False)
    ran = workers(3, run_tiny, plain(config))
    assert {(r.outcome.step, r.outcome.signal) for r in ran} == {(TOTAL_STEPS, 0)}
    assert [worker.seen for worker in ran] == [[], [], []]  # no step is repeated
    assert newest(config).manifest.finished
    assert bits(config) == bits(whole)
    assert newest(config).read("state.json") == newest(whole).read("state.json")
    assert newest(config).manifest.metrics == newest(whole).manifest.metrics
    assert log_of(config) == log_of(whole)


class Animals(TinyTask):
    class_names = ("ape", "bat")


class Renamed(TinyTask):
    class_names = ("bat", "ape")


class Unevaluated(Animals):
    def eval_data(self) -> None:
        return None


class Other(Animals):
    def train_data(self) -> Data:
        return Data(ArraySource(tiny_arrays(ROWS, 7), rows_per_block=16), self._augmented)


@pytest.mark.parametrize(
    ("kind", "options", "named"),
    [
        (Other, {}, f"training data ({ROWS} rows"),
        (Animals, {"rows": ROWS + 1}, f"training data ({ROWS + 1} rows"),
        (Animals, {"eval_rows": EVAL_ROWS + 1}, f"evaluation data ({EVAL_ROWS + 1} rows"),
        (Unevaluated, {}, "no evaluation data"),
        (Renamed, {}, "2 classes: bat, ape"),
    ],
)
def test_fault_29_a_run_whose_data_changed_is_not_resumed(
    kind: type[TinyTask], options: dict[str, int], named: str, workers: Group, tmp_path: Path
):
    config = tiny_config(tmp_path, "grown")
    workers(3, run_tiny, plain(config), None, 3, 0, None, Animals)
    before = bits(config)
    for outcome in workers.outcomes(3, run_tiny, plain(config), options, 0, 0, None, kind):
        assert isinstance(outcome, Raised)  # on all ranks, without waiting for others
        assert outcome.exit_status == 4
        assert named in outcome.text
    assert bits(config) == before


def test_fault_29_a_run_without_evaluation_data_is_not_resumed_with_some(tmp_path: Path):
    config = plain(tiny_config(tmp_path, "grown"))
    for stop in (3, 5):
        run_tiny(0, 1, config, None, stop, kind=Unevaluated)
    with pytest.raises(DataError, match="evaluation data"):
        run_tiny(0, 1, config, kind=Animals)


# ------------------------------------------------------------------ the number of workers


@pytest.mark.parametrize("sizes", [{4: 0}, {3: 4, 2: 13, 1: 21, 4: 0}])
def test_fault_28_the_number_of_workers_changes_results_only_by_rounding(
    sizes: Mapping[int, int], reference: Reference, workers: Group, tmp_path: Path
):
    """Promise 1: the same rows in the same slots, and values that differ only by rounding; also if
    the number changes (where: in which step)."""
    whole, on_three = reference("sgd")
    config = tiny_config(tmp_path, "sized")
    steps: dict[int, list[int]] = {}
    for size, stop in sizes.items():
        steps |= rows_by_step(workers(size, run_tiny, plain(config), None, stop))
    assert steps == rows_by_step(on_three)
    assert losses_of(config) == pytest.approx(losses_of(whole), rel=1e-6)
    assert_close(weights(config), weights(whole))


def assert_close(ours: Mapping[str, torch.Tensor], theirs: Mapping[str, torch.Tensor]) -> None:
    """Weights and running statistics are equal within rounding, and integers exactly."""
    assert ours.keys() == theirs.keys()
    assert int(ours["norm.num_batches_tracked"]) == TOTAL_STEPS
    for name, tensor in ours.items():
        torch.testing.assert_close(tensor, theirs[name], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(("rows", "eval_rows"), [(20, 9), (3, 2)])
def test_fault_23_a_run_with_fewer_rows_than_a_batch_or_workers_equals_one_worker(
    rows: int, eval_rows: int, workers: Group, tmp_path: Path
):
    """Ranks without samples take part in collectives but do not change the weights."""
    options = {"rows": rows, "eval_rows": eval_rows}
    alone, config = (tiny_config(tmp_path, name) for name in ("alone", "three"))
    workers(1, run_tiny, plain(alone), options)
    ran = workers(3, run_tiny, plain(config), options)
    for worker_rows in rows_by_step(ran).values():
        assert sorted(worker_rows) == list(range(rows))
    assert losses_of(config) == pytest.approx(losses_of(alone), rel=1e-6)
    evaluations = [
        [r["metrics"] for r in log_of(c) if r["kind"] == "eval"] for c in (alone, config)
    ]
    assert [m["loss"] for m in evaluations[1]] == pytest.approx([m["loss"] for m in evaluations[0]])
    for name, tensor in weights(config).items():
        torch.testing.assert_close(tensor, weights(alone)[name], rtol=1e-4, atol=1e-6)


def test_uneven_slots_and_a_short_last_step_give_the_gradient_of_the_whole_batch(
    workers: Group, tmp_path: Path
):
    """Four slots on three workers, compared with plain torch and one batch per step."""
    rows, epochs = 75, 2  # 32, 32 and 11 rows: lanes of 18, 19, 19 and 19
    optim = OptimConfig(lr=0.5, momentum=0.0, nesterov=False, weight_decay=0.0)
    constant = ScheduleConfig(name="constant", warmup_epochs=0.0)
    config = tiny_config(tmp_path, "plain", epochs=epochs, optim=optim, schedule=constant)
    workers(3, run_tiny, plain(config), {"rows": rows, "norm": False})

    torch.manual_seed(config.seed)
    model = TinyNet(norm=False)
    arrays = {name: torch.from_numpy(array) for name, array in tiny_arrays(rows, 0).items()}
    losses = []
    for epoch in range(epochs):
        for slots in planned(config, epoch, rows):
            batch = torch.tensor([row for each in slots for row in each])
            loss = cross_entropy(model(arrays["x"][batch]), arrays["y"][batch])
            model.zero_grad()
            loss.backward()
            losses.append(loss.item())
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.sub_(0.5 * parameter.grad)
    assert losses_of(config) == pytest.approx(losses, rel=1e-6)
    for name, tensor in weights(config).items():
        torch.testing.assert_close(tensor, model.state_dict()[name], rtol=1e-5, atol=1e-6)


# ------------------------------------------------------------------ checkpoints


def test_pruning_keeps_the_best_checkpoint_also_after_a_resume(
    workers: Group, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    config = tiny_config(
        tmp_path / "runs",
        "best",
        epochs=6,
        checkpoint=CheckpointConfig(every_steps=5, every_s=0.0, keep_last=2),
    )
    options = {"scores": [3.0, 1.0, 2.0, 1.0, 5.0, 6.0]}  # the first of equal ones is the best
    workers(1, run_tiny, plain(config), options, 43)
    assert kept_steps(config) == [20, 40, 43]
    (ran,) = workers(1, run_tiny, plain(config), options)
    assert kept_steps(config) == [20, 55, 60]
    assert (ran.outcome.best, ran.outcome.best_step) == (1.0, 20)
    bests = [(r["step"], r["best"]) for r in log_of(config) if r["kind"] == "eval"]
    assert bests == [(10, True), (20, True), (30, False), (40, False), (50, False), (60, False)]
    assert find_checkpoint("best", "best").name.step == 20
    assert find_checkpoint("best", "last").name.step == 60


# ------------------------------------------------------------------ the commands without Ray

DIGITS = ["--batch-size", "128", "--micro-batch", "32", "--epochs", "2", "--data.workers", "1"]
DIGITS += ["--log.no-tensorboard"]


def start(folder: Path, name: str, *flags: str, **variables: str) -> subprocess.Popen[str]:
    """``fit`` on the digits, 24 steps."""
    each = "--log.every-steps", "1"
    return warm_python.fit(folder, "--name", name, *DIGITS, *each, *flags, **variables)


def test_fit_under_torchrun_is_one_run_of_two_workers(tmp_path: Path):
    """With the variables that it sets, and the store that its agent serves."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    group = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "1"}
    group |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port)}
    group |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0"}
    ranks = [
        start(tmp_path, "pair", **group, RANK=rank, LOCAL_RANK=rank, GROUP_RANK="0")
        for rank in "01"
    ]
    outs = [process.communicate(timeout=240)[0] for process in ranks]
    assert [process.returncode for process in ranks] == [0, 0], outs
    config = load(str(tmp_path / "runs" / "pair" / "config.toml"))
    config = dataclasses.replace(config, storage=str(tmp_path / "runs"))
    log = log_of(config)
    assert [r["step"] for r in log if r["kind"] == "train"] == list(range(1, 25))
    assert [r["step"] for r in log if r["kind"] == "eval"] == [12, 24]
    assert newest(config).manifest.world_size == 2
    assert (kept_steps(config), newest(config).manifest.attempt) == ([12, 24], 1)
    assert ["loading torch" in out for out in outs] == [True, False]  # only rank 0 prints


def test_fault_35_sigterm_exits_with_143_and_the_same_command_resumes_to_the_same_bits(
    tmp_path: Path,
):
    processes = [start(tmp_path, name, "--local") for name in ("whole", "stopped")]
    log = tmp_path / "runs" / "stopped" / METRICS_FILE
    wait_until(lambda: log.exists() and len(log.read_text().splitlines()) >= 3, 100)
    processes[1].send_signal(signal.SIGTERM)
    whole, stopped = (process.communicate(timeout=100)[0] for process in processes)
    assert (processes[0].returncode, processes[1].returncode) == (0, 143), whole + stopped
    assert "Stopping after this step" in stopped

    config = load(str(tmp_path / "runs" / "stopped" / "config.toml"))
    config = dataclasses.replace(config, storage=str(tmp_path / "runs"))
    interrupted_at = newest(config).name.step
    assert 3 <= interrupted_at < 24
    again = start(tmp_path, "stopped", "--local")
    out, _ = again.communicate(timeout=100)
    assert again.returncode == 0, out
    reference = dataclasses.replace(config, name="whole")
    assert bits(config) == bits(reference)
    assert log_of(config) == log_of(reference)


@pytest.mark.parametrize("exact", [False, True])
def test_at_most_one_graph_of_a_loss_exists(tmp_path: Path, exact: bool) -> None:
    """The graphs of two passes, as in the warm-up, would need twice the memory of a step."""
    full, most = set[int](), list[int]()

    class Graph(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            ctx.number = len(most)
            full.add(ctx.number)
            weakref.finalize(ctx, full.discard, ctx.number)
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            full.discard(ctx.number)  # torch frees what is saved
            return grad

    class OneGraph(TinyTask):
        def loss(self, model: torch.nn.Module, batch: Any) -> torch.Tensor:
            most.append(len(full))
            return cross_entropy(Graph.apply(model(batch["x"])), batch["y"])

    config = tiny_config(tmp_path, "run", exact=exact, epochs=1)
    run_tiny(0, 1, plain(config), kind=OneGraph)
    assert len(most) > STEPS_PER_EPOCH
    assert max(most) == 0
