"""What `data.source` names: found and checked without torch, before anything is started."""

from __future__ import annotations

import glob
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from raytrain_ddp.errors import DataError

EVAL_SPLITS = ("test", "val", "validation", "valid", "eval")


@dataclass(frozen=True)
class Located:
    """Where one split lies: Parquet files, an ImageFolder's root, or a torchvision set's name."""

    kind: Literal["parquet", "folder", "torchvision"]
    paths: tuple[str, ...]
    split: Literal["train", "eval"]


def locate(source: str, eval_source: str | None) -> tuple[Located, Located | None]:
    """The train split and the evaluation split (None: there is none).

    Raises:
        DataError: nothing is there, or nothing that can be read as images.
    """
    train = _locate(source, "train", "data.source")
    if train is None:
        raise DataError(f"data.source = {source!r} has files for evaluation only, none to train.")
    if eval_source is not None:
        other = _locate(eval_source, "eval", "data.eval_source")
        return train, other or _locate(eval_source, "train", "data.eval_source")
    return train, _locate(source, "eval", "data.source")


def _locate(source: str, split: Literal["train", "eval"], field: str) -> Located | None:
    if source == "digits":
        source = str(Path(__file__).parent / "digits")
    kind, _, name = source.partition(":")
    if kind == "torchvision":
        return Located("torchvision", (name,), split)
    path = Path(source).expanduser()
    if path.is_file() or any(sign in source for sign in "*?["):
        files = [str(path)] if path.is_file() else sorted(glob.glob(str(path), recursive=True))
        if not files:
            raise DataError(f"{field} = {source!r}: no file matches.")
        return _parquet_split(files, split, path.parent)
    if not path.is_dir():
        raise DataError(
            f"{field} = {source!r}: no such file or folder (other choices: 'digits', "
            "'torchvision:CIFAR10')."
        )
    parquet = sorted(str(file) for file in path.rglob("*.parquet"))
    if parquet:
        return _parquet_split(parquet, split, path)
    folders = {folder.name: folder for folder in path.iterdir() if folder.is_dir()}
    if not folders:
        raise DataError(f"{field} = {source!r}: holds neither Parquet files nor class folders.")
    names = ("train",) if split == "train" else EVAL_SPLITS
    found = next((folders[name] for name in names if name in folders), None)
    if found is None and not any(name in folders for name in ("train", *EVAL_SPLITS)):
        found = path if split == "train" else None  # class folders without splits: all to train
    return Located("folder", (str(found),), split) if found else None


def _parquet_split(files: list[str], split: Literal["train", "eval"], root: Path) -> Located | None:
    """Splits by file name (train-00000-of-00002) or by folder below `root`, as on Hugging Face."""
    to_eval = [file for file in files if _names_eval(Path(file), root)]
    chosen = to_eval if split == "eval" else [file for file in files if file not in to_eval]
    return Located("parquet", tuple(chosen), split) if chosen else None


def _names_eval(path: Path, root: Path) -> bool:
    stem = path.stem.lower().replace("_", "-").split("-")[0].split(".")[0]
    folder = path.parent.name.lower() if path.parent != root else ""
    return stem in EVAL_SPLITS or folder in EVAL_SPLITS
