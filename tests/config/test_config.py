"""The config: refuses invalid values, is unchanged by TOML, and defines what may change on
resume."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from processes import run_cli

from raytrain_ddp.command_line import FitArgs
from raytrain_ddp.config import input_sections, recipe, sections
from raytrain_ddp.config.field_types import Section
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
from raytrain_ddp.evaluate import EvaluateArgs
from raytrain_ddp.export.__main__ import ExportArgs
from raytrain_ddp.predict.__main__ import PredictArgs
from raytrain_ddp.tasks.model_zoo import check_model, known_models

# Adding a flag is a promise to keep it; "free" means that it does not affect the result.

FREE = """
checkpoint.every_epochs checkpoint.every_s checkpoint.every_steps checkpoint.keep_last
checkpoint.max_failed
data.cache data.cache_gib data.classes data.max_bad data.memory_mib data.prefetch
data.prefetch_mib data.root data.workers
epochs
max_time
log.audit log.every_steps log.mlflow log.profile_ranks log.profile_steps
log.project log.tensorboard log.wandb
name
optim.max_nonfinite optim.nonfinite
scaling.backend scaling.check_every_steps scaling.cpus_per_worker scaling.gpus_per_worker
scaling.hang_s scaling.max_failures scaling.max_preemptions scaling.num_workers
scaling.placement scaling.replace_workers scaling.resize_s
scaling.spares scaling.start_timeout_s scaling.use_gpu scaling.wait_s scaling.warm_processes
settled
steps stop.min_delta stop.patience
storage
"""

FIXED = """
batch_size
compute.channels_last compute.compile compute.deterministic compute.precision compute.tf32
augment.crop augment.cutmix augment.erase augment.flip augment.jitter augment.magnitude
augment.mixup augment.operations augment.policy augment.repeats augment.scale
augment.spread_repeats
data.bad_records data.config data.eval_crop data.eval_size data.eval_source data.eval_split
data.exif_orientation data.grow_epochs data.holdout data.holdout_seed
data.image_column data.image_size data.interpolation data.jpeg_scaling data.label_column
data.mean data.shuffle data.shuffle_window data.source data.start_size data.std
data.target_columns data.train_split
ddp.bucket_cap_mb ddp.compression ddp.find_unused_parameters ddp.gradient_as_bucket_view
ddp.static_graph ddp.sync_batchnorm
ema.decay ema.warmup
eval.every_epochs eval.every_steps eval.micro_batch exact
limit_eval_batches limit_train_batches
loss.class_weights loss.gamma loss.name
micro_batch
model.args model.dropout model.freeze model.name model.weights
optim.betas optim.clip_norm optim.decay_bias optim.decay_norms optim.groups optim.head_lr
optim.label_smoothing optim.layer_decay optim.lr optim.momentum optim.name optim.nesterov
optim.weight_decay
overfit_batches
schedule.final_lr schedule.gamma schedule.name schedule.step_epochs schedule.warmup_epochs
seed
task task_options
"""

DOOR_FLAGS = {
    FitArgs: (
        "address audit config dashboard describe dry_run emit local print_config "
        "profile recipe resume_from"
    ),
    EvaluateArgs: "checkpoint data device follow out per_class read run",
    ExportArgs: "checkpoint data format image_size license out overwrite run",
    PredictArgs: (
        "address batch_size checkpoint device image_column image_size inputs layer out overwrite "
        "probabilities run top tta workers"
    ),
}


def with_field(name: str, value: Any) -> TrainConfig:
    """The default config with one field set: ``with_field("optim.lr", 0.2)``."""
    section, _, field = name.rpartition(".")
    if not section:
        return dataclasses.replace(TrainConfig(), **{field: value})
    changed = dataclasses.replace(getattr(TrainConfig(), section), **{field: value})
    return dataclasses.replace(TrainConfig(), **{section: changed})


# ------------------------------------------------------------------ checked and frozen

NONSENSE = [
    ("name", "../x"),
    ("name", ".."),
    ("name", "a/b"),
    ("name", ""),
    ("storage", ""),
    ("name", "x" * 129),
    ("name", "new\n"),
    ("seed", -1),
    ("seed", 2**63),
    ("epochs", 0),
    ("batch_size", 0),
    ("batch_size", 50),
    ("batch_size", 10**12),
    ("micro_batch", 0),
    ("micro_batch", 65),
    ("data.source", ""),
    ("data.image_size", -1),
    ("data.image_size", 2**20),
    ("data.eval_size", -1),
    ("data.eval_crop", 0.0),
    ("data.eval_crop", 1.1),
    ("data.mean", (124.0, 117.0, 104.0)),  # of 0 to 255, as elsewhere
    ("data.mean", (-0.5, 0.5, 0.5)),
    ("data.std", (1.0, 0.0, 1.0)),
    ("data.std", (58.0, 57.0, 57.0)),
    ("data.holdout", 20.0),  # percent, as below
    ("data.shuffle_window", 0),
    ("data.prefetch", 0),
    ("data.workers", -1),
    ("data.workers", 10**6),
    ("data.max_bad", -1),
    ("data.memory_mib", 0),
    ("data.prefetch_mib", 0),
    ("data.cache_gib", -1.0),
    ("augment.scale", (0.0, 1.0)),
    ("augment.scale", (0.9, 0.5)),
    ("augment.scale", (0.5, 1.5)),
    ("augment.operations", 0),
    ("augment.magnitude", 31),
    ("augment.jitter", (0.0, 0.0, -0.1, 0.0)),
    ("augment.jitter", (0.0, 0.0, 0.0, 0.6)),
    ("augment.jitter", (40.0, 40.0, 40.0, 0.1)),
    ("schedule.gamma", 10.0),
    ("augment.erase", 1.1),
    ("augment.mixup", -1.0),
    ("augment.cutmix", -1.0),
    ("augment.repeats", 0),
    ("augment.repeats", 3),
    ("model.dropout", 1.0),
    ("model.dropout", math.nan),
    ("optim.lr", 0.0),
    ("optim.lr", math.nan),
    ("optim.lr", math.inf),
    ("optim.momentum", 1.0),
    ("optim.momentum", 0.0),
    ("optim.betas", (0.9, 1.5)),
    ("optim.weight_decay", -1.0),
    ("optim.clip_norm", -1.0),
    ("optim.max_nonfinite", -1),
    ("optim.label_smoothing", 1.0),
    ("optim.layer_decay", 0.0),
    ("optim.layer_decay", 1.5),
    ("optim.head_lr", 0.0),
    ("optim.groups", ("lr=0.1",)),
    ("optim.groups", ("layer1",)),
    ("optim.groups", ("layer1", "lr=0")),
    ("optim.groups", ("layer1", "lr=fast")),
    ("optim.groups", ("layer1", "weight_decay=-1")),
    ("optim.groups", ("layer1", "momentum=0.1")),
    ("model.args", {"img size": 3}),
    ("loss.gamma", 0.5),
    ("schedule.warmup_epochs", -1.0),
    ("schedule.final_lr", 1.5),
    ("schedule.step_epochs", 0.0),
    ("schedule.gamma", -0.1),
    ("ddp.bucket_cap_mb", 0.0),
    ("eval.every_epochs", -1),
    ("checkpoint.every_epochs", -1),
    ("checkpoint.every_steps", -1),
    ("checkpoint.every_s", -1.0),
    ("checkpoint.every_s", "sometimes"),
    ("checkpoint.max_failed", 0),
    ("checkpoint.keep_last", 1),
    ("scaling.num_workers", 0),
    ("scaling.num_workers", -1),
    ("scaling.num_workers", 5),
    ("scaling.num_workers", "3:2"),
    ("scaling.num_workers", "0:2"),
    ("scaling.num_workers", "many"),
    ("scaling.num_workers", "1:2:3"),
    ("scaling.cpus_per_worker", 0.00001),
    ("scaling.gpus_per_worker", 0.0),
    ("scaling.gpus_per_worker", 2.0),
    ("scaling.max_failures", -1),
    ("scaling.wait_s", -1.0),
    ("scaling.max_preemptions", -2),
    ("scaling.resize_s", 0.0),
    ("scaling.start_timeout_s", 0.0),
    ("scaling.start_timeout_s", "long"),
    ("scaling.hang_s", -1.0),
    ("scaling.hang_s", "long"),
    ("scaling.check_every_steps", -1),
    ("log.every_steps", 0),
]

# An empty text, and the two that are invalid only in combination with another field.
TOLD_OTHERWISE = [("data.source", ""), ("optim.momentum", 0.0), ("scaling.num_workers", 5)]


@pytest.mark.parametrize(("field", "value"), NONSENSE)
def test_invalid_values_are_refused_by_the_constructor(field: str, value: Any):
    with pytest.raises(ConfigError) as caught:
        with_field(field, value)
    assert caught.value.exit_status == 2


@pytest.mark.parametrize(("field", "value"), NONSENSE)
def test_a_config_error_names_the_field_the_value_and_the_remedy(field: str, value: Any):
    try:
        with_field(field, value)
    except ConfigError as error:
        message = str(error)
    else:
        pytest.skip("not refused: see test_invalid_values_are_refused_by_the_constructor")
    assert field in message or field == "scaling.num_workers"
    assert str(value) in message or repr(value) in message or (field, value) in TOLD_OTHERWISE
    assert any(word in message for word in ("must", "set ", "take ", "use ", "lower", "give "))


@given(
    st.integers(1, 300),
    st.integers(1, 300),
    st.one_of(st.just("auto"), st.integers(1, 40).map(str)),
)
def test_a_config_is_refused_or_its_slots_divide_among_the_workers(
    batch_size: int, micro_batch: int, workers: str
):
    scaling = sections.ScalingConfig(num_workers=workers)
    try:
        config = TrainConfig(batch_size=batch_size, micro_batch=micro_batch, scaling=scaling)
    except ConfigError:
        fits = batch_size % micro_batch == 0
        assert not (fits and (workers == "auto" or int(workers) <= batch_size // micro_batch))
    else:
        assert config.slots * micro_batch == batch_size
        assert config.slots >= scaling.worker_range()[1]


@given(st.integers(1, 40), st.integers(1, 40), st.integers(2, 200))
def test_the_remedy_for_too_few_slots_works(slots: int, micro_batch: int, workers: int):
    config = TrainConfig(batch_size=slots * micro_batch, micro_batch=micro_batch)
    if workers > slots:
        with pytest.raises(ConfigError) as caught:
            config.require_slots(workers)
        remedy = str(caught.value).split(": set ")[1].split(", or ")[0].split()
        fields = {
            flag[2:].replace("-", "_"): int(n)
            for flag, n in zip(remedy[::2], remedy[1::2], strict=True)
        }
        config = dataclasses.replace(config, **fields)
    config.require_slots(workers)


def test_every_section_is_frozen():
    config = TrainConfig()
    for section in [config, *vars(config).values()]:
        if dataclasses.is_dataclass(section):
            first = dataclasses.fields(section)[0].name
            with pytest.raises(dataclasses.FrozenInstanceError):
                setattr(section, first, None)


def test_every_field_has_a_line_of_help():
    """The help shows the string below a field; a field without one is undocumented."""
    for name in ("sections", "input_sections", "train_config"):
        source = (Path(sections.__file__).parent / f"{name}.py").read_text()
        lines = [line.strip() for line in source.splitlines()]
        for place, line in enumerate(lines):
            is_field = line.startswith(
                tuple(f"{n.rpartition('.')[2]}: " for n in flat(TrainConfig()))
            )
            if is_field and "Config = field" not in line:
                rest = lines[place + 1 : place + 4]
                assert any(text.startswith('"""') for text in rest), line


def test_fault_45_a_saved_config_contains_no_secret_of_a_uri():
    where = "endpoint_override=http%3A%2F%2F10.0.0.1%3A9000&scheme=http"
    secret = f"s3://key:canary@bucket/images?secret_key=canary&region=x&{where}"
    data = input_sections.DataConfig(source=secret, eval_source=secret)
    config = TrainConfig(storage=secret, data=data)
    assert "canary" not in dumps(publishable(config))
    for written in (publishable(config).storage, publishable(config).data.source):
        assert written == f"s3://bucket/images?region=x&{where}"
    assert publishable(publishable(config)) == publishable(config)
    written = to_dict(publishable(config))
    assert changed_fields(written, config) == []  # the run continues with the same flags
    elsewhere = dataclasses.replace(data, source="s3://bucket/images?region=y")
    assert changed_fields(written, dataclasses.replace(config, data=elsewhere)) == []
    other = dataclasses.replace(config, data=input_sections.DataConfig(source="s3://other/images"))
    assert [name for name, _, _ in changed_fields(written, other)] == [
        *("data.source", "data.eval_source"),
    ]


# ------------------------------------------------------------------ round trips

numbers = st.floats(1e-6, 1e6)
texts = partial(  # others are refused: test_hostile_text.py
    st.text,
    st.characters(exclude_categories=["Cc", "Cs"], exclude_characters="\u2028\u2029\ufeff"),
)
configs = st.builds(
    TrainConfig,
    name=st.from_regex(r"[A-Za-z0-9_-]{1,20}", fullmatch=True),
    storage=texts(min_size=1),
    task_options=st.dictionaries(texts(), texts(), max_size=3),
    seed=st.integers(0, 2**63 - 1),
    epochs=st.integers(1, 10**6),
    data=st.builds(
        input_sections.DataConfig,
        source=texts(min_size=1),
        eval_source=st.none() | texts(),
        mean=st.tuples(*[st.floats(0, 1)] * 3),
        shuffle=st.sampled_from(["auto", "full", "block"]),
        workers=st.just("auto") | st.integers(0, 99),
    ),
    augment=st.builds(
        input_sections.AugmentConfig,
        flip=st.booleans(),
        policy=st.sampled_from(["none", "randaugment", "trivial", "augmix"]),
        mixup=numbers,
        repeats=st.sampled_from([1, 2, 8]),
    ),
    model=st.builds(
        sections.ModelConfig,
        weights=st.none() | texts(),
        dropout=st.just(0.5),
        args=st.dictionaries(
            st.sampled_from(["drop_path_rate", "img_size"]),
            texts() | st.booleans() | st.integers() | numbers,
        ),
        freeze=st.lists(texts(), max_size=2).map(tuple),
    ),
    optim=st.builds(
        sections.OptimConfig,
        name=st.sampled_from(["sgd", "adamw"]),
        lr=numbers,
        betas=st.tuples(st.floats(0, 0.99), st.floats(0, 0.99)),
    ),
    scaling=st.builds(
        sections.ScalingConfig,
        num_workers=st.sampled_from(["auto", "1:3", 1, 2, 3, 4]),
        use_gpu=st.sampled_from([True, False, "auto"]),
        gpus_per_worker=st.floats(0.125, 1),
    ),
)


@given(configs)
def test_a_config_is_unchanged_after_a_round_trip_through_dict_and_toml(config: TrainConfig):
    assert from_dict(to_dict(config)) == config
    again = from_dict(recipe.tomllib.loads(dumps(config)))
    assert again == config
    assert dumps(again) == dumps(config)
    changed = recipe.tomllib.loads(dumps(config, TrainConfig()))
    assert from_dict(changed) == config
    default = recipe.flat(TrainConfig())
    assert all(default[name] != value for name, value in recipe.fields_of(changed))
    assert changed_fields(to_dict(config), again) == []


def test_a_recipe_file_is_read_and_names_its_runs(tmp_path: Path):
    (tmp_path / "mine.toml").write_text("epochs = 3\n[optim]\nlr = 1\n")
    config = load(str(tmp_path / "mine.toml"))
    assert (config.name, config.epochs, config.optim.lr) == (None, 3, 1.0)
    assert recipe.default_name(str(tmp_path / "mine.toml")) == "mine"
    assert recipe.default_name("my recipe (é).toml") == "my-recipe"
    assert recipe.default_name("é.toml") is None
    assert recipe.default_name(str(tmp_path / "config.toml")) == tmp_path.name


@pytest.mark.parametrize("name", recipe.shipped_recipes())
def test_shipped_recipes_load_and_name_known_models(name: str):
    config = load(name)
    assert (config.name, recipe.default_name(name)) == (None, name)
    check_model(config.model.name)


@pytest.mark.parametrize("kind", ["mixup", "cutmix"])
def test_mixing_needs_two_images_in_a_micro_batch(kind: str):
    """Otherwise, it would be enabled but never applied."""
    for micro, repeats in ((1, 1), (4, 4)):
        augment = input_sections.AugmentConfig(repeats=repeats, **{kind: 0.2})
        reported = rf"augment\.{kind} = 0\.2: .* set micro_batch to {2 * repeats} or more"
        with pytest.raises(ConfigError, match=reported):
            TrainConfig(batch_size=8, micro_batch=micro, augment=augment)
        TrainConfig(batch_size=8, micro_batch=2 * repeats, augment=augment)


def test_spread_repeats_need_as_many_slots_and_no_larger_micro_batch():
    augment = input_sections.AugmentConfig(repeats=3, spread_repeats=True, mixup=0.2)
    TrainConfig(batch_size=8, micro_batch=2, augment=augment)
    with pytest.raises(
        ConfigError, match=r"repeats = 3: with spread_repeats, .* at most 2, the sl"
    ):
        TrainConfig(batch_size=8, micro_batch=4, augment=augment)


def test_the_digits_recipe_equals_the_default_config():
    assert dataclasses.replace(load("digits"), name=None) == TrainConfig()


# ------------------------------------------------------------------ errors of a recipe


def test_unknown_keys_are_named_with_a_suggestion():
    with pytest.raises(ConfigError) as caught:
        from_dict({"epoch": 3, "optim": {"learning_rate": 1, "lrr": 2}}, where="mine.toml")
    lines = str(caught.value).splitlines()
    assert lines[0].startswith("mine.toml: there is no field epoch.")
    assert "'epochs'" in lines[0]
    assert any("optim.lrr" in line and "'lr'" in line for line in lines)
    assert len(lines) == 3


def test_the_types_of_a_config_are_looked_up_once():
    """The lookup takes 20 ms of CPU, a dict less than one."""
    from_dict({"epochs": 3})
    looked_up = Section.kinds.cache_info().misses  # type: ignore[attr-defined]
    assert from_dict({"epochs": 4}).epochs == 4
    assert Section.kinds.cache_info().misses == looked_up  # type: ignore[attr-defined]


def test_all_errors_of_a_recipe_are_reported_together():
    """Unknown keys, wrong types, and invalid values, each on its own line."""
    values = {
        "epochz": 3,
        "epochs": "many",
        "data": {"prefetch": 0, "shufle": 1},
        "schedule": {"name": "sometimes"},  # a section with valid types is checked further
        "optim": {"lr": -1},
        "model": {"dropout": 2},
    }
    with pytest.raises(ConfigError) as caught:
        from_dict(values)
    message = str(caught.value)
    fields = ["epochz", "epochs =", "data.prefetch", "schedule.name =", "data.shufle"]
    fields += ["optim.lr", "model.dropout"]
    assert [field for field in fields if field not in message] == []


@pytest.mark.parametrize(
    "values",
    [
        {"epochs": "three"},
        {"epochs": 1.5},
        {"data": 3},
        {"optim": {"betas": [0.9]}},
        {"optim": {"name": "sdg"}},
        {"data": {"std": ["a", 1, 1]}},
        {"task_options": {"a": {"b": 1}}},
        {"scaling": {"num_workers": [1]}},
        {"name": 5},
    ],
)
def test_a_value_of_a_wrong_type_is_a_config_error_that_names_the_field(values: dict[str, Any]):
    with pytest.raises(ConfigError) as caught:
        from_dict(values)
    field = next(iter(values))
    assert field in str(caught.value)


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(
                st.sampled_from(
                    ["optim", "data", "lr", "epochs", "name", "x", "scaling", "workers"]
                ),
                inner,
                max_size=4,
            )
        ),
    )
)
def test_any_recipe_content_gives_a_config_or_a_config_error(values: Any):
    if not isinstance(values, dict):
        values = {"optim": values}
    with contextlib.suppress(ConfigError):
        assert isinstance(from_dict(values), TrainConfig)


@given(st.binary(max_size=60) | st.text(max_size=60).map(str.encode))
def test_any_recipe_bytes_give_a_config_or_a_config_error(content: bytes):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "recipe.toml"
        path.write_bytes(content)
        with contextlib.suppress(ConfigError):
            assert isinstance(load(str(path)), TrainConfig)


# ------------------------------------------------------------------ what may change on resume


def test_the_list_of_flags_is_frozen():
    assert sorted(flat(TrainConfig())) == sorted((FREE + FIXED).split())
    for args, names in DOOR_FLAGS.items():
        assert sorted(f.name for f in dataclasses.fields(args)) == names.split()


@pytest.mark.parametrize("field", (FREE + FIXED).split())
def test_fault_27_a_change_on_resume_is_refused_unless_the_field_may_change(field: str):
    then: dict[str, Any] = to_dict(TrainConfig())
    section, _, name = field.rpartition(".")
    (then[section] if section else then)[name] = "something else"
    changed = [name for name, _, _ in changed_fields(then, TrainConfig())]
    assert changed == ([] if field in FREE.split() else [field])


def test_a_field_newer_than_the_checkpoint_counts_as_its_default():
    then = to_dict(TrainConfig())
    del then["optim"]["clip_norm"], then["compute"]
    assert changed_fields(then, TrainConfig()) == []
    assert changed_fields(then, with_field("optim.clip_norm", 1.0)) == [
        ("optim.clip_norm", 0.0, 1.0)
    ]


def test_a_removed_field_is_reported():
    then = {**to_dict(TrainConfig()), "shape": "round"}
    assert changed_fields(then, TrainConfig()) == [("shape", "round", None)]


# ------------------------------------------------------------------ fast commands

WITHOUT_TORCH_OR_RAY = [
    (("--help",), 0),
    (("digits", "--print-config"), 0),
    (("digitz",), 2),
    (("--optim.lrr", "3"), 2),
    (("--optim.lr", "abc"), 2),
    (("--epochs", "0"), 2),
    (("--model.name", "resnet81"), 2),
    (("--task", "image-clasification"), 2),
    (("--data.source", "nowhere"), 4),
    (("--scaling.num-workers", "64", "--batch-size", "1024"), 3),
]


@pytest.mark.parametrize(("argv", "status"), WITHOUT_TORCH_OR_RAY)
def test_fault_39_help_and_errors_answer_without_torch_or_ray(
    argv: tuple[str, ...], status: int, tmp_path: Path
):
    answer = run_cli("fit", *argv, cwd=tmp_path)
    assert answer.status == status
    assert answer.heavy == []
    assert answer.cpu_s < 1.0  # of CPU, so that a busy machine does not matter


def test_help_names_every_flag(tmp_path: Path):
    answer = run_cli("fit", "--help-all", cwd=tmp_path)
    missing = [f for f in flat(TrainConfig()) if f"--{f.replace('_', '-')}" not in answer.out]
    assert missing == []


# ------------------------------------------------------------------ models


def test_known_models_are_those_of_torchvision_and_our_own():
    import torchvision
    from torchvision.models import list_models

    assert sorted(known_models()) == sorted(["digits-cnn", *list_models(module=torchvision.models)])


def test_fault_40_an_unknown_model_is_refused_with_similar_names():
    assert "resnet50" in known_models()
    with pytest.raises(ConfigError, match=r"model\.name = 'resnet51'.*'resnet50'"):
        check_model("resnet51")
