"""`raytrain_ddp.load`: the model of a run with its preprocessing, compared with plain PyTorch."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from safetensors.torch import load_file
from torch.nn.functional import cross_entropy
from torchvision.transforms import v2

import raytrain_ddp
from raytrain_ddp import TrainConfig, fit_locally
from raytrain_ddp.checkpoint.run_folder import NoCheckpointError
from raytrain_ddp.config.input_sections import DataConfig
from raytrain_ddp.config.sections import LogConfig
from raytrain_ddp.errors import ConfigError, DataError
from raytrain_ddp.evaluate import main as evaluate
from raytrain_ddp.tasks.small_networks import DigitsCNN

IMAGE = np.zeros((8, 8, 3), np.uint8)


def plain(run: str, model: torch.nn.Module) -> torch.nn.Module:
    """The model of a run, loaded without this package's loader."""
    newest = max(Path(run).glob("checkpoints/step-*/model.safetensors"))
    model.load_state_dict(load_file(newest))
    return model.eval()


def test_a_loaded_model_has_the_averaged_weights_and_the_class_names(digits: str):
    model = raytrain_ddp.load(digits, device="cpu")
    newest = max(Path(digits).glob("checkpoints/step-*"))
    averaged, trained = (load_file(newest / f"{n}.safetensors") for n in ("model", "trained"))
    own = model.model.state_dict()
    assert all(torch.equal(own[name], averaged[name]) for name in averaged)
    assert not torch.equal(averaged["head.weight"], trained["head.weight"])
    assert model.class_names == list("0123456789")
    assert not model.training


def test_paths_arrays_bytes_and_pictures_give_the_same_without_the_data(
    photos: tuple[str, Path],
):
    run, folder = photos
    path = folder / "light" / "3.jpg"
    model = raytrain_ddp.load(run, device="cpu")
    with Image.open(path) as image:
        picture = image.convert("RGB")
    given = [path, str(path), path.read_bytes(), picture, np.asarray(picture)]
    pixels = model.preprocess(given)
    assert pixels.shape == (5, 3, 32, 32)
    assert all(torch.equal(each, pixels[0]) for each in pixels)
    results = model.predict(given)  # in batches of 4 and 1, which may round in another way
    for result in results:
        assert result["probabilities"] == pytest.approx(results[0]["probabilities"], abs=1e-5)
    assert set(results[0]["probabilities"]) == {"dark", "light"}
    assert results[0]["probability"] == max(results[0]["probabilities"].values())
    assert results[0]["class"] == max(
        results[0]["probabilities"], key=results[0]["probabilities"].get
    )


def test_jpegs_give_the_same_outputs_as_torchvision_and_plain_pytorch(photos: tuple[str, Path]):
    run, folder = photos
    paths = sorted(folder.rglob("*.jpg"))
    found = raytrain_ddp.load(run, device="cpu").predict(paths)
    config = raytrain_ddp.load(run, device="cpu").config.data
    transform = v2.Compose(
        [
            v2.PILToTensor(),
            v2.Resize(round(32 / 0.875), antialias=True),
            v2.CenterCrop(32),
            v2.ToDtype(torch.float32, scale=True),
            v2.Normalize(config.mean, config.std),
        ]
    )
    images = torch.stack([transform(Image.open(path).convert("RGB")) for path in paths])
    with torch.no_grad():
        wanted = plain(run, timm.create_model("test_resnet", num_classes=2))(images).softmax(1)
    probabilities = torch.tensor([list(row["probabilities"].values()) for row in found])
    assert (probabilities - wanted).abs().max() < 0.01  # a resized pixel may be rounded otherwise


def test_calling_the_model_gives_the_logits_of_normalized_images(digits: str):
    model = raytrain_ddp.load(digits, device="cpu")
    images = torch.randint(0, 256, (5, 3, 8, 8), dtype=torch.uint8)
    mean, std = (
        torch.tensor(v).view(3, 1, 1) for v in (model.config.data.mean, model.config.data.std)
    )
    with torch.no_grad():
        wanted = plain(digits, DigitsCNN(classes=10))((images.float() - mean * 255) / (std * 255))
        torch.testing.assert_close(model(images), wanted)


def test_flip_averages_an_image_and_its_mirror_image(digits: str):
    model = raytrain_ddp.load(digits, device="cpu")
    image = np.random.default_rng(1).integers(0, 256, (8, 8, 3), dtype=np.uint8)
    both = model.predict([image, np.ascontiguousarray(image[:, ::-1])])
    (flipped,) = model.predict([image], tta="flip")
    for name, value in flipped["probabilities"].items():
        mean = (both[0]["probabilities"][name] + both[1]["probabilities"][name]) / 2
        assert value == pytest.approx(mean, abs=1e-6)


def test_a_layers_output_can_be_returned(digits: str):
    model = raytrain_ddp.load(digits, device="cpu")
    images = [np.full((8, 8, 3), level, np.uint8) for level in (0, 90, 250)]
    with torch.inference_mode():
        wanted = model(model.preprocess(images))
    found = model.predict(images, layer="head")
    torch.testing.assert_close(torch.stack([row["embedding"] for row in found]), wanted)


def test_images_are_resized_to_the_training_size(digits: str):
    """The run uses images as they are stored."""
    model = raytrain_ddp.load(digits, device="cpu")
    assert model.image_size == 8
    images = [np.zeros((20, 30, 3), np.uint8), np.zeros((8, 8), np.uint8)]
    assert model.preprocess(images).shape == (2, 3, 8, 8)


def test_the_image_size_is_that_of_the_training_for_any_data(tmp_path: Path):
    """Also after an evaluation on images of another size."""
    for split, side in (("train", 16), ("val", 16), ("larger", 40)):
        for level, name in ((0, "dark"), (200, "light")):
            place = tmp_path / "set" / split / name
            place.mkdir(parents=True)
            for row in range(4):
                pixels = np.full((side, side, 3), level + row, np.uint8)
                Image.fromarray(pixels).save(place / f"{row}.png")
    (tmp_path / "set/larger").rename(tmp_path / "larger")
    config = TrainConfig(
        name="run",
        storage=str(tmp_path),
        steps=1,
        batch_size=4,
        micro_batch=4,
        data=DataConfig(source=str(tmp_path / "set")),
        log=LogConfig(tensorboard=False),
    )
    fit_locally(config)
    (tmp_path / "set").rename(tmp_path / "away")
    run = str(tmp_path / "run")
    model = raytrain_ddp.load(run, device="cpu")
    assert model.image_size == 16
    images = sorted((tmp_path / "larger").glob("*/*.png"))
    found = model.predict([str(path) for path in images])
    right = sum(row["class"] == path.parent.name for row, path in zip(found, images, strict=True))
    out = tmp_path / "e.json"
    flags = ("--device", "cpu", "--data", str(tmp_path / "larger"), "--out", str(out))
    assert evaluate([run, *flags]) == 0
    loss = json.loads(out.read_text())["metrics"]
    assert loss["top1"] == right / len(images)
    with torch.inference_mode():
        logits = model(model.preprocess([str(path) for path in images]))
    labels = torch.tensor([model.class_names.index(path.parent.name) for path in images])
    assert loss["loss"] == pytest.approx(float(cross_entropy(logits, labels)), abs=1e-5)


REFUSED = [
    ([b"no image"], {}, DataError, "image 0: "),
    (["nowhere.jpg"], {}, DataError, "nowhere.jpg: .* no such file"),
    ([np.zeros((8, 8, 3))], {}, DataError, r"float64 \(8, 8, 3\)"),
    ([np.zeros((0, 5, 3), np.uint8)], {}, DataError, r"\(0, 5, 3\)"),
    ([Image.new("L", (0, 5))], {}, DataError, r"image 0: .* \(5, 0\)"),
    ("a.jpg", {}, ConfigError, "list of images"),
    (Image.new("L", (8, 8)), {}, ConfigError, "list of images"),
    ([], {}, ConfigError, "list of images"),
    ([IMAGE], {"batch_size": 0}, ConfigError, "batch_size = 0"),
    ([IMAGE], {"batch_size": 1.5}, ConfigError, "batch_size = 1.5"),
    ([IMAGE], {"tta": "flop"}, ConfigError, "tta = 'flop'"),
    ([IMAGE], {"layer": "haed"}, ConfigError, "--layer haed: .*'head'"),
]


def test_what_cannot_be_predicted_is_named(digits: str):
    model = raytrain_ddp.load(digits, device="cpu")
    for images, options, error, named in REFUSED:
        with pytest.raises(error, match=named):
            model.predict(images, **options)
    with pytest.raises(ConfigError, match="'worst'"):
        raytrain_ddp.load(digits, checkpoint="worst", device="cpu")  # type: ignore[arg-type]


def test_a_run_without_a_checkpoint_is_refused(tmp_path: Path):
    (tmp_path / "config.toml").write_text("")
    with pytest.raises(NoCheckpointError):
        raytrain_ddp.load(str(tmp_path))
