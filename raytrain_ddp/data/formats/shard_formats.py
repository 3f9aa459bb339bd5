"""The formats of files of images and labels: how they are recognized and opened."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from raytrain_ddp.data.formats.image_folder import NO_FILE
from raytrain_ddp.data.formats.shard import Columns, Opened, Shard, opened_at, with_retries
from raytrain_ddp.data.formats.table_shard import open_arrow, open_list, open_parquet
from raytrain_ddp.data.formats.tar_shard import open_tar
from raytrain_ddp.errors import DataError, RaytrainError, first_names
from raytrain_ddp.uri import attempt, reason_of, without_secrets

_OPENERS = 16
_ERRORS_SHOWN = 20


@dataclass(frozen=True)
class Format:
    """A format of files.

    Args:
        ends: in lower case.
        open: reads and checks the description of a file's rows. Raises ValueError, OSError or
            tarfile.TarError if it is missing or damaged, DataError if it cannot be used.
    """

    title: str
    ends: tuple[str, ...]
    open: Callable[[Opened, Columns], Shard]


_LISTS = tuple(
    f"{end}{packed}" for end in (".csv", ".tsv", ".jsonl", ".ndjson") for packed in ("", ".gz")
)
PARQUET = Format("Parquet", (".parquet",), open_parquet)
LIST = Format("CSV, TSV or JSON lines", _LISTS, open_list)
TAR = Format("tar", (".tar", ".tar.gz", ".tgz", ".tar.zst", ".tar.bz2", ".tar.xz"), open_tar)
ARROW = Format("Arrow", (".arrow",), open_arrow)
FORMATS = (PARQUET, ARROW, TAR, LIST)


def format_of(name: str) -> Format | None:
    """The format of a file of this name."""
    return next((form for form in FORMATS if name.lower().endswith(form.ends)), None)


def open_shard(uri: str, columns: Columns) -> Shard:
    """Reads and checks the description of the rows of a file at a URI or path.

    Raises:
        DataError: it is missing or damaged, or a column is missing or of the wrong type.
    """
    name = without_secrets(uri)
    form = format_of(name) or PARQUET
    if not os.path.isfile(uri) and not os.path.isdir(uri) and os.path.exists(uri):
        raise DataError(f"{name}: {NO_FILE}: remove it.")
    outcome = with_retries(lambda: form.open(opened_at(uri, name), columns), "://" not in uri)
    if isinstance(outcome, RaytrainError):
        raise outcome
    if isinstance(outcome, FileNotFoundError):
        raise DataError(f"{name}: no such file.")
    if isinstance(outcome, Exception):
        raise DataError(f"{name}: not a readable {form.title} file: {reason_of(uri, outcome)}.")
    return outcome


def open_shards(paths: Sequence[str], columns: Columns) -> list[Shard]:
    """Opens all files, or raises one error that lists each unusable file."""
    with ThreadPoolExecutor(_OPENERS, thread_name_prefix="footers") as pool:
        opened = list(pool.map(lambda path: attempt(lambda: open_shard(path, columns)), paths))
    errors = [result for result in opened if isinstance(result, Exception)]
    for error in errors:
        if len(errors) == 1 or not isinstance(error, DataError):
            raise error
    if errors:
        texts = [str(error).rstrip(".") for error in errors]
        listed = first_names(texts, _ERRORS_SHOWN, "; and ", "; ")
        raise DataError(f"{len(errors)} of {len(paths)} files cannot be used: {listed}.")
    return [result for result in opened if isinstance(result, Shard)]
