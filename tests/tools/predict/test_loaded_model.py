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
from torchvision.transforms import v2

import raytrain_ddp
from raytrain_ddp.checkpoint.run_folder import NoCheckpointError
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


def test_logits_and_layers_follow_from_the_plain_network(digits: str):
    model = raytrain_ddp.load(digits, device="cpu")
    images = [*np.random.default_rng(1).integers(0, 256, (3, 8, 8, 3), dtype=np.uint8)]
    data = model.config.data
    mean, std = (torch.tensor(each).view(3, 1, 1) * 255 for each in (data.mean, data.std))
    inputs = (torch.from_numpy(np.stack(images)).permute(0, 3, 1, 2).float() - mean) / std
    with torch.no_grad():
        wanted = plain(digits, DigitsCNN(classes=10))(inputs)
        torch.testing.assert_close(model(model.preprocess(images)), wanted)
    found = model.predict(images, layer="head")
    torch.testing.assert_close(torch.stack([row["embedding"] for row in found]), wanted)


def test_images_are_resized_to_the_training_size(digits: str, tmp_path: Path):
    """The run uses images as they are stored. `evaluate` does the same with other data."""
    model = raytrain_ddp.load(digits, device="cpu")
    assert model.image_size == 8
    assert model.preprocess([np.zeros((20, 30, 3), np.uint8), IMAGE[..., 0]]).shape == (2, 3, 8, 8)
    for row in range(20):
        place = tmp_path / "larger" / str(row % 10)
        place.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.full((20, 20, 3), 12 * row, np.uint8)).save(place / f"{row}.png")
    paths = sorted((tmp_path / "larger").glob("*/*.png"))
    right = [
        row["class"] == path.parent.name
        for row, path in zip(model.predict(paths), paths, strict=True)
    ]
    out = tmp_path / "e.json"
    flags = ("--device", "cpu", "--data", str(tmp_path / "larger"), "--out", str(out))
    assert evaluate([digits, *flags]) == 0
    assert json.loads(out.read_text())["metrics"]["top1"] == pytest.approx(np.mean(right))


REFUSED = [
    ([b"no image"], {}, DataError, "image 0: "),
    (["nowhere.jpg"], {}, DataError, "nowhere.jpg: .*no such file"),
    ([np.zeros((8, 8, 3))], {}, DataError, r"float64 \(8, 8, 3\)"),
    ([np.zeros((0, 5, 3), np.uint8)], {}, DataError, r"\(0, 5, 3\)"),
    ([Image.new("L", (0, 5))], {}, DataError, r"image 0: .* \(5, 0\)"),
    ("a.jpg", {}, ConfigError, "list of images"),
    (Image.new("L", (8, 8)), {}, ConfigError, "list of images"),
    ([], {}, ConfigError, "list of images"),
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
