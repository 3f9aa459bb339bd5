"""The config: refuses invalid values, is unchanged by TOML, and defines what may change on
resume."""

# mypy: disable-error-code="arg-type"

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from processes import run_cli

from raytrain_ddp.config import recipe, sections
from raytrain_ddp.config.recipe import (
    changed_fields,
    dumps,
    flat,
    from_dict,
    load,
    publishable,
    to_dict,
)
from raytrain_ddp.config.train_config import TrainConfig
from raytrain_ddp.errors import ConfigError
from raytrain_ddp.tasks.model_zoo import check_model

# Fields that do not affect the result. Adding one is a promise.

FREE = """
checkpoint.every_epochs checkpoint.every_s checkpoint.every_steps checkpoint.keep_last
checkpoint.max_failed
data.classes data.max_bad data.memory_mib data.prefetch
data.prefetch_mib data.root data.workers
epochs
max_time
log.audit log.every_steps log.mlflow log.profile_ranks log.profile_steps
log.project log.tensorboard log.wandb
name
optim.max_nonfinite optim.nonfinite
scaling.backend scaling.check_every_steps scaling.cpus_per_worker scaling.gpus_per_worker
scaling.hang_s scaling.max_failures scaling.num_workers
scaling.placement scaling.replace_workers scaling.resize_s
scaling.start_timeout_s scaling.use_gpu scaling.wait_s scaling.warm_processes
steps stop.min_delta stop.patience
storage
"""


def test_a_config_is_refused_or_its_slots_divide_among_the_workers():
    for batch in (1, 2, 7, 8, 12, 30):
        for micro in (1, 2, 3, 4, 6, 7, 8, 30, 31):
            for workers in ("auto", 1, 2, 3, 4, 5, "2:4"):
                scaling = sections.ScalingConfig(num_workers=workers)
                most = {"auto": 1, "2:4": 4}.get(str(workers), workers)
                fits = batch % micro == 0 and most <= batch // micro
                try:
                    config = TrainConfig(batch_size=batch, micro_batch=micro, scaling=scaling)
                except ConfigError:
                    assert not fits
                else:
                    assert fits
                    assert config.slots * micro == batch


def test_equivalent_python_values_are_accepted():
    config = TrainConfig(
        storage=Path("runs"),
        epochs=np.int64(3),
        task_options={"a": 3, "b": True, "c": 0.5, "d": "x"},
        exact=np.bool_(True),
        data=sections.DataConfig(
            source=Path("photos"), mean=[0.5, 0.5, 1], std=np.array([1, 0.5, 0.25])
        ),
        optim=sections.OptimConfig(lr=np.float32(0.5)),
    )
    assert (config.storage, config.data.source) == ("runs", "photos")
    assert (config.epochs, type(config.epochs)) == (3, int)
    assert (config.data.mean, config.data.std) == ((0.5, 0.5, 1.0), (1.0, 0.5, 0.25))
    assert config.exact is True
    assert (config.optim.lr, type(config.optim.lr)) == (0.5, float)
    assert from_dict(json.loads(json.dumps(to_dict(config)))) == config


def test_fault_45_a_saved_config_contains_no_secret_of_a_uri():
    where = "endpoint_override=http%3A%2F%2F10.0.0.1%3A9000&scheme=http"
    secret = f"s3://key:canary@bucket/images?secret_key=canary&region=x&{where}"
    data = sections.DataConfig(source=secret, eval_source=secret)
    config = TrainConfig(storage=secret, data=data)
    assert "canary" not in dumps(publishable(config))
    for written in (publishable(config).storage, publishable(config).data.source):
        assert written == f"s3://bucket/images?region=x&{where}"
    assert publishable(publishable(config)) == publishable(config)
    written = to_dict(publishable(config))
    assert changed_fields(written, config) == []  # the run continues with the same flags
    elsewhere = dataclasses.replace(data, source="s3://bucket/images?region=y")
    assert changed_fields(written, dataclasses.replace(config, data=elsewhere)) == []
    other = dataclasses.replace(config, data=sections.DataConfig(source="s3://other/images"))
    changed = [name for name, _, _ in changed_fields(written, other)]
    assert changed == ["data.source", "data.eval_source"]


def test_a_recipe_file_is_read_and_names_its_runs(tmp_path: Path):
    (tmp_path / "mine.toml").write_text("epochs = 3\n[optim]\nlr = 1\n")
    config = load(str(tmp_path / "mine.toml"))
    assert (config.name, config.epochs, config.optim.lr) == (None, 3, 1.0)
    assert recipe.default_name(str(tmp_path / "mine.toml")) == "mine"
    assert recipe.default_name("my recipe (é).toml") == "my-recipe"
    assert recipe.default_name("é.toml") is None
    assert recipe.default_name(str(tmp_path / "config.toml")) == tmp_path.name


def test_shipped_recipes_load_and_name_known_models():
    for name in recipe.shipped_recipes():
        config = load(name)
        assert (config.name, recipe.default_name(name)) == (None, name)
        check_model(config.model.name)
    assert dataclasses.replace(load("digits"), name=None) == TrainConfig()


def test_all_errors_of_a_recipe_are_reported_together():
    """Unknown keys, with similar ones, wrong types, and invalid values, in one line."""
    values = {
        "epochz": 3,
        "epochs": "many",
        "data": {"prefetch": 0, "shufle": 1},
        "schedule": {"name": "sometimes"},  # a section with valid types is checked further
        "optim": {"lr": -1},
        "model": {"dropout": 2},
    }
    with pytest.raises(ConfigError) as caught:
        from_dict(values, where="mine.toml")
    told = str(caught.value)
    fields = ["epochz", "epochs =", "data.prefetch", "schedule.name =", "data.shufle"]
    fields += ["optim.lr", "model.dropout", "'epochs'", "'data.shuffle'"]
    assert [field for field in fields if field not in told] == []
    assert told.startswith("mine.toml: ")
    assert "\n" not in told


def test_fault_27_a_change_on_resume_is_refused_unless_the_field_may_change():
    assert {*FREE.split()} <= {*flat(TrainConfig())}
    for field in flat(TrainConfig()):
        then: dict[str, Any] = to_dict(TrainConfig())
        section, _, name = field.rpartition(".")
        (then[section] if section else then)[name] = "something else"
        changed = [name for name, _, _ in changed_fields(then, TrainConfig())]
        assert changed == ([] if field in FREE.split() else [field])


def test_fields_newer_than_a_checkpoint_count_as_defaults_and_removed_ones_are_reported():
    then = to_dict(TrainConfig())
    del then["optim"]["clip_norm"], then["compute"]
    assert changed_fields(then, TrainConfig()) == []
    clipped = TrainConfig(optim=sections.OptimConfig(clip_norm=1.0))
    assert changed_fields(then, clipped) == [("optim.clip_norm", 0.0, 1.0)]
    then["shape"] = "round"
    assert changed_fields(then, TrainConfig()) == [("shape", "round", None)]
    options = to_dict(TrainConfig(task_options={"a": 3}))
    assert changed_fields(options, TrainConfig(task_options={"a": "3"})) == []


@pytest.mark.parametrize("command", ["--help", "--help-all", "digits --print-config"])
def test_fault_39_help_and_errors_answer_without_torch_or_ray(command: str, tmp_path: Path):
    """Errors are in the table of errors; these are not in any other test."""
    answer = run_cli("fit", *command.split(), cwd=tmp_path)
    assert (answer.status, answer.heavy) == (0, [])
    assert answer.cpu_s < 1.0  # of CPU, so that a busy machine does not matter
    flags = flat(TrainConfig()) if command == "--help-all" else ()
    assert [f for f in flags if f"--{f.replace('_', '-')}" not in answer.out] == []
