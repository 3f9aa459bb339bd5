"""The user's code on other machines: what is copied, and when."""

from __future__ import annotations

import os
import sys
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from raytrain_ddp.errors import PreflightError
from raytrain_ddp.launcher import code_shipping
from raytrain_ddp.launcher.code_shipping import provide_folders
from raytrain_ddp.launcher.rank_environment import Placement, assign_ranks


def written(folder: Path, *names: str) -> Path:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(name)
    return folder


def in_folder(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    monkeypatch.chdir(folder)
    (folder / "script.py").touch()


def names_in(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if not path.is_dir()}


def test_only_the_users_code_is_copied_from_a_folder(tmp_path: Path):
    left_out = [".git/x", "lib/__pycache__/n.pyc", "env/pyvenv.cfg", "runs/1/y.py"]
    here = written(tmp_path / "here", "train.py", "lib/net.py", "data.txt", *left_out)
    written(here, "lib/runs/z.py", "wandb/__init__.py")  # packages of these names
    (here / "results").mkdir()
    code_shipping.unpack_folder(code_shipping.pack_folder(here), there := tmp_path / "there")
    kept = {"train.py", "lib/net.py", "data.txt", "lib/runs/z.py", "wandb/__init__.py"}
    assert names_in(there) == kept
    assert (there / "results").is_dir()


def test_links_are_copied_as_their_targets(tmp_path: Path):
    here = written(tmp_path / "here", "lib/net.py")
    written(tmp_path, "shared/config.yaml", "dataset/1.png")
    (here / "config.yaml").symlink_to("../shared/config.yaml")
    (here / "data").symlink_to(tmp_path / "dataset")
    (here / "same").symlink_to(here / "lib")
    (here / "self").symlink_to(here)
    (here / "gone").symlink_to("/no/such/place")
    os.mkfifo(here / "pipe")
    archive = code_shipping.pack_folder(here)
    there = written(tmp_path / "there", "config.yaml")
    (there / "lib").symlink_to(tmp_path / "dataset")  # of an earlier copy
    for _ in range(2):
        code_shipping.unpack_folder(archive, there)
    assert {name for name in names_in(there) if not name.startswith("self/")} >= {"lib/net.py"}
    assert not (there / "config.yaml").is_symlink()
    assert (there / "config.yaml").read_text() == "shared/config.yaml"
    assert (there / "data").readlink() == tmp_path / "dataset"
    assert [str((there / name).readlink()) for name in ("same", "self")] == ["lib", "."]
    assert not (there / "lib").is_symlink()
    assert sorted(path.name for path in (tmp_path / "dataset").iterdir()) == ["1.png"]
    assert (there / "gone").is_symlink()
    assert not (there / "pipe").exists()


class OtherMachine:
    """Another machine: the responses of its agents."""

    def __init__(self, shared: bool = False) -> None:
        self.shared, self.asked = shared, list[str]()

    def __call__(self, workers: Sequence[Any], method: str, *args: Any) -> list[Any]:
        self.asked.append(method)
        if method == "exists":
            return [self.shared and Path(args[0]).exists() for _ in workers]
        return ["/copy" for _ in workers]


def provided(elsewhere: OtherMachine, ship: str = "auto") -> dict[int, str]:
    others = assign_ranks([Placement(0, "b", "10.0.0.10", "w10")])
    return provide_folders(ship, others, elsewhere)


@pytest.fixture
def putting(monkeypatch: pytest.MonkeyPatch) -> None:
    ray = types.ModuleType("ray")
    ray.put = lambda value: value
    monkeypatch.setitem(sys.modules, "ray", ray)


def test_a_folder_is_copied_unless_it_is_shared(tmp_path: Path, monkeypatch, putting: None):
    in_folder(monkeypatch, tmp_path)
    assert provided(seen := OtherMachine(shared=True)) == {}
    assert seen.asked == ["exists"]
    assert names_in(tmp_path) == {"script.py"}
    assert provided(OtherMachine(shared=True), ship="always") == {0: "/copy"}
    assert provided(OtherMachine()) == {0: "/copy"}
    assert provided(OtherMachine(), ship="never") == {}


def test_paths_in_the_copied_folder_lead_to_the_copy(tmp_path: Path):
    script = str(tmp_path / "train.py")
    assert code_shipping.path_in_copy(script, tmp_path, "/copy") == "/copy/train.py"
    assert code_shipping.path_in_copy(script, tmp_path / "jobs", "/copy") == script


def test_a_large_folder_is_refused(tmp_path: Path):
    with (tmp_path / "data.bin").open("wb") as file:
        file.truncate(101 * 2**20)
    with pytest.raises(PreflightError, match="--ship never"):
        code_shipping.pack_folder(tmp_path)
