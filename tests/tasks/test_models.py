"""Models by name, their arguments, and initial weights, compared with torchvision and timm."""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock
from urllib.error import URLError

import pytest
import timm
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torchvision.models import WeightsEnum, get_model

from raytrain_ddp import DataConfig, ModelConfig, TrainConfig, fit_locally
from raytrain_ddp.checkpoint.manifest import Manifest
from raytrain_ddp.checkpoint.run_folder import checkpoint_store
from raytrain_ddp.checkpoint.snapshot import encode_tensors
from raytrain_ddp.checkpoint.storage import open_storage
from raytrain_ddp.driver.dry_run import dry_run
from raytrain_ddp.driver.recipe_args import command
from raytrain_ddp.errors import ConfigError, PreflightError, RaytrainError
from raytrain_ddp.evaluate import main as evaluate
from raytrain_ddp.fit import parse_fit
from raytrain_ddp.ray_backend.task_transfer import import_paths, shipped_code
from raytrain_ddp.tasks.image_classification import ImageClassification
from raytrain_ddp.tasks.model_parts import head_of
from raytrain_ddp.tasks.model_zoo import check_weights

SMALL = "timm:test_resnet"  # 0.5 M parameters, as all timm:test_*


def begun(name: str, classes: int = 5, **model: Any) -> tuple[nn.Module, str]:
    """The model of a run, and what is said about its weights."""
    torch.manual_seed(1)
    config = TrainConfig(model=ModelConfig(name=name, **model))
    task = ImageClassification.without_data(config, [str(n) for n in range(classes)])
    return task.model(), " ".join(task.notes)


def seeded(make: Callable[..., nn.Module], *args: Any, **named: Any) -> nn.Module:
    torch.manual_seed(1)
    return make(*args, **named)


def different(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> list[str]:
    return [k for k, t in one.items() if k not in other or not torch.equal(t, other[k])]


def test_the_head_is_the_last_layer_of_each_model():
    for name in ("squeezenet1_1", "vit_b_16", "maxvit_t", "vgg11", "densenet121"):
        with torch.device("meta"):
            model = get_model(name, num_classes=7)
        sizes = {k: p.shape[0] for k, p in model.named_parameters()}
        assert {sizes[key] for key in head_of(model)} == {7}, name
    deit = timm.create_model("deit_tiny_distilled_patch16_224", num_classes=7)
    assert head_of(deit) == ["head.weight", "head.bias", "head_dist.weight", "head_dist.bias"]


# ------------------------------------------------------------------ arguments


@pytest.mark.parametrize(
    ("name", "args"),
    [
        ("timm:test_vit", {"drop_path_rate": 0.2, "img_size": (96, 96), "global_pool": "avg"}),
        ("resnet18", {"zero_init_residual": True}),
    ],
)
def test_a_model_with_arguments_equals_the_librarys(name: str, args: dict[str, Any]):
    make = partial(timm.create_model if "timm:" in name else get_model, name.removeprefix("timm:"))
    words = [word for pair in args.items() for word in map(str, pair)]
    config = parse_fit(["--model.name", name, "--model.args", *words]).config
    ours = begun(name, args=config.model.args)[0]
    expected = seeded(make, num_classes=5, **args)
    assert str(ours) == str(expected)
    assert different(expected.state_dict(), ours.state_dict()) == []
    assert parse_fit(shlex.split(command(config))[3:]).config == config


OF_8 = {"image": torch.zeros(2, 3, 8, 8, dtype=torch.uint8), "label": torch.tensor([0, 1])}


def test_images_of_a_size_the_model_does_not_accept_are_refused():
    task = ImageClassification(TrainConfig(model=ModelConfig(name="timm:test_vit")))
    model = timm.create_model("test_vit")
    for use in (partial(task.loss, model, OF_8), partial(task.evaluate, model, OF_8, {})):
        with pytest.raises(ConfigError, match=r"8 x 8 .*--model\.args img_size=8"):
            use()


def test_a_model_with_the_wrong_number_of_outputs_is_refused():
    task = ImageClassification(TrainConfig())
    wrong: dict[str, Callable[[Tensor], Any]] = {
        "(2, 3)": lambda x: x.mean((2, 3)),
        "(2, 10, 1, 1)": lambda x: x.new_zeros(2, 10, 1, 1),
        "(1, 10)": lambda x: x.new_zeros(1, 10),
        "tuple": lambda x: (x.new_zeros(2, 10),),
    }
    for named, model in wrong.items():
        for use in (task.loss, partial(task.evaluate, metrics={}), task.predict, task.logits):
            with pytest.raises(ConfigError) as raised:
                use(model, OF_8)  # type: ignore[operator]
            assert named in str(raised.value)


def test_a_users_model_function_gets_the_classes_and_arguments(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "own_models.py").write_text(
        "from torch.nn import *\n\ndef make(classes, side=4):\n"
        "    head = Linear(3 * side**2, classes)\n"
        "    return Sequential(AdaptiveAvgPool2d(side), Flatten(), head)\n"
    )
    for name in ("own_models.py:make", "own_models:make"):
        model = begun(name, args={"side": 6})[0]
        assert model[2].weight.shape == (5, 108)  # type: ignore[index, union-attr]
    config = TrainConfig(model=ModelConfig(name="own_models.py:make"))
    dry_run(config)  # it is built and tried with a batch
    assert shipped_code(config) == {"py_modules": [str(tmp_path / "own_models.py")]}
    assert import_paths(config)[0] == str(tmp_path)


# ------------------------------------------------------------------ pretrained weights


@pytest.mark.parametrize(
    ("name", "weights", "options"),
    [
        ("resnet18", "DEFAULT", {}),
        ("googlenet", "DEFAULT", {"init_weights": False, "aux_logits": True}),
        ("squeezenet1_1", "IMAGENET1K_V1", {}),
    ],
)
def test_pretrained_models_equal_torchvisions_except_for_the_head(
    name: str, weights: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
):
    state = seeded(get_model, name, weights=None, **options).state_dict()
    state = {
        k: t.nan_to_num().clamp(-1, 1) if t.is_floating_point() else t for k, t in state.items()
    }
    monkeypatch.setattr(WeightsEnum, "get_state_dict", lambda *_, **__: dict(state))
    ours, reported = begun(name, 7, weights=weights)
    theirs = get_model(name, weights=weights)
    assert getattr(ours, "transform_input", None) == getattr(theirs, "transform_input", None)
    mine, reference = ours.state_dict(), theirs.state_dict()
    assert set(mine) <= set(reference)
    head = different(mine, reference)
    assert head == head_of(ours)
    assert {(reference[key].shape[0], mine[key].shape[0]) for key in head} == {(1000, 7)}
    assert f"{len(mine) - len(head)} of {len(mine)} tensors" in reported
    assert all(f"{key} (7" in reported for key in head)
    assert "--data.mean" not in reported


@pytest.fixture
def no_hub(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Replaces timm's downloads with a seeded model of that name; lists them."""
    asked: list[str] = []

    def load_from_hub(hub_id: Any, *_: object, **__: object) -> Any:
        asked.append(str(hub_id).rpartition("/")[2].rstrip("')"))
        return seeded(timm.create_model, asked[-1].partition(".")[0]).state_dict()

    monkeypatch.setattr(timm.models._builder, "load_state_dict_from_hf", load_from_hub)
    return asked


@pytest.mark.parametrize(
    ("name", "weights", "args"),
    [
        ("timm:test_convnext", "r160_in1k", {}),
        ("timm:test_convnext", "DEFAULT", {}),
        ("timm:test_vit.r160_in1k", None, {"img_size": 96}),  # resizes the positions
    ],
)
def test_pretrained_models_equal_timms_except_for_the_head(
    name: str, weights: str | None, args: dict[str, Any], no_hub: list[str]
):
    ours, reported = begun(name, 7, weights=weights, args=args)
    full = name.removeprefix("timm:").partition(".")[0] + ".r160_in1k"
    theirs = timm.create_model(full, pretrained=True, num_classes=7, **args)
    assert {*different(theirs.state_dict(), ours.state_dict())} <= {*head_of(ours)}
    assert all(f"{key} (7" in reported for key in head_of(ours))
    assert no_hub == [full] * 2
    assert "--data.mean 0.5 0.5 0.5" in reported  # with which it was trained
    assert begun(SMALL)[1] == ""  # no tag: no weights
    assert no_hub == [full] * 2


def test_a_failed_download_has_status_3(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    refuse = Mock(side_effect=URLError("Name or service not known"))
    monkeypatch.setattr(torch.hub, "download_url_to_file", refuse)
    monkeypatch.setattr("timm.models._builder.load_state_dict_from_hf", refuse)
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    for name, weights in (("squeezenet1_1", "DEFAULT"), ("timm:test_vit.r160_in1k", None)):
        with pytest.raises(PreflightError, match=weights or name):
            begun(name, weights=weights)


# ------------------------------------------------------------------ files and runs


@pytest.mark.parametrize("suffix", [".safetensors", ".pth"])
def test_weights_are_loaded_from_a_file_and_new_parameters_are_reported(
    suffix: str, tmp_path: Path
):
    first = begun(SMALL, 9)[0]
    state = first.state_dict()
    if suffix == ".pth":  # as training scripts save it
        state = {"model": {f"module.{k}": v for k, v in state.items()}, "epoch": 3}  # type: ignore[dict-item]
    place = tmp_path / f"begun{suffix}"
    (save_file if suffix == ".safetensors" else torch.save)(state, place)
    model, reported = begun(SMALL, 5, weights=str(place))
    assert different(model.state_dict(), first.state_dict()) == head_of(model)
    assert "fc.weight (5x96, there 9x96), fc.bias (5, there 9)" in reported
    same, reported = begun(SMALL, 9, weights=str(place))
    assert different(same.state_dict(), first.state_dict()) == []
    assert "new" not in reported


class Code:
    def __reduce__(self) -> Any:
        return os.system, ("touch ran",)


def test_a_weights_file_runs_no_code_and_an_unusable_one_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    state = timm.create_model("test_resnet").state_dict()
    torch.save({"model": Code()}, "code.pth")
    torch.save({"fc.weight": 3}, "number.pth")
    torch.save(timm.create_model("test_vit").state_dict(), "other.pth")
    torch.save({**state, "bn1.bias": torch.full_like(state["bn1.bias"], torch.nan)}, "nan.pth")
    torch.save({k: (v * 100).to(torch.int8) for k, v in state.items()}, "int8.pth")
    torch.save(state, "flipped.pth")
    content = bytearray(Path("flipped.pth").read_bytes())
    content[len(content) // 2] ^= 1
    Path("flipped.pth").write_bytes(content)
    Path("damaged.safetensors").write_bytes(b"\0" * 100)
    wrong = {
        **{"code.pth": "posix.system", "number.pth": "'fc.weight'", "other.pth": "0%"},
        **{"nan.pth": "bn1.bias", "int8.pth": "0%", "flipped.pth": "", "damaged.safetensors": ""},
    }
    for file, named in wrong.items():
        with pytest.raises(ConfigError, match=f"model.weights = '{file}'") as caught:
            begun(SMALL, weights=file)
        assert named in str(caught.value)
        assert "\n" not in str(caught.value)
    assert not Path("ran").exists()


def test_a_model_can_start_from_a_run_given_by_name_folder_or_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    run = tmp_path / "runs" / "first"
    files = {"model.safetensors": b"".join(encode_tensors(begun("digits-cnn", 10)[0].state_dict()))}
    checkpoint_store(open_storage(str(run))).commit(Manifest(6, 0, 1, 1, {}, "x"), files)
    (newest,) = (run / "checkpoints").glob("step-*")
    theirs = load_file(newest / "model.safetensors")
    monkeypatch.chdir(tmp_path)
    Path("first").mkdir()  # a folder of data, with the name of the run
    for place in ("first", str(run), str(newest)):
        config = check_weights(ModelConfig(weights=place), str(run.parent))
        assert Path(str(config.weights)).is_absolute()
        model, _ = begun("digits-cnn", weights=config.weights)
        assert different(model.state_dict(), theirs) == ["head.weight", "head.bias"]
    (run / "logs").mkdir()
    with pytest.raises(ConfigError, match="'first'"):
        check_weights(ModelConfig(weights="frist"), str(run.parent))
    with pytest.raises(ConfigError, match=r"model\.weights = .*no run there"):
        begun("digits-cnn", weights=str(run / "logs"))


def test_the_weights_are_reported_and_a_resumed_or_evaluated_run_does_not_need_them(tmp_path: Path):
    file = tmp_path / "begun.safetensors"
    save_file(begun("digits-cnn", 10)[0].state_dict(), file)
    config = TrainConfig(
        name="second",
        storage=str(tmp_path / "runs"),
        epochs=1,
        batch_size=64,
        limit_train_batches=2,
        limit_eval_batches=1,
        data=DataConfig(workers=0),
        model=ModelConfig(weights=str(file)),
    )
    reported = f"Start from {file}: 26 of 26 tensors"
    assert reported in dry_run(config)
    fit_locally(config)
    assert reported in (tmp_path / "runs/second/events.jsonl").read_text()
    file.unlink()
    assert evaluate([str(tmp_path / "runs/second")]) == 0
    assert fit_locally(replace(config, epochs=2)).step == 4
    with pytest.raises(RaytrainError):
        fit_locally(replace(config, name="third"))
