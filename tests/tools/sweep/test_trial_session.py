"""A trial is an ordinary run: the same bits, stopped at a commit and continued from there."""

from __future__ import annotations

import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console
from tiny import STEPS_PER_EPOCH, bits, newest, tiny_config

from raytrain_ddp.checkpoint.lease import Lease
from raytrain_ddp.checkpoint.run_folder import checkpoint_store, read_events, read_log, run_storage
from raytrain_ddp.config.sections import OptimConfig
from raytrain_ddp.config.train_config import TrainConfig
from raytrain_ddp.driver.fit_driver import fit_locally
from raytrain_ddp.events import End, Note, Train
from raytrain_ddp.tools.display.progress_display import Display
from raytrain_ddp.tools.sweep import trial_session
from raytrain_ddp.tools.sweep.conductor import Evaluation, branched
from raytrain_ddp.tools.sweep.sweep_state import Trial
from raytrain_ddp.tools.sweep.trial_configs import trial_config
from raytrain_ddp.tools.sweep.trial_session import StopOrder, Ties, train_trial

TASK = f"{Path(__file__).parents[2] / 'tiny.py'}:TinyTask"


def config_of(folder: Path, name: str) -> TrainConfig:
    config = tiny_config(folder, name, task=TASK)
    return replace(config, scaling=replace(config.scaling, cpus_per_worker=1.0))


def free(_: Evaluation) -> None:
    return None


def test_a_stopped_and_continued_trial_has_the_same_bits_as_a_run(tmp_path: Path):
    plain = config_of(tmp_path, "plain")
    fit_locally(plain, display=Display(Console(quiet=True), live=False))

    trial, said = config_of(tmp_path, "trial"), []

    def tell(evaluation: Evaluation) -> StopOrder | None:
        said.append(evaluation)
        return StopOrder(15, "not among the best") if len(said) == 1 else None

    end = train_trial(trial, Ties(tell, lambda: None))
    assert end.status == "interrupted"
    assert [(e.step, e.epochs) for e in end.evaluations] == [(10, 1.0)]
    assert newest(trial).manifest.step == 11  # the order came after step 10 was evaluated
    notes = [e.text for e, _, _ in read_events(run_storage(trial)) if isinstance(e, Note)]
    assert "the sweep stops this run: not among the best" in notes

    end = train_trial(trial, Ties(tell, lambda: None))
    assert end.status == "finished"
    assert [e.epochs for e in end.evaluations] == [1.0, 2.0, 3.0]
    # Earlier evaluations are reported again: the driver may have died in between.
    assert [len(each.evaluations) for each in said] == [1, 1, 2, 3]
    assert (said[0].monitor, said[0].goal) == ("loss", "min")
    assert bits(trial) == bits(plain)

    again = train_trial(trial, Ties(tell, lambda: None))
    assert (again.status, again.evaluations) == ("finished", end.evaluations)


def test_a_trial_stopped_within_its_first_epoch_reports_fractional_epochs(tmp_path: Path):
    config = config_of(tmp_path, "trial")
    config = replace(config, eval=replace(config.eval, every_steps=4))
    end = train_trial(config, Ties(lambda _: StopOrder(15, "enough"), lambda: None))
    assert [(e.step, e.epochs) for e in end.evaluations] == [(4, 0.4)]


def test_a_trial_killed_at_its_pause_makes_the_same_step_before_it_stops(tmp_path: Path):
    """A copy of it therefore starts from the same state as without the kill."""
    config = config_of(tmp_path, "trial")
    save = replace(config, checkpoint=replace(config.checkpoint, every_epochs=1))
    steps = iter(range(100))

    def killed() -> StopOrder | None:
        """Killed between the commit after the evaluation and the next one."""
        done = next(steps)
        if done > STEPS_PER_EPOCH and checkpoint_store(run_storage(save)).names():
            raise KeyboardInterrupt
        time.sleep(0.05 * (done > STEPS_PER_EPOCH))
        return None

    with pytest.raises(KeyboardInterrupt):
        train_trial(save, Ties(free, killed))
    assert newest(save).manifest.step == STEPS_PER_EPOCH
    end = train_trial(save, Ties(lambda _: StopOrder(15, "waits"), lambda: None))
    assert end.status == "interrupted"
    assert newest(save).manifest.step == STEPS_PER_EPOCH + 1
    assert [e.step for e in end.evaluations] == [STEPS_PER_EPOCH]


def test_fit_resumes_a_run_begun_by_a_trial(tmp_path: Path):
    trial = config_of(tmp_path, "trial")
    steps = iter(range(100))
    asked = lambda: StopOrder(2, "Ctrl-C") if next(steps) == 4 else None  # noqa: E731
    assert train_trial(trial, Ties(free, asked)).status == "interrupted"
    assert newest(trial).manifest.step == 5
    result = fit_locally(trial, display=Display(Console(quiet=True), live=False))
    assert (result.status, result.step) == ("finished", 30)


def test_kinds_of_failures_are_distinguished(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    config = config_of(tmp_path, "diverges")
    diverges = replace(config, optim=OptimConfig(lr=1e30))
    end = train_trial(diverges, Ties(free, lambda: None))
    assert end.status == "failed"
    assert "is nan at step 2" in end.message
    missing = replace(config, name="task", task=TASK.replace("TinyTask", "NoTask"))
    end = train_trial(missing, Ties(free, lambda: None))
    assert end.status == "failed"
    assert "has no class 'NoTask'" in end.message
    (tmp_path / "file").write_text("")
    end = train_trial(replace(config, storage=str(tmp_path / "file")), Ties(free, lambda: None))
    assert end.status == "lost"  # a storage may answer again

    def tell(_: Evaluation) -> None:
        raise ZeroDivisionError("in the user's code")

    end = train_trial(replace(config, name="raises"), Ties(tell, lambda: None))
    assert (end.status, end.message) == ("failed", "ZeroDivisionError: in the user's code")

    left = replace(config, name="leaves")
    end = train_trial(left, Ties(lambda _: sys.exit(3), lambda: None))
    assert (end.status, end.message) == ("failed", "the task called sys.exit(3)")
    assert isinstance(last := read_events(run_storage(left))[-1].event, End)
    assert (last.status, last.error) == (1, "SystemExit")

    monkeypatch.setattr(trial_session, "_LOCKED_S", 0.0)
    locked = replace(config, name="locked")
    with Lease.take(run_storage(locked)):
        end = train_trial(locked, Ties(free, lambda: None))
    assert end.status == "lost"
    assert "is driven by another process" in end.message


def test_a_clone_continues_from_another_trials_checkpoint_with_its_own_values(tmp_path: Path):
    """As in population based training: the samples and the log are those of the other trial."""
    base = config_of(tmp_path, "sweep")
    trials = [
        Trial(0, "trial-0000", {"optim.lr": 0.05}, 0),
        Trial(1, "trial-0001", {"optim.lr": 0.04}, 0, origin="trial-0000"),
    ]
    first, second = (trial_config(base, trial) for trial in trials)
    end = train_trial(first, Ties(lambda _: StopOrder(15, "waits for the others"), lambda: None))
    assert end.status == "interrupted"
    branched(second, "trial-0000")
    branched(second, "trial-0000")  # after a kill of the driver: not twice
    there = newest(first)
    paused = STEPS_PER_EPOCH + 1  # a stop follows the next step
    assert newest(second).name.step == there.name.step == paused
    assert newest(second).read("model.safetensors") == there.read("model.safetensors")
    end = train_trial(second, Ties(free, lambda: None))
    assert end.status == "finished"
    assert [each.epochs for each in end.evaluations] == [1, 2, 3]
    rates = {r.step: r.lr for r in read_log(run_storage(second)) if isinstance(r, Train)}
    known = {r.step: r.lr for r in read_log(run_storage(first)) if isinstance(r, Train)}
    assert rates[paused] == known[paused]
    train_trial(first, Ties(free, lambda: None))  # the other trial is unchanged
    known = {r.step: r.lr for r in read_log(run_storage(first)) if isinstance(r, Train)}
    assert sorted(known) == sorted(rates)
    later = [step for step in rates if step > paused]
    assert [rates[step] / known[step] for step in later] == pytest.approx([0.8] * len(later))
