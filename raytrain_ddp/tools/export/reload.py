"""Loads an export by the code in its README.md, in a process of its own.

Only the format safetensors, whose model the user builds, needs this package for it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from raytrain_ddp.errors import RaytrainError

_TIMEOUT_S = 600.0


def logits_of_export(
    folder: Path, use: str, model: Mapping[str, Any], images: Any
) -> tuple[Any, str]:
    """The logits of uint8 images (n, 3, h, w), float32 (n, classes), computed by a fresh process,
    the first image apart from the others; and the name and version of what computed them.

    Args:
        use: code that makes `logits` of `images`, and of a `model` in which to load weights.
        model: the config of the run and the number of classes, to build `model`.

    Raises:
        RaytrainError: the export cannot be loaded or used.
    """
    with tempfile.TemporaryDirectory() as place:
        np.save(f"{place}/images.npy", images)
        request = json.dumps({"folder": str(folder), "use": use, **model})
        Path(place, "request.json").write_text(request, encoding="utf-8")
        code = f"from raytrain_ddp.tools.export import reload; reload.compute({place!r})"
        argv = [sys.executable, "-W", "ignore", "-c", code]
        try:
            done = subprocess.run(
                argv, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False
            )
        except subprocess.TimeoutExpired:
            text = f"reloading the export took longer than {_TIMEOUT_S:g} s."
            raise RaytrainError(text) from None
        if done.returncode:
            last = (done.stderr.strip().splitlines() or [f"status {done.returncode}"])[-1]
            raise RaytrainError(f"the export cannot be loaded again: {last}")
        return np.load(f"{place}/logits.npy"), done.stdout.strip().splitlines()[-1]


def compute(place: str) -> None:
    """Computes the logits in a folder; prints the name and version of what computed them."""
    request = json.loads(Path(place, "request.json").read_text(encoding="utf-8"))
    images, found = np.load(f"{place}/images.npy"), []
    given = {"model": _built(request)} if "load_state_dict" in request["use"] else {}
    os.chdir(request["folder"])
    for part in filter(len, (images[:1], images[1:])):
        names = {**given, "images": part}
        exec(request["use"], names)
        found.append(np.asarray(names["logits"], np.float32))
    np.save(f"{place}/logits.npy", np.concatenate(found))
    package = "onnxruntime" if "onnxruntime" in sys.modules else "torch"
    print(package, sys.modules[package].__version__)


def _built(request: Mapping[str, Any]) -> Any:
    from raytrain_ddp.config.recipe import from_dict
    from raytrain_ddp.tasks.model_zoo import build

    return build(from_dict(request["config"], where="export").model, request["classes"])
