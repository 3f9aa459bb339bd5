"""Lists files in an object store; reports an error if the store does not respond."""

from __future__ import annotations

import errno
import glob
import socket
import ssl
from collections.abc import Iterator
from pathlib import PurePosixPath
from typing import Any, TypeVar

from pyarrow import fs as pafs

from raytrain_ddp.data.discovery.file_listing import FileListing, fits
from raytrain_ddp.data.formats.image_folder import without_leftovers
from raytrain_ddp.data.formats.shard import read_file
from raytrain_ddp.errors import DataError, PreflightError, RaytrainError
from raytrain_ddp.uri import (
    REACH_TIMEOUT_S,
    answer_within,
    attempt,
    fsspec_inside,
    open_uri,
    reason_of,
    uri_beside,
    without_secrets,
)

T = TypeVar("T")

_PAGES = "https://huggingface.co/datasets/"
_URI_GLOB_SIGNS = "*["  # "?" starts the query


def list_in_store(source: str, shown: str) -> FileListing:
    """Lists the files below a URI or matching its glob, with a single list request.

    Args:
        shown: the field and its value, for messages.

    Raises:
        DataError: nothing matches, or it cannot be read.
        ConfigError: the scheme is unknown.
        PreflightError: the store cannot be reached.
    """
    if source.startswith(_PAGES):
        raise DataError(f"{shown} is a web page: use hf://datasets/{source.removeprefix(_PAGES)}.")
    folder, pattern = _cut_at_glob(source)

    def ask() -> tuple[Any, Any]:
        fs, path = open_uri(folder)
        info = fs.get_file_info(path)
        inner = fsspec_inside(fs)
        if info.type == pafs.FileType.NotFound and inner is not None:
            inner.info(path)  # raises what the listing hides, such as a refused connection
        return fs, info

    fs, info = _answered(answer_within(REACH_TIMEOUT_S, ask), source, shown)
    if info.type == pafs.FileType.NotFound:
        raise _not_there(source, shown)
    root, sizes = info.path, {}
    left_out: list[str] = []
    if info.is_file and not pattern:
        root, name = str(PurePosixPath(info.path).parent), PurePosixPath(info.path).name
        sizes, pattern = {name: info.size}, glob.escape(name)
    else:
        # No time limit: a long list takes longer than the first response.
        sizes = _answered(attempt(lambda: _files_below(fs, root)), source, shown)
        found = [name for name in sizes if not pattern or fits(name, pattern)]
        names, left_out = without_leftovers(found, pattern.split("/"))
        sizes = {name: sizes[name] for name in names}
        if pattern and not sizes:
            raise DataError(f"{shown}: no file matches.")

    def uri_of(name: str) -> str:
        return source if info.is_file else uri_beside(folder, f"{root}/{name}")

    def content(name: str) -> bytes:
        return _answered(attempt(lambda: read_file(fs, f"{root}/{name}")), source, shown)

    return FileListing(
        shown=shown,
        is_local=False,
        files=tuple(sizes),
        folders=(),
        left_out=tuple(left_out),
        pattern=pattern,
        uri_of=uri_of,
        content=content,
        size_of=sizes.get,
    )


def _cut_at_glob(uri: str) -> tuple[str, str]:
    """The URI of the folder before the first glob character, and the pattern ("": none)."""
    place, question_mark, query = uri.partition("?")
    first = min((place.find(sign) for sign in _URI_GLOB_SIGNS if sign in place), default=-1)
    if first < 0:
        return uri, ""
    cut = place.rfind("/", 0, first)
    return place[:cut] + question_mark + query, place[cut + 1 :]


def _files_below(fs: Any, path: str) -> dict[str, int]:
    """Sizes of all files, by their paths below the folder, sorted."""
    infos = fs.get_file_info(pafs.FileSelector(path, recursive=True))
    files = {info.path.removeprefix(path).lstrip("/"): info.size for info in infos if info.is_file}
    return dict(sorted(files.items()))


def _answered(outcome: T | Exception, source: str, shown: str) -> T:
    if isinstance(outcome, RaytrainError):
        raise outcome
    chain = _chain(outcome) if isinstance(outcome, Exception) else iter(())
    lost = next(filter(_is_of_network, chain), None)
    if isinstance(outcome, FileNotFoundError) and lost is None:
        raise _not_there(source, shown)
    if isinstance(outcome, Exception):
        download = ""
        if source.startswith("hf://datasets/"):
            name = "/".join(without_secrets(source).split("/")[3:5])
            command = f"hf download --repo-type dataset {name} --local-dir DIR"
            download = f", or download it ({command}) and use DIR"
        if isinstance(outcome, TimeoutError):
            raise PreflightError(
                f"{shown} did not respond within {REACH_TIMEOUT_S:.0f} s: check the address, the "
                f"network and the credentials{download}."
            )
        hidden = lost if isinstance(outcome, FileNotFoundError) else None
        reason = reason_of(source, hidden or outcome)
        if "NETWORK_CONNECTION" in reason or lost is not None:
            raise PreflightError(
                f"{shown} cannot be reached: {reason}. Check the network{download}."
            )
        raise DataError(f"{shown}: cannot be read: {reason}.")
    return outcome


def _not_there(source: str, shown: str) -> DataError:
    if not source.startswith("hf://"):
        return DataError(f"{shown}: no such file or folder.")
    if source.startswith("hf://datasets/"):
        return DataError(
            f"{shown}: no such data set, file or folder on the Hugging Face Hub. If it is private "
            "or gated, log in (hf auth login)."
        )
    return DataError(
        f"{shown}: no such model: for a data set, use hf://datasets/{source.removeprefix('hf://')}."
    )


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """An error and its causes."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__


def _is_of_network(error: BaseException) -> bool:
    """Whether it is a failed name resolution, a refused or lost connection, or an offline mode."""
    return isinstance(error, ConnectionError | socket.gaierror | ssl.SSLError) or (
        isinstance(error, OSError) and error.errno in (errno.ENETUNREACH, errno.EHOSTUNREACH)
    )
