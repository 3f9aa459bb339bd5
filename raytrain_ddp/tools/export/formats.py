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
from raytrain_ddp.tasks.model_zoo import TIMM, arguments
from raytrain_ddp.tools.inference.loaded_model import LoadedModel

_INLINE_BYTES = 2**30  # an ONNX file holds at most 2 GiB
INPUT, OUTPUT = "images", "logits"

Facts = Mapping[str, str]  # as the metadata of a file


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
        write: (model, example of two images, facts, folder).
        use: how to load it in Python, from the folder.
    """

    file: str
    needs: tuple[str, ...]
    write: Callable[[LoadedModel, Tensor, Facts, Path], None]
    use: str


def facts_of(model: LoadedModel, height: int, width: int) -> dict[str, Any]:
    """What a user of the model has to know: preprocessing.json. Images that are not square are
    neither resized nor cropped."""
    data, eval_crop = model.config.data, model.config.data.eval_crop or CENTRE_SHARE
    square = height == width
    return {
        "class_names": model.class_names,
        "image_size": width if square else [height, width],
        "resize_shorter_side": round(width / eval_crop) if square else None,
        "crop": "center" if square else "none",
        "images_of_exactly_this_size": "neither resized nor cropped",
        "interpolation": data.interpolation,
        "antialias": True,
        "exif_orientation": data.exif_orientation,
        "channels": "RGB",
        "mean": [*data.mean],
        "std": [*data.std],
        "activation": activation(model),
    }


def activation(model: LoadedModel) -> str:
    """What makes predictions of the logits: softmax, sigmoid or none."""
    config = model.config
    if config.loss.name == "bce":
        return "sigmoid"
    return "none" if config.data.target_columns else "softmax"


def require_format(name: str, model: LoadedModel) -> Format:
    """The format, if the model can be written in it here.

    Raises:
        ConfigError: not a model for it. PreflightError: packages are missing.
    """
    if not model.takes_images:
        raise ConfigError(
            f"task = {model.config.task!r} is not an image classification: export the model of "
            "raytrain_ddp.load(RUN).model with torch.export, whose inputs you know."
        )
    form = FORMATS[name]
    if name in ("timm", "hf") and not model.config.model.name.startswith(TIMM):
        raise ConfigError(
            f"--format {name} needs a model of timm, and the run has {model.config.model.name!r}: "
            "use --format safetensors, onnx or torch-export."
        )
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
        except RaytrainError:
            raise
        except Exception as error:
            raise RaytrainError(
                f"--format {name}: the model cannot be exported: {first_line(error)}. Try another "
                "format; safetensors works with every model."
            ) from error


def _onnx(model: LoadedModel, example: Tensor, facts: Facts, folder: Path) -> None:
    with _exporting("onnx"):
        program = torch.onnx.export(
            WithNormalization(model).eval(),
            (example,),
            dynamo=True,
            verbose=False,
            input_names=[INPUT],
            output_names=[OUTPUT],
            dynamic_shapes=({0: torch.export.Dim("batch", min=1)},),
        )
    assert program is not None
    program.model.metadata_props.update(facts)
    size = sum(weight.numel() * weight.element_size() for weight in model.model.parameters())
    program.save(folder / "model.onnx", external_data=size > _INLINE_BYTES)


def _torch_export(model: LoadedModel, example: Tensor, facts: Facts, folder: Path) -> None:
    shapes = ({0: torch.export.Dim("batch", min=1)},)
    with _exporting("torch-export"):
        graph = WithNormalization(model).eval()
        program = torch.export.export(graph, (example,), dynamic_shapes=shapes)
        content = io.BytesIO()  # torch's own writer ends the process if the disk is full
        torch.export.save(program, content, extra_files=dict(facts))
    (folder / "model.pt2").write_bytes(content.getbuffer())


def _torchscript(model: LoadedModel, example: Tensor, facts: Facts, folder: Path) -> None:
    with _exporting("torchscript"), torch.no_grad():
        graph = torch.jit.trace(WithNormalization(model).eval(), (example,))
        content = io.BytesIO()  # as above
        torch.jit.save(graph, content, _extra_files=dict(facts))
    (folder / "model.ts").write_bytes(content.getbuffer())


def _safetensors(model: LoadedModel, example: Tensor, facts: Facts, folder: Path) -> None:
    tensors = {name: t.contiguous().clone() for name, t in model.model.state_dict().items()}
    content = save(tensors, {"format": "pt", **facts})  # its own writer raises no OSError
    (folder / "model.safetensors").write_bytes(content)


def _timm(model: LoadedModel, example: Tensor, facts: Facts, folder: Path) -> None:
    from timm.models import save_for_hf

    data = model.config.data
    preprocessing = {
        "input_size": (3, *example.shape[-2:]),
        "mean": data.mean,
        "std": data.std,
        "interpolation": data.interpolation,
        # Images that are used as they are stored have the size, and are not cropped.
        "crop_pct": data.eval_crop or CENTRE_SHARE if data.eval_size or data.image_size else 1.0,
    }
    save_for_hf(
        model.model,
        str(folder),
        model_config={"label_names": [*model.class_names]},
        model_args=arguments(model.config.model) or None,
        safe_serialization=True,
        data_config=preprocessing,
    )


_NORMALIZE = """\
import json

import torch

facts = json.load(open("preprocessing.json"))
mean, std = (torch.tensor(facts[name]).view(3, 1, 1) * 255 for name in ("mean", "std"))
inputs = (images.float() - mean) / std  # images: uint8 (n, 3, height, width)
logits = model.eval()(inputs)
"""
FORMATS = {
    "onnx": Format(
        "model.onnx",
        ("onnx", "onnxscript", "onnxruntime"),
        _onnx,
        "import onnxruntime\n\n"
        'session = onnxruntime.InferenceSession("model.onnx")\n'
        '(logits,) = session.run(None, {"images": images})  # uint8 (n, 3, height, width)\n',
    ),
    "torch-export": Format(
        "model.pt2",
        (),
        _torch_export,
        "import torch\n\n"
        'model = torch.export.load("model.pt2").module()\n'
        "logits = model(images)  # uint8 (n, 3, height, width)\n",
    ),
    "torchscript": Format(
        "model.ts",
        (),
        _torchscript,
        "import torch\n\n"
        'model = torch.jit.load("model.ts")\n'
        "logits = model(images)  # uint8 (n, 3, height, width)\n",
    ),
    "safetensors": Format(
        "model.safetensors",
        (),
        _safetensors,
        "from safetensors.torch import load_file\n\n"
        'model.load_state_dict(load_file("model.safetensors"))  # the model as you build it\n\n'
        + _NORMALIZE,
    ),
    "timm": Format(
        "model.safetensors",
        (),
        _timm,
        "import timm\n\n"
        "model = timm.create_model(\n"
        '    "{architecture}", num_classes={classes}, checkpoint_path="model.safetensors"\n'
        ")\n\n" + _NORMALIZE,
    ),
    "hf": Format(
        "model.safetensors",
        (),
        _timm,
        "import timm\n\n"
        'model = timm.create_model("hf-hub:OWNER/NAME", pretrained=True)  # or local-dir:FOLDER\n\n'
        + _NORMALIZE,
    ),
}


def as_text(facts: Mapping[str, Any]) -> dict[str, str]:
    """As the metadata of a file: text by name."""
    return {name: v if isinstance(v, str) else json.dumps(v) for name, v in facts.items()}
