"""What `data.source` names: found and checked without torch, before anything is started."""

from __future__ import annotations

import glob
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path, PurePath, PurePosixPath
from typing import Any, Literal, TypeVar

from pyarrow import fs as pafs

from raytrain_ddp.errors import DataError, PreflightError, RaytrainError
from raytrain_ddp.inputs import DataConfig
from raytrain_ddp.uri import (
    REACH_TIMEOUT_S,
    answer_within,
    attempt,
    open_uri,
    reason_of,
    uri_beside,
    without_secrets,
)

Split = Literal["train", "eval"]
T = TypeVar("T")

EVAL_SPLITS = ("test", "val", "validation", "valid", "eval")
DATASET_FILE = "dataset.json"  # written by `convert`

_ERRORS_SHOWN = 20
_GLOB_SIGNS = "*?["
_URI_GLOB_SIGNS = "*["  # a "?" begins the query


@dataclass(frozen=True)
class Located:
    """Where one split lies: Parquet files (paths or URIs), an ImageFolder's root, or a torchvision
    set's name.

    Args:
        split: what it is used for.
        name: of the split, as its files or folder have it; "" if nothing names it.
    """

    kind: Literal["parquet", "folder", "torchvision"]
    paths: tuple[str, ...]
    split: Split
    name: str = ""


@dataclass(frozen=True)
class Found:
    """The data of a run, the same wherever and however often they are looked for.

    Args:
        eval: None if there is no evaluation split.
        eval_from: where the evaluation split comes from, such as "the validation split of
            data.source"; "" without one.
        notes: what is there and not used, in sentences.
    """

    train: Located
    eval: Located | None = None
    eval_from: str = ""
    notes: tuple[str, ...] = ()


Splits = Mapping[Split, Located]


def locate(config: DataConfig) -> Found:
    """Finds the split to train on and the one to evaluate on.

    Raises:
        DataError: nothing is there, nothing that can be read as images, or not all of a data set.
        ConfigError: a flag does not fit the data, or nothing knows the scheme of a URI.
        PreflightError: an object store does not answer.
    """
    source, eval_source = config.source, config.eval_source
    found = _find(source, "data.source")
    if "train" not in found:
        raise DataError(
            f"data.source = {_shown(source)} has files for evaluation only, none to train."
        )
    if eval_source is not None:
        other = _find(eval_source, "data.eval_source")
        return Found(found["train"], other.get("eval") or other["train"], "data.eval_source")
    return Found(found["train"], found.get("eval"), "data.source" if "eval" in found else "")


def _find(source: str, field: str) -> Splits:
    told = f"{field} = {_shown(source)}"
    if source == "digits":
        source = str(Path(__file__).parent / "digits")
    if source.startswith("torchvision:"):
        names = (source.partition(":")[2],)
        return {split: Located("torchvision", names, split) for split in ("train", "eval")}
    if source.startswith("file://"):
        source = open_uri(source)[1]
    return _in_store(source, told) if "://" in source else _on_disk(source, told)


def _on_disk(source: str, told: str) -> Splits:
    path = Path(source).expanduser()
    if path.is_file():
        return _by_name([str(path)], str(path.parent))
    if any(sign in source for sign in _GLOB_SIGNS) and not path.exists():
        files = sorted(glob.glob(str(path), recursive=True))
        if not files:
            raise DataError(f"{told}: no file matches.")
        return _by_name(files, str(path.parent))
    if not path.is_dir():
        raise DataError(
            f"{told}: no such file or folder (other choices: 'digits', 'torchvision:CIFAR10')."
        )
    if (path / DATASET_FILE).is_file():

        def size_of(name: str) -> int | None:
            return (path / name).stat().st_size if (path / name).is_file() else None

        of_split = _of_dataset((path / DATASET_FILE).read_bytes(), size_of, told)
        if of_split is not None:
            return _parquet(of_split, lambda name: str(path / name))
    names = (file.relative_to(path).as_posix() for file in path.rglob("*.parquet"))
    parquet = sorted(str(path / name) for name in names if not _is_hidden(name))
    return _by_name(parquet, str(path)) if parquet else _in_folders(path, told)


def _in_folders(path: Path, told: str) -> Splits:
    folders = {folder.name: str(folder) for folder in path.iterdir() if folder.is_dir()}
    if not folders:
        raise DataError(f"{told}: holds neither Parquet files nor class folders.")
    found: dict[Split, Located] = {}
    if "train" in folders:
        found["train"] = Located("folder", (folders["train"],), "train")
    for name in EVAL_SPLITS:
        if name in folders:
            found["eval"] = Located("folder", (folders[name],), "eval")
            break
    # Class folders without splits: all to train.
    return found or {"train": Located("folder", (str(path),), "train")}


def _in_store(source: str, told: str) -> Splits:
    """As `_on_disk`, for Parquet files in an object store, which is asked for one list."""
    folder, pattern = _cut_at_glob(source)

    def ask() -> tuple[Any, Any]:
        fs, path = open_uri(folder)
        return fs, fs.get_file_info(path)

    fs, info = _answered(answer_within(REACH_TIMEOUT_S, ask), source, told)
    if info.is_file and not pattern:
        return _by_name([info.path], str(PurePosixPath(info.path).parent), lambda _: source)
    if info.type == pafs.FileType.NotFound:
        raise DataError(f"{told}: no such file or folder.")
    # No time limit: a long list takes longer than a first answer.
    sizes = _answered(attempt(lambda: _files_below(fs, info.path)), source, told)

    def uri_of(path: str) -> str:
        return uri_beside(folder, path)

    if pattern:
        wanted = PurePosixPath(pattern).parts
        chosen = [name for name in sizes if _fits(PurePosixPath(name).parts, wanted)]
        if not chosen:
            raise DataError(f"{told}: no file matches.")
        root = str(PurePosixPath(info.path, pattern).parent)
        return _by_name([f"{info.path}/{name}" for name in chosen], root, uri_of)
    if DATASET_FILE in sizes:
        content = _answered(
            attempt(lambda: _content(fs, f"{info.path}/{DATASET_FILE}")), source, told
        )
        of_split = _of_dataset(content, sizes.get, told)
        if of_split is not None:
            return _parquet(of_split, lambda name: uri_of(f"{info.path}/{name}"))
    chosen = [name for name in sizes if name.endswith(".parquet") and not _is_hidden(name)]
    if not chosen:
        raise DataError(f"{told}: holds no Parquet files (class folders: only on local disks).")
    return _by_name([f"{info.path}/{name}" for name in chosen], info.path, uri_of)


def _cut_at_glob(uri: str) -> tuple[str, str]:
    """The URI of the folder before the first sign of a pattern, and the pattern ("": none)."""
    place, question_mark, query = uri.partition("?")
    first = min((place.find(sign) for sign in _URI_GLOB_SIGNS if sign in place), default=-1)
    if first < 0:
        return uri, ""
    cut = place.rfind("/", 0, first)
    return place[:cut] + question_mark + query, place[cut + 1 :]


def _fits(parts: Sequence[str], pattern: Sequence[str]) -> bool:
    """Whether a path fits, as `glob` has it: ``**`` stands for any number of folders."""
    if not pattern:
        return not parts
    if pattern[0] == "**":
        return any(_fits(parts[n:], pattern[1:]) for n in range(len(parts) + 1))
    return bool(parts) and fnmatchcase(parts[0], pattern[0]) and _fits(parts[1:], pattern[1:])


def _files_below(fs: Any, path: str) -> dict[str, int]:
    """Sizes of all files, by their paths below the folder, sorted."""
    infos = fs.get_file_info(pafs.FileSelector(path, recursive=True))
    files = {info.path.removeprefix(path).lstrip("/"): info.size for info in infos if info.is_file}
    return dict(sorted(files.items()))


def _content(fs: Any, path: str) -> bytes:
    with fs.open_input_stream(path, compression=None) as stream:
        return bytes(stream.read())


def _answered(outcome: T | Exception, source: str, told: str) -> T:
    if isinstance(outcome, RaytrainError):
        raise outcome
    if isinstance(outcome, TimeoutError):
        raise PreflightError(
            f"{told} did not answer within {REACH_TIMEOUT_S:.0f} s: check the address, the "
            "network and the credentials."
        )
    if isinstance(outcome, FileNotFoundError):
        raise DataError(f"{told}: no such file or folder.")
    if isinstance(outcome, Exception):
        raise DataError(f"{told}: cannot be read: {reason_of(source, outcome)}.")
    return outcome


def _of_dataset(
    content: bytes, size_of: Callable[[str], int | None], told: str
) -> dict[Split, list[str]] | None:
    """The files of each split that `convert` has written; None if it was somebody else.

    Raises:
        DataError: files are missing or of another size; naming all of them.
    """
    try:
        dataset = json.loads(content)
        if not isinstance(dataset, dict) or dataset.get("format") != "raytrain_ddp":
            return None
        if dataset["version"] != 1:
            raise DataError(
                f"{told}: {DATASET_FILE} is of version {dataset['version']}; this is a version of "
                "raytrain_ddp that knows version 1."
            )
        files = [(str(f["path"]), str(f["split"]), int(f["bytes"])) for f in dataset["files"]]
    except (ValueError, KeyError, TypeError):
        raise DataError(f"{told}: {DATASET_FILE} is damaged: convert the data again.") from None
    wrong = []
    of_split: dict[Split, list[str]] = {}
    for name, split, expected in files:
        size = None if _leads_out(name) else size_of(name)
        if size != expected:
            found = "is missing" if size is None else f"has {size} bytes, not {expected}"
            wrong.append(f"{name} {found}")
        of_split.setdefault("eval" if split in EVAL_SPLITS else "train", []).append(name)
    if wrong:
        more = f", and {len(wrong) - _ERRORS_SHOWN} more" * (len(wrong) > _ERRORS_SHOWN)
        raise DataError(
            f"{told}: {len(wrong)} of {len(files)} files are not as {DATASET_FILE} has them: "
            f"{', '.join(wrong[:_ERRORS_SHOWN])}{more}. Copy them again, or convert again."
        )
    return of_split


def _by_name(paths: Sequence[str], root: str, uri_of: Callable[[str], str] = str) -> Splits:
    """Splits by file name (train-00000-of-00002) or by folder below `root`, as on Hugging Face."""
    of_split: dict[Split, list[str]] = {}
    for path in paths:
        of_split.setdefault("eval" if _names_eval(path, root) else "train", []).append(path)
    return _parquet(of_split, uri_of)


def _parquet(of_split: Mapping[Split, Sequence[str]], uri_of: Callable[[str], str]) -> Splits:
    return {
        split: Located("parquet", tuple(map(uri_of, paths)), split)
        for split, paths in of_split.items()
    }


def _names_eval(path: str, root: str) -> bool:
    place = PurePosixPath(path)
    folder = place.parent.name.lower() if str(place.parent) != root else ""
    return split_told_by(place) in EVAL_SPLITS or folder in EVAL_SPLITS


def split_told_by(path: PurePath) -> str:
    """What a file's name begins with: ``train`` of ``train-00000-of-00002.parquet``."""
    return path.stem.lower().replace("_", "-").split("-")[0].split(".")[0]


def _is_hidden(name: str) -> bool:
    return any(part.startswith(".") for part in PurePosixPath(name).parts)


def _leads_out(name: str) -> bool:
    return name.startswith("/") or ".." in PurePosixPath(name).parts


def _shown(source: str) -> str:
    return repr(without_secrets(source))
