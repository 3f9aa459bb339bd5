"""The recipes: each equals its source except for listed differences, and runs."""

from __future__ import annotations

import inspect
import io
import math
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from processes import run_cli
from references import CONVNEXT, REFERENCES, SCIKIT, TORCHVISION
from torchvision import datasets
from torchvision.ops._utils import split_normalization_params

from raytrain_ddp import fit_locally
from raytrain_ddp.command_line import parse_fit
from raytrain_ddp.config.effects import idle, watched
from raytrain_ddp.config.input_sections import DataConfig
from raytrain_ddp.config.recipe import flat, load, load_with_info, shipped_recipes
from raytrain_ddp.config.recipe_info import RecipeInfo
from raytrain_ddp.config.sections import CheckpointConfig, ComputeConfig, EvalConfig, LogConfig
from raytrain_ddp.config.train_config import TrainConfig
from raytrain_ddp.errors import ConfigError
from raytrain_ddp.tasks.model_zoo import build
from raytrain_ddp.tasks.task_loading import load_task
from raytrain_ddp.training.optimizer.lr_schedule import learning_rate
from raytrain_ddp.training.optimizer.param_groups import param_groups

EXAMPLES = Path(__file__).parents[2] / "examples"
SHIPPED = [*shipped_recipes()]
NAMES = [*SHIPPED, *(path.stem for path in sorted(EXAMPLES.glob("*.toml")))]
CLASSES = ("ants", "bees", "cats")


def path_of(name: str) -> str:
    """A recipe's name, or the file of an example."""
    return name if name in SHIPPED else str(EXAMPLES / f"{name}.toml")


def task_of(name: str) -> str:
    """The task that a recipe names, whatever the current folder is."""
    task = load(path_of(name)).task
    return task if name in SHIPPED else str(EXAMPLES.parent / task)


# ------------------------------------------------------------------ descriptions


@pytest.mark.parametrize("name", NAMES)
def test_a_recipe_states_its_source_and_expected_result(name: str):
    info = load_with_info(path_of(name))[1]
    assert min(map(len, (info.about, info.source, info.expected, info.gpu_hours))) >= 4
    for text in (info.about, info.source, info.expected, info.reached, *info.differs.values()):
        assert not text.endswith(".")
        assert text == " ".join(text.split())


def test_recipes_are_listed_and_described(tmp_path: Path):
    every = run_cli("fit", "--describe", cwd=tmp_path)
    assert (every.status, every.heavy) == (0, [])
    for name in SHIPPED:
        assert f"\n{name}\n" in f"\n{every.out}"
        assert load_with_info(name)[1].expected.split()[0] in every.out
    one = run_cli("fit", "imagenet-resnet50", "--describe", cwd=tmp_path)
    assert one.status == 0
    said = " ".join(one.out.split())
    assert "76.13 % top-1" in said
    assert "reached not run" in said
    assert "differs amp: bf16, not fp32" in said
    assert max(map(len, (one.out + every.out).splitlines())) <= 100


def test_your_own_recipe_may_describe_itself(tmp_path: Path):
    path = tmp_path / "mine.toml"
    path.write_text("epochs = 3\n[recipe]\nabout = 'photos'\nreached = '93 %'\n")
    config, info = load_with_info(str(path))
    assert (config, info) == (TrainConfig(epochs=3), RecipeInfo(about="photos", reached="93 %"))
    assert info.page("mine") == "mine: photos\n  reached   93 %\n"


@pytest.mark.parametrize(
    ("table", "reported"),
    [
        ("recipe = 3", r"mine\.toml: recipe = 3: must be a table"),
        ("[recipe]\nabot = 'x'", r"there is no field recipe\.abot\. Did you mean 'about'"),
        ("[recipe]\nexpected = 76.1", r"recipe\.expected = 76\.1: must be text"),
        (
            "[recipe.differs]\namp = true",
            r"recipe\.differs = \{'amp': True\}: must be a table whose values are text",
        ),
        (
            "[recipe]\ndiffers = 'amp'",
            r"recipe\.differs = 'amp': must be a table whose values are text",
        ),
    ],
)
def test_an_invalid_description_is_refused(table: str, reported: str, tmp_path: Path):
    path = tmp_path / "mine.toml"
    path.write_text(table)
    with pytest.raises(ConfigError, match=reported):
        load(str(path))


@pytest.mark.parametrize("line", ["digits --describe --epochs 3", "--describe --dry-run"])
def test_describing_a_recipe_accepts_no_other_flags(line: str):
    with pytest.raises(ConfigError, match="has no effect with --describe: remove it"):
        parse_fit(line.split())


# ------------------------------------------------------------------ comparison with the sources


@pytest.mark.parametrize("name", [name for name in NAMES if name != "digits"])
def test_a_recipe_equals_its_source_except_for_listed_differences(name: str):
    config, info = load_with_info(path_of(name))
    source = REFERENCES[name]
    assert {*source.here} == {*source.arguments}
    said = {argument: here(config) for argument, here in source.here.items()}
    other = {argument for argument, value in source.arguments.items() if said[argument] != value}
    assert other | source.besides == {*info.differs}, {a: said[a] for a in other}


# What decides the result, and is not as if it were absent unless a recipe says so.
NEUTRAL = {
    **flat(TrainConfig()),
    "augment.crop": "none",
    "optim.label_smoothing": 0.0,
    "optim.nesterov": False,
    "optim.weight_decay": 0.0,
    "schedule.warmup_epochs": 0.0,
}
# Where data come from, when they are evaluated, how it is computed.
OUTSIDE = {"data.source", "data.holdout", "task", "compute.channels_last", "eval.every_epochs"}
OUTSIDE |= {"checkpoint.every_epochs", "micro_batch", "ema.warmup"}


@pytest.mark.parametrize("name", [name for name in NAMES if name != "digits"])
def test_every_setting_of_a_recipe_is_compared_with_its_source(name: str):
    config = load(path_of(name))
    reads: set[str] = {*idle(config)}
    for here in REFERENCES[name].here.values():
        here(watched(config, reads))
    set_here = {field for field, value in flat(config).items() if value != NEUTRAL[field]}
    if config.task != TrainConfig().task:
        set_here = {field for field in set_here if not field.startswith("augment.")}
    if name not in SHIPPED:  # it is of the built-in loss
        set_here -= {"optim.label_smoothing"}
    assert set_here - reads <= OUTSIDE


def test_an_unlisted_difference_is_detected():
    source, config = REFERENCES["imagenet-resnet50-v2"], load("imagenet-resnet50-v2")
    changed = replace(config, optim=replace(config.optim, lr=0.4))
    assert source.here["lr"](config) == source.arguments["lr"] != source.here["lr"](changed)


def test_the_scikit_learn_defaults_in_the_table_are_current():
    networks = pytest.importorskip("sklearn.neural_network")
    defaults = inspect.signature(networks.MLPClassifier).parameters
    for name, value in SCIKIT.items():
        assert defaults[name].default == ("auto" if name == "batch_size" else value)


def test_the_second_resnet_applies_weight_decay_to_the_same_parameters_as_torchvision():
    config = load("imagenet-resnet50-v2")
    model = build(config.model, 1000)
    norms, others = split_normalization_params(model)  # of train.py with --norm-weight-decay
    decay = {
        id(p): g["weight_decay"] for g in param_groups(model, config.optim) for p in g["params"]
    }
    assert {decay[id(p)] for p in norms} == {0.0}
    assert {decay[id(p)] for p in others} == {config.optim.weight_decay}
    first = load("imagenet-resnet50").optim
    assert {g["weight_decay"] for g in param_groups(model, first)} == {first.weight_decay}


@pytest.mark.parametrize("name", ["imagenet-resnet50", "imagenet-resnet50-v2"])
def test_the_learning_rate_follows_torchvisions_schedulers(name: str):
    """In the middle of an epoch, it is between theirs for that epoch and the next one."""
    config, steps = load(name), 100
    schedule, warmup = config.schedule, int(config.schedule.warmup_epochs)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], config.optim.lr)
    kinds = torch.optim.lr_scheduler
    theirs: Any
    if schedule.name == "step":
        theirs = kinds.StepLR(optimizer, int(schedule.step_epochs), schedule.gamma)
    else:
        main = kinds.CosineAnnealingLR(optimizer, T_max=config.epochs - warmup)
        start = TORCHVISION["lr_warmup_decay"]
        rise = kinds.LinearLR(optimizer, start_factor=start, total_iters=warmup)
        theirs = kinds.SequentialLR(optimizer, [rise, main], [warmup])
    rates = []
    for _ in range(config.epochs + 1):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        theirs.step()
    for epoch in range(warmup, config.epochs):
        ours = learning_rate(config, epoch * steps, steps)
        assert math.isclose(ours, rates[epoch], rel_tol=1e-9, abs_tol=1e-12)
    for epoch in range(warmup):
        low, high = sorted(rates[epoch : epoch + 2])
        middle = learning_rate(config, epoch * steps + steps // 2, steps)
        assert low * 0.98 < middle < high * 1.02


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("imagenet-resnet50", 25_557_032),  # torchvision's ResNet50_Weights
        ("imagenet-vit-s", 22_050_664),  # README_deit.md: 22 M
        ("imagenet-convnext-t", 28_589_128),  # its README.md: 28 M
        ("mnist", 1_199_882 + 2 * 32 * 9),  # Keras prints 1,199,882; here, images have 3 channels
    ],
)
def test_a_recipes_model_has_the_parameter_count_of_its_source(name: str, parameters: int):
    classes = 10 if name == "mnist" else 1000
    model = build(load(name).model, classes)
    assert sum(p.numel() for p in model.parameters()) == parameters
    if name == "imagenet-convnext-t":
        scales = [p for n, p in model.named_parameters() if n.endswith("gamma")]
        assert all(torch.all(p == CONVNEXT["layer_scale_init_value"]) for p in scales)


def test_a_resnet_for_small_images_does_not_downsample_in_its_stem():
    model = build(load("cifar10").model, 10).eval()
    assert sum(p.numel() for p in model.parameters()) == 11_173_962  # Cutout's ResNet18
    seen = {}
    model.layer4.register_forward_hook(lambda _, inputs, out: seen.update(shape=out.shape))  # type: ignore[union-attr, operator]
    assert model(torch.zeros(1, 3, 32, 32)).shape == (1, 10)
    assert seen["shape"] == (1, 512, 4, 4)


def test_the_gpt_has_the_size_of_nanogpts(tmp_path: Path):
    """Its train.py prints 10.65M, without the positions, for the 65 characters of Shakespeare."""
    config = load(path_of("char-lm"))
    text = tmp_path / "input.txt"
    text.write_bytes(bytes(range(65)) * 50)
    of_text = replace(config, task=task_of("char-lm"), data=DataConfig(source=str(text)))
    model: Any = load_task(of_text).model()
    count = sum(p.numel() for p in model.parameters()) - model.places.weight.numel()
    assert f"{count / 1e6:.2f}M" == "10.65M"


# ------------------------------------------------------------------ they run


class Fake:
    """A data set of torchvision with a few images of noise, which "downloads" nothing."""

    classes = tuple("0123456789")
    shape: tuple[int, ...] = ()

    def __init__(self, root: str, train: bool = True, download: bool = False) -> None:
        assert download
        self._random = np.random.default_rng(int(train))
        self.targets = [row % 10 for row in range(24 if train else 10)]
        self._images = self._random.integers(0, 256, (len(self.targets), *self.shape), np.uint8)

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, row: int) -> tuple[Image.Image, int]:
        return Image.fromarray(self._images[row]), self.targets[row]


def photos(folder: Path) -> Path:
    """train/ and val/ with a few photos of three classes, of unequal size."""
    random = np.random.default_rng(0)
    for split, count in (("train", 8), ("val", 2)):
        for name in CLASSES:
            (folder / split / name).mkdir(parents=True)
            for number in range(count):
                pixels = random.integers(0, 256, (40 + number, 48, 3), np.uint8)
                content = io.BytesIO()
                Image.fromarray(pixels).save(content, "jpeg")
                (folder / split / name / f"{number}.jpg").write_bytes(content.getvalue())
    return folder


def table(path: Path) -> Path:
    random = np.random.default_rng(0)
    rows = [",".join(f"{x:.4f}" for x in random.normal(size=4)) for _ in range(60)]
    lines = [f"{row},{'yes' if float(row.split(',')[0]) > 0 else 'no'}" for row in rows]
    path.write_text("\n".join(["a,b,c,d,label", *lines]) + "\n")
    return path


def small(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> TrainConfig:
    """A recipe on generated data of its kind, with all its features enabled, for two small
    steps."""
    config = load(path_of(name))
    data, model, options = config.data, config.model, dict(config.task_options)
    if data.source.startswith("torchvision:"):
        fake = data.source.partition(":")[2]
        kind = type(fake, (Fake,), {"shape": (28, 28) if fake == "MNIST" else (32, 32, 3)})
        monkeypatch.setattr(datasets, fake, kind)
        data = replace(data, root=str(folder / "data"))
    elif data.source in ("imagenet", "photos"):
        data = replace(data, source=str(photos(folder / "photos")), image_size=32)
        data = replace(data, eval_size=data.eval_size and 40)
    elif data.source == "table.csv":
        data = replace(data, source=str(table(folder / "table.csv")))
    elif data.source == "input.txt":
        text = folder / "input.txt"
        text.write_text("To be, or not to be, that is the question. " * 20)
        data = replace(data, source=str(text))
        options = {"length": "16", "width": "16", "depth": "2", "heads": "2", "dropout": "0.2"}
    if "deit" in model.name:
        model = replace(model, args={**model.args, "img_size": data.image_size, "depth": 2})
    if model.name == "resnet50":  # its size is compared above, and takes a CPU a minute
        model = replace(model, name="resnet18")
    if "convnext" in model.name:
        model = replace(model, args={**model.args, "depths": "(1, 1, 1, 1)"})
    if ".tv_in1k" in model.name:  # would be downloaded
        model = replace(model, name=model.name.partition(".")[0])
    slots = max(2, config.augment.repeats if config.augment.spread_repeats else 0)
    return replace(
        config,
        name=name,
        task=task_of(name),
        storage=str(folder / "runs"),
        data=replace(data, workers=0),
        model=model,
        task_options=options,
        optim=replace(config.optim, lr=config.optim.lr / 100),  # for so small a batch
        epochs=1,
        steps=0,
        limit_train_batches=2,
        batch_size=2 * slots,
        micro_batch=2,
        eval=EvalConfig(every_epochs=0),
        checkpoint=CheckpointConfig(every_epochs=0, every_s=0.0),
        log=LogConfig(every_steps=1, tensorboard=False),
        scaling=replace(config.scaling, use_gpu=False),
        compute=ComputeConfig(),  # a CPU is slow in bf16
    )


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.each_version
def test_a_recipe_trains_two_steps_and_is_evaluated(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    config = small(name, tmp_path, monkeypatch)
    result = fit_locally(config)
    assert (result.exit_status, result.step) == (0, 2)
    losses = [record["loss"] for record in result.history if record["kind"] == "train"]
    assert len(losses) == 2
    assert all(0 < loss < 10 for loss in losses)
    assert {*result.last} == {"step", *load_task(config).metrics()}
    assert all(math.isfinite(value) for value in result.last.values())
    events = (tmp_path / "runs" / name / "events.jsonl").read_text()
    assert "has no effect" not in events
    assert "does not read it" not in events


@pytest.mark.parametrize("name", ["char-lm", "tabular", "imagenet-resnet50-v2"])
def test_a_recipe_resumed_after_its_first_step_ends_with_the_same_bits(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    config = small(name, tmp_path, monkeypatch)
    every = replace(config.checkpoint, every_steps=1)
    fit_locally(replace(config, checkpoint=every))
    first, last = sorted((tmp_path / "runs" / name / "checkpoints").glob("step-*"))
    whole = (last / "model.safetensors").read_bytes()
    shutil.rmtree(last)
    assert fit_locally(replace(config, checkpoint=every)).step == 2
    (again,) = (tmp_path / "runs" / name / "checkpoints").glob("step-*2-a*")
    assert (again / "model.safetensors").read_bytes() == whole
    assert (first / "model.safetensors").read_bytes() != whole


@pytest.mark.parametrize(
    ("options", "reported"),
    [
        ({"length": "x"}, r"task_options\.length = 'x': must be an integer"),
        ({"length": "0"}, "sizes must be above 0"),
        ({"width": "33", "heads": "2"}, "width a multiple of heads = 2"),
        ({"dropout": "1"}, "dropout 0 or more and below 1"),
    ],
)
def test_invalid_gpt_sizes_are_refused(options: dict[str, str], reported: str):
    config = TrainConfig(task=task_of("char-lm"), task_options=options)
    with pytest.raises(ConfigError, match=reported):
        load_task(config)
