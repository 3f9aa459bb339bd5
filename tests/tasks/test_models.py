"""Models by name, their arguments, and initial weights, compared with torchvision and timm."""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import Group, run_cli
from timm import create_model
from torch import Tensor, nn
from torchvision.models import VisionTransformer

from raytrain_ddp import DataConfig, ModelConfig, TrainConfig, fit_locally
from raytrain_ddp.checkpoint.manifest import Manifest
from raytrain_ddp.checkpoint.run_folder import checkpoint_store
from raytrain_ddp.checkpoint.snapshot import encode_tensors
from raytrain_ddp.checkpoint.storage import open_storage
from raytrain_ddp.command_line import parse_fit
from raytrain_ddp.config.recipe import load
from raytrain_ddp.driver.cluster_files import _unshared
from raytrain_ddp.driver.config_flags import command
from raytrain_ddp.driver.dry_run import dry_run
from raytrain_ddp.driver.preflight import check, try_model
from raytrain_ddp.errors import ConfigError, PreflightError, RaytrainError
from raytrain_ddp.ray_backend.cluster import import_paths, shipped_code
from raytrain_ddp.tasks.image_classification import ImageClassification
from raytrain_ddp.tasks.model_parts import head_of
from raytrain_ddp.tasks.model_zoo import (
    arguments,
    build,
    check_model,
    known_models,
    known_weights,
    timm_models,
)
from raytrain_ddp.tasks.pretrained import begun_model, check_weights

SMALL = "timm:test_resnet"  # 0.5 M parameters, as all timm:test_*


def seeded(make: Callable[[], nn.Module], seed: int = 1) -> nn.Module:
    torch.manual_seed(seed)
    return make()


def equal(one: nn.Module, other: nn.Module) -> bool:
    mine, theirs = one.state_dict(), other.state_dict()
    return list(mine) == list(theirs) and all(torch.equal(t, theirs[k]) for k, t in mine.items())


def different(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> list[str]:
    return [k for k, t in one.items() if k not in other or not torch.equal(t, other[k])]


# ------------------------------------------------------------------ names


def test_the_model_names_are_timms_with_tags():
    import timm

    assert set(timm_models()) == set(timm.list_models())
    theirs: dict[str, set[str]] = {}
    for name in timm.list_pretrained():
        theirs.setdefault(name.partition(".")[0], set()).add(name.partition(".")[2])
    read = {name: set(tags) for name, tags in timm_models().items() if tags}
    assert len(read) > 800
    assert [n for n in read if not read[n] >= theirs.get(n, {""}) - {""}] == []


@pytest.mark.parametrize(
    ("name", "reported"),
    [
        ("timm:convnext_tny", "no such model. Did you mean 'timm:convnext_tiny'"),
        ("timm:convnext_tiny.fb_in22kk", "convnext_tiny has the weights .*mean 'fb_in22k'"),
        ("convnextv2_tiny", "Did you mean 'convnext_tiny'.*Did you mean 'timm:convnextv2_tiny'"),
        ("nowhere:make", "no module 'nowhere' can be imported"),
        ("nowhere.py:make", "there is no file nowhere.py"),
    ],
)
def test_an_unknown_model_is_refused_with_similar_names(name: str, reported: str):
    with pytest.raises(ConfigError, match=reported):
        check_model(name)


def test_the_names_of_weights_are_torchvisions():
    from torchvision.models import get_model_weights

    for name in known_models()[1:]:
        assert set(known_weights(name)) == set(get_model_weights(name).__members__), name
    for name in ("[v2/net.py:build", "resnet1."):  # no patterns
        assert known_weights(name) == []


@pytest.mark.parametrize(
    ("model", "weights", "reported"),
    [
        ("digits-cnn", "DEFAULT", "digits-cnn has no weights"),
        ("resnet18", "IMAGENET1K_V2", "resnet18 has IMAGENET1K_V1, DEFAULT. Did you mean"),
        ("resnet50", "default", "resnet50 has IMAGENET1K_V1, IMAGENET1K_V2, DEFAULT"),
        ("resnet50", "mine.pth", "model.weights = 'mine.pth': there is no such file"),
        (SMALL, "r16_in1kk", "test_resnet has r160_in1k, DEFAULT. Did you mean 'r160_in1k'"),
        ("timm:test_vit.r160_in1k", "r160_in1", "may also be a file"),
        ("timm:convnext_tiny.in12k", "fb_in1k", "already names its weights. Set --model.name timm"),
    ],
)
def test_unknown_weights_are_refused(model: str, weights: str, reported: str, tmp_path: Path):
    with pytest.raises(ConfigError, match=reported):
        check_weights(ModelConfig(name=model, weights=weights), str(tmp_path))


def test_invalid_names_and_weights_are_reported_without_torch(tmp_path: Path):
    config = f'[model]\nname = "{SMALL}"\nweights = "r16"\n'
    (tmp_path / "mine.toml").write_text(config)
    for words in (["mine.toml"], ["--model.name", "timm:convnext_tny"]):
        answer = run_cli("fit", *words, cwd=tmp_path)
        assert (answer.status, answer.heavy) == (2, [])
        assert len(answer.err.splitlines()) == 1


def test_the_head_is_the_last_layer_of_each_model():
    from torchvision.models import get_model

    for name in ("squeezenet1_1", "vit_b_16", "maxvit_t", "vgg11", "convnext_tiny", "densenet121"):
        with torch.device("meta"):
            model = get_model(name, num_classes=7)
        sizes = {k: p.shape[0] for k, p in model.named_parameters()}
        assert {sizes[key] for key in head_of(model)} == {7}, name
    deit = build(ModelConfig(name="timm:deit_tiny_distilled_patch16_224"), 7)
    assert head_of(deit) == ["head.weight", "head.bias", "head_dist.weight", "head_dist.bias"]


# ------------------------------------------------------------------ arguments


def test_a_timm_or_torchvision_model_equals_the_librarys():
    import timm
    import torchvision.models

    args = {"drop_path_rate": 0.2, "img_size": "(96, 96)"}
    ours = seeded(lambda: build(ModelConfig(name="timm:test_vit", args=args), 5))
    theirs = seeded(
        lambda: timm.create_model("test_vit", num_classes=5, drop_path_rate=0.2, img_size=(96, 96))
    )
    assert equal(ours, theirs)
    zero = ModelConfig(name="resnet18", args={"zero_init_residual": "true"})
    ours = seeded(lambda: build(zero, 5))
    theirs = seeded(lambda: torchvision.models.resnet18(num_classes=5, zero_init_residual=True))
    assert equal(ours, theirs)
    assert ours.layer1[0].bn2.weight.abs().sum() == 0


def test_model_arguments_are_the_same_from_flags_toml_and_python(tmp_path: Path):
    wanted = {"img_size": 96, "drop_path_rate": 0.2, "flag": True, "act_layer": "gelu", "n": "None"}
    pairs = "img_size 96 drop_path_rate 0.2 flag true act_layer gelu n None"
    equals = " ".join(f"{k}={v}" for k, v in zip(*[iter(pairs.split())] * 2, strict=True))
    name = ["--model.name", SMALL, "--model.args"]
    configs = [parse_fit([*name, *each.split()]).config for each in (pairs, equals)]
    (tmp_path / "mine.toml").write_text(
        f'[model]\nname = "{SMALL}"\n[model.args]\nimg_size = 96\ndrop_path_rate = 0.2\n'
        'flag = true\nact_layer = "gelu"\nn = "None"\n'
    )
    configs.append(load(str(tmp_path / "mine.toml")))
    assert [config.model.args for config in configs] == [wanted] * 3
    assert parse_fit(command(configs[0]).split()[3:]).config == configs[0]
    with pytest.raises(
        ConfigError, match=r"--model\.args takes pairs of KEY and VALUE, or KEY=VALUE"
    ):
        parse_fit([*name, "img_size"])


@pytest.mark.parametrize(
    "text", ["{[]: 1}", "{{}}", "-" * 100_000 + "1", "[" * 1000, "1 +", "gelu"]
)
def test_an_argument_that_is_not_a_python_literal_stays_text(text: str):
    assert arguments(ModelConfig(name="resnet18", args={"x": text})) == {"x": text}


@pytest.mark.parametrize(
    ("name", "args", "reported"),
    [
        ("resnet18", {"foo": 1}, "resnet18 refuses them: .*unexpected keyword argument 'foo'"),
        (SMALL, {"foo": 1}, "test_resnet refuses them: .*unexpected keyword argument 'foo'"),
        ("vit_b_16", {"image_size": 30}, "vit_b_16 refuses them: .*divisible"),
        ("resnet18", {"num_classes": 3}, "has num_classes: remove it; the data decide it"),
        (SMALL, {"pretrained": True}, "has pretrained: remove it; set model.weights"),
    ],
)
def test_unknown_model_arguments_are_refused_in_one_line_before_workers_start(
    name: str, args: dict[str, Any], reported: str
):
    config = TrainConfig(model=ModelConfig(name=name, args=args))
    with pytest.raises(ConfigError, match=f"model.args .*{reported}"):
        try_model(config, is_new=True)


@pytest.mark.parametrize(
    ("make", "argument"),
    [
        (lambda: create_model("test_vit"), "img_size=8"),
        (lambda: VisionTransformer(32, 16, 1, 1, 8, 8, num_classes=10), "image_size=8"),
    ],
)
def test_images_of_a_size_the_model_does_not_accept_are_refused_in_one_line(
    make: Callable[[], nn.Module], argument: str
):
    task, model = ImageClassification(TrainConfig()), make()
    batch = {"image": torch.zeros(2, 3, 8, 8, dtype=torch.uint8), "label": torch.tensor([0, 1])}
    for use in (partial(task.loss, model, batch), partial(task.evaluate, model, batch, {})):
        with pytest.raises(ConfigError, match=f"images of 8 x 8 pixels .*--model.args {argument}"):
            use()


# ------------------------------------------------------------------ user-defined models

OWN = """
from torch import nn

def make(classes, width=4):
    return nn.Sequential(nn.Conv2d(3, width, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
                         nn.Linear(width, classes))

def wrong(classes):
    return classes
"""


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    file = tmp_path / f"models_{abs(hash(str(tmp_path)))}.py"  # imported once in a process
    file.write_text(OWN)
    return file


def test_a_users_model_function_gets_the_classes_and_arguments(own: Path):
    for name in (f"{own.name}:make", f"{own.stem}:make"):
        model = build(ModelConfig(name=name, args={"width": 6}), 5)
        assert model[3].weight.shape == (5, 6)
    config = TrainConfig(model=ModelConfig(name=f"{own.name}:make"))
    assert "conv" not in dry_run(config)  # it is built and tried with a batch
    assert shipped_code(config) == {"py_modules": [str(own)]}
    assert import_paths(config)[0] == str(own.parent)
    reported = "\n".join(_unshared(replace(config, storage="s3://x/y"), "machines"))
    assert f"model.name = {own.name}:make must exist on the head" in reported


@pytest.mark.parametrize(
    ("function", "args", "reported"),
    [
        ("mak", {}, "has no function 'mak'. Did you mean 'make'"),
        ("make", {"width": 0.5}, r"make fails with them: ValueError.*\(.*\.py:\d+\)"),
        ("make", {"depth": 3}, "got an unexpected keyword argument 'depth'"),
        ("wrong", {}, "it returned a int; expected a torch.nn.Module"),
    ],
)
def test_an_invalid_model_function_is_refused_in_one_line(
    own: Path, function: str, args: dict[str, Any], reported: str
):
    config = ModelConfig(name=f"{own.name}:{function}", args=args)
    with pytest.raises(ConfigError, match=reported):
        try_model(check(TrainConfig(model=config)), is_new=True)


@pytest.mark.parametrize(
    ("returns", "reported"),
    [
        (lambda x: x.mean((2, 3)), "returns shape (2, 3) instead of shape (2, 10)"),
        (lambda x: x.new_zeros(2, 11), "returns shape (2, 11) instead"),
        (lambda x: x.new_zeros(2, 10, 1, 1), "returns shape (2, 10, 1, 1) instead"),
        (lambda x: x.new_zeros(1, 10), "returns shape (1, 10) instead"),
        (lambda x: (x.new_zeros(2, 10),), "returns a tuple instead"),
    ],
)
def test_a_model_with_the_wrong_number_of_outputs_is_refused_in_one_line(
    returns: Callable[[torch.Tensor], Any], reported: str
):
    class Wrong(nn.Module):
        def forward(self, inputs: torch.Tensor) -> Any:
            return returns(inputs)

    task = ImageClassification(TrainConfig())
    batch = {"image": torch.zeros(2, 3, 8, 8, dtype=torch.uint8), "label": torch.tensor([0, 1])}
    uses = (task.loss, partial(task.evaluate, metrics={}), task.predict, task.logits)
    for use in uses:
        with pytest.raises(
            ConfigError, match=f"for 2 images and 10 classes.*{re.escape(reported)}"
        ):
            use(Wrong(), batch)


# ------------------------------------------------------------------ pretrained weights


@pytest.fixture
def no_download(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Replaces the downloads of torchvision's builders with seeded weights."""
    from torchvision.models import WeightsEnum, get_model

    asked: dict[str, Any] = {}

    def get_state_dict(self: Any, *_: object, **__: object) -> Any:
        torch.manual_seed(1)
        return get_model(asked["name"], weights=None, **asked["options"]).state_dict()

    monkeypatch.setattr(WeightsEnum, "get_state_dict", get_state_dict)
    return asked


@pytest.mark.parametrize(
    ("name", "weights", "options"),
    [
        ("resnet18", "DEFAULT", {}),
        ("squeezenet1_1", "IMAGENET1K_V1", {}),
        ("googlenet", "DEFAULT", {"init_weights": False, "aux_logits": True}),
        ("vit_b_16", "IMAGENET1K_SWAG_E2E_V1", {"image_size": 384}),
    ],
)
def test_pretrained_models_equal_torchvisions_except_for_the_head(
    name: str, weights: str, options: dict[str, Any], no_download: dict[str, Any]
):
    from torchvision.models import get_model

    no_download |= {"name": name, "options": options}
    ours, reported = begun_model(ModelConfig(name=name, weights=weights), 7)
    theirs = get_model(name, weights=weights)
    assert getattr(ours, "transform_input", None) == getattr(theirs, "transform_input", None)
    mine, reference = ours.state_dict(), theirs.state_dict()
    assert set(mine) <= set(reference)
    head = different(mine, reference)
    assert head == head_of(ours)
    assert {(reference[key].shape[0], mine[key].shape[0]) for key in head} == {(1000, 7)}
    assert reported.startswith(
        f"Start from {weights}: {len(mine) - len(head)} of {len(mine)} tensors"
    )
    assert all(f"{key} (7" in reported for key in head)


@pytest.fixture
def no_hub(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Replaces timm's downloads with a seeded model of that name."""
    import timm
    from timm.models import _builder

    asked: list[Any] = []

    def load_from_hub(hub_id: Any, *_: object, **__: object) -> Any:
        asked.append(hub_id)
        name = str(hub_id).rpartition("/")[2].rstrip("')").partition(".")[0]
        return seeded(lambda: timm.create_model(name)).state_dict()

    monkeypatch.setattr(_builder, "load_state_dict_from_hf", load_from_hub)
    return asked


@pytest.mark.parametrize(
    ("name", "weights"),
    [
        ("timm:test_convnext.r160_in1k", None),
        ("timm:test_convnext", "r160_in1k"),
        ("timm:test_convnext", "DEFAULT"),
        ("timm:test_vit.r160_in1k", "DEFAULT"),
    ],
)
def test_pretrained_models_equal_timms_except_for_the_head(
    name: str, weights: str | None, no_hub: list[Any]
):
    import timm

    config = ModelConfig(name=name, weights=weights)
    assert check_weights(config, "runs") == config
    ours, reported = begun_model(config, 7)
    full = name.removeprefix("timm:").partition(".")[0] + ".r160_in1k"
    theirs = timm.create_model(full, pretrained=True, num_classes=7)
    assert {*different(ours.state_dict(), theirs.state_dict())} <= {*head_of(ours)}
    assert all(f"{key} (7" in reported for key in head_of(ours))
    assert full in str(no_hub[0])


def test_a_custom_image_size_resizes_the_positional_embedding_as_in_timm(
    no_hub: list[Any],
):
    import timm

    config = ModelConfig(name="timm:test_vit.r160_in1k", args={"img_size": 96})
    ours, _ = begun_model(config, 7)
    theirs = timm.create_model("test_vit.r160_in1k", pretrained=True, num_classes=7, img_size=96)
    assert {*different(ours.state_dict(), theirs.state_dict())} <= {*head_of(ours)}
    assert ours.pos_embed.shape == theirs.pos_embed.shape != (1, 101, 64)


def test_a_normalization_that_differs_from_the_weights_is_reported(no_hub: list[Any]):
    task = ImageClassification(TrainConfig(model=ModelConfig(name="timm:test_vit.r160_in1k")))
    task.model()
    flags = "--data.mean 0.5 0.5 0.5 --data.std 0.5 0.5 0.5"
    assert task.notes[1:] == [f"Its weights were trained with {flags}; this run has others."]
    half = (0.5, 0.5, 0.5)
    config = TrainConfig(model=ModelConfig(name="timm:test_vit.r160_in1k"))
    same = ImageClassification(replace(config, data=DataConfig(mean=half, std=half)))
    same.model()
    assert same.notes[1:] == []


def test_a_model_name_without_a_tag_loads_no_weights(no_hub: list[Any]):
    assert begun_model(ModelConfig(name=SMALL), 7)[1] == ""
    assert no_hub == []


def test_weights_can_come_from_a_hub_repository(monkeypatch: pytest.MonkeyPatch):
    theirs = create_model("test_resnet", num_classes=1000).state_dict()
    asked: list[Any] = []

    def download(model_id: str, *, weights_only: bool) -> Any:
        asked.append((model_id, weights_only))
        return theirs

    monkeypatch.setattr("timm.models.load_state_dict_from_hf", download)
    config = ModelConfig(name="timm:test_resnet", weights="hf-hub:me/mine@v2")
    assert check_weights(config, "runs") == config
    model, reported = begun_model(config, 5)
    assert asked == [("me/mine@v2", True)]
    assert different(model.state_dict(), theirs) == ["fc.weight", "fc.bias"]
    assert reported.startswith("Start from hf-hub:me/mine@v2: ")
    with pytest.raises(ConfigError, match=r"only \d+% of the parameters of resnet18"):
        begun_model(replace(config, name="resnet18"), 5)
    monkeypatch.undo()


def test_a_failed_weight_download_is_one_line_with_status_3(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    from urllib.error import URLError

    from timm.models import _builder

    def refuse(*_: object, **__: object) -> None:
        raise URLError("Name or service not known")

    monkeypatch.setattr(torch.hub, "download_url_to_file", refuse)
    monkeypatch.setattr(_builder, "load_state_dict_from_hf", refuse)
    monkeypatch.setattr("timm.models.load_state_dict_from_hf", refuse)
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    with pytest.raises(PreflightError, match=r"model.weights = 'DEFAULT': https://\S+ cannot be d"):
        begun_model(ModelConfig(name="resnet18", weights="DEFAULT"), 10)
    with pytest.raises(PreflightError, match=r"timm's test_vit.r160_in1k cannot be downloaded"):
        begun_model(ModelConfig(name="timm:test_vit.r160_in1k"), 10)
    with pytest.raises(ConfigError, match="timm has no pretrained weights of resnet200"):
        begun_model(ModelConfig(name="timm:resnet200", weights="DEFAULT"), 10)
    with pytest.raises(PreflightError, match="weights = 'hf-hub:me/mine': hf-hub:me/mine cannot"):
        begun_model(ModelConfig(name=SMALL, weights="hf-hub:me/mine"), 10)


def _downloading(rank: int, size: int, folder: str) -> str:
    os.environ["TORCH_HOME"] = folder

    def download(url: str, file: str, *_: object, **__: object) -> None:
        from torchvision.models import squeezenet1_1

        with Path(folder, "log").open("a") as log:
            log.write(f"{rank}\n")
        time.sleep(0.3)
        torch.manual_seed(1)
        torch.save(squeezenet1_1().state_dict(), file)

    torch.hub.download_url_to_file = download
    model, _ = begun_model(ModelConfig(name="squeezenet1_1", weights="DEFAULT"), 5)
    return str(model.state_dict()["features.0.weight"].sum().item())


def test_the_ranks_of_a_node_download_weights_once(workers: Group, tmp_path: Path):
    sums = workers(3, _downloading, str(tmp_path))
    assert len(set(sums)) == 1
    assert len((tmp_path / "log").read_text().split()) == 1
    workers.end()  # its processes have another download function


# ------------------------------------------------------------------ files and runs


@pytest.mark.parametrize("suffix", [".safetensors", ".pth"])
def test_weights_are_loaded_from_a_file_and_new_parameters_are_reported(
    suffix: str, tmp_path: Path
):
    from safetensors.torch import save_file

    begun = seeded(lambda: build(ModelConfig(name=SMALL), 9))
    state = begun.state_dict()
    if suffix == ".pth":  # as training scripts save it
        state = {"model": {f"module.{k}": v for k, v in state.items()}, "epoch": 3}
    place = tmp_path / f"begun{suffix}"
    (save_file if suffix == ".safetensors" else torch.save)(state, place)
    config = check_weights(ModelConfig(name=SMALL, weights=str(place)), "runs")
    model, reported = begun_model(config, 5)
    assert different(model.state_dict(), begun.state_dict()) == head_of(model)
    shapes = "fc.weight (5x96, there 9x96), fc.bias (5, there 9)"
    assert reported.endswith(f"tensors of {SMALL} fit; new: {shapes}.")
    same, reported = begun_model(config, 9)
    assert equal(same, begun)
    assert reported.endswith(" fit.")


class _Code:
    def __reduce__(self) -> Any:
        return os.system, ("touch ran",)


def test_a_weights_file_runs_no_code_and_an_unusable_one_is_refused_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    from torchvision.models import resnet18, resnet50

    torch.save({"model": _Code()}, "code.pth")
    torch.save({"fc.weight": 3}, "number.pth")
    torch.save(resnet50().state_dict(), "resnet50.pth")
    torch.save({**resnet18().state_dict(), "bn1.bias": torch.full((64,), float("nan"))}, "nan.pth")
    whole = {k: (v * 100).to(torch.int8) for k, v in resnet18().state_dict().items()}
    torch.save(whole, "int8.pth")
    torch.save(resnet18().state_dict(), "flipped.pth")
    content = bytearray(Path("flipped.pth").read_bytes())
    content[len(content) // 2] ^= 1
    Path("flipped.pth").write_bytes(content)
    Path("damaged.safetensors").write_bytes(b"\0" * 100)
    Path("damaged.pth").write_bytes(b"\0" * 100)
    wrong = {
        "code.pth": r"it cannot be read: .*Unsupported globals: posix.system\.$",
        "number.pth": "its 'fc.weight' is not a tensor",
        "damaged.safetensors": "it cannot be read",
        "flipped.pth": r"it cannot be read: \S+ in it is damaged\.$",
        "int8.pth": "only 0% of the parameters of resnet18",
        "damaged.pth": "it cannot be read",
        "nan.pth": r"bn1.bias has values that are not finite \(NaN, inf\)",
        "resnet50.pth": r"only \d\d% of the parameters of resnet18 outside its head fit. Not "
        r"there, of another shape or type: layer1.0.conv1.weight \(64x64x3x3, there "
        r"64x64x1x1\), ",
    }
    for file, reported in wrong.items():
        config = TrainConfig(model=ModelConfig(name="resnet18", weights=file))
        with pytest.raises(ConfigError, match=f"model.weights = '.*{file}': {reported}") as caught:
            try_model(check(config), is_new=True)
        assert "\n" not in str(caught.value)
    assert not Path("ran").exists()


@pytest.fixture(scope="module")
def begun_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run of digits-cnn with one checkpoint."""
    folder = tmp_path_factory.mktemp("begun") / "first"
    state = seeded(lambda: build(ModelConfig(), 10)).state_dict()
    files = {"model.safetensors": b"".join(encode_tensors(state))}
    checkpoint_store(open_storage(str(folder))).commit(Manifest(6, 0, 1, 1, {}, "x"), files)
    (folder / "logs").mkdir()
    return folder


def test_a_model_can_start_from_a_run_given_by_name_folder_or_checkpoint(
    begun_run: Path, monkeypatch: pytest.MonkeyPatch
):
    from safetensors.torch import load_file

    (newest,) = (begun_run / "checkpoints").glob("step-*")
    theirs = load_file(newest / "model.safetensors")
    for place in ("first", str(begun_run), str(newest)):
        config = check_weights(ModelConfig(weights=place), str(begun_run.parent))
        assert Path(str(config.weights)).is_absolute()
        model, reported = begun_model(config, 5)
        assert different(model.state_dict(), theirs) == ["head.weight", "head.bias"]
        assert "new: head.weight (5x128, there 10x128), head.bias (5, there 10)" in reported
    monkeypatch.chdir(begun_run.parents[1])
    Path("first").mkdir(exist_ok=True)  # a folder of data, with the name of the run
    config = check_weights(ModelConfig(weights="first"), str(begun_run.parent))
    assert config.weights == str(begun_run)
    with pytest.raises(ConfigError, match=r"Did you mean 'first'.*a run, or a checkpoint; none is"):
        check_weights(ModelConfig(weights="frist"), str(begun_run.parent))
    with pytest.raises(ConfigError, match=r"model\.weights = .*no checkpoint there"):
        begun_model(ModelConfig(weights=str(begun_run / "logs")), 5)


def test_the_weights_are_reported_and_a_resumed_or_evaluated_run_does_not_need_them(
    begun_run: Path, tmp_path: Path
):
    from raytrain_ddp.evaluate import main as evaluate

    (newest,) = (begun_run / "checkpoints").glob("step-*")
    file = tmp_path / "begun.safetensors"
    file.write_bytes((newest / "model.safetensors").read_bytes())
    config = TrainConfig(
        name="second",
        storage=str(tmp_path / "runs"),
        epochs=1,
        batch_size=256,
        micro_batch=64,
        model=ModelConfig(weights=str(file)),
    )
    reported = f"Start from {file}: 26 of 26 tensors of digits-cnn fit."
    assert reported in dry_run(config)
    fit_locally(config)
    lines = (tmp_path / "runs/second/events.jsonl").read_text().splitlines()
    events = [json.loads(line) for line in lines]
    assert reported in [event.get("text") for event in events]
    file.unlink()
    assert evaluate([str(tmp_path / "runs/second")]) == 0
    again = fit_locally(replace(config, epochs=2))
    assert again.step == 2 * events[-1]["step"]
    with pytest.raises(RaytrainError, match="there is no such file"):
        fit_locally(replace(config, name="third"))
