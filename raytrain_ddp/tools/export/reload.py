"""Loads an export as its users do, in a process of its own, and computes its logits.

Only the format safetensors, whose model the user builds, needs this package for it."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from raytrain_ddp.errors import RaytrainError

_TIMEOUT_S = 600.0

Compute = Callable[[Any], Any]  # uint8 images -> their logits, float32


def logits_of_export(folder: Path, request: dict[str, Any], images: Any) -> tuple[Any, str]:
    """The logits of uint8 images (n, 3, h, w), float32 (n, classes), computed by a fresh process,
    the first image apart from the others; and the name and version of what computed them.

    Raises:
        RaytrainError: the export cannot be loaded or used.
    """
    np.save(folder / "images.npy", images)
    (folder / "request.json").write_text(json.dumps(request), encoding="utf-8")
    reloaded = in_fresh_process(folder)
    found = np.load(folder / "logits.npy")
    for name in ("images.npy", "request.json", "logits.npy"):
        (folder / name).unlink()
    return found, reloaded


def in_fresh_process(folder: Path) -> str:
    """What `computed` returns in a process of its own."""
    code = f"from raytrain_ddp.tools.export import reload; print(reload.computed({str(folder)!r}))"
    try:
        argv = [sys.executable, "-W", "ignore", "-c", code]
        done = subprocess.run(argv, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        raise RaytrainError(f"reloading the export took longer than {_TIMEOUT_S:g} s.") from None
    if done.returncode:
        last = (done.stderr.strip().splitlines() or [f"status {done.returncode}"])[-1]
        raise RaytrainError(f"the export cannot be loaded again: {last}")
    return done.stdout.strip().splitlines()[-1]


def computed(place: str | Path) -> str:
    """Computes the logits in the folder; returns the name and version of what computed them."""
    folder = Path(place)
    request = json.loads((folder / "request.json").read_text(encoding="utf-8"))
    images = np.load(folder / "images.npy")
    compute = _LOADERS[request["format"]](folder, request)
    parts = [part for part in (images[:1], images[1:]) if len(part)]
    np.save(folder / "logits.npy", np.concatenate([compute(part) for part in parts]))
    package = {"onnx": "onnxruntime", "timm": "timm", "hf": "timm"}.get(request["format"], "torch")
    return f"{package} {sys.modules[package].__version__}"


def _onnx(folder: Path, request: dict[str, Any]) -> Compute:
    import onnxruntime

    session = onnxruntime.InferenceSession(
        str(folder / request["file"]), providers=["CPUExecutionProvider"]
    )
    return lambda images: session.run(None, {"images": images})[0]


def _torch_export(folder: Path, request: dict[str, Any]) -> Compute:
    import torch

    return _computing(torch.export.load(folder / request["file"]).module())


def _torchscript(folder: Path, request: dict[str, Any]) -> Compute:
    import torch

    return _computing(torch.jit.load(str(folder / request["file"])))


def _safetensors(folder: Path, request: dict[str, Any]) -> Compute:
    from safetensors.torch import load_file

    from raytrain_ddp.config.recipe import from_dict
    from raytrain_ddp.tasks.model_zoo import build

    model = build(from_dict(request["config"], where="export").model, request["classes"])
    model.load_state_dict(load_file(folder / request["file"]))
    return _of_normalized(folder, model)


def _timm(folder: Path, request: dict[str, Any]) -> Compute:
    import timm

    model = timm.create_model(
        request["architecture"],
        num_classes=request["classes"],
        checkpoint_path=str(folder / request["file"]),
        **request["model_args"],
    )
    return _of_normalized(folder, model)


def _hf(folder: Path, request: dict[str, Any]) -> Compute:
    import timm

    return _of_normalized(folder, timm.create_model(f"local-dir:{folder}", pretrained=True))


def _of_normalized(folder: Path, model: Any) -> Compute:
    import torch

    facts = json.loads((folder / "preprocessing.json").read_text(encoding="utf-8"))
    mean, std = (torch.tensor(facts[name]).view(3, 1, 1) * 255 for name in ("mean", "std"))
    model.eval()
    return _computing(lambda images: model((images.float() - mean) / std))


def _computing(model: Any) -> Compute:
    import torch

    def compute(images: Any) -> Any:
        with torch.no_grad():
            return model(torch.from_numpy(images)).float().numpy()

    return compute


_LOADERS = {
    "onnx": _onnx,
    "torch-export": _torch_export,
    "torchscript": _torchscript,
    "safetensors": _safetensors,
    "timm": _timm,
    "hf": _hf,
}
