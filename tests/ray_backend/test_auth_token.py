"""Ray's token file is private to the user before Ray reads it."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from raytrain_ddp.ray_backend.ray_start import use_token


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("RAY_AUTH_MODE", "token")  # and is restored afterward
    for name in ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_fault_62_a_token_is_private_from_its_creation_and_again_if_others_could_read_it(
    home: Path,
):
    before = os.umask(0o000)
    try:
        use_token(embedded=True)
    finally:
        os.umask(before)
    file = home / ".ray" / "auth_token"
    assert (mode(file), mode(file.parent)) == (0o600, 0o700)
    token = file.read_text()
    assert len(token) == 64
    reported: list[str] = []
    use_token(True, reported.append)
    assert reported == []
    for bits, embedded in ((0o640, True), (0o604, False)):
        file.chmod(bits)
        file.parent.chmod(0o777)
        use_token(embedded, reported.append)
        assert (mode(file), mode(file.parent)) == (0o600, 0o755)
        assert f"mode {bits:03o}" in reported.pop()
        assert reported == []
    assert file.read_text() == token


def test_without_token_authentication_no_token_is_created(
    home: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    use_token(embedded=True)
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    monkeypatch.setenv("RAY_AUTH_TOKEN", "a" * 64)
    use_token(embedded=True)
    assert not (home / ".ray").exists()
