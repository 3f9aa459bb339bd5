"""URIs: what they open and how they are shown; Parquet files in object stores."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from parquet_files import all_of, hugging_face, located, opened, png, write_images, write_parquet
from s3 import S3

from raytrain_ddp.data.formats import shard as shard_module
from raytrain_ddp.errors import ConfigError, DataError
from raytrain_ddp.files import expanded
from raytrain_ddp.uri import below, open_uri, reason_of, shareable, uri_beside, without_secrets

SECRET = "hunter2"


@pytest.fixture(scope="module")
def pictures(s3: S3, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """pictures/ in the bucket and on this disk: 20, 11 and 5 rows, the last ones to evaluate."""
    root = tmp_path_factory.mktemp("pictures")
    write_images(root / "train" / "0.parquet", 20)
    write_images(root / "train" / "1.parquet", 11, first=20)
    write_images(root / "test" / "0.parquet", 5)
    s3.put_folder(root, "pictures")
    return root


@pytest.fixture(autouse=True)
def short_retries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shard_module, "RETRY_S", (0.01, 0.01))


def test_paths_and_uris_are_opened_and_written_back():
    assert below("/a/b", "c d") == "/a/b/c d"
    assert below("s3://b/a?region=x", "c d") == "s3://b/a/c%20d?region=x"
    for uri, path in (
        ("/a/b c.parquet", "/a/b c.parquet"),
        ("file:///a/b%20c", "/a/b c"),
        ("file:///", "/"),
        ("s3://bucket?region=x", "bucket"),
        ("s3://bucket/?region=x", "bucket"),
        ("s3://bucket/a%20b/c%2Bd/?region=x", "bucket/a b/c+d"),
        ("s3://key:secret@bucket/a?region=x", "bucket/a"),
        ("memory://a/b c", "/a/b c"),
    ):
        fs, found = open_uri(uri)
        assert found == path
        if "://" in uri and not uri.startswith("file"):
            beside = uri_beside(uri, f"{path}/x y?z")
            assert open_uri(beside)[1] == f"{path}/x y?z"
            assert open_uri(beside)[0].equals(fs)
    assert "key:secret@" in uri_beside("s3://key:secret@bucket/a?region=x", "bucket/b")


def test_an_unknown_scheme_or_a_uri_that_names_nothing_is_a_config_error():
    for uri, named in (
        (f"foo://user:{SECRET}@bucket/x", "foo://bucket/x"),
        ("s3://", "s3://"),
        ("file://box/a/b", "file:///a/b"),
    ):
        with pytest.raises(ConfigError, match=named) as caught:
            open_uri(uri)
        assert SECRET not in str(caught.value)
    for place in ("s3:/bucket/runs", "file:/tmp/x", "GS://b/x"):
        with pytest.raises(ConfigError):
            expanded(place)
    for place in ("runs", "/a/b:c/d", "torchvision:CIFAR10", "c:/x"):
        assert str(expanded(place)).endswith(place)


def test_fault_45_a_shareable_uri_keeps_the_location_but_not_the_credentials():
    endpoint = "endpoint_override=http%3A%2F%2F127.0.0.1%3A9000"
    hidden_in_endpoint = f"endpoint_override=http%3A%2F%2FKEY%3A{SECRET}%40host"
    for uri, reported in (
        (f"s3://b/x?{endpoint}&region=eu-1&scheme=http", None),
        ("/a/b@c?region=x", None),
        ("hf://datasets/a/b@main/x", None),
        ("abfs://container@account.dfs.core.windows.net/a@b", None),
        ("sftp://user@host/a", None),
        (f"sftp://user:{SECRET}@host:22/a", "sftp://host:22/a"),
        (f"sftp://user:{SECRET}@host/a@b", "sftp://***"),
        (f"s3://{SECRET}@b/x@y", "s3://b/x@y"),
        (f"s3://KEY:{SECRET}@b/x?secret_key={SECRET}&region=eu#{SECRET}", "s3://b/x?region=eu"),
        (f"s3://b/x?{hidden_in_endpoint}&region=eu", "s3://b/x?region=eu"),
        (f"s3://b/x?endpoint_override=KEY:{SECRET}@host&region=eu", "s3://***"),
        (f"s3://KEY:{SECRET}?region=x@b/x", "s3://***"),
    ):
        assert shareable(uri) == (reported or uri)
        assert shareable(shareable(uri)) == shareable(uri)
    assert without_secrets("hf://datasets/a/b@main/x?y") == "hf://datasets/a/b@main/x"
    uri = f"s3://KEY:{SECRET}/more@bucket/folder/x?token=se%2Fcret&region=eu"
    for text, reason in (
        *((text, "ValueError") for text in (uri, f"port {SECRET}", "no se/cret", "no se%2Fcret")),
        ("bucket/folder/x is cut off.\nmore", "bucket/folder/x is cut off"),
    ):
        assert reason_of(uri, ValueError(text)) == reason


def names(found: Any) -> list[str]:
    assert found is not None
    return [without_secrets(path).partition("bucket/")[2] for path in found.paths]


def test_a_folder_file_or_pattern_of_a_store_is_located_as_on_disk(s3: S3, pictures: Path):
    train_files = ["pictures/train/0.parquet", "pictures/train/1.parquet"]
    for path, evaluation, train in (
        ("pictures", None, train_files),
        ("pictures/*/0.parquet", None, train_files[:1]),
        ("pictures/train/0.parquet", s3.uri("pictures/test"), train_files[:1]),
    ):
        s3.requests()
        found = located(s3.uri(path), evaluation)
        assert [*map(names, found)] == [train, ["pictures/test/0.parquet"]]
        asked = [request.query for request in s3.requests()]
        if path == "pictures":  # listed once
            assert len([q for q in asked if "list-type" in q and "max-keys=1000" in q]) == 1
    assert names(located(s3.uri("**/train/[01].parquet"), None)[0]) == train_files


def test_fault_17_missing_store_objects_are_named_without_secrets(s3: S3, pictures: Path):
    s3.put("texts/readme.txt", b"no pictures")
    for path in ("nothing", "pictures/*.parquet", "pictures/*est/*.parquet", "texts"):
        with pytest.raises(DataError) as caught:
            located(s3.uri(path).replace("s3://", f"s3://KEY:{SECRET}@"), None)
        assert f"data.source = 's3://bucket/{path}'" in str(caught.value)
        for error in (caught.value, caught.value.__context__):
            assert SECRET not in str(error)
            assert "endpoint" not in str(error)


def test_a_store_gives_the_same_rows_and_fingerprint_as_the_disk(s3: S3, pictures: Path):
    here, there = (opened(*located(p, None)[0].paths) for p in (str(pictures), s3.uri("pictures")))
    assert all_of(there) == all_of(here) == [(png(i), i) for i in range(31)]
    assert there.fingerprint() == here.fingerprint()
    assert there.where(20) == "s3://bucket/pictures/train/1.parquet, row group 0, row 0"
    there.close()


def test_each_row_group_is_fetched_once_and_nothing_else(s3: S3, tmp_path: Path):
    columns = {
        "waste": ["waste" * 10_000] * 12,
        "image": hugging_face([png(i) for i in range(12)], ["x" * 9000] * 12),
        "more": ["waste" * 10_000] * 12,
        "label": list(range(12)),
    }
    path = write_parquet(tmp_path / "x.parquet", columns, use_dictionary=False, compression="none")
    s3.put("once.parquet", Path(path).read_bytes())
    source = opened(s3.uri("once.parquet"))
    s3.requests()
    order = np.arange(12).reshape(3, 4).T.reshape(-1)  # in turns from each row group
    source.ahead(order)
    for start in range(0, 12, 3):
        source.read(order[start : start + 3])
    source.close()
    ranges = [[*map(int, request.range[6:].split("-"))] for request in s3.gets()]
    assert len(ranges) == 3 * 2  # three row groups, of two columns
    assert sum(last - first for first, last in ranges) < 10_000, "no waste"


def test_a_temporarily_failing_store_is_retried_and_a_failing_one_is_named(s3: S3, pictures: Path):
    source = opened(s3.uri("pictures/train/0.parquet"))
    s3.fail(3)
    assert len(all_of(source)) == 20
    s3.put("gone.parquet", (pictures / "test" / "0.parquet").read_bytes())
    source = opened(s3.uri("gone.parquet"))
    s3.delete("gone.parquet")
    with pytest.raises(DataError, match=r"^s3://bucket/gone\.parquet, row group 1: cannot be read"):
        source.read(np.array([4]))
    with pytest.raises(DataError, match=r"s3://bucket/gone\.parquet: no such file"):
        opened(s3.uri("gone.parquet"))
    source.close()
