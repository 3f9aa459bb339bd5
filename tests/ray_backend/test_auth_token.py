"""Ray's token file is private to the user before Ray reads it."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from raytrain_ddp.errors import PreflightError
from raytrain_ddp.ray_backend.auth_token import use_token


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("RAY_AUTH_MODE", "token")  # and is restored afterward
    for name in ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def written(path: Path, bits: int, folder: int = 0o755) -> Path:
    path.parent.mkdir(exist_ok=True)
    path.write_text("a" * 64)
    path.chmod(bits)
    path.parent.chmod(folder)
    return path


@pytest.mark.parametrize("umask", [0o000, 0o077])
def test_a_token_is_created_before_ray_starts_and_is_private_to_the_user(home: Path, umask: int):
    before = os.umask(umask)
    try:
        use_token(embedded=True)
    finally:
        os.umask(before)
    file = home / ".ray" / "auth_token"
    assert (mode(file), mode(file.parent)) == (0o600, 0o700)
    token = file.read_text()
    assert len(token) == 64
    use_token(embedded=True)
    assert file.read_text() == token


@pytest.mark.parametrize(("bits", "embedded"), [(0o640, True), (0o604, False), (0o777, True)])
def test_fault_62_a_token_file_readable_by_others_is_made_private_and_reported(
    home: Path, bits: int, embedded: bool
):
    file = written(home / ".ray" / "auth_token", bits, folder=0o777)
    reported: list[str] = []
    use_token(embedded, reported.append)
    assert (mode(file), mode(file.parent)) == (0o600, 0o755)
    assert len(reported) == 1
    assert f"{file} (mode {bits:03o})" in reported[0]
    use_token(embedded, reported.append)
    assert len(reported) == 1


def test_fault_62_a_token_of_another_user_is_refused(home: Path, monkeypatch: pytest.MonkeyPatch):
    file = written(home / ".ray" / "auth_token", 0o600)
    if file.stat().st_uid == 0:
        os.chown(file, 12345, 12345)
    own = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: own + 1)
    with pytest.raises(PreflightError):
        use_token(embedded=True)


def test_fault_62_permissions_that_cannot_be_fixed_are_refused_for_an_embedded_ray(
    home: Path, monkeypatch: pytest.MonkeyPatch
):
    """Those of a mounted secret are the cluster's responsibility."""
    written(home / ".ray" / "auth_token", 0o644)

    def read_only(*_: object) -> None:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(Path, "chmod", read_only)
    with pytest.raises(PreflightError, match="644"):
        use_token(embedded=True)
    use_token(embedded=False)


def test_without_token_authentication_no_token_is_created(
    home: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    use_token(embedded=True)
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    monkeypatch.setenv("RAY_AUTH_TOKEN", "a" * 64)
    use_token(embedded=True)
    assert not (home / ".ray").exists()
