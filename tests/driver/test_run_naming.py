"""The same command resumes its run, a different one gets a new run."""

from __future__ import annotations

import io
import os
import shutil
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from processes import Group, run_cli
from rich.console import Console
from tiny import tiny_config

from raytrain_ddp import fit_locally
from raytrain_ddp.checkpoint.run_folder import CONFIG_FILE, find_checkpoint, run_storage
from raytrain_ddp.checkpoint.storage import Storage
from raytrain_ddp.config.recipe import default_name, dumps
from raytrain_ddp.config.train_config import TrainConfig
from raytrain_ddp.driver.dry_run import dry_run
from raytrain_ddp.driver.preflight import check
from raytrain_ddp.driver.run_naming import CLAIM_FILE, find_run
from raytrain_ddp.driver.run_ownership import driven
from raytrain_ddp.errors import ConfigError, RunLockedError
from raytrain_ddp.fit import parse_fit
from raytrain_ddp.tools.display.progress_display import Display

TASK = f"{Path(__file__).parents[1] / 'tiny.py'}:TinyTask"


def unnamed(folder: Path | str, lr: float = 0.05, **changes: Any) -> TrainConfig:
    config = tiny_config(Path("x"), "x", task=TASK, epochs=1, **changes)
    optim = replace(config.optim, lr=lr)
    return replace(config, name=None, storage=str(folder), optim=optim)


def begin(config: TrainConfig, name: str) -> None:
    """A run that has begun but has no checkpoint yet."""
    run = run_storage(replace(config, name=name))
    run.mkdir()
    run.write_atomic(CONFIG_FILE, dumps(replace(config, name=name)).encode())


def named(config: TrainConfig, default: str | None = None) -> tuple[str | None, bool]:
    run = find_run(config, default)
    return run.config.name, run.is_new


def trained(config: TrainConfig) -> tuple[str, int, str, str]:
    """(name, step, status, output) of a run of this config."""
    shown = io.StringIO()
    result = fit_locally(config, display=Display(Console(file=shown, width=300), live=False))
    return Path(result.path).name, result.step, result.status, shown.getvalue()


def test_the_same_command_resumes_and_another_config_starts_a_new_run(tmp_path: Path):
    config = unnamed(tmp_path)
    steps = trained(config)[1]
    assert trained(config)[:3] == ("TinyTask", steps, "already complete")
    name, step, status, shown = trained(replace(config, optim=replace(config.optim, lr=0.1)))
    assert (name, step, status) == ("TinyTask-2", steps, "finished")
    assert "optim.lr 0.05 -> 0.1" in shown
    # Fields that may change, such as the number of epochs, do not make a different config.
    longer = replace(config, epochs=2, checkpoint=replace(config.checkpoint, keep_last=5))
    assert trained(longer)[:3] == ("TinyTask", 2 * steps, "finished")
    # With an explicit name, other configs are refused.
    with pytest.raises(ConfigError, match="seed  0 -> 2"):
        fit_locally(replace(config, name="TinyTask", seed=2))
    assert "TinyTask-3" in dry_run(replace(config, seed=2))
    assert sorted(os.listdir(tmp_path)) == ["TinyTask", "TinyTask-2"]
    assert not list(tmp_path.glob(f"*/{CLAIM_FILE}"))


def test_the_first_run_with_the_config_or_the_first_free_name_is_chosen(tmp_path: Path):
    config = unnamed(tmp_path)
    for number, lr in (("", 0.1), ("-2", 0.2), ("-3", 0.1), ("-10", 0.3)):
        begin(unnamed(tmp_path, lr), f"TinyTask{number}")
    for other in ("TinyTask-02", "TinyTask-1", "TinyTask-x", "TinyTask2", "MyTinyTask"):
        begin(config, other)
    assert named(config) == ("TinyTask-4", True)
    assert named(unnamed(tmp_path, 0.1)) == ("TinyTask", False)
    assert named(unnamed(tmp_path, 0.3)) == ("TinyTask-10", False)
    assert named(config, "other") == ("other", True)
    (tmp_path / "TinyTask" / CONFIG_FILE).write_text("torn = ")  # nothing identifies its run
    assert named(unnamed(tmp_path, 0.1)) == ("TinyTask-3", False)
    long = "x" * 128
    begin(unnamed(tmp_path, 0.1), long)
    assert named(config, long) == (f"{'x' * 120}-2", True)


def test_a_run_is_named_after_its_recipe_or_the_given_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """The name of a shipped recipe, or of a file without `name`, is only a prefix."""
    monkeypatch.chdir(tmp_path)
    for name in ("digits", "mine", "own"):
        begin(unnamed("runs"), name)
    Path("mine.toml").write_text("epochs = 3\n")
    Path("own.toml").write_text('name = "own"\n')
    for words, meant in {
        "": ("digits-2", True),
        "digits": ("digits-2", True),
        "mine.toml": ("mine-2", True),
        "own.toml": ("own", False),
        "mine.toml --name digits": ("digits", False),
    }.items():
        args = parse_fit(words.split())
        assert named(check(args.config), default_name(args.recipe)) == meant


def test_only_identical_simultaneous_commands_share_a_run_name(tmp_path: Path):
    """One of two identical ones exits with status 8, as always."""
    gate, done = (threading.Barrier(6, timeout=60) for _ in range(2))

    def start(lr: float) -> str | None:
        run = find_run(unnamed(tmp_path, lr))
        gate.wait()
        try:
            with driven(run, lambda _: None) as (run, _):
                done.wait()
                return run.config.name
        except RunLockedError:
            done.wait()
            return None

    rates = [0.1, 0.2, 0.3] * 2
    with ThreadPoolExecutor(6) as pool:
        names = list(pool.map(start, rates))
    held = {rate: name for rate, name in zip(rates, names, strict=True) if name}
    assert sorted(filter(None, names)) == sorted(map(str, held.values()))
    assert sorted(map(str, held.values())) == ["TinyTask", "TinyTask-2", "TinyTask-3"]


def fit_here(rank: int, size: int, config: TrainConfig) -> tuple[str, int]:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (("RANK", rank), ("WORLD_SIZE", size), ("LOCAL_RANK", rank)):
            patch.setenv(name, str(value))
        return trained(config)[:2]


def test_three_ranks_agree_on_a_new_run_and_resume_it(workers: Group, tmp_path: Path):
    begin(unnamed(tmp_path, 0.2), "TinyTask")
    config = unnamed(tmp_path, 0.1)
    first = workers(3, fit_here, config)
    assert {name for name, _ in first} == {"TinyTask-2"}
    longer = workers(3, fit_here, replace(config, epochs=2))
    assert longer == [("TinyTask-2", 2 * first[0][1])] * 3
    assert sorted(os.listdir(tmp_path)) == ["TinyTask", "TinyTask-2"]


SMALL = (
    *("--local", "--batch-size", "16", "--micro-batch", "8", "--log.no-tensorboard"),
    *("--data.image-size", "16"),
)
STEPS, SPLITS = 2, ("train", "val")  # of an epoch
NET = """
from torch import nn
def make(classes):
    return nn.Sequential(nn.Flatten(), nn.Linear(3 * 16 * 16, classes))
"""
OF_PROJECT = ("--data.source", "photos", "--model.name", "net.py:make")


def write_photos(root: Path, side: int = 16) -> None:
    for path in (f"{split}/{name}/{n}.bmp" for split in SPLITS for name in "ab" for n in range(16)):
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (side, side), (90, 80, 90)).save(root / path)


@pytest.fixture(scope="module")
def trained_project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with images, the code of a model, and a run, with paths relative to it."""
    folder = tmp_path_factory.mktemp("trained") / "project"
    write_photos(folder / "photos")
    (folder / "net.py").write_text(NET)
    done = run_cli("fit", *OF_PROJECT, *SMALL, "--epochs", "1", cwd=folder, warm=True)
    assert done.status == 0, done.err
    return folder


@pytest.fixture
def project(
    trained_project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Path]:
    """That folder, moved to where it has never been: as on another machine."""
    shutil.copytree(trained_project, tmp_path / "project")
    moved = trained_project.rename(trained_project.with_name("away"))
    monkeypatch.chdir(tmp_path / "project")
    yield tmp_path / "project"
    moved.rename(trained_project)


def meant(*words: str) -> tuple[str, int]:
    """(folder, committed step) of the run that ``fit WORDS`` would train."""
    args = parse_fit(words)
    run = find_run(check(args.config), default_name(args.recipe))
    return str(run.folder), run.manifest.step if run.manifest is not None else 0


def test_a_moved_project_goes_on_and_is_evaluated_from_any_folder(
    project: Path, trained_project: Path
):
    def on(*words: str, cwd: Path) -> None:
        done = run_cli(*words, cwd=cwd, warm=True)
        assert done.status == 0, done.err

    on("fit", *OF_PROJECT, *SMALL, "--name", "whole", "--epochs", "2", cwd=project)
    (project / "runs/photos").rename(project / "runs/renamed")
    run, elsewhere = str(project / "runs/renamed"), project.parent
    on("fit", run, "--local", "--epochs", "2", cwd=elsewhere)
    whole, renamed = (find_checkpoint(f"runs/{name}", "last") for name in ("whole", "renamed"))
    assert renamed.manifest.step == whole.manifest.step == 2 * STEPS
    assert renamed.read("model.safetensors") == whole.read("model.safetensors")
    on("evaluate", run, cwd=elsewhere)
    assert sorted(os.listdir(project / "runs")) == ["renamed", "whole"]
    # Data of the same sizes are not the same while the former ones are still there.
    (project / "runs/whole").rename(project / "runs/photos")
    shutil.copytree(project / "photos", project / "twin/photos")
    words = ("--data.source", "twin/photos", *OF_PROJECT[2:], *SMALL)
    assert meant(*words) == (f"{project}/runs/photos-2", 0)


def test_the_spelling_of_a_path_does_not_make_another_run(
    project: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("HOME", str(project))
    run = str(project / "runs/photos")
    for form in ("{}", "{}/", "{}/config.toml", "../project/{}", f"{project}/{{}}"):
        assert meant(form.format("runs/photos"), *SMALL, "--epochs", "2") == (run, STEPS)
    Path("link").symlink_to("photos")
    spellings = ["photos", "photos/", "../project/photos", "runs/../photos", "~/photos", "link"]
    for spelling in (*spellings, f"{project}/photos", f"file://{project}/photos"):
        words = ("--data.source", spelling, *OF_PROJECT[2:], *SMALL)
        assert meant(*words, "--name", "photos") == (run, STEPS)


def test_data_that_moved_are_the_same_and_other_data_are_not(project: Path):
    words = (*OF_PROJECT[2:], *SMALL)
    run = str(project / "runs/photos")
    Path("big").mkdir()
    Path("photos").rename("big/photos")
    assert meant("--data.source", "big/photos", *words, "--name", "photos") == (run, STEPS)
    assert meant("--data.source", "big/photos", *words) == (f"{run}-2", 0)  # without a name
    assert meant("runs/photos", "--data.source", "big/photos", *SMALL) == (run, STEPS)
    write_photos(Path("more/photos"), side=18)
    assert meant("--data.source", "more/photos", *words) == (f"{run}-2", 0)
    with pytest.raises(ConfigError, match=r"data\.source"):
        meant("runs/photos", "--data.source", "more/photos", *SMALL)


def test_the_name_of_another_users_run_is_not_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "TinyTask").mkdir()
    read = Storage.read

    def of_another(storage: Storage, name: str) -> bytes:
        if str(storage).endswith("TinyTask"):
            raise PermissionError
        return read(storage, name)

    monkeypatch.setattr(Storage, "read", of_another)
    assert named(unnamed(tmp_path)) == ("TinyTask-2", True)
