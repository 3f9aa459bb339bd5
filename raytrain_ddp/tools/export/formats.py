"""Writes a trained model in the formats of other programs."""

from __future__ import annotations

import importlib.util
import io
import json
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor, nn

from raytrain_ddp.data.pixels.cropping import CENTRE_SHARE
from raytrain_ddp.errors import ConfigError, PreflightError, RaytrainError, first_line
from raytrain_ddp.tools.inference.loaded_model import LoadedModel

_INLINE_BYTES = 2**30  # an ONNX file holds at most 2 GiB

Facts = Mapping[str, Any]


class WithNormalization(nn.Module):
    """uint8 images (n, 3, h, w) -> logits (n, classes). Normalizes as the loader's batches are."""

    def __init__(self, model: LoadedModel) -> None:
        super().__init__()
        self.model = model.model
        data = model.config.data
        for name, values in (("mean", data.mean), ("std", data.std)):
            self.register_buffer(name, (torch.tensor(values) * 255).view(1, 3, 1, 1))

    def forward(self, images: Tensor) -> Tensor:
        inputs = images.float() - self.mean  # type: ignore[operator]
        logits: Tensor = self.model(inputs / self.std)  # type: ignore[operator]
        return logits


@dataclass(frozen=True)
class Format:
    """A format.

    Args:
        file: that has the model.
        needs: packages to install.
        write: (model, example of two images, facts, path).
        use: how to compute logits in Python, in the folder.
    """

    file: str
    needs: tuple[str, ...]
    write: Callable[[LoadedModel, Tensor, Facts, Path], None]
    use: str


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


def require_format(name: str, model: LoadedModel) -> Format:
    """The format, if the model can be written in it here.

    Raises:
        ConfigError: the run is no image classification. PreflightError: packages are missing.
    """
    if not model.takes_images:
        raise ConfigError(
            f"task = {model.config.task!r} is not an image classification: export the model of "
            "raytrain_ddp.load(RUN).model with torch.export, whose inputs you know."
        )
    form = FORMATS[name]
    missing = [package for package in form.needs if importlib.util.find_spec(package) is None]
    if missing:
        raise PreflightError(
            f"--format {name} needs packages that are missing: pip install {' '.join(missing)}"
        )
    return form


@contextmanager
def _exporting(name: str) -> Iterator[None]:
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
    with _exporting("onnx"):
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
    program.model.metadata_props.update(_as_text(facts))
    size = sum(weight.numel() * weight.element_size() for weight in model.model.parameters())
    program.save(path, external_data=size > _INLINE_BYTES)


def _torch_export(model: LoadedModel, example: Tensor, facts: Facts, path: Path) -> None:
    shapes = ({0: torch.export.Dim("batch", min=1)},)
    content = io.BytesIO()  # torch's own writer ends the process if the disk is full
    with _exporting("torch-export"):
        graph = WithNormalization(model).eval()
        program = torch.export.export(graph, (example,), dynamic_shapes=shapes)
        torch.export.save(program, content, extra_files=_as_text(facts))
    path.write_bytes(content.getbuffer())


def _safetensors(model: LoadedModel, example: Tensor, facts: Facts, path: Path) -> None:
    tensors = {name: t.contiguous().clone() for name, t in model.model.state_dict().items()}
    path.write_bytes(save(tensors, {"format": "pt", **_as_text(facts)}))


def _as_text(facts: Facts) -> dict[str, str]:
    """As the metadata of a file."""
    return {name: v if isinstance(v, str) else json.dumps(v) for name, v in facts.items()}


FORMATS = {
    "onnx": Format(
        "model.onnx",
        ("onnx", "onnxscript", "onnxruntime"),
        _onnx,
        """\
import onnxruntime

# images: an array of uint8 (n, 3, height, width)
session = onnxruntime.InferenceSession("model.onnx", providers=["CPUExecutionProvider"])
(logits,) = session.run(None, {"images": images})
""",
    ),
    "torch-export": Format(
        "model.pt2",
        (),
        _torch_export,
        """\
import torch

# images: an array of uint8 (n, 3, height, width)
model = torch.export.load("model.pt2").module()
with torch.no_grad():
    logits = model(torch.from_numpy(images))
""",
    ),
    "safetensors": Format(
        "model.safetensors",
        (),
        _safetensors,
        """\
import json

import torch
from safetensors.torch import load_file

# images: an array of uint8 (n, 3, height, width); model: as you build it
model.load_state_dict(load_file("model.safetensors"))
facts = json.load(open("preprocessing.json"))
mean, std = (torch.tensor(facts[name]).view(3, 1, 1) * 255 for name in ("mean", "std"))
with torch.no_grad():
    logits = model.eval()((torch.from_numpy(images).float() - mean) / std)
""",
    ),
}
