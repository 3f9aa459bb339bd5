"""The command `export`: the outputs of other programs with the exported files."""

from __future__ import annotations

import inspect
import json
import re
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import raytrain_ddp
from raytrain_ddp.errors import (
    ConfigError,
    DataError,
    PreflightError,
    RaytrainError,
    RunLockedError,
)
from raytrain_ddp.tools.export.__main__ import main as export
from raytrain_ddp.tools.export.formats import FORMATS, checked
from raytrain_ddp.tools.staging import Staging

PAGE = Path(__file__).parents[3] / "docs/trained-model.md"
FILES = {"onnx": "model.onnx", "torch-export": "model.pt2", "safetensors": "model.safetensors"}
# What a user of the export runs, without this package.
USES = {
    "onnx": "import onnx, onnxruntime\n"
    "facts = {p.key: p.value for p in onnx.load('model.onnx').metadata_props}\n"
    "assert facts['activation'] == 'softmax', facts\n"
    "session = onnxruntime.InferenceSession('model.onnx')\n"
    "logits = session.run(None, {'images': images})[0]\n",
    "torch-export": "import torch\n"
    "model = torch.export.load('model.pt2').module()\n"
    "logits = model(torch.from_numpy(images)).detach().numpy()\n",
    "safetensors": "import json, timm, torch\nfrom safetensors.torch import load_file\n"
    "model = timm.create_model('test_resnet', num_classes=2).eval()\n"
    "model.load_state_dict(load_file('model.safetensors'))\n"
    "facts = json.load(open('preprocessing.json'))\n"
    "mean, std = (torch.tensor(facts[n]).view(3, 1, 1) for n in ('mean', 'std'))\n"
    "logits = model((torch.from_numpy(images) / 255 - mean) / std).detach().numpy()\n",
}


@pytest.mark.parametrize("form", FILES)
def test_another_program_computes_the_same_for_any_batch(
    form: str,
    photos: tuple[str, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    run, folder = photos
    if form == "onnx":
        pytest.importorskip("onnxruntime")
    monkeypatch.chdir(tmp_path)
    assert export([run, "--format", form, "--data", str(folder)]) == 0
    out = tmp_path / f"photos-{form}"
    assert {path.name for path in out.iterdir()} == {
        *(FILES[form], "README.md", "preprocessing.json")
    }
    shown = capsys.readouterr().out
    apart = re.search(r"on 18 images: .* at most (\S+)", shown)
    assert apart is not None, shown
    assert float(apart[1]) < 1e-5
    facts = json.loads((out / "preprocessing.json").read_text())
    assert facts["class_names"] == ["dark", "light"]
    assert (facts["image_size"], facts["resize_shorter_side"]) == (32, 37)
    assert [path.name for path in tmp_path.iterdir()] == [out.name]  # no temporary folder is left
    images = np.random.default_rng(0).integers(0, 256, (7, 3, 32, 32), dtype=np.uint8)
    np.save(tmp_path / "images.npy", images)
    code = f"import numpy\nimages = numpy.load('../images.npy')\n{USES[form]}"
    code += "numpy.save('../logits.npy', logits)\n"
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], cwd=out, check=True)
    with torch.no_grad():
        wanted = raytrain_ddp.load(run, device="cpu")(torch.from_numpy(images))
    np.testing.assert_allclose(np.load(tmp_path / "logits.npy"), wanted, atol=1e-4)


def test_the_readme_has_the_metrics_with_counts_and_the_hashes(digits: str, tmp_path: Path):
    out = tmp_path / "d"
    export([digits, "--format", "safetensors", "--out", str(out)])
    page = (out / "README.md").read_text()
    records = (Path(digits) / "metrics.jsonl").read_text().splitlines()
    logged = [r for r in map(json.loads, records) if r["kind"] == "eval"][-1]["metrics"]["top1"]
    assert f"- top1: {logged:.6f} ({round(360 * logged)} of 360)" in page
    newest = max(Path(digits).glob("checkpoints/step-*"))
    manifest = json.loads((newest / "manifest.json").read_text())
    assert manifest["files"]["model.safetensors"]["sha256"] in page
    assert manifest["data_fingerprint"] in page
    assert 'name = "digits-cnn"' in page


@pytest.mark.parametrize(
    ("use", "named"),
    [
        (
            "import numpy, torch\nlogits = numpy.eye(10)[: len(images)] * 9",
            "gives different results",
        ),
        ("import nothing", "cannot be loaded again: .*nothing"),
    ],
)
def test_an_export_with_other_outputs_is_refused(digits: str, tmp_path: Path, use: str, named: str):
    images = torch.zeros((3, 3, 8, 8), dtype=torch.uint8)
    form = FORMATS["onnx"]._replace(package="torch", use=use)
    with pytest.raises(RaytrainError, match=named):
        checked(tmp_path, form, raytrain_ddp.load(digits, device="cpu"), images)


@pytest.mark.parametrize("form", ["safetensors", "torch-export"])
def test_a_full_disk_leaves_nothing(digits: str, tmp_path: Path, form: str):
    """The safetensors writer raises its own error, and torch's would end the process."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, limits[1]))
    try:
        with pytest.raises(PreflightError, match="cannot be written: File too large"):
            export([digits, "--format", form, "--out", str(tmp_path / "out")])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert [*tmp_path.iterdir()] == []


def test_an_export_replaces_what_a_killed_one_left(digits: str, tmp_path: Path):
    out = tmp_path / "d"
    staging = Staging(out, "exporting", "d")
    argv = [digits, "--format", "safetensors", "--out", str(out)]
    with staging.held(), pytest.raises(RunLockedError):
        export(argv)
    staging.result.mkdir(parents=True)
    (staging.result / "half").touch()
    assert export(argv) == 0
    with pytest.raises(ConfigError, match="exists already"):
        export(argv)
    assert export([*argv, "--overwrite"]) == 0
    assert [path.name for path in tmp_path.iterdir()] == ["d"]
    assert not (out / "half").exists()


def test_the_documented_upload_example_works(
    photos: tuple[str, Path], monkeypatch: pytest.MonkeyPatch
):
    import timm

    asked: list[dict[str, Any]] = []
    push = timm.models.push_to_hf_hub

    def note(*args: Any, **given: Any) -> None:
        asked.append(inspect.signature(push).bind(*args, **given).arguments)

    monkeypatch.setattr(timm.models, "push_to_hf_hub", note)
    monkeypatch.setattr(raytrain_ddp, "load", lambda _, find=raytrain_ddp.load: find(photos[0]))
    *_, upload, serving = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    compile(serving, "serving.py", "exec")
    exec(upload, {})
    assert asked[0]["repo_id"] == "OWNER/photos"
    assert asked[0]["model_config"] == {"label_names": ["dark", "light"]}


@pytest.mark.parametrize(
    ("argv", "named"),
    [
        ("", "--format"),
        ("--format onx", "'onnx'"),
        ("--format onnx --out .", "is not an export"),
        ("--format safetensors --out x\udcff", "UTF-8"),
        ("--format onnx --out no/where", "no folder no"),
    ],
)
def test_an_unsupported_export_is_refused(digits: str, argv: str, named: str):
    with pytest.raises(ConfigError, match=named):
        export([digits, *argv.split()])


def test_without_the_data_the_error_asks_for_other_images(photos: tuple[str, Path], tmp_path: Path):
    with pytest.raises(DataError, match="--data FOLDER"):
        export([photos[0], "--format", "safetensors", "--out", str(tmp_path / "p")])
