"""Writes a trained model in the formats of other programs, with a README.md, and compares the
results of the code in the README.md with those of the model."""

from __future__ import annotations

import io
import json
import os
import warnings
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors.torch import save
from torch import Tensor, nn

from raytrain_ddp.checkpoint.run_folder import recorded
from raytrain_ddp.config.recipe import dumps, publishable
from raytrain_ddp.data.order import Draws
from raytrain_ddp.data.pixels.image_batches import CENTER_SHARE
from raytrain_ddp.errors import DataError, PreflightError, RaytrainError, first_line
from raytrain_ddp.tasks.task_check import model_of
from raytrain_ddp.tools.inference.inputs import open_input
from raytrain_ddp.tools.inference.loaded_model import LoadedModel

_ROWS = 64  # rows used for the comparison
_TOLERANCE = 1e-3  # relative to the largest logit

Facts = Mapping[str, Any]  # preprocessing.json


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
        "resize_shorter_side": round(width / (data.eval_crop or CENTER_SHARE)) if square else None,
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


def write(name: str, model: LoadedModel, images: Tensor, facts: Facts, folder: Path) -> None:
    """Writes the model and its preprocessing.json.

    Args:
        name: a key of `FORMATS`. images: an example batch of two.

    Raises:
        PreflightError: a package is missing.
        RaytrainError: the exporter fails in any way.
    """
    text = json.dumps(facts, indent=1, ensure_ascii=False) + "\n"
    (folder / "preprocessing.json").write_text(text, encoding="utf-8")
    as_text = {key: v if isinstance(v, str) else json.dumps(v) for key, v in facts.items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about the exporter's own future
        try:
            _write(model, images, as_text, folder / FORMATS[name].file)
        except OSError:
            raise
        except ImportError as error:
            packages = "pip install onnx onnxscript onnxruntime"
            raise PreflightError(f"--format {name}: {first_line(error)}: {packages}") from None
        except Exception as error:
            raise RaytrainError(
                f"--format {name}: the model cannot be exported: {first_line(error)}. Try another "
                "format; safetensors works with every model."
            ) from error


def _write(model: LoadedModel, images: Tensor, facts: dict[str, str], path: Path) -> None:
    if path.suffix == ".safetensors":
        tensors = {name: t.contiguous().clone() for name, t in model.model.state_dict().items()}
        path.write_bytes(save(tensors, {"format": "pt", **facts}))
        return
    graph, any_batch = WithNormalization(model).eval(), ({0: torch.export.Dim("batch", min=1)},)
    if path.suffix == ".pt2":
        content = io.BytesIO()  # torch's own writer ends the process if the disk is full
        exported = torch.export.export(graph, (images,), dynamic_shapes=any_batch)
        torch.export.save(exported, content, extra_files=dict(facts))
        path.write_bytes(content.getbuffer())
        return
    import onnxruntime  # noqa: F401  (the check needs it)

    names: dict[str, Any] = {"input_names": ["images"], "output_names": ["logits"]}
    options = {"dynamo": True, "verbose": False, "dynamic_shapes": any_batch, **names}
    program = torch.onnx.export(graph, (images,), **options)
    assert program is not None
    program.model.metadata_props.update(facts)
    program.save(path)


class Format(NamedTuple):
    """An export format.

    Args:
        file: the file that contains the model. package: the package that runs it.
        use: Python code that computes logits, to be run in the folder.
    """

    file: str
    package: str
    use: str


FORMATS = {
    "onnx": Format(
        "model.onnx",
        "onnxruntime",
        """\
import onnxruntime

session = onnxruntime.InferenceSession("model.onnx", providers=["CPUExecutionProvider"])
(logits,) = session.run(None, {"images": images})  # NumPy, uint8 (n, 3, height, width)
""",
    ),
    "torch-export": Format(
        "model.pt2",
        "torch",
        """\
import torch

model = torch.export.load("model.pt2").module()
with torch.no_grad():
    logits = model(torch.from_numpy(images))  # NumPy, uint8 (n, 3, height, width)
""",
    ),
    "safetensors": Format(
        "model.safetensors",
        "torch",
        """\
import json

import torch
from safetensors.torch import load_file

model.load_state_dict(load_file("model.safetensors"))  # the model as you build it
with open("preprocessing.json", encoding="utf-8") as file:
    facts = json.load(file)
mean, std = (torch.tensor(facts[name]).view(3, 1, 1) * 255 for name in ("mean", "std"))
with torch.no_grad():  # images: NumPy, uint8 (n, 3, height, width)
    logits = model.eval()((torch.from_numpy(images).float() - mean) / std)
""",
    ),
}

_CARD = """\
# {name}

This is `{model}`, trained by raytrain_ddp {version} on `{source}`. The export was {checked}.

```python
{use}```

`preprocessing.json` has the names of the outputs in order, the sizes to which RGB images are
resized and cropped, their normalization, and the activation that turns logits into probabilities.

## Metrics

{metrics}

## Origin

- checkpoint: `{checkpoint}`, whose `model.safetensors` has the sha256 `{sha256}`
- training data: fingerprint `{data}`

```toml
{config}```
"""


def model_card(model: LoadedModel, use: str, checked: str) -> str:
    """The README.md: how to use the export, metrics with their counts, hashes, and config.

    Args:
        use: code that computes logits.
        checked: how the export compares with the model.
    """
    config, manifest = publishable(model.config), model.checkpoint.manifest
    rows = recorded(model.checkpoint).get("data", {}).get("eval_rows") or 0
    metrics = []
    for name, value in manifest.metrics.items():
        counted = f" ({round(value * rows)} of {rows})" if name in ("top1", "top5") and rows else ""
        metrics.append(f"- {name}: {value:.6f}{counted}")
    return _CARD.format(
        name=config.name,
        model=config.model.name,
        version=manifest.written_by,
        source=config.data.source,
        checked=checked,
        use=use,
        metrics="\n".join(metrics or ["The run has not been evaluated."]),
        checkpoint=model.checkpoint.name,
        sha256=manifest.files["model.safetensors"].sha256,
        data=manifest.data_fingerprint,
        config=dumps(config),
    )


def images_of(model: LoadedModel, data: str | None, image_size: int) -> Tensor:
    """Images for the comparison, uint8 (n, 3, h, w), spread over all of the data.

    Args:
        data, image_size: see `open_input`. None: the evaluation data of the run.

    Raises:
        DataError: no image can be read.
    """
    bad: dict[int, str] = {}
    try:
        words = () if data is None else (data,)
        given = open_input(words, model, bad.__setitem__, image_size=image_size).data
    except RaytrainError as error:
        hint = " To compare the export on other images: --data FOLDER." if data is None else ""
        raise type(error)(f"{error}{hint}") from None
    rows = np.unique(np.linspace(0, given.rows - 1, _ROWS).astype(np.int64))
    images: Tensor = given.batch(Draws(0, 0, rows))["image"]
    given.close()
    if not len(images):
        raise DataError(f"none of {len(rows)} images can be read: {next(iter(bad.values()))}.")
    return images.contiguous()


def checked(folder: Path, form: Format, model: LoadedModel, images: Tensor) -> str:
    """How far the export's logits are from the model's: ``checked by onnxruntime ...``.

    Raises:
        RaytrainError: they differ too much, or the export cannot be loaded.
    """
    theirs = _computed(folder, form, model, images)
    with torch.inference_mode():
        ours = model(images).float()
    apart = (theirs - ours).abs().max().item()
    by = f"by {form.package} {version(form.package)} on {len(images)} images"
    if not apart <= _TOLERANCE * max(1.0, ours.abs().max().item()):
        text = f"the export gives different results than the model, by up to {apart:.3g}"
        raise RaytrainError(f"{text} (checked {by}).")
    return f"checked {by}: results differ by at most {apart:.2g}"


def _computed(folder: Path, form: Format, model: LoadedModel, images: Tensor) -> Tensor:
    """The logits that the export computes, for the first image and then for all others."""
    found, here = [], Path.cwd()
    names: dict[str, Any] = {"model": model_of(model.task, pretrained=False)}
    try:
        os.chdir(folder)
        for part in filter(len, (images[:1], images[1:])):
            names["images"] = part.numpy()
            exec(form.use, names)
            found.append(torch.as_tensor(names["logits"]).float())
    except Exception as error:
        raise RaytrainError(f"the export cannot be loaded again: {first_line(error)}") from error
    finally:
        os.chdir(here)
    return torch.cat(found)
