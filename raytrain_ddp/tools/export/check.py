"""Compares an export with the model: a fresh process runs the code in its README.md.

Only the format safetensors, whose model the user builds, needs this package there."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from raytrain_ddp.config.recipe import from_dict, to_dict
from raytrain_ddp.data.order.sample_rng import Draws
from raytrain_ddp.errors import DataError, RaytrainError
from raytrain_ddp.tools.inference.inputs import open_input
from raytrain_ddp.tools.inference.loaded_model import LoadedModel

_ROWS = 64
_TOLERANCE = 1e-3  # of a probability


def images_of(model: LoadedModel, data: str | None, image_size: int) -> Tensor:
    """Images to compare on, uint8 (n, 3, h, w), from all over the data.

    Args:
        data, image_size: see `open_input`. None: the evaluation data of the run.

    Raises:
        DataError: there are none that can be read.
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


def checked(folder: Path, use: str, model: LoadedModel, activation: str, images: Tensor) -> str:
    """How far the export is from the model: ``checked by onnxruntime ...``.

    Args:
        use: the code that makes `logits` of `images`, with a `model` in which it loads weights.
        activation: makes probabilities of logits.

    Raises:
        RaytrainError: they differ, or the export cannot be loaded.
    """
    request = {"folder": str(folder), "use": use, "config": to_dict(model.config)}
    with tempfile.TemporaryDirectory() as place:
        np.save(f"{place}/images.npy", images.numpy())
        text = json.dumps({**request, "classes": len(model.class_names)})
        Path(place, "request.json").write_text(text, encoding="utf-8")
        code = f"from raytrain_ddp.tools.export import check; check.compute({place!r})"
        argv = [sys.executable, "-W", "ignore", "-c", code]
        done = subprocess.run(argv, capture_output=True, text=True, check=False)
        if done.returncode:
            last = (done.stderr.strip().splitlines() or [f"status {done.returncode}"])[-1]
            raise RaytrainError(f"the export cannot be loaded again: {last}")
        theirs = torch.from_numpy(np.load(f"{place}/logits.npy"))
    with torch.inference_mode():
        ours = model(images).float()
    if activation != "none":
        shares = torch.sigmoid if activation == "sigmoid" else lambda logits: logits.softmax(1)
        ours, theirs = shares(ours), shares(theirs)
    apart = (theirs - ours).abs().max().item()
    by = f"by {done.stdout.strip()} in a fresh process on {len(images)} images"
    what = "an output differs" if activation == "none" else "a probability differs"
    if not apart <= _TOLERANCE * max(1.0, ours.abs().max().item()):
        raise RaytrainError(f"the export gives other results, {by}: {what} by {apart:.3g}.")
    same = int((theirs.argmax(1) == ours.argmax(1)).sum())
    same_class = "" if activation == "none" else f", {same} of the same class"
    return f"checked {by}: {what} by at most {apart:.2g}{same_class}"


def compute(place: str) -> None:
    """In the fresh process: computes the logits of the first image, and of all others; prints the
    name and version of what did it."""
    request = json.loads(Path(place, "request.json").read_text(encoding="utf-8"))
    images, found, given = np.load(f"{place}/images.npy"), [], {}
    if "load_state_dict" in request["use"]:
        from raytrain_ddp.tasks.model_zoo import build

        config = from_dict(request["config"], where="export")
        given["model"] = build(config.model, request["classes"])
    os.chdir(request["folder"])
    for part in filter(len, (images[:1], images[1:])):
        names = {**given, "images": part}
        exec(request["use"], names)
        found.append(np.asarray(names["logits"], np.float32))
    np.save(f"{place}/logits.npy", np.concatenate(found))
    package = "onnxruntime" if "onnxruntime" in sys.modules else "torch"
    print(package, sys.modules[package].__version__)
