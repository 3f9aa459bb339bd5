"""The folder that a conversion makes: whether it may, how it is built, and its ``dataset.json``.

It is built in a hidden staging folder next to it:

    .NAME.converting/            becomes NAME by one rename
      train-00000-of-00004.parquet.part     a shard, under a name that no reader accepts
      state/plan.json            what is being converted, and how: compared on resume
      state/train-00000-of-00004.json       a shard's record; written when the shard is complete
      state/spool/               images of sources without random access

Worker processes write into it only by `replace_with` and `write_json`: a file is complete or does
not exist, even if two processes write the same one."""

from __future__ import annotations

import os
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from raytrain_ddp.data.discovery.discovery import DATASET_FILE
from raytrain_ddp.errors import ConfigError, DataError, PreflightError, first_line
from raytrain_ddp.files import (
    different,
    expanded,
    fsync,
    read_json,
    require_alone,
    require_utf8,
    sha256_of,
    write_json,
)
from raytrain_ddp.tools.convert.options import ConvertConfig
from raytrain_ddp.tools.convert.shard_writer import PART
from raytrain_ddp.tools.convert.source_splits import SourceSplit, open_source_splits

FORMAT = {"format": "raytrain_ddp", "version": 1}
_KINDS = {"files": list, "rows": dict, "class_names": list, "skipped": list, "sampled": dict}
_KINDS |= {"mean": list, "std": list}
_FILE_KINDS = {"path": str, "split": str, "rows": int, "bytes": int, "sha256": str}


def shaping(config: ConvertConfig) -> dict[str, Any]:
    """The options that the bytes depend on. The policy for bad records is not among them: a
    conversion that stopped at a bad record can be resumed with another policy."""
    free = {"root", "bad_records"}
    given = asdict(config)
    # Omitted at their defaults: data sets converted before these options existed are the same.
    free |= {name for name in ("train_split", "eval_split", "config") if given[name] == "auto"}
    return {name: value for name, value in given.items() if name not in free}


def check_dest(source: str, dest: str) -> Path:
    """The folder to write, as an absolute path without links."""
    if "://" in dest:
        raise ConfigError(f"DST {dest}: must be a folder on this machine; copy it afterward.")
    folder = expanded(dest).resolve()
    for name, path in (("SRC", Path(source)), ("DST", folder)):
        require_utf8(name, path)
    origin = Path(source) if "://" in source else expanded(source).resolve()
    if origin.is_dir() and (folder == origin or origin in folder.parents):
        raise ConfigError(f"DST {dest} is inside SRC {source}: use a folder outside it.")
    if folder.exists() and (not folder.is_dir() or os.path.ismount(folder)):
        kind = "a mount point" if folder.is_dir() else "a file"
        raise ConfigError(f"DST {dest} is {kind}: use a new folder.")
    names = sorted(entry.name for entry in folder.iterdir()) if folder.exists() else []
    if names and DATASET_FILE not in names:
        raise ConfigError(
            f"DST {dest}: has other files ({', '.join(names[:3])}{', ...' * (len(names) > 3)}): "
            "use a new folder."
        )
    return folder


def require_same(dest: Path, dataset: Mapping[str, Any], given: Mapping[str, Any]) -> None:
    made = {**dataset, "arguments": dict(dataset.get("arguments", {}))}
    made["arguments"].pop("bad_records", None)
    differences = different({name: made.get(name) for name in given}, given)
    if differences:
        raise ConfigError(
            f"{dest} is complete, but was made with other input: {'; '.join(differences)}. Use "
            "another folder, or delete it."
        )


def content_of(splits: Sequence[SourceSplit]) -> dict[str, str]:
    """What the splits are, by name."""
    return {split.name: split.content for split in splits}


def seen_of(splits: Sequence[SourceSplit]) -> dict[str, str]:
    """What the splits are, with the times of their files, by name."""
    return {split.name: split.fingerprint() for split in splits}


def require_up_to_date(
    place: Path, dataset: Mapping[str, Any], source: str, config: ConvertConfig
) -> str:
    """A sentence if files of the source have been written since, and have the same sizes; else "".

    Raises:
        DataError: files are missing, or the source is there and has changed since.
    """
    for file in dataset["files"]:
        path = place / file["path"]
        if not path.is_file() or path.stat().st_size != file["bytes"]:
            what = "is missing" if not path.is_file() else "has another size"
            raise DataError(f"{path} {what}: delete {place}, and convert again.")
    if "content" not in dataset:  # an earlier version wrote it
        return ""
    try:
        splits, _ = open_source_splits(source, config)
    except (DataError, PreflightError):
        return ""  # a source may be deleted once it is converted
    content = content_of(splits)
    changed = [name for name in content if content[name] != dataset["content"].get(name)]
    if changed or len(content) != len(dataset["content"]):
        raise DataError(
            f"{source} has changed since it was converted into {place} "
            f"({', '.join(changed) or 'other splits'}): use another folder, or delete it."
        )
    if dataset.get("seen", now := seen_of(splits)) == now:
        return ""
    return (
        f"files of {source} have been written since, or replaced by others with the same names and "
        f"sizes. If their pixels differ, delete {place}, and convert again."
    )


# ------------------------------------------------------------------ staging


class Stage:
    """The folder in which `dest` is built. Nothing is written before `held`."""

    def __init__(self, dest: Path) -> None:
        self.dest = dest
        self.folder = dest.parent / f".{dest.name}.converting"
        self.state = self.folder / "state"
        self.spool = self.state / "spool"

    @contextmanager
    def held(self) -> Iterator[None]:
        """Locks the folder for one process.

        Raises:
            RunLockedError: another process holds the lock.
        """
        self.spool.mkdir(parents=True, exist_ok=True)
        with (self.state / "lock").open("w") as lock:
            text = "another process is converting into it: wait for it, or stop it."
            require_alone(lock, f"{self.dest}: {text}")
            yield

    def begin(self, plan: Mapping[str, Any]) -> None:
        """Records what is being converted, or compares it with an earlier conversion here.

        Raises:
            ConfigError: they differ.
            DataError: the record is damaged.
        """
        try:
            before = read_json(self.state / "plan.json")
        except DataError as error:
            raise DataError(f"{error} Delete {self.folder}, and convert again.") from None
        if before is None or not self.has_work():
            write_json(self.state / "plan.json", plan, self.state)
        elif differences := different(before, plan):
            raise ConfigError(
                f"{self.dest}: a conversion was started here with other input: "
                f"{'; '.join(differences)}. Use the same input, or delete {self.folder}."
            )

    def has_work(self) -> bool:
        """Whether anything of an earlier conversion can be used."""
        done = (self.folder.glob(f"*{PART}"), self.folder.glob("*.parquet"))
        return any(True for paths in (*done, self.spool.glob("*.json")) for _ in paths)

    def size_bytes(self, split: str) -> int:
        """The size of the files of a split that exist already."""
        parts = (self.spool.glob(f"{split}-*.bin"), self.folder.glob(f"{split}-*{PART}"))
        return sum(path.stat().st_size for paths in parts for path in paths)

    def part(self, name: str) -> Path:
        """The path of a complete shard: as part, or under its final name."""
        final = self.folder / name
        return final if final.exists() else self.folder / f"{name}{PART}"

    def finish(self, names: list[str], dataset: Mapping[str, Any]) -> None:
        """Turns the folder into `dest`: renames all shards; the last step is one rename."""
        for name in names:
            if not (self.folder / name).exists():
                os.replace(self.folder / f"{name}{PART}", self.folder / name)
        write_json(self.folder / DATASET_FILE, dataset, self.state)
        self.give_name()

    def give_name(self) -> None:
        """The last step, after `dataset.json` is written."""
        shutil.rmtree(self.state)
        fsync(self.folder)
        os.replace(self.folder, self.dest)
        fsync(self.dest.parent)


# ------------------------------------------------------------------ dataset.json


def read_dataset_file(folder: Path) -> dict[str, Any]:
    """The content of a folder's ``dataset.json``.

    Raises:
        DataError: the file is missing, or this version cannot read it.
    """
    path = folder / DATASET_FILE
    try:
        content = read_json(path)
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error}.") from error
    if content is None:
        raise DataError(f"{path}: not found: this is not a complete data set made by `convert`.")
    if not FORMAT.items() <= content.items():
        raise DataError(f"{path}: not of format 'raytrain_ddp', version {FORMAT['version']}.")
    _require_kinds(path, content, _KINDS, "")
    for number, file in enumerate(content["files"]):
        _require_kinds(path, file, _FILE_KINDS, f"files[{number}].")
    _require_kinds(path, content["rows"], dict.fromkeys(content["rows"], int), "rows.")
    return content


def _require_kinds(path: Path, found: Any, kinds: Mapping[str, type], above: str) -> None:
    for name, kind in kinds.items():
        if not isinstance(found, dict) or not isinstance(found.get(name), kind):
            raise DataError(f"{path}: {above}{name} is missing or wrong: convert again.")


def verify(folder: Path, threads: int, tell: Callable[[int, int], None]) -> dict[str, Any]:
    """Reads every byte of a converted data set and compares it with its ``dataset.json``.

    Raises:
        DataError: lists each file that is missing, damaged or unexpected.
    """
    content = read_dataset_file(folder)
    files = {file["path"]: file for file in content["files"]}
    rows = Counter(dict.fromkeys(content["rows"], 0))
    for file in files.values():
        rows[file["split"]] += file["rows"]
    wrong = [] if rows == content["rows"] else [f"{DATASET_FILE}: rows do not add up"]
    found = {path.relative_to(folder).as_posix() for path in folder.rglob("*.parquet")}
    with ThreadPoolExecutor(threads) as pool:
        for problems in pool.map(lambda file: list(_problems(folder, file, tell)), files.values()):
            wrong += problems
    wrong += [f"{name}: not in {DATASET_FILE}" for name in sorted(found - files.keys())]
    if wrong:
        count = f"{len(wrong)} problem{'s' * (len(wrong) > 1)}"
        raise DataError(f"{folder}: {count}: {'; '.join(wrong)}")
    return content


def _problems(
    folder: Path, file: Mapping[str, Any], tell: Callable[[int, int], None]
) -> Iterator[str]:
    name, rows = file["path"], file["rows"]
    path = folder / name
    if Path(name).name != name or not path.is_file():
        yield f"{name}: missing"
        return
    size = path.stat().st_size
    if size != file["bytes"]:
        yield f"{name}: {size} bytes, not {file['bytes']}"
    elif sha256_of(path) != file["sha256"]:
        yield f"{name}: content differs from what was written (sha256)"
    yield from _parquet_problems(path, name, rows)
    tell(rows, size)


def _parquet_problems(path: Path, name: str, rows: int) -> Iterator[str]:
    """Checks the footer and the page checksums, to locate damage in a file."""
    try:
        file = pq.ParquetFile(path, page_checksum_verification=True)
    except (OSError, pa.ArrowException) as error:
        yield f"{name}: footer cannot be read: {first_line(error)}"
        return
    with file:
        if file.metadata.num_rows != rows:
            yield f"{name}: {file.metadata.num_rows} rows, not {rows}"
        for group in range(file.metadata.num_row_groups):
            try:
                file.read_row_group(group, use_threads=False)
            except (OSError, pa.ArrowException) as error:
                yield f"{name}, row group {group}: cannot be read: {first_line(error)}"
