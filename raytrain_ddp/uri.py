"""Opens files and folders in object stores by URI, and removes secrets from URIs for display.

Cheap to import: pyarrow and fsspec are loaded when the first URI is opened.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable
from contextlib import suppress
from functools import lru_cache
from threading import Thread
from typing import Any, TypeVar
from urllib.parse import quote, unquote

from raytrain_ddp.errors import ConfigError, in_one_line

T = TypeVar("T")

_LOOK_S = 0.5
REACH_TIMEOUT_S = 25.0  # pyarrow itself would try GCS for 15 minutes

_OWN_SCHEMES = ("s3", "gs", "gcs", "file")  # pyarrow's; fsspec has packages for many more
_SHORTEST_SECRET = 3
_HARMLESS_KEYS = ("region", "endpoint_override", "scheme")  # they tell where, not who
_HARMLESS_VALUE = re.compile(r"[\w.:/\[\]-]*", re.ASCII)  # an address without user part or query


def open_uri(uri: str) -> tuple[Any, str]:
    """The pyarrow file system of a URI or plain path, and the path in it.

    ``s3://``, ``gs://`` and ``file://`` are pyarrow's own, with their options in the query
    (``?region=...&endpoint_override=...``); all other schemes (``hf://``, ``abfs://`` ...) are
    those of fsspec, with their options in the environment; without adlfs, ``abfs://`` is pyarrow's.
    For S3, the bucket's region is looked up if the query does not give it.

    Raises:
        ConfigError: the scheme is unknown, its package is missing, nothing follows it, or it is a
            file:// URI with a host.
        ValueError, OSError: the rest of the URI is invalid. The message may contain its secrets:
            show `reason_of` instead.
    """
    scheme, rest, query = _parts(uri)
    if not rest and "://" in uri:
        raise ConfigError(f"{uri}: names no bucket or folder.")
    if not rest:
        from pyarrow import fs as pafs

        return pafs.LocalFileSystem(), uri
    if scheme in _OWN_SCHEMES:
        place, _, path = rest.partition("/")
        if scheme == "file" and place:
            shown = without_secrets(uri)
            raise ConfigError(f"{shown}: names a host: write file:///{path}, or a path.")
        fs, root = _own_file_system(scheme, place, query)
        return fs, f"{root}/{unquote(path)}".rstrip("/") or "/"
    return _fsspec_file_system(uri)


def uri_beside(uri: str, path: str) -> str:
    """The URI of another path (in pyarrow's form) in the file system of `uri`."""
    scheme, rest, query = _parts(uri)
    if scheme not in _OWN_SCHEMES:
        fs, _ = _fsspec_file_system(uri)
        if inner := fsspec_inside(fs):
            return str(inner.unstrip_protocol(path))
    place, path = rest.partition("/")[0], path.partition("/")[2]
    return f"{scheme}://{place}/{quote(path)}" + (f"?{query}" if query else "")


def below(place: str, name: str) -> str:
    """The path or URI of what is called `name` in the folder at a path or URI."""
    if "://" not in place:
        return f"{place}/{name}"
    folder, mark, query = place.partition("?")
    return f"{folder}/{quote(name)}{mark}{query}"


def split_last(place: str) -> tuple[str, str]:
    """Splits a path or URI into its folder and its name there; `below` is the inverse."""
    if "://" not in place:
        return os.path.split(place)
    path, mark, query = place.partition("?")
    folder, _, name = path.rstrip("/").rpartition("/")
    return f"{folder}{mark}{query}", unquote(name)


def fsspec_inside(fs: Any) -> Any:
    """The file system of fsspec that a pyarrow file system passes its calls to, or None."""
    from pyarrow import fs as pafs

    handler = getattr(fs, "handler", None)
    return handler.fs if isinstance(handler, pafs.FSSpecHandler) else None


def without_secrets(uri: str) -> str:
    """The URI without password, key and query, even if a secret in it is not percent-encoded."""
    scheme, separator, rest = uri.partition("://")
    if not separator:
        return uri
    place, *query = re.split(r"[?#]", rest, maxsplit=1)
    if query and "@" in query[0]:  # an unquoted "?" in a password, or an "@" in the query
        return f"{scheme}://***"
    first, slash, path = place.partition("/")
    user, at, host = first.rpartition("@")
    if scheme == "hf" or "@" not in place:  # a revision of Hugging Face's follows an "@"
        bare = place
    elif ":" not in (user if at else first) or _ends_in_port(scheme, first):  # no password
        # With one of pyarrow's schemes this is a key; else a name, as in container@account.
        bare = f"{host}{slash}{path}" if at and scheme in _OWN_SCHEMES else place
    else:  # if there are several, all before the last one may belong to the password
        bare = "***" if at and "@" in path else place.rpartition("@")[2]
    return f"{scheme}://{bare}"


def shareable(uri: str) -> str:
    """The URI without its secrets, but with the query options that locate the data.

    It opens the same place if the credentials come from the environment.
    """
    bare = without_secrets(uri)
    if bare.endswith("://***"):
        return bare
    pairs = _parts(uri)[2].partition("#")[0].split("&")
    kept = "&".join(pair for pair in pairs if _is_harmless(*pair.partition("=")[::2]))
    return f"{bare}?{kept}" if kept else bare


def reason_of(uri: str, error: BaseException) -> str:
    """The first line of an error's text; shortened if it contains any part of the URI's secrets."""
    text = str(error).partition("\n")[0].rstrip(". ")
    kept = set(_parts_of(without_secrets(uri)))
    secrets = [part for part in _parts_of(uri) if part not in kept]
    if any(part in text.casefold() for part in secrets):
        token = re.search(r"AWS Error [A-Z_]+", text)
        text = token.group() if token else ""
    return in_one_line(text) or type(error).__name__


def attempt(ask: Callable[[], T]) -> T | Exception:
    """What `ask` returns or raises. An error is returned, not raised, because the error raised in
    its place must not have it as its context: it may contain secrets."""
    try:
        return ask()
    except Exception as error:
        return error


def answer_within(
    seconds: float, ask: Callable[[], T], is_over: Callable[[], bool] = lambda: False
) -> T | Exception:
    """As `attempt`, or a TimeoutError; then `ask` keeps running in a thread.

    Args:
        is_over: asked every half second meanwhile; whether nobody needs the answer any more.
    """
    outcome: list[T | Exception] = []
    run = Thread(target=lambda: outcome.append(attempt(ask)), name="answer_within", daemon=True)
    run.start()
    deadline = time.monotonic() + seconds
    while run.is_alive() and (left := deadline - time.monotonic()) > 0:
        run.join(min(left, _LOOK_S))
        if run.is_alive() and is_over():
            break
    return outcome[0] if outcome else TimeoutError(f"no answer within {seconds:.0f} s")


def _parts(uri: str) -> tuple[str, str, str]:
    scheme, _, rest = uri.partition("://")  # a plain path has no rest
    rest, _, query = rest.partition("?") if scheme in _OWN_SCHEMES else (rest, "", "")
    return scheme, rest, query


def _ends_in_port(scheme: str, first: str) -> bool:
    """Whether it is ``host:port``; an unencoded "/" in a password looks like that in S3 keys."""
    return scheme not in _OWN_SCHEMES and re.fullmatch(r"[^@:]+:\d{1,5}", first) is not None


def _is_harmless(key: str, value: str) -> bool:
    return key in _HARMLESS_KEYS and _HARMLESS_VALUE.fullmatch(unquote(value)) is not None


def _parts_of(uri: str) -> list[str]:
    """The parts between a URI's delimiters, as written and percent-decoded."""
    pieces = re.split(r"[:/@?#&=]", uri) + re.split(r"[:/@?#&=]", unquote(uri))
    return [piece.casefold() for piece in pieces if len(piece) >= _SHORTEST_SECRET]


@lru_cache(maxsize=16)  # a client is expensive: it has its own threads, connections and credentials
def _own_file_system(scheme: str, place: str, query: str) -> tuple[Any, str]:
    from pyarrow import fs as pafs

    root = place or ("/" if scheme == "file" else "")
    uri = f"{scheme}://{root}" + (f"?{query}" if query else "")
    if scheme == "s3":
        # A small file is then one PUT instead of the three requests of a multipart upload.
        with suppress(ValueError):  # not in pyarrow 17
            extra = ("&" if query else "?") + "allow_delayed_open=true"
            fs, path = pafs.FileSystem.from_uri(uri + extra)
            return fs, path.rstrip("/")
    fs, path = pafs.FileSystem.from_uri(uri)
    return fs, path.rstrip("/")


def _fsspec_file_system(uri: str) -> tuple[Any, str]:
    from pyarrow import fs as pafs

    shown = without_secrets(uri)
    try:
        from fsspec import available_protocols  # type: ignore[import-untyped]
        from fsspec.core import url_to_fs  # type: ignore[import-untyped]
    except ImportError:
        raise ConfigError(f"{shown}: needs the package fsspec: pip install fsspec.") from None
    try:
        inner, path = url_to_fs(uri)
    except ImportError as error:
        if shown.startswith("abfs"):
            with suppress(ValueError):  # pyarrow was built without it, or there is no account
                return tuple(pafs.FileSystem.from_uri(uri))
        raise ConfigError(f"{shown}: a package is missing: {reason_of(uri, error)}.") from None
    except ValueError:
        schemes = shown.partition("://")[0].split("::")  # several: those before the last cache
        unknown = [scheme for scheme in schemes if scheme not in available_protocols()]
        if not unknown:
            raise
        raise ConfigError(
            f"{shown}: unknown scheme {unknown[0]}://. Use s3://, gs://, hf://, or another scheme "
            "of fsspec."
        ) from None
    return pafs.PyFileSystem(pafs.FSSpecHandler(inner)), path
