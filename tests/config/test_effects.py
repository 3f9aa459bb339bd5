"""Every given setting has an effect, or is refused or noted."""

from __future__ import annotations

import copy
import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from processes import run_cli
from tiny import TinyTask, tiny_config

from raytrain_ddp import TrainConfig
from raytrain_ddp.chaos.__main__ import parse as parse_chaos
from raytrain_ddp.command_line import parse_fit
from raytrain_ddp.config.effects import (
    effect_notes,
    given_flags,
    idle,
    ranks_of_launcher,
    unread_notes,
    value_of,
    watched,
)
from raytrain_ddp.config.recipe import dumps, flat, load, shipped_recipes
from raytrain_ddp.config.scaling_section import ScalingConfig
from raytrain_ddp.config.sections import DdpConfig, ModelConfig, OptimConfig
from raytrain_ddp.doctor.__main__ import parse as parse_doctor
from raytrain_ddp.driver.config_flags import command
from raytrain_ddp.driver.dry_run import dry_run
from raytrain_ddp.errors import ConfigError, PreflightError
from raytrain_ddp.report.write import write_report

IDLE = [
    ("--model.name resnet50 --model.dropout 0.1", "model.dropout"),
    ("--model.args a 1", "model.args"),
    ("--data.eval-crop 1", "data.eval_crop"),
    ("--data.interpolation bicubic", "data.interpolation"),
    ("--loss.gamma 3", "loss.gamma"),
    ("--loss.name focal --optim.label-smoothing 0.2", "optim.label_smoothing"),
    (
        "--loss.name bce --data.target-columns a b --optim.label-smoothing 0.2",
        "optim.label_smoothing",
    ),
    (
        "--loss.name bce --data.target-columns a b --data.label-column c",
        "data.label_column",
    ),
    ("--optim.weight-decay 0 --optim.decay-norms", "optim.decay_norms"),
    ("--optim.betas 0.9 0.999", "optim.betas"),
    ("--optim.name adamw --optim.momentum 0.9", "optim.momentum"),
    ("--optim.name adamw --optim.no-nesterov", "optim.nesterov"),
    ("--optim.max-nonfinite 5", "optim.max_nonfinite"),
    ("--schedule.step-epochs 3", "schedule.step_epochs"),
    ("--schedule.gamma=0.5", "schedule.gamma"),
    ("--schedule.name step --schedule.final-lr 0.1", "schedule.final_lr"),
    ("--exact --ddp.static-graph", "ddp.static_graph"),
    ("--ddp.static-graph --ddp.find-unused-parameters", "ddp.find_unused_parameters"),
    ("--exact --ddp.no-gradient-as-bucket-view", "ddp.gradient_as_bucket_view"),
    ("--data.shuffle full --data.shuffle-window 3", "data.shuffle_window"),
    ("--data.max-bad 3", "data.max_bad"),
    ("--data.workers 0 --data.prefetch 9", "data.prefetch"),
    ("--data.cache /tmp/x", "data.cache"),
    ("--data.cache-gib 3", "data.cache_gib"),
    ("--data.holdout-seed 3", "data.holdout_seed"),
    ("--data.root elsewhere", "data.root"),
    ("--data.source torchvision:MNIST --data.label-column y", "data.label_column"),
    ("--augment.scale 0.5 1", "augment.scale"),
    ("--augment.policy trivial --augment.magnitude 5", "augment.magnitude"),
    ("--augment.operations 3", "augment.operations"),
    ("--scaling.resize-s 10", "scaling.resize_s"),
    ("--scaling.use-gpu False --scaling.gpus-per-worker 0.5", "scaling.gpus_per_worker"),
    ("--log.project mine", "log.project"),
    ("--log.profile-ranks 1", "log.profile_ranks"),
    ("--storage s3://bucket/x --log.tensorboard", "log.tensorboard"),
    ("--task-options rows 5", "task_options"),
    ("--local --scaling.num-workers 2", "scaling.num_workers"),
    ("--local --scaling.max-failures 2", "scaling.max_failures"),
]


@pytest.mark.parametrize(("line", "field"), IDLE, ids=[line for line, _ in IDLE])
def test_a_flag_without_effect_is_refused(line: str, field: str):
    with pytest.raises(ConfigError, match=f"^{field} has no effect: it needs "):
        parse_fit(line.split())


@pytest.mark.parametrize(
    "line",
    [
        "--optim.name adamw --optim.betas 0.8 0.9",
        "--schedule.name step --schedule.gamma 0.5",
        "--local --scaling.cpus-per-worker 2",
        "--profile --log.profile-ranks 1",
        "--data.source torchvision:MNIST --data.root elsewhere",
        "--data.source s3://b/x --data.cache /tmp/x --data.cache-gib 3",
        "--augment.policy randaugment --augment.magnitude 5",
        "--scaling.num-workers 1:2 --scaling.resize-s 10",
        "--local --exact --scaling.cpus-per-worker 2",
        "--task x.py:Y --model.dropout 0.1 --augment.scale 0.5 1",
        "imagenet-resnet50 --model.weights DEFAULT",
        "digits --describe=true",
    ],
)
def test_a_flag_with_effect_is_accepted(line: str):
    parse_fit(line.split())


@pytest.mark.parametrize(
    ("line", "reported"),
    [
        ("--local --address auto", "--address has no effect with --local"),
        ("--local --dashboard", "--dashboard has no effect with --local"),
        ("--address auto --dashboard", "--dashboard has no effect with --address"),
        ("--dry-run --emit slurm", "--emit has no effect with --dry-run"),
        ("--print-config --dry-run", "--dry-run has no effect with --print-config"),
        ("--dry-run --address auto", "--address has no effect with --dry-run"),
        ("--print-config --local", "--local has no effect with --print-config"),
        ("--dry-run --local --address auto", "--address has no effect with --dry-run"),
        ("--dry-run --local --scaling.num-workers 2", "scaling.num_workers has no effect"),
    ],
)
def test_flags_that_disable_each_other_are_refused(line: str, reported: str):
    with pytest.raises(ConfigError, match=reported):
        parse_fit(line.split())


def test_ray_only_flags_are_refused_under_torchrun(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
    with pytest.raises(ConfigError, match="--address has no effect with torchrun"):
        parse_fit(["--address", "auto"])
    with pytest.raises(ConfigError, match=r"scaling\.num_workers has no effect"):
        parse_fit(["--scaling.num-workers", "2"])
    parse_fit(["--epochs", "2", "--local"])


ADDRESS = {"MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}


@pytest.mark.parametrize(
    ("environment", "ranks"),
    [
        ({}, (0, 1, 0)),
        ({"RANK": "2", "WORLD_SIZE": "3", "LOCAL_RANK": "1", **ADDRESS}, (2, 3, 1)),
        ({"RANK": "1", "WORLD_SIZE": "2"}, None),
        ({"WORLD_SIZE": "2", "MASTER_ADDR": "localhost"}, None),
        ({"RANK": "1", "WORLD_SIZE": "2", **ADDRESS, "MASTER_PORT": "65536"}, None),
        ({"RANK": "1", "WORLD_SIZE": "2", **ADDRESS, "MASTER_PORT": "http"}, None),
        ({"RANK": "3"}, None),
        ({"RANK": "3", "WORLD_SIZE": "3"}, None),
        ({"RANK": "one", "WORLD_SIZE": "3"}, None),
        ({"WORLD_SIZE": "0"}, None),
        ({"LOCAL_RANK": "-1"}, None),
    ],
)
def test_ranks_that_do_not_fit_together_are_refused(
    environment: dict[str, str], ranks: tuple[int, int, int] | None, monkeypatch: pytest.MonkeyPatch
):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", *ADDRESS):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    if ranks is None:
        with pytest.raises(PreflightError, match=r"(RANK|WORLD_SIZE) = .*: start with torchrun"):
            ranks_of_launcher()
    else:
        assert ranks_of_launcher() == ranks


def test_the_other_commands_refuse_flags_without_effect(tmp_path: Path):
    for argv in (["--nodes", "2", "--workers", "2"], ["--log.no-tensorboard"], ["--name", "x"]):
        with pytest.raises(ConfigError, match=r"already sets it|chaos sets this itself"):
            parse_chaos(argv)
    with pytest.raises(ConfigError, match=r"--scaling.use-gpu = True: --local is on CPUs"):
        parse_chaos(["--local", "--scaling.use-gpu", "true"])
    for argv in (["--optim.betas", "0.8", "0.9"], ["--local", "--scaling.placement", "SPREAD"]):
        with pytest.raises(ConfigError, match=r"(optim\.betas|scaling\.placement) has no effect"):
            parse_chaos(argv)
    for argv in (["--run", "x", "--epochs", "3"], ["digits", "--run", "x"]):
        with pytest.raises(ConfigError, match="has no effect with --run"):
            parse_doctor(argv)
    with pytest.raises(ConfigError, match="--device has no effect"):
        write_report(["x"], None, False, "cpu")
    with pytest.raises(ConfigError, match="--device bogus: expected"):
        write_report(["x"], None, True, "bogus")
    answer = run_cli("convert", "--verify", "x", "--address", "auto", cwd=tmp_path)
    assert (answer.status, answer.err) == (2, "error: --address has no effect with --verify.\n")


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


def test_flags_are_recognized_in_all_their_forms():
    argv = ["digits", "--optim.no-nesterov", "--epochs=3", "--log.every_steps", "-5", "--no-x"]
    assert {"optim.nesterov", "epochs", "log.every_steps", "x"} <= given_flags(argv)


# ------------------------------------------------------------------ user tasks


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
    assert "optim.label_smoothing = 0.3 is set, but test_effects:Reading does not read" in reported
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
    assert value_of(seen, "data.source") == "digits"
    assert unread_notes(config, reads) == []  # the built-in task


def test_batch_norm_needs_samples_in_each_slot_to_be_synchronized(tmp_path: Path):
    """Reported by --dry-run as well, which knows the data."""
    changes = {"ddp": DdpConfig(sync_batchnorm=True), "batch_size": 58, "micro_batch": 29}
    scaling = ScalingConfig(num_workers=2, use_gpu=True)
    config = tiny_config(tmp_path, "run", task=TinyTask, scaling=scaling, **changes)
    with pytest.raises(ConfigError, match="samples for all 2 slots"):
        dry_run(config)
    assert "2 workers" in dry_run(replace(config, batch_size=96, micro_batch=48))
    assert "this process" in dry_run(replace(config, scaling=ScalingConfig()), local=True)
    # For a cluster with GPUs that this machine lacks.
    of_auto = replace(config, scaling=ScalingConfig(num_workers=2), batch_size=96, micro_batch=48)
    assert "2 workers" in dry_run(of_auto)
