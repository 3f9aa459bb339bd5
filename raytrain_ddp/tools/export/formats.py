"""Writes a trained model in the formats of other programs."""

from __future__ import annotations

import importlib.util
import io
import json
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import save
from torch import Tensor, nn

from raytrain_ddp.data.pixels.cropping import CENTRE_SHARE
from raytrain_ddp.errors import PreflightError, RaytrainError, first_line
from raytrain_ddp.tools.inference.loaded_model import LoadedModel

_INLINE_BYTES = 2**30  # an ONNX file holds at most 2 GiB

Facts = Mapping[str, str]  # preprocessing.json, as the metadata of a file


class WithNormalization(nn.Module):
    """uint8 images (n, 3, h, w) -> logits (n, classes). Normalizes as the loader's batches are."""

    def __init__(self, model: LoadedModel) -> None:
        super().__init__()
        self.model, data = model.model, model.config.data
        mean, std = (torch.tensor(each).view(1, 3, 1, 1) * 255 for each in (data.mean, data.std))
        self.register_buffer("mean", mean)
        self.register_buffer("std", std)

    def forward(self, images: Tensor) -> Tensor:
        inputs = images.float() - self.mean  # type: ignore[operator]
        logits: Tensor = self.model(inputs / self.std)  # type: ignore[operator]
        return logits


def facts_of(model: LoadedModel, height: int, width: int) -> dict[str, Any]:
    """What a user of the model has to know: preprocessing.json. Images that are not square are
    neither resized nor cropped."""
    data, square = model.config.data, height == width
    numbers = "none" if data.target_columns else "softmax"
    return {
        "class_names": model.class_names,
        "image_size": width if square else [height, width],
        "resize_shorter_side": round(width / (data.eval_crop or CENTRE_SHARE)) if square else None,
        "crop": "center" if square else "none",
        "images_of_exactly_this_size": "neither resized nor cropped",
        "interpolation": data.interpolation,
        "antialias": True,
        "exif_orientation": data.exif_orientation,
        "channels": "RGB",
        "mean": [*data.mean],
        "std": [*data.std],
        "activation": "sigmoid" if model.config.loss.name == "bce" else numbers,
    }


@contextmanager
def exporting(name: str) -> Iterator[None]:
    """Raises RaytrainError, with a remedy, if the exporter fails; it may fail in any way."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about the exporter's own future
        try:
            yield
        except Exception as error:
            raise RaytrainError(
                f"--format {name}: the model cannot be exported: {first_line(error)}. Try another "
                "format; safetensors works with every model."
            ) from error


def _onnx(model: LoadedModel, example: Tensor, facts: Facts, path: Path) -> None:
    packages = ("onnx", "onnxscript", "onnxruntime")
    missing = [package for package in packages if importlib.util.find_spec(package) is None]
    if missing:
        raise PreflightError(f"--format onnx needs packages: pip install {' '.join(missing)}")
    with exporting("onnx"):
        program = torch.onnx.export(
            WithNormalization(model).eval(),
            (example,),
            dynamo=True,
            verbose=False,
            input_names=["images"],
            output_names=["logits"],
            dynamic_shapes=({0: torch.export.Dim("batch", min=1)},),
        )
    assert program is not None
    program.model.metadata_props.update(facts)
    size = sum(weight.numel() * weight.element_size() for weight in model.model.parameters())
    program.save(path, external_data=size > _INLINE_BYTES)


def _torch_export(model: LoadedModel, example: Tensor, facts: Facts, path: Path) -> None:
    shapes = ({0: torch.export.Dim("batch", min=1)},)
    content = io.BytesIO()  # torch's own writer ends the process if the disk is full
    with exporting("torch-export"):
        graph = WithNormalization(model).eval()
        program = torch.export.export(graph, (example,), dynamic_shapes=shapes)
        torch.export.save(program, content, extra_files=dict(facts))
    path.write_bytes(content.getbuffer())


def _safetensors(model: LoadedModel, example: Tensor, facts: Facts, path: Path) -> None:
    tensors = {name: t.contiguous().clone() for name, t in model.model.state_dict().items()}
    path.write_bytes(save(tensors, {"format": "pt", **facts}))


def as_text(facts: Mapping[str, Any]) -> dict[str, str]:
    """As the metadata of a file."""
    return {name: v if isinstance(v, str) else json.dumps(v) for name, v in facts.items()}


class Format(NamedTuple):
    """A format.

    Args:
        file: that has the model.
        write: (model, example of two images, facts, path).
        use: how to compute logits in Python, in the folder.
    """

    file: str
    write: Callable[[LoadedModel, Tensor, Facts, Path], None]
    use: str


FORMATS = {
    "onnx": Format(
        "model.onnx",
        _onnx,
        """\
import onnxruntime

session = onnxruntime.InferenceSession("model.onnx", providers=["CPUExecutionProvider"])
(logits,) = session.run(None, {"images": images})  # NumPy, uint8 (n, 3, height, width)
""",
    ),
    "torch-export": Format(
        "model.pt2",
        _torch_export,
        """\
import torch

model = torch.export.load("model.pt2").module()
with torch.no_grad():
    logits = model(torch.from_numpy(images))  # NumPy, uint8 (n, 3, height, width)
""",
    ),
    "safetensors": Format(
        "model.safetensors",
        _safetensors,
        """\
import json

import torch
from safetensors.torch import load_file

model.load_state_dict(load_file("model.safetensors"))  # the model as you build it
facts = json.load(open("preprocessing.json"))
mean, std = (torch.tensor(facts[name]).view(3, 1, 1) * 255 for name in ("mean", "std"))
with torch.no_grad():  # images: NumPy, uint8 (n, 3, height, width)
    logits = model.eval()((torch.from_numpy(images).float() - mean) / std)
""",
    ),
}
