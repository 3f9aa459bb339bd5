"""``dataset.json``: the content of a converted data set, and its verification."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from raytrain_ddp.data.discovery.discovery import DATASET_FILE
from raytrain_ddp.errors import DataError
from raytrain_ddp.files import read_json, sha256_of

FORMAT = {"format": "raytrain_ddp", "version": 1}


def read_dataset_file(folder: Path) -> dict[str, Any]:
    """The content of a folder's ``dataset.json``.

    Raises:
        DataError: the file is missing, or this version cannot read it.
    """
    path = folder / DATASET_FILE
    try:
        content = read_json(path)
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: cannot be read: {error}.") from error
    if content is None:
        raise DataError(f"{path}: not found: this is not a complete data set made by `convert`.")
    if not isinstance(content, dict) or not FORMAT.items() <= content.items():
        raise DataError(f"{path}: not of format 'raytrain_ddp', version {FORMAT['version']}.")
    return content


def verify(folder: Path, threads: int, tell: Callable[[int, int], None]) -> dict[str, Any]:
    """Reads every byte of a converted data set and compares it with its ``dataset.json``.

    Raises:
        DataError: lists each file that is missing, damaged or unexpected.
    """
    content = read_dataset_file(folder)
    try:
        files = {str(file["path"]): file for file in content["files"]}
        rows = dict.fromkeys(content["rows"], 0)
        for file in files.values():
            rows[file["split"]] += file["rows"]
        wrong = [] if rows == content["rows"] else [f"{DATASET_FILE}: rows do not add up"]
    except (KeyError, TypeError) as error:
        raise DataError(f"{folder / DATASET_FILE}: {error} is missing or wrong.") from error
    found = {path.relative_to(folder).as_posix() for path in folder.rglob("*.parquet")}
    with ThreadPoolExecutor(threads) as pool:
        for problems in pool.map(lambda file: list(_problems(folder, file, tell)), files.values()):
            wrong += problems
    wrong += [f"{name}: not in {DATASET_FILE}" for name in sorted(found - files.keys())]
    if wrong:
        lines = "\n".join(f"  {line}" for line in wrong)
        raise DataError(f"{folder}: {len(wrong)} problem{'s' * (len(wrong) > 1)}:\n{lines}")
    return content


def _problems(
    folder: Path, file: Mapping[str, Any], tell: Callable[[int, int], None]
) -> Iterator[str]:
    name = str(file["path"])
    path = folder / name
    if Path(name).name != name or not path.is_file():
        yield f"{name}: missing"
        return
    size = path.stat().st_size
    if size != file["bytes"]:
        yield f"{name}: {size} bytes, not {file['bytes']}"
    elif sha256_of(path) != file["sha256"]:
        yield f"{name}: content differs from what was written (sha256)"
    yield from _parquet_problems(path, name, int(file["rows"]))
    tell(int(file["rows"]), size)


def _parquet_problems(path: Path, name: str, rows: int) -> Iterator[str]:
    """Checks the footer and the page checksums, to locate damage in a file."""
    try:
        file = pq.ParquetFile(path, page_checksum_verification=True)
    except (OSError, pa.ArrowException) as error:
        yield f"{name}: footer cannot be read: {_line(error)}"
        return
    with file:
        if file.metadata.num_rows != rows:
            yield f"{name}: {file.metadata.num_rows} rows, not {rows}"
        for group in range(file.metadata.num_row_groups):
            try:
                file.read_row_group(group, use_threads=False)
            except (OSError, pa.ArrowException) as error:
                yield f"{name}, row group {group}: cannot be read: {_line(error)}"


def _line(error: Exception) -> str:
    return str(error).partition("\n")[0]
