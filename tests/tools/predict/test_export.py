"""The command `export`: the outputs of other programs with the exported files."""

from __future__ import annotations

import asyncio
import errno
import importlib.util
import inspect
import json
import re
import resource
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import yaml

import raytrain_ddp
from raytrain_ddp.errors import (
    ConfigError,
    DataError,
    PreflightError,
    RaytrainError,
    RunLockedError,
)
from raytrain_ddp.tools.export import __main__ as command
from raytrain_ddp.tools.export import reload
from raytrain_ddp.tools.export.__main__ import main as export

PAGE = Path(command.__file__).parents[2] / "docs/how-to/export.md"
FILES = {
    "onnx": "model.onnx",
    "torch-export": "model.pt2",
    "torchscript": "model.ts",
    "safetensors": "model.safetensors",
    "timm": "model.safetensors",
    "hf": "model.safetensors",
}


@pytest.mark.filterwarnings("ignore")  # as in the fresh process
@pytest.mark.parametrize("form", FILES)
def test_a_fresh_process_computes_the_same(
    form: str,
    photos: tuple[str, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    """It gets a single image, and then all others. Only two processes are started because that
    takes seconds."""
    run, folder = photos
    if form == "onnx":
        pytest.importorskip("onnxruntime")
    if form not in ("onnx", "hf"):
        monkeypatch.setattr(reload, "in_fresh_process", reload.computed)
    monkeypatch.chdir(tmp_path)
    assert export([run, "--format", form, "--data", str(folder)]) == 0
    out = tmp_path / f"photos-{form}"
    names = {FILES[form], "README.md", "preprocessing.json"}
    names |= {"config.json"} if form in ("timm", "hf") else set()
    assert {path.name for path in out.iterdir()} == names
    shown = capsys.readouterr().out
    checked = re.search(r"in a fresh process on 18 images: .* at most (\S+), 18 of", shown)
    assert checked is not None, shown
    assert float(checked[1]) < 1e-5
    facts = json.loads((out / "preprocessing.json").read_text())
    assert facts["class_names"] == ["dark", "light"]
    assert (facts["image_size"], facts["resize_shorter_side"]) == (32, 37)
    assert [path.name for path in tmp_path.iterdir()] == [out.name]  # no temporary folder is left


def test_onnx_has_its_preprocessing_and_takes_any_batch(digits: str, tmp_path: Path):
    onnx, onnxruntime = map(pytest.importorskip, ("onnx", "onnxruntime"))
    export([digits, "--format", "onnx", "--out", str(tmp_path / "d")])
    metadata = {p.key: p.value for p in onnx.load(tmp_path / "d/model.onnx").metadata_props}
    assert json.loads(metadata["class_names"]) == list("0123456789")
    assert metadata["activation"] == "softmax"
    session = onnxruntime.InferenceSession(tmp_path / "d/model.onnx")
    model = raytrain_ddp.load(digits, device="cpu")
    random = np.random.default_rng(0)
    for count in (1, 3, 8):
        images = random.integers(0, 256, (count, 8, 8, 3), dtype=np.uint8)
        batch = model.preprocess(list(images))
        (logits,) = session.run(None, {"images": batch.numpy()})
        np.testing.assert_allclose(logits, model(batch).detach(), atol=1e-4)


def test_the_card_has_the_metrics_with_counts_and_the_hashes(digits: str, tmp_path: Path):
    out = tmp_path / "d"
    export([digits, "--format", "safetensors", "--license", "mit", "--out", str(out)])
    card = (out / "README.md").read_text()
    front = yaml.safe_load(card.split("---\n")[1])
    assert front["license"] == "mit"
    records = (Path(digits) / "metrics.jsonl").read_text().splitlines()
    logged = [r for r in map(json.loads, records) if r["kind"] == "eval"][-1]["metrics"]["top1"]
    assert f"- top1: {logged:.6f} ({round(360 * logged)} of 360)" in card
    newest = max(Path(digits).glob("checkpoints/step-*"))
    manifest = json.loads((newest / "manifest.json").read_text())
    assert manifest["files"]["model.safetensors"]["sha256"] in card
    assert manifest["data_fingerprint"] in card
    assert "training data: 1437 rows" in card
    assert 'name = "digits-cnn"' in card


def test_an_export_with_different_outputs_is_discarded(
    digits: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def other(folder: Path, request: dict[str, Any], images: Any) -> tuple[Any, str]:
        return np.eye(10, dtype=np.float32)[np.arange(len(images)) % 10] * 9, "other 1.0"

    monkeypatch.setattr(reload, "logits_of_export", other)
    with pytest.raises(RaytrainError, match=r"gives other results, by other 1.0 .* differs by"):
        export([digits, "--format", "safetensors", "--out", str(tmp_path / "d")])
    assert not [*tmp_path.iterdir()]


def test_an_export_that_cannot_be_loaded_is_reported(digits: str, tmp_path: Path):
    (tmp_path / "model.onnx").write_bytes(b"x")
    request = {"format": "onnx", "file": "model.onnx"}
    with pytest.raises(RaytrainError, match="the export cannot be loaded again: "):
        reload.logits_of_export(tmp_path, request, np.zeros((2, 3, 8, 8), np.uint8))


def test_a_missing_package_is_named(digits: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    find = importlib.util.find_spec
    absent = lambda name, package=None: None if "onnx" in name else find(name, package)  # noqa: E731
    monkeypatch.setattr(importlib.util, "find_spec", absent)
    with pytest.raises(PreflightError, match="pip install onnx onnxscript onnxruntime"):
        export([digits, "--format", "onnx", "--out", str(tmp_path / "d")])


@pytest.mark.parametrize("form", ["safetensors", "torch-export", "torchscript"])
def test_weights_that_do_not_fit_on_the_disk_give_a_one_line_error(
    digits: str, tmp_path: Path, form: str
):
    """The safetensors writer raises its own error, and torch's would end the process."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, limits[1]))
    try:
        with pytest.raises(PreflightError, match="cannot be written: File too large"):
            export([digits, "--format", form, "--out", str(tmp_path / "out")])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert [*tmp_path.iterdir()] == []


def test_a_full_disk_leaves_nothing(digits: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(command, "_write_json", full)
    with pytest.raises(PreflightError, match="cannot be written: No space left on device"):
        export([digits, "--format", "safetensors", "--out", str(tmp_path / "d")])
    assert not [*tmp_path.iterdir()]


def test_a_concurrent_export_to_the_same_folder_is_refused(
    digits: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    argv = [digits, "--format", "safetensors", "--out", str(tmp_path / "d")]
    write = command._write_json

    def begun(*args: Any) -> None:
        monkeypatch.setattr(command, "_write_json", write)
        with pytest.raises(RunLockedError, match="another process is exporting to it"):
            export(argv)
        write(*args)

    monkeypatch.setattr(command, "_write_json", begun)
    assert export(argv) == 0
    assert [path.name for path in tmp_path.iterdir()] == ["d"]
    assert {"README.md", "model.safetensors"} <= {path.name for path in (tmp_path / "d").iterdir()}
    assert not {"lock", "export"} & {path.name for path in (tmp_path / "d").iterdir()}


def test_without_the_data_the_error_asks_for_other_images(photos: tuple[str, Path], tmp_path: Path):
    with pytest.raises(DataError, match="To compare the export on other images: --data FOLDER"):
        export([photos[0], "--format", "safetensors", "--out", str(tmp_path / "p")])


def blocks() -> list[str]:
    """The Python examples of the page on exports."""
    return re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)


def test_the_documented_upload_example_works(monkeypatch: pytest.MonkeyPatch):
    import huggingface_hub

    asked: list[dict[str, Any]] = []
    for name in ("create_repo", "upload_folder"):
        method = getattr(huggingface_hub.HfApi, name)

        def note(*args: Any, _method: Any = method, **given: Any) -> None:
            asked.append(inspect.signature(_method).bind(*args, **given).arguments)

        monkeypatch.setattr(huggingface_hub.HfApi, name, note)
    exec(blocks()[0], {})
    assert [call["repo_id"] for call in asked] == ["OWNER/photos"] * 2


def test_the_documented_serving_example_works(
    photos: tuple[str, Path], monkeypatch: pytest.MonkeyPatch
):
    """The deployment's class without Ray: its requests are answered in one batch."""
    import ray

    made: list[tuple[Any, str]] = []

    class Deployment:
        def __init__(self, kind: type) -> None:
            self.kind = kind

        def bind(self, run: str) -> None:
            made.append((self.kind, run))

    serve, requests = ModuleType("ray.serve"), ModuleType("starlette.requests")
    serve.deployment, serve.batch = lambda **_: Deployment, lambda **_: lambda method: method
    requests.Request = object
    monkeypatch.setattr(ray, "serve", serve, raising=False)
    for module in (serve, ModuleType("starlette"), requests):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    exec(blocks()[1], {"__name__": "serving"})
    kind, run = made[0]
    assert run == "/shared/runs/photos"
    image = (photos[1] / "dark/1.jpg").read_bytes()
    answers = asyncio.run(kind(photos[0]).classify([image, image]))
    assert [answer["class"] in ("dark", "light") for answer in answers] == [True, True]


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ((), "--format is missing"),
        (("--format", "onx"), "Did you mean 'onnx'"),
        (("--format", "timm"), "--format timm needs a model of timm, and the run has 'digits-cnn'"),
        (("--format", "hf"), "--format hf needs a model of timm"),
        (("--format", "onnx", "--out", "."), "exists already"),
        (
            ("--format", "onnx", "--out", ".", "--overwrite"),
            "is not an export, and is not replaced",
        ),
        (("--format", "safetensors", "--out", "x\udcff"), "must be UTF-8"),
        (("--format", "onnx", "--out", "no/where"), "there is no folder no"),
    ],
)
def test_an_unsupported_export_is_refused(digits: str, argv: Sequence[str], message: str):
    with pytest.raises(ConfigError, match=message):
        export([digits, *argv])
