"""Every given setting has an effect, or is refused or noted."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tiny import TinyTask, tiny_config

from raytrain_ddp import TrainConfig
from raytrain_ddp.config.process import ranks_of_launcher
from raytrain_ddp.config.recipe import dumps, flat, load, shipped_recipes
from raytrain_ddp.config.sections import DdpConfig, ModelConfig, OptimConfig, ScalingConfig
from raytrain_ddp.config.train_config import effect_notes, idle, unread_notes, watched
from raytrain_ddp.driver.dry_run import dry_run
from raytrain_ddp.driver.recipe_args import command
from raytrain_ddp.errors import ConfigError, PreflightError
from raytrain_ddp.fit import parse_fit

# The field or flag that has no effect on these command lines.
IDLE = """
model.dropout: --model.name resnet50 --model.dropout 0.1
model.args: --model.args a 1
data.interpolation: --data.interpolation bicubic
loss.gamma: --loss.gamma 3
optim.label_smoothing: --loss.name focal --optim.label-smoothing 0.2
data.label_column: --loss.name bce --data.target-columns a b --data.label-column c
optim.decay_norms: --optim.weight-decay 0 --optim.decay-norms
optim.momentum: --optim.name adamw --optim.momentum 0.9
optim.nesterov: --optim.name adamw --optim.no-nesterov
optim.max_nonfinite: --optim.max-nonfinite 5
schedule.step_epochs: --schedule.step-epochs 3
schedule.final_lr: --schedule.name step --schedule.final-lr 0.1
ddp.static_graph: --exact --ddp.static-graph
ddp.find_unused_parameters: --ddp.static-graph --ddp.find-unused-parameters
data.shuffle_window: --data.shuffle full --data.shuffle-window 3
data.max_bad: --data.max-bad 3
data.prefetch: --data.workers 0 --data.prefetch 9
data.holdout_seed: --data.holdout-seed 3
data.root: --data.root elsewhere
data.label_column: --data.source torchvision:MNIST --data.label-column y
augment.scale: --augment.scale 0.5 1
augment.magnitude: --augment.policy trivial --augment.magnitude 5
scaling.resize_s: --scaling.resize-s 10
scaling.gpus_per_worker: --scaling.use-gpu False --scaling.gpus-per-worker 0.5
log.project: --log.project mine
log.tensorboard: --storage s3://bucket/x --log.tensorboard
task_options: --task-options rows 5
scaling.num_workers: --local --scaling.num-workers 2
scaling.max_failures: --local --scaling.max-failures 2
--dashboard: --local --dashboard
--emit: --dry-run --emit slurm
--dry-run: --print-config --dry-run
--address: --dry-run --address auto
--address: --dry-run --local --address auto
scaling.num_workers: --dry-run --local --scaling.num-workers 2
"""
ACCEPTED = """
--optim.name adamw --optim.betas 0.8 0.9
--schedule.name step --schedule.gamma 0.5
--local --scaling.cpus-per-worker 2
--log.profile-steps 5 --log.profile-ranks 1
--data.source torchvision:MNIST --data.root elsewhere
--augment.policy randaugment --augment.magnitude 5
--scaling.num-workers 1:2 --scaling.resize-s 10
--local --exact --scaling.cpus-per-worker 2
--task x.py:Y --model.dropout 0.1 --augment.scale 0.5 1
imagenet-resnet50 --model.weights DEFAULT
digits --describe=true
"""


def test_a_flag_without_effect_is_refused():
    for row in IDLE.strip().splitlines():
        field, line = row.split(": ", 1)
        with pytest.raises(ConfigError, match=f"^{field} "):
            parse_fit(line.split())


def test_a_flag_with_effect_is_accepted():
    for line in ACCEPTED.strip().splitlines():
        parse_fit(line.split())


def test_ray_only_flags_are_refused_under_torchrun(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
    with pytest.raises(ConfigError, match="--address"):
        parse_fit(["--address", "auto"])
    with pytest.raises(ConfigError, match="num_workers"):
        parse_fit(["--scaling.num-workers", "2"])
    parse_fit(["--epochs", "2", "--local"])


ADDRESS = {"MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}
UNFIT: list[Mapping[str, str]] = [
    {"RANK": "1", "WORLD_SIZE": "2"},
    {"WORLD_SIZE": "2", "MASTER_ADDR": "localhost"},
    {"RANK": "1", "WORLD_SIZE": "2", **ADDRESS, "MASTER_PORT": "65536"},
    {"RANK": "1", "WORLD_SIZE": "2", **ADDRESS, "MASTER_PORT": "http"},
    *({"RANK": "3"}, {"RANK": "3", "WORLD_SIZE": "3"}, {"RANK": "one", "WORLD_SIZE": "3"}),
    *({"WORLD_SIZE": "0"}, {"LOCAL_RANK": "-1"}),
]


def test_ranks_that_do_not_fit_together_are_refused(monkeypatch: pytest.MonkeyPatch):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", *ADDRESS):
        monkeypatch.delenv(name, raising=False)
    assert ranks_of_launcher() == (0, 1, 0)
    for environment in UNFIT:
        with monkeypatch.context() as patch:
            for name, value in environment.items():
                patch.setenv(name, value)
            with pytest.raises(PreflightError, match=r"RANK|WORLD_SIZE"):
                ranks_of_launcher()
    for name, value in {"RANK": "2", "WORLD_SIZE": "3", "LOCAL_RANK": "1", **ADDRESS}.items():
        monkeypatch.setenv(name, value)
    assert ranks_of_launcher() == (2, 3, 1)


def test_every_rule_names_a_field_and_no_default_or_recipe_violates_it(tmp_path: Path):
    fields = flat(TrainConfig())
    every = [idle(c, on_ray) for c in (TrainConfig(), TrainConfig(exact=True)) for on_ray in (0, 1)]
    assert set().union(*every) <= set(fields)
    for name in shipped_recipes():
        assert effect_notes(load(name)) == []
        path = tmp_path / "config.toml"  # as in a run: with every field
        path.write_text(dumps(load(name)))
        assert effect_notes(parse_fit([str(path)]).config) == []


def test_recipe_fields_without_effect_are_noted_and_not_emitted(tmp_path: Path):
    (tmp_path / "mine.toml").write_text('[optim]\nname = "adamw"\nmomentum = 0.5\n')
    config = parse_fit([str(tmp_path / "mine.toml")]).config
    note = "optim.momentum = 0.5 has no effect: it needs optim.name = sgd."
    assert effect_notes(config) == [note]
    assert note in dry_run(replace(config, storage=str(tmp_path)))
    assert "momentum" not in command(config)
    assert "adamw" in command(config)


class Reading(TinyTask):
    def __init__(self, config: TrainConfig) -> None:
        super().__init__(config)
        self._config = config

    def loss(self, model: Any, batch: Any) -> Any:
        assert self._config.model.dropout == 0.5
        return super().loss(model, batch)


def test_a_field_that_a_task_does_not_read_is_noted(tmp_path: Path):
    config = tiny_config(tmp_path, "reads", task=Reading, model=ModelConfig(dropout=0.5))
    config = replace(config, optim=replace(config.optim, label_smoothing=0.3))
    reported = dry_run(config)
    assert "optim.label_smoothing = 0.3 is set, but test_rules:Reading does not read" in reported
    assert "model.dropout = 0.5 is set" not in reported  # it is read in `loss`


def test_a_watched_config_otherwise_behaves_like_the_config():
    config, reads = TrainConfig(optim=OptimConfig(lr=0.5)), set()
    seen = watched(config, reads)
    assert isinstance(seen, TrainConfig)
    assert reads == set()
    assert (seen.optim.lr, seen.slots) == (0.5, config.slots)
    assert {"optim", "optim.lr", "batch_size"} <= reads
    assert "data.source" not in reads
    for same in (pickle.loads(pickle.dumps(seen)), copy.deepcopy(seen)):
        assert same == config
        assert type(same) is TrainConfig
        assert type(same.optim) is OptimConfig
    assert replace(seen.data, image_size=8).image_size == 8
    assert unread_notes(config, reads) == []  # the built-in task


def test_batch_norm_needs_samples_in_each_slot_to_be_synchronized(tmp_path: Path):
    """Reported by --dry-run as well, which knows the data."""
    changes = {"ddp": DdpConfig(sync_batchnorm=True), "batch_size": 58, "micro_batch": 29}
    scaling = ScalingConfig(num_workers=2, use_gpu=True)
    config = tiny_config(tmp_path, "run", task=TinyTask, scaling=scaling, **changes)
    with pytest.raises(ConfigError, match="sync_batchnorm"):
        dry_run(config)
    assert "2 workers" in dry_run(replace(config, batch_size=96, micro_batch=48))
    assert "this process" in dry_run(replace(config, scaling=ScalingConfig()), local=True)
    # For a cluster with GPUs that this machine lacks.
    of_auto = replace(config, scaling=ScalingConfig(num_workers=2), batch_size=96, micro_batch=48)
    assert "2 workers" in dry_run(of_auto)
