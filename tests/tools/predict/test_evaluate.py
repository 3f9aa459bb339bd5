"""`evaluate --data`: other data than those of the run, with other columns."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from parquet_files import hugging_face, write_parquet

from raytrain_ddp import DataConfig, ModelConfig, TrainConfig, fit_locally, load
from raytrain_ddp.checkpoint.committed import Checkpoint
from raytrain_ddp.checkpoint.run_folder import checkpoint_store, find_checkpoint, with_checkpoint
from raytrain_ddp.checkpoint.storage import open_storage
from raytrain_ddp.config.sections import LogConfig
from raytrain_ddp.errors import ConfigError, DataError
from raytrain_ddp.evaluate import main
from raytrain_ddp.tasks.image_classification import ImageClassification


def metrics(*argv: str, out: Path) -> dict[str, float]:
    assert main([*argv, "--out", str(out)]) == 0
    found: dict[str, float] = json.loads(out.read_text())["metrics"]
    return found


def test_for_a_checkpoint_that_the_run_deletes_meanwhile_the_newest_is_taken(
    digits: str, tmp_path: Path
):
    run = str(shutil.copytree(digits, tmp_path / "run"))
    best = find_checkpoint(run)
    newer = replace(best.manifest, step=best.name.step + 1, files={})
    checkpoint_store(open_storage(run)).commit(newer, {"model.safetensors": b"newer"})

    def read(found: Checkpoint) -> bytes:
        shutil.rmtree(best.storage.path, ignore_errors=True)
        return found.read("model.safetensors")

    assert with_checkpoint(run, "best", read) == b"newer"


@pytest.fixture
def table(photos: tuple[str, Path], tmp_path: Path) -> str:
    """The photos as a Parquet file with columns of other names."""
    files = sorted(photos[1].glob("*/*.jpg"))
    images = hugging_face([path.read_bytes() for path in files])
    return write_parquet(
        tmp_path / "t.parquet", {"jpg": images, "y": [p.parent.name for p in files]}
    )


def test_data_with_other_columns_are_evaluated_without_the_training_data(
    photos: tuple[str, Path], table: str, tmp_path: Path
):
    run, folder = photos
    of_folder = metrics(run, "--data", str(folder), out=tmp_path / "a.json")
    read = ("--data.image-column", "jpg", "--data.label-column", "y")
    assert metrics(run, "--data", table, *read, out=tmp_path / "b.json") == of_folder
    larger = metrics(run, "--data", str(folder), "--data.image-size", "48", out=tmp_path / "c.json")
    assert larger["loss"] != of_folder["loss"]


@pytest.mark.parametrize(
    ("flags", "kind", "message"),
    [
        (("--data", "{table}"), DataError, "--data.label-column"),
        (("--data.target-columns", "a", "b"), ConfigError, "the run predicts classes of"),
        (("--data.image-size", "-1"), ConfigError, "data.image_size = -1"),
        (("--data", "{photos}", "--data.root", "x"), ConfigError, "--data.root is not used for"),
        (("--data", "{photos}", "--data.label-column", "y"), ConfigError, "has no columns"),
        (("--data", "{table}", "--data.eval-split", "test"), DataError, "no named splits"),
        ((), DataError, "no such file or folder"),
        (("--data", "nothing"), DataError, r"'nothing': no such file or folder in /"),
    ],
)
def test_unreadable_data_are_refused(
    flags: tuple[str, ...],
    kind: type[Exception],
    message: str,
    photos: tuple[str, Path],
    table: str,
):
    with pytest.raises(kind, match=message):
        main([photos[0], *(flag.format(table=table, photos=photos[1]) for flag in flags)])


def test_a_missing_model_file_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    Path("lost_net.py").write_text(
        "from torch import nn\n"
        "def net(classes):\n"
        "    return nn.Sequential(nn.Flatten(), nn.Linear(192, classes))\n"
    )
    config = TrainConfig(
        name="lost",
        steps=1,
        data=DataConfig(source="digits"),
        model=ModelConfig(name="lost_net.py:net"),
        log=LogConfig(tensorboard=False),
    )
    fit_locally(config)
    torch.use_deterministic_algorithms(False)
    Path("lost_net.py").unlink()
    monkeypatch.delitem(__import__("sys").modules, "lost_net")
    with pytest.raises(ConfigError, match=r"there is no file '/\S*lost_net.py"):
        main(["lost"])


def test_the_head_is_reinitialized_for_other_classes(photos: tuple[str, Path]):
    same = ModelConfig(name="timm:test_resnet", weights=photos[0])
    for names, fitting in ((["dark", "light"], True), (["light", "dark"], False)):
        task = ImageClassification.without_data(TrainConfig(model=same), names)
        model = task.model()
        then = load(photos[0], device="cpu").model.state_dict()
        assert torch.equal(model.state_dict()["fc.weight"], then["fc.weight"]) == fitting
        assert torch.equal(model.state_dict()["conv1.0.weight"], then["conv1.0.weight"])
        assert ("; new for other classes: fc.weight" in task.notes[0]) is not fitting


def test_runs_are_found_by_paths_of_pathlib(photos: tuple[str, Path], tmp_path: Path):
    run = Path(photos[0])
    assert load(run, device="cpu").checkpoint.name == load(str(run), device="cpu").checkpoint.name
    config = TrainConfig(name="self", storage=run.parent, log=LogConfig(tensorboard=False))  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="self"):
        fit_locally(config, resume_from=run.parent / "self")
