"""Which files a run is trained and evaluated on, compared with what `datasets` finds."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from raytrain_ddp.data.data_set import open_data_set
from raytrain_ddp.data.locate import Found, locate
from raytrain_ddp.data.split_names import ROLE_OF
from raytrain_ddp.errors import DataError
from raytrain_ddp.inputs import DataConfig

Parts = dict[str, set[str]]


def _encoded(number: int) -> bytes:
    content = io.BytesIO()
    Image.new("RGB", (4, 4), (number * 40, 0, 0)).save(content, "png")
    return content.getvalue()


PICTURES = [_encoded(number) for number in range(4)]


@pytest.fixture(autouse=True)
def _offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)


def write(root: Path, *names: str, readme: str = "") -> Path:
    """Files of the kinds that their names say, with one row each."""
    for name in names:
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if name.endswith("/"):
            path.mkdir(exist_ok=True)
        elif name.lower().endswith(".parquet"):
            images = [{"bytes": PICTURES[0], "path": None}]
            pq.write_table(pa.table({"image": images, "label": [0]}), path)
        elif name.lower().endswith((".png", ".jpg")):
            path.write_bytes(PICTURES[len(name) % 4])
        else:
            path.write_text("other\n")
    if readme:
        (root / "README.md").write_text(readme)
    return root


def found_at(source: Path | str, **fields: Any) -> Found:
    return locate(DataConfig(source=str(source), **fields))


def below(root: Path, paths: Sequence[str]) -> set[str]:
    return {str(Path(path).relative_to(root.resolve())) for path in paths}


def parts_of(found: Found, root: Path) -> tuple[set[str], set[str]]:
    return below(root, found.train.paths), below(root, found.eval.paths if found.eval else ())


def of_datasets(root: Path, config: str | None = None) -> Parts:
    """Files by split, as `load_dataset` would read them; none if it refuses."""
    cache = str(root.parent / "cache")
    try:
        builder = datasets.load_dataset_builder(str(root), config, cache_dir=cache)
    except (ValueError, FileNotFoundError):
        return {}
    files = builder.config.data_files
    return {split: below(root, files[split]) for split in files}


def of_ours(root: Path, config: str = "auto") -> Parts:
    """The same by us, under the names that `datasets` gives."""
    found = open_data_set(str(root), "data.source", DataConfig(config=config))
    parts: Parts = {}
    for split, files in found.splits.items():
        name = ROLE_OF.get(split, split or "train")
        parts.setdefault(name, set()).update(files)
    return parts


# ------------------------------------------------------------------ as datasets has it

SHARDS = ("train-00000-of-00002.parquet", "train-00001-of-00002.parquet")
SAME = {
    "sharded": (*SHARDS, "validation-00000-of-00001.parquet", "test-00000-of-00001.parquet"),
    "sharded in data": (*(f"data/{name}" for name in SHARDS), "data/test-00000-of-00001.parquet"),
    "with a hash": ("data/train-00000-of-00001-b42a2b8f0a5f5ce9.parquet",),
    "any name in data": (
        *(f"data/{split}-00000-of-00001.parquet" for split in ("train", "extra", "test")),
        "data/unsupervised-00000-of-00001.parquet",
    ),
    "train alone": ("train.parquet",),
    "one file of any name": ("photos.parquet",),
    "files without names of splits": ("a.parquet", "b.parquet", "deep/er/c.parquet"),
    "one set of shards of any name": ("part-00000-of-00002.parquet", "part-00001-of-00002.parquet"),
    "plain": ("train.parquet", "test.parquet"),
    "valid": ("train.parquet", "valid.parquet"),
    "val": ("train_1.parquet", "train_2.parquet", "val_1.parquet"),
    "dev": ("train-00000.parquet", "dev-00000.parquet"),
    "training and testing": ("training.parquet", "testing.parquet"),
    "eval": ("train.parquet", "eval.parquet"),
    "evaluation": ("train.parquet", "evaluation-0.parquet"),
    "a name in front": ("my_dataset-train.parquet", "my_dataset-test.parquet"),
    "a dot": ("mnist.train.parquet", "mnist.test.parquet"),
    "a blank": ("train 1.parquet", "test 1.parquet"),
    "numbers": ("train2017.parquet", "val2017.parquet"),
    "parts by letters": ("train_a.parquet", "train_b.parquet", "test_a.parquet"),
    "no keyword within a word": ("pretraining.parquet", "latest.parquet"),
    "folders": ("train/0000.parquet", "train/0001.parquet", "test/0000.parquet"),
    "folders in data": ("data/train/0.parquet", "data/validation/0.parquet"),
    "a config's folder": ("plain_text/train/0.parquet", "plain_text/test/0.parquet"),
    "a config's folder of shards": (
        "plain_text/train-00000-of-00001.parquet",
        "plain_text/test-00000-of-00001.parquet",
    ),
    "folders within the split": ("train/a/0.parquet", "train/b/0.parquet", "test/a/0.parquet"),
    "folders with more in their names": ("my-train/0.parquet", "my-test/0.parquet"),
    "numbered folders": ("train-1/0.parquet", "train-2/0.parquet", "val-1/0.parquet"),
    "the folder counts, not the file": ("train/test-0.parquet", "test/train-0.parquet"),
    "what the folders leave out": ("train/0.parquet", "test/0.parquet", "val_old.parquet"),
    "extra files": ("train.parquet", "test.parquet", "extra.parquet"),
    "extra folder": ("train/0.parquet", "test/0.parquet", "extra/0.parquet"),
    "no split to train on": ("validation.parquet", "test.parquet"),
    "what belongs to no data set": (
        *("train.parquet", "README.md", "LICENSE", ".hidden.parquet", ".cache/train.parquet"),
        *("__MACOSX/train.parquet", "__pycache__/test.parquet", ".ipynb_checkpoints/val.parquet"),
    ),
}


@pytest.mark.parametrize("layout", SAME)
def test_files_are_split_as_datasets_splits_them(layout: str, tmp_path: Path):
    root = write(tmp_path / "root", *SAME[layout])
    theirs, ours = of_datasets(root), of_ours(root)
    assert {split: ours.get(split) for split in theirs} == theirs
    more = ours.keys() - theirs.keys()
    assert not more & {"train", "validation", "test"}, "of no use for a run that names no split"
    if "train" in theirs:
        train, evaluation = parts_of(found_at(root), root)
        assert train == theirs["train"]
        assert evaluation == theirs.get("validation", theirs.get("test", set()))


DIFFERENT: dict[str, tuple[Sequence[str], str, Parts | str]] = {
    # name: (files, what datasets does, ours: files by split, or the error)
    "case is ignored": (
        ("Train-0.parquet", "TEST-0.parquet"),
        "all is training data",
        {"train": {"Train-0.parquet"}, "test": {"TEST-0.parquet"}},
    ),
    "case of folders is ignored": (
        ("Train/0.parquet", "Validation/0.parquet"),
        "all is training data",
        {"train": {"Train/0.parquet"}, "validation": {"Validation/0.parquet"}},
    ),
    "the endings' case is ignored": (
        ("train.PARQUET", "test.parquet"),
        "refused",
        {"train": {"train.PARQUET"}, "test": {"test.parquet"}},
    ),
    "the inner folder names the split": (
        ("train/train/0.parquet", "train/val/0.parquet"),
        "train/val is in both splits",
        {"train": {"train/train/0.parquet"}, "validation": {"train/val/0.parquet"}},
    ),
    "a name of two splits names none": (
        ("train_test/train/0.parquet", "train_test/test/0.parquet"),
        "all files are in both splits",
        {"train": {"train_test/train/0.parquet"}, "test": {"train_test/test/0.parquet"}},
    ),
    "what lies beside train under a longer name": (
        ("train-00000-of-00001.parquet", "train_extra-00000-of-00001.parquet"),
        "all is training data",
        {
            "train": {"train-00000-of-00001.parquet"},
            "train-extra": {"train_extra-00000-of-00001.parquet"},
        },
    ),
    "shards of several names": (
        ("extra-00000-of-00001.parquet", "unsupervised-00000-of-00001.parquet"),
        "all is training data",
        {
            "extra": {"extra-00000-of-00001.parquet"},
            "unsupervised": {"unsupervised-00000-of-00001.parquet"},
        },
    ),
    "train by file, test by folder": (
        ("train.parquet", "test/0.parquet"),
        "there is no training data",
        {"train": {"train.parquet"}, "test": {"test/0.parquet"}},
    ),
    "several configs without a README.md": (
        ("plain_text/train-00000-of-00001.parquet", "other/train-00000-of-00001.parquet"),
        "they are merged",
        "several configs: other, plain_text",
    ),
    "several data sets by their names": (
        ("cifar-train.parquet", "mnist-train.parquet", "mnist-test.parquet"),
        "they are merged",
        "several data sets, by their names",
    ),
}


@pytest.mark.parametrize("layout", DIFFERENT)
def test_files_are_split_otherwise_than_datasets_splits_them_on_purpose(
    layout: str, tmp_path: Path
):
    files, _, expected = DIFFERENT[layout]
    root = write(tmp_path / "root", *files)
    if isinstance(expected, str):
        with pytest.raises(DataError, match=expected):
            of_ours(root)
        assert of_datasets(root)
    else:
        ours = of_ours(root)
        assert ours == expected
        assert of_datasets(root) != ours
