"""Which files a run is trained and evaluated on, compared with what `datasets` finds."""

from __future__ import annotations

from pathlib import Path

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from split_checks import (
    below,
    found_at,
    labels_of,
    of_datasets,
    of_ours,
    parts_of,
    splits_of,
    tiny_picture,
    write,
)

from raytrain_ddp.config.sections import DataConfig
from raytrain_ddp.data.discovery.data_check import open_data_set
from raytrain_ddp.data.discovery.file_listing import EXTENSIONS
from raytrain_ddp.data.discovery.split_names import ROLE_OF
from raytrain_ddp.data.splits import FolderImages
from raytrain_ddp.errors import ConfigError, DataError
from raytrain_ddp.tools.formatting import format_data

datasets = pytest.importorskip("datasets")


@pytest.fixture(autouse=True)
def _offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)


# ------------------------------------------------------------------ splits as in datasets

SHARDS = ("train-00000-of-00002.parquet", "train-00001-of-00002.parquet")
SAME = {
    "sharded": (*SHARDS, "validation-00000-of-00001.parquet", "test-00000-of-00001.parquet"),
    "sharded in data": (*(f"data/{name}" for name in SHARDS), "data/test-00000-of-00001.parquet"),
    "with a hash": ("data/train-00000-of-00001-b42a2b8f0a5f5ce9.parquet",),
    "any name in data": (
        *(f"data/{split}-00000-of-00001.parquet" for split in ("train", "extra", "test")),
        "data/unsupervised-00000-of-00001.parquet",
    ),
    "one file of any name": ("photos.parquet",),
    "a number after a keyword": ("train=0.parquet", "test=0.parquet"),
    "val": ("train_1.parquet", "train_2.parquet", "val_1.parquet"),
    "evaluation": ("train.parquet", "evaluation-0.parquet"),
    "a name in front": ("my_dataset-train.parquet", "my_dataset-test.parquet"),
    "no keyword within a word": ("pretraining.parquet", "latest.parquet"),
    "folders": ("train/0000.parquet", "train/0001.parquet", "test/0000.parquet"),
    "a config's folder": ("plain_text/train/0.parquet", "plain_text/test/0.parquet"),
    "folders within the split": ("train/a/0.parquet", "train/b/0.parquet", "test/a/0.parquet"),
    "the folder counts, not the file": ("train/test-0.parquet", "test/train-0.parquet"),
    "what the folders leave out": ("train/0.parquet", "test/0.parquet", "val_old.parquet"),
    "no split to train on": ("validation.parquet", "test.parquet"),
    "what belongs to no data set": (
        *("train.parquet", "README.md", "LICENSE", ".hidden.parquet", ".cache/train.parquet"),
        *("__MACOSX/train.parquet", "__pycache__/test.parquet", ".ipynb_checkpoints/val.parquet"),
    ),
}


@pytest.mark.parametrize("layout", SAME)
def test_files_are_split_as_datasets_splits_them_on_the_disk_in_a_store_and_by_a_glob(
    layout: str, tmp_path: Path
):
    root = write(tmp_path / "root", *SAME[layout])
    theirs, ours = of_datasets(root), of_ours(root)
    assert {split: ours.get(split) for split in theirs} == theirs
    more = ours.keys() - theirs.keys()
    assert not more & {"train", "validation", "test"}, "of no use for a run that names no split"
    if "train" in theirs:
        train, evaluation = parts_of(found_at(root), root)
        assert train == theirs["train"]
        assert evaluation == theirs.get("validation", theirs.get("test", set()))
    store = f"/splits/{abs(hash(layout))}"
    for name in SAME[layout]:
        fsspec.filesystem("memory").pipe(f"{store}/{name}", b"other\n")
    expected = open_data_set(str(root), "data.source", DataConfig()).splits
    for source in (f"memory:/{store}", str(root / "**")):
        assert open_data_set(source, "data.source", DataConfig()).splits == expected


def test_rows_and_classes_are_those_that_datasets_loads(tmp_path: Path):
    cache = str(tmp_path / "cache")
    root = write(tmp_path / "parquet", *SAME["sharded"])
    theirs = datasets.load_dataset(str(root), cache_dir=cache)
    opened = splits_of(root, classes=("0", "1"))
    assert opened.eval is not None
    assert (labels_of(opened.train), labels_of(opened.eval)) == ([0, 0], [0])
    assert (len(theirs["train"]), len(theirs["validation"])) == (2, 1)
    for number, layout in enumerate(("train and val", "before test", "in data")):
        files = [name for name in FOLDERS[layout][0] if name.endswith(".png")]
        more = [name.replace("/a/", "/b/") for name in files]
        root = write(tmp_path / str(number), *files, *more)
        theirs = datasets.load_dataset(str(root), cache_dir=cache)
        found = found_at(root)
        assert found.eval
        for part, split in ((found.train, "train"), (found.eval, "validation")):
            ours = FolderImages(part.paths[0])
            assert ours.class_names == theirs[split].features["label"].names
            assert sorted(label for _, label in ours.files) == sorted(theirs[split]["label"])


# ------------------------------------------------------------------ the choice


def test_validation_is_used_if_there_is_one_and_what_is_not_used_is_named(tmp_path: Path):
    root = write(tmp_path, "train.parquet", "validation.parquet", "test.parquet", "extra/0.parquet")
    found = found_at(root)
    assert (found.train.name, found.eval and found.eval.name) == ("train", "validation")
    assert found.eval_from == "the validation split of data.source"
    assert sorted(note.split()[1] for note in found.notes) == ["extra", "test"]
    (root / "validation.parquet").unlink()
    assert found_at(root).eval_from == "the test split of data.source"
    images = [{"bytes": tiny_picture(0), "path": None}] * 2
    for name, labels in (("train", [0, 1]), ("test", [-1, -1])):
        pq.write_table(pa.table({"image": images, "label": labels}), root / f"{name}.parquet")
    opened = splits_of(root)
    assert opened.eval is None  # an unlabeled test split is ignored
    assert any("test" in note for note in opened.notes)


@pytest.mark.parametrize(
    ("fields", "train", "evaluation"),
    [
        ({"train_split": "extra"}, "extra", "val"),
        ({"train_split": "EXTRA", "eval_split": "Test"}, "extra", "test"),
        ({"train_split": "training"}, "train", "val"),  # another word for it
        ({"eval_split": "validation"}, "train", "val"),
        ({"eval_split": "none"}, "train", None),
        ({"train_split": "val"}, "val", "test"),
        ({"eval_split": "train"}, "train", "train"),
    ],
)
def test_a_split_can_be_selected_by_name(
    fields: dict[str, str], train: str, evaluation: str | None, tmp_path: Path
):
    files = ("train.parquet", "val.parquet", "test.parquet", "extra.parquet")
    found = found_at(write(tmp_path, *files), **fields)
    assert (found.train.name, found.eval.name if found.eval else None) == (train, evaluation)
    assert any("training data" in note for note in found.notes) == (train == evaluation)


def test_an_evaluation_source_has_its_own_splits(tmp_path: Path):
    source = write(tmp_path / "a", "train.parquet", "val.parquet")
    other = write(tmp_path / "b", "train.parquet", "test.parquet", "dev.parquet", "extra.parquet")
    found = found_at(source, eval_source=str(other))
    assert found.eval
    assert (found.eval.name, found.eval_from) == ("dev", "the dev split of data.eval_source")
    assert sorted(note.split()[1] for note in found.notes) == ["extra", "test", "val"]
    found = found_at(source, eval_source=str(other), eval_split="extra", train_split="val")
    assert (found.train.name, found.eval and found.eval.name) == ("val", "extra")
    for eval_source in (source / "train.parquet", write(tmp_path / "c", "x.parquet")):
        assert found_at(source, eval_source=str(eval_source)).eval
    with pytest.raises(DataError, match=r"data\.eval_source"):
        found_at(source, eval_source=str(other), eval_split="x")
    with pytest.raises(ConfigError, match=r"data\.eval_source"):
        found_at(source, eval_source=str(other), eval_split="none")


# ------------------------------------------------------------------ shards and class folders


def shards(split: str, *numbers: int, of: int) -> list[str]:
    return [f"{split}-{number:05d}-of-{of:05d}.parquet" for number in numbers]


def test_complete_shard_sets_and_partial_globs_are_accepted(tmp_path: Path):
    files = [*shards("train", 0, 1, 2, of=3), "part-1-of-2.parquet", "val_1_of_1.parquet"]
    root = write(tmp_path, *files)
    assert len(found_at(root).train.paths) == 3  # part is not used, so it may be incomplete
    assert len(found_at(root / "train-0000[02]-*").train.paths) == 2
    assert len(found_at(root / files[0]).train.paths) == 1
    (root / files[1]).unlink()
    assert len(found_at(root / "train-0000[02]-*").train.paths) == 2
    with pytest.raises(DataError, match=r"train-00001-of-00003\.parquet"):
        found_at(root / "train-*")


FOLDERS: dict[str, tuple[list[str], str, str | None]] = {
    "alike without training": (["my_val/a/0.png", "my_test/a/0.png"], ".", None),
    # name: (files, train, evaluation)
    "train and val": (["train/a/0.png", "train/b/0.png", "val/a/0.png"], "train", "val"),
    "Train and Test": (["Train/a/0.png", "Train/b/0.png", "Test/a/0.png"], "Train", "Test"),
    "training": (["training/a/0.png", "testing/a/0.png"], "training", "testing"),
    "Hive's": (
        ["split=train/label=a/0.png", "split=train/label=b/0.png", "split=val/label=a/0.png"],
        "split=train",
        "split=val",
    ),
    "Hive's classes": (["label=apple/0.png", "label=train/0.png", "label=truck/0.png"], ".", None),
    "train2017": (["train2017/a/0.png", "val2017/a/0.png"], "train2017", "val2017"),
    "before test": (["train/a/0.png", "val/a/0.png", "test/a/0.png"], "train", "val"),
    "in data": (["data/train/a/0.png", "data/val/a/0.png"], "data/train", "data/val"),
    "named alike": (["seg_train/a/0.png", "seg_test/a/0.png"], "seg_train", "seg_test"),
    "no splits": (["a/0.png", "b/0.png"], ".", None),
    "words within class names": (["test tube/0.png", "training shoe/0.png"], ".", None),
    "an empty split with classes": (["train/a/0.png", "val/a/", "test/a/0.png"], "train", "test"),
    "a test split without classes": (["train/a/0.png", "test/0.png"], "train", None),
    "what does not belong to it": (
        [
            *("train/a/0.png", "test/a/0.png", "README.md", "LICENSE", "train/.DS_Store"),
            *(".cache/train/a/0.png", "__MACOSX/train/a/._0.png", ".ipynb_checkpoints/a/0.png"),
        ],
        "train",
        "test",
    ),
}


@pytest.mark.parametrize("layout", FOLDERS)
def test_class_folders_are_split_by_the_folders_above_them(layout: str, tmp_path: Path):
    files, train, evaluation = FOLDERS[layout]
    root = write(tmp_path / "root", *files)
    found = found_at(root)
    assert found.train.kind == "folder"
    assert parts_of(found, root) == ({train}, {evaluation} if evaluation else set())


def test_class_folders_are_listed_as_by_torchvision(tmp_path: Path):
    from torchvision.datasets import ImageFolder
    from torchvision.datasets.folder import IMG_EXTENSIONS

    for name in ("b/x/2.JPG", "b/10.png", "b/x/y/1.webp", "b/readme.txt", "a/z.jpeg", "a/Z.jpeg"):
        write(tmp_path, name)
    (tmp_path / "notes.txt").touch()
    (tmp_path / "c").symlink_to(tmp_path / "b")
    source, theirs = FolderImages(str(tmp_path)), ImageFolder(str(tmp_path))
    assert source.class_names == theirs.classes == ["a", "b", "c"]
    assert source.files == theirs.samples
    assert EXTENSIONS == IMG_EXTENSIONS


def test_splits_and_classes_of_any_name_can_be_configured(tmp_path: Path):
    root = write(tmp_path / "1", "train/car/0.png", "train/train/0.png", "val/car/0.png")
    with pytest.raises(DataError, match=r"--data\.train-split train"):
        found_at(root)
    found = found_at(root, train_split="train")
    assert FolderImages(found.train.paths[0]).class_names == ["car", "train"]
    assert found.eval
    for word in (*ROLE_OF, "Train", "val2017", "split=test"):
        root = write(tmp_path / word, "apple/0.png", f"{word}/0.png", "truck/0.png")
        with pytest.raises(DataError, match=r"--data\.train-split \."):
            found_at(root)
        found = found_at(root, train_split=".")
        assert below(root, found.train.paths) == {"."}
        assert FolderImages(found.train.paths[0]).class_names == sorted(["apple", word, "truck"])
        assert found.eval is None
    root = write(tmp_path / "2", "one/a/0.png", "one/b/0.png", "two/a/0.png", "three/a/0.png")
    found = found_at(root, train_split="one", eval_split="two")
    assert parts_of(found, root) == ({"one"}, {"two"})
    assert "three" in found.notes[0]


def test_folders_behind_symlinks_are_found_but_not_those_above(tmp_path: Path):
    write(tmp_path / "elsewhere", "a/0.png", "b/0.png")
    root = write(tmp_path / "root", "val/a/0.png")
    (root / "train").symlink_to(tmp_path / "elsewhere")
    (root / "gone").symlink_to(tmp_path / "nowhere")
    assert parts_of(found_at(root), root) == ({"train"}, {"val"})
    (root / "val" / "a" / "up").symlink_to(root)
    with pytest.raises(DataError, match="val/a/up"):
        found_at(root)


# ------------------------------------------------------------------ what is refused

REFUSED: list[tuple[list[str], dict[str, str], str]] = [
    # (files, fields, what is named)
    (["train.parquet", "val.parquet"], {"train_split": "x"}, "train, val"),
    (["a.parquet"], {"eval_split": "test"}, "data.source"),
    (["val.parquet"], {}, "--data.train-split val"),
    (["extra.parquet", "test.parquet"], {}, "extra, test"),
    (["train.parquet", "training.parquet"], {}, "train, training"),
    (["train.parquet", "dev.parquet", "val.parquet"], {}, "dev, val"),
    (["train/a/0.png", "train/b/0.png"], {"eval_split": "val"}, "train"),
    (["train/", "val/a/0.png"], {}, "train"),
    (["train/a/0.png", "train/b/0.png", "train/val/a/0.png"], {}, "data.train-split train"),
    (["train/0.png", "cat/0.png", "dog/0.png"], {}, "train"),
    (["x/train/a/0.png", "y/train/a/0.png"], {}, "x, y"),
    (["train-1/a/0.png", "train-2/a/0.png"], {}, "train-1, train-2"),
    (["train/a/notes.txt"], {}, "data.source"),
    (shards("train", 0, 2, of=3), {}, "train-00001-of-00003.parquet"),
    ([*shards("train", 0, of=1), *shards("val", 1, of=2)], {}, "val-00000-of-00002"),
    (["data/" + name for name in shards("train", 1, of=2)], {}, "data/train-00000-of"),
    ([*shards("train", 0, of=1), *shards("train", 0, 1, of=2)], {}, "train-0000"),
    (["train-00000-of-00002-ab.parquet", *shards("train", 0, 1, of=2)], {}, "-ab.parquet"),
    (shards("train", 0, 1, 2, of=2), {}, "train-00002-of-00002.parquet"),
    (shards("train", 5, of=99), {}, "98 of 99"),
]


def test_what_may_be_meant_otherwise_or_is_incomplete_is_refused(tmp_path: Path):
    for number, (files, fields, named) in enumerate(REFUSED):
        root = write(tmp_path / str(number), *files)
        with pytest.raises(DataError) as caught:
            found_at(root, **fields)
        assert named in str(caught.value)
        assert "\n" not in str(caught.value)
        if "-of-" in files[0] and len(files) > 1:  # a glob that matches them, too
            with pytest.raises(DataError):
                found_at(root / "**" / "*.parquet")


def test_a_name_of_a_hub_is_recognized():
    for source, named in (
        ("ylecun/mnist", "hf:ylecun/mnist"),
        ("https://huggingface.co/datasets/ylecun/mnist", "hf://datasets/ylecun/mnist"),
        ("x" * 300, "x" * 100),
        ("mnist", "'digits'"),
    ):
        with pytest.raises(DataError) as caught:
            found_at(source)
        assert named in str(caught.value)


# ------------------------------------------------------------------ what is no data

LEFTOVERS = ["__MACOSX/", ".DS_Store", "._0.png", "@eaDir/", "$RECYCLE.BIN/", ".git/", "~$x.png"]


def test_leftovers_of_systems_are_noted_and_are_no_data(tmp_path: Path):
    for number, name in enumerate(LEFTOVERS):
        root, bare = tmp_path / str(number), name.rstrip("/")
        inside = f"{name}0.png" if name.endswith("/") else name
        folders = write(root / "folders", "cat/0.png", "dog/0.png", inside, f"cat/{inside}")
        (root / "folders" / inside).write_bytes(tiny_picture(0))
        splits = splits_of(folders)
        assert (splits.class_names, int(splits.train.blocks.sum())) == (["cat", "dog"], 2), name
        assert [note for note in splits.notes if bare in note]
        if name.endswith("/"):
            named = splits_of(folders, classes=(bare, "cat", "dog"))
            assert int(named.train.blocks.sum()) == 4
        rows = f"{name}0.parquet" if name.endswith("/") else f".{bare}.parquet"
        files = write(root / "files", "train.parquet", f"sub/{rows}")
        assert [len(found_at(source).train.paths) for source in (files, f"{files}/**")] == [1, 1]


def test_each_unused_file_or_folder_is_in_one_note(tmp_path: Path):
    files = [f"{split}/{name}/0.png" for split in ("train", "val") for name in ("cat", "dog")]
    extra = ("train/metadata.csv", "notes.txt", "train/cat/notes.txt", "train/0.png", "val/0.png")
    splits = splits_of(write(tmp_path / "1", *files, *extra))
    for name in ("metadata.csv", ".csv", "2 .txt", "images in train"):
        assert sum(name in note for note in splits.notes) == 1, splits.notes
    folders = ("train/a/0.png", "val/", "test/0.png", "extra/a/0.png", "eval/a/0.png")
    notes = found_at(write(tmp_path / "2", *folders)).notes
    assert sorted(note.split()[0] for note in notes) == ["extra", "test", "val"]
    root = write(tmp_path / "3", "train.parquet", "test.parquet", "train/a/0.png")
    assert found_at(root).train.kind == "files"
    assert "train/a" in "".join(found_at(root).notes)
    (root / "train.parquet").rename(root / "metadata.parquet")  # that of `datasets`
    (root / "test.parquet").unlink()
    assert found_at(root).train.kind == "folder"


def test_names_with_control_characters_stay_in_one_line(tmp_path: Path):
    for number, odd in enumerate(("a\nb", "a\x1b[31mb", "a\u2028b", "a\udcffb")):
        both = [f"{name}/0.png" for name in ("cat", odd)]
        root = write(tmp_path / str(number), *both, f"cat/{odd}.txt", f"{odd}.csv")
        reported = format_data(splits_of(root).summary(), "images")
        assert [text for _, text in reported if odd.encode("unicode_escape").decode() in text]
        assert all(text.isprintable() for _, text in reported)
        for source in (write(root / "empty", "cat/0.png", f"{odd}/x.txt"), f"{root}/{odd}/x"):
            with pytest.raises((ConfigError, DataError)) as caught:
                splits_of(source)
            assert str(caught.value).isprintable()
