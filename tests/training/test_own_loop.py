"""A loop of one's own keeps the promises: the same bits and log, each sample once, survivors."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import own_loops
import pytest
from generation_runs import Run
from own_loops import EPOCHS, own_config, plain_loop, result, run_own
from processes import Died, Group, Raised
from tiny import plain

STEPS = 4 * EPOCHS


@pytest.fixture(scope="module")
def undisturbed(workers: Group, tmp_path_factory: pytest.TempPathFactory) -> dict[Any, Any]:
    found = {}
    for size, exact in ((1, False), (3, False), (1, True)):
        config = own_config(tmp_path_factory.mktemp("undisturbed"), exact)
        assert workers(size, run_own, plain(config), plain_loop) == [(STEPS, 0)] * size
        found[size, exact] = result(config)
    return found


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize(
    "points",
    [
        "train.before_step:term@rank=0,step=6",
        "train.after_backward:kill@rank=0,step=7",
        "train.after_step:kill@rank=0,step=3",
        "train.after_step:kill@rank=0,step=8",
        "evaluate:kill@rank=0,step=8",
        "checkpoint.manifest:kill@step=6",
        "checkpoint.committed:kill@step=12",
    ],
)
def test_a_killed_loop_ends_with_the_same_bits_and_log(
    size: int, points: str, workers: Group, undisturbed: dict[Any, Any], tmp_path: Path
) -> None:
    config = own_config(tmp_path)
    (tmp_path / "fired").mkdir()
    ended = workers.outcomes(size, run_own, plain(config), plain_loop, 0, points)
    assert any(isinstance(each, Died) for each in ended)
    assert workers(size, run_own, plain(config), plain_loop) == [(STEPS, 0)] * size
    assert result(config) == undisturbed[size, False]


@pytest.mark.parametrize(
    "points",
    [
        "train.after_backward:kill@rank=1,step=3",
        "train.after_backward:kill@rank=0,step=7",
        "train.after_step:kill@rank=2,step=8",
        "evaluate:kill@rank=1,step=8",
        "train.before_step:kill@rank=0,step=6",
    ],
)
def test_survivors_of_a_death_repeat_no_step(
    points: str, undisturbed: dict[Any, Any], tmp_path: Path
) -> None:
    config = own_config(tmp_path / "runs", every=100)  # only what survivors keep
    run = Run(config, tmp_path / "notes", points, loop=plain_loop)
    notes = run.wait()
    assert run.deaths == 1
    step = int(points.rpartition("=")[2]) - ("after_backward" in points or "before" in points)
    assert {start for note in notes for start in note["steps"]} - {0} == {step}
    assert result(config) == undisturbed[3, False]


def test_a_stopped_exact_loop_has_the_same_bits_on_any_number_of_workers(
    workers: Group, undisturbed: dict[Any, Any], tmp_path: Path
) -> None:
    config = own_config(tmp_path, exact=True)
    assert workers(1, run_own, plain(config), plain_loop, 3) == [(3, 15)]
    assert workers(3, run_own, plain(config), plain_loop, 8) == [(8, 15)] * 3
    assert workers(2, run_own, plain(config), plain_loop) == [(STEPS, 0)] * 2
    assert result(config) == undisturbed[1, True]


@pytest.mark.parametrize(
    ("loop", "exact"), [("scaled", False), ("adversaries", True), ("adversaries", False)]
)
def test_a_loop_with_a_scaler_or_two_optimizers_resumes(
    loop: str, exact: bool, workers: Group, tmp_path: Path
) -> None:
    train = getattr(own_loops, f"{loop}_loop")
    whole, parts = own_config(tmp_path / "a", exact), own_config(tmp_path / "b", exact)
    assert workers(3, run_own, plain(whole), train) == [(STEPS, 0)] * 3
    assert workers(3, run_own, plain(parts), train, 7) == [(7, 15)] * 3
    assert workers(3, run_own, plain(parts), train) == [(STEPS, 0)] * 3
    assert result(parts) == result(whole)


@pytest.mark.parametrize("by_tokens", [False, True])
@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("size", [1, 3])
def test_gradients_are_those_of_the_whole_batch(
    size: int, exact: bool, by_tokens: bool, workers: Group, tmp_path: Path
) -> None:
    config = own_config(tmp_path, exact)
    workers(size, run_own, plain(config), partial(own_loops.counting_loop, by_tokens))


BACKWARD, UPDATE = "step.backward(cross_entropy(model(x), y))", "optimizer.step()"
SIDE = "torch.optim.SGD(nn.Linear(6, 3).parameters(), 0.1)"
FALLS = "torch.optim.lr_scheduler.StepLR(optimizer, 1)"
HALVES = "optimizer.param_groups[0]['lr'] /= 2\n        for step"
MISTAKES = [
    ("model", "model", 3, ""),  # none
    (UPDATE, f"{UPDATE}; other = {SIDE}; other.step()", 1, "run.register(optimizer="),
    ("run.register(", f"{FALLS}; run.register(", 1, "scheduler="),
    ("model=model, ", "", 1, "run.register(model=model)"),
    ("model.parameters()", "nn.Linear(6, 3).parameters()", 1, "outside of the models"),
    ("register(", "register(odd=1, ", 1, "run.register(odd="),
    (BACKWARD, "cross_entropy(model(x), y).backward()", 1, "step.backward(loss)"),
    (BACKWARD, f"{BACKWARD}; {BACKWARD}", 1, "step.backward(loss)"),
    (BACKWARD, f"{BACKWARD}; optimizer.step()", 1, "are final"),
    (BACKWARD, "break", 3, "are final"),
    (BACKWARD, f"{BACKWARD}; torch.distributed.all_reduce(x)", 3, "allreduce"),
    (BACKWARD, f"{BACKWARD}; 1 / 0", 3, "ZeroDivisionError"),
    ("for x, y in step:\n    ", "if False:\n    ", 1, "left early"),
    ("optimizer.zero_grad()", "pass", 1, "optimizer.zero_grad()"),
    ("optimizer.zero_grad()", "break", 1, "run.stop()"),
    ("optimizer.zero_grad()", "return", 1, "run.stop()"),
    ("prepare(nn.Linear(6, 3))", "prepare(run.prepare(nn.Linear(6, 3)))", 3, "run.prepare()"),
    ("for step", HALVES, 1, "scheduler.step()"),
    ("Samples()", "iter([1])", 1, "cannot be indexed"),
    ("micro_batch=6", "micro_batch=5", 1, "micro_batch=5"),
]


@pytest.mark.parametrize(("old", "new", "size", "named"), MISTAKES)
def test_a_mistake_ends_the_run_in_one_line(
    old: str, new: str, size: int, named: str, workers: Group, tmp_path: Path
) -> None:
    loop = partial(own_loops.changed_loop, old, new)
    ended = workers.outcomes(size, run_own, plain(own_config(tmp_path)), loop)
    found = [each for each in ended if isinstance(each, Raised)]
    assert bool(found) == bool(named)
    assert not named or any(named in each.text.strip().splitlines()[-1] for each in found)
