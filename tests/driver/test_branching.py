"""Runs that start from the state of another run, with changes."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from processes import Died, Group
from tiny import bits, kept_steps, newest, plain, run_tiny, tiny_config

from raytrain_ddp import fit_locally
from raytrain_ddp.checkpoint.run_folder import EVENTS_FILE, read_history, run_storage
from raytrain_ddp.config.sections import ModelConfig, OptimConfig
from raytrain_ddp.config.train_config import TrainConfig
from raytrain_ddp.driver.dry_run import dry_run
from raytrain_ddp.driver.run_naming import begun_from, branch_of, find_run
from raytrain_ddp.errors import ConfigError

OPTIM = OptimConfig(lr=0.05, weight_decay=1e-3)


def begin(config: TrainConfig, origin: str) -> None:
    run = find_run(config)
    branch = branch_of(run, origin)
    assert branch is not None
    begun_from(run, branch)


@pytest.fixture
def base(workers: Group, tmp_path: Path) -> TrainConfig:
    """A run that was stopped at step 20."""
    config = tiny_config(tmp_path, "base", optim=OPTIM, exact=True)
    workers(3, run_tiny, plain(config), None, 20)
    assert 20 in kept_steps(config)
    return config


def test_a_branch_without_changes_ends_with_the_same_bits_as_the_base_run(
    workers: Group, base: TrainConfig
):
    copy, nested = replace(base, name="copy"), replace(base, name="nested")
    begin(copy, "base")
    begin(nested, str(newest(copy)))  # a checkpoint's folder
    for config in (base, copy, nested):
        assert workers(2, run_tiny, plain(config))[0].start_step == 20
    assert bits(copy) == bits(base) == bits(nested)
    assert read_history(run_storage(copy))[:5] == read_history(run_storage(base))[:5]


def test_changes_apply_from_the_first_step_and_survive_a_kill(workers: Group, base: TrainConfig):
    optim = replace(OPTIM, lr=0.02, weight_decay=0.3, momentum=0.5, nesterov=False)
    changed = [replace(base, name=name, optim=optim) for name in ("left-alone", "killed")]
    for config in changed:
        begin(config, "base")
    workers(3, run_tiny, plain(changed[0]))
    ends = workers.outcomes(3, run_tiny, plain(changed[1]), None, 0, 27)
    assert ends[2] == Died(9)
    workers(3, run_tiny, plain(changed[1]))
    assert bits(changed[0]) == bits(changed[1])
    groups = newest(changed[1]).read("state.json").decode()
    decays = [group.split("]")[0] for group in groups.split('["weight_decay", ')[1:]]
    assert {float(decay) for decay in decays} == {0.0, 0.3}
    assert '["momentum", 0.5]' in groups
    workers(3, run_tiny, plain(base))
    assert bits(base) != bits(changed[0])


@pytest.mark.parametrize(
    ("field", "changes"),
    [
        ("model.freeze", {"model": ModelConfig(freeze=("a",))}),
        ("optim.name", {"optim": replace(OPTIM, name="adamw")}),
    ],
)
def test_the_state_of_another_model_or_optimizer_is_refused(
    base: TrainConfig, field: str, changes: dict[str, Any]
):
    run = find_run(replace(base, name="new", **changes))
    with pytest.raises(ConfigError, match=f"{field}: .*--model.weights base"):
        branch_of(run, "base")
    assert not Path(run.folder.path).exists()


def test_other_batches_and_another_seed_go_on_from_the_state_and_are_listed_in_one_note(
    workers: Group, base: TrainConfig
):
    changed = replace(base, name="new", batch_size=64, seed=7)
    begin(changed, "base")
    assert str(branch_of(find_run(replace(changed, name="other")), "base")).endswith(
        "a0001; its config differs: seed 0 -> 7, batch_size 32 -> 64"
    )
    assert workers(3, run_tiny, plain(changed))[0].start_step == 20


def test_a_base_run_that_conflicts_is_missing_or_is_finished_is_refused(
    workers: Group, base: TrainConfig
):
    with pytest.raises(ConfigError, match=r"--resume-from gone: .*/gone: no run there"):
        branch_of(find_run(replace(base, name="new")), "gone")
    with pytest.raises(ConfigError, match="Did you mean 'base'"):
        branch_of(find_run(replace(base, name="new")), "bas")
    with pytest.raises(ConfigError, match="run base has this config, but began at step 0, not fr"):
        branch_of(find_run(base), "other")
    workers(3, run_tiny, plain(base))
    with pytest.raises(ConfigError, match=r"base has finished at step \d+, and nothing is left"):
        branch_of(find_run(replace(base, name="new")), "base")


def test_a_run_cannot_start_from_itself(
    tmp_path: Path, base: TrainConfig, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    checkpoint = str(newest(base))
    reported = r"run base has this config, but began at step 0, not from .*: set another --name"
    for origin in ("base", "./base", checkpoint):
        for storage in (base.storage, "."):
            with pytest.raises(ConfigError, match=reported):
                dry_run(replace(base, storage=storage), None, origin)
    twin = replace(base, name="base-2")  # of another name
    begin(twin, checkpoint)
    assert branch_of(find_run(twin), checkpoint) is None


def test_the_same_command_branches_then_continues(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.chdir(tmp_path)
    config = TrainConfig(name="base", steps=3)
    fit_locally(config)
    new = replace(config, name="new", steps=5, optim=replace(config.optim, lr=0.01))
    options: Any = {"resume_from": "base"}
    with pytest.raises(ConfigError, match="resume_from is empty"):  # would begin at step 0
        dry_run(new, None, "")
    assert f"new would be created, and starts from {tmp_path}/runs/base/" in dry_run(
        new, None, **options
    )
    assert not Path("runs/new").exists()
    assert fit_locally(new, **options).step == 5
    reported = read_history(run_storage(new), EVENTS_FILE)[0]
    assert reported["text"].endswith("; its config differs: optim.lr 0.1 -> 0.01")
    steps = [r["step"] for r in read_history(run_storage(new)) if r["kind"] == "train"]
    assert steps == sorted(set(steps))
    Path("runs/base").rename("runs/elsewhere")  # is no longer needed
    assert fit_locally(replace(new, steps=6), **options).step == 6
    assert json.loads(Path("runs/new/branch.json").read_text())["origin"] == "base"
