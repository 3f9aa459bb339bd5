"""Which run a command refers to: the same command resumes its run, a different one gets a new
run."""

from __future__ import annotations

import os
import shutil
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from processes import Group, run_cli
from rich.console import Console
from tiny import tiny_config

from raytrain_ddp.checkpoint.lease import Lease
from raytrain_ddp.checkpoint.run_folder import (
    CONFIG_FILE,
    find_checkpoint,
    run_storage,
)
from raytrain_ddp.command_line import parse_fit
from raytrain_ddp.config.recipe import default_name, dumps
from raytrain_ddp.config.train_config import TrainConfig
from raytrain_ddp.display.progress_display import Display
from raytrain_ddp.driver.dry_run import dry_run
from raytrain_ddp.driver.fit_driver import fit_locally
from raytrain_ddp.driver.preflight import check
from raytrain_ddp.driver.run_naming import CLAIM_FILE, find_run, run_of_rank_0
from raytrain_ddp.driver.run_ownership import driven
from raytrain_ddp.errors import ConfigError, PreflightError, RunLockedError
from raytrain_ddp.events import Note
from raytrain_ddp.training.runtime import launched

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


class RecordingDisplay(Display):
    """Collects everything that is reported to it."""

    def __init__(self) -> None:
        super().__init__(Console(quiet=True), live=False)
        self.notes: list[str] = []

    def handle(self, event: object) -> None:
        if isinstance(event, Note):
            self.notes.append(event.text)


def trained(config: TrainConfig, **options: Any) -> tuple[str, int, str, list[str]]:
    """(name, step, status, notes) of a run of this config."""
    ears = RecordingDisplay()
    result = fit_locally(config, display=ears, **options)
    return Path(result.path).name, result.step, result.status, ears.notes


# ------------------------------------------------------------------ one command after another


def test_the_same_command_resumes_and_another_config_starts_a_new_run(tmp_path: Path):
    config = unnamed(tmp_path)
    steps = trained(config)[1]
    assert trained(config) == ("TinyTask", steps, "already complete", [])
    name, step, status, notes = trained(replace(config, optim=replace(config.optim, lr=0.1)))
    assert (name, step, status) == ("TinyTask-2", steps, "finished")
    assert "optim.lr 0.05 -> 0.1" in notes[0]
    # Fields that may change, such as the number of epochs, do not make a different config.
    longer = replace(config, epochs=2, checkpoint=replace(config.checkpoint, keep_last=5))
    assert trained(longer) == ("TinyTask", 2 * steps, "finished", [])
    again = replace(config, epochs=2, optim=replace(config.optim, lr=0.1))
    assert trained(again)[:3] == ("TinyTask-2", 2 * steps, "finished")
    assert trained(replace(config, seed=1))[0] == "TinyTask-3"
    assert sorted(os.listdir(tmp_path)) == ["TinyTask", "TinyTask-2", "TinyTask-3"]
    assert not list(tmp_path.glob(f"*/{CLAIM_FILE}"))
    # With an explicit name, other configs are refused.
    with pytest.raises(ConfigError, match="seed  0 -> 2"):
        fit_locally(replace(config, name="TinyTask", seed=2))
    assert "TinyTask-4" in dry_run(replace(config, seed=2))
    assert "TinyTask-3" in dry_run(replace(config, seed=1))
    assert sorted(os.listdir(tmp_path)) == ["TinyTask", "TinyTask-2", "TinyTask-3"]


# ------------------------------------------------------------------ which name


def test_the_first_run_with_the_config_or_the_first_free_name_is_chosen(tmp_path: Path):
    config = unnamed(tmp_path)
    assert named(config) == ("TinyTask", True)
    for number, lr in ((1, 0.1), (2, 0.2), (3, 0.1), (10, 0.3), (12, 0.4)):
        begin(unnamed(tmp_path, lr), "TinyTask" if number == 1 else f"TinyTask-{number}")
    for other in ("TinyTask-02", "TinyTask-1", "TinyTask-x", "TinyTask2", "MyTinyTask", "my"):
        begin(config, other)
    assert named(config) == ("TinyTask-4", True)
    assert named(unnamed(tmp_path, 0.1)) == ("TinyTask", False)
    assert named(unnamed(tmp_path, 0.2)) == ("TinyTask-2", False)
    assert named(unnamed(tmp_path, 0.3)) == ("TinyTask-10", False)
    assert named(config, "my") == ("my", False)
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
    expected = {
        (): ("digits-2", True),
        ("digits",): ("digits-2", True),
        ("mine.toml",): ("mine-2", True),
        ("own.toml",): ("own", False),
        ("mine.toml", "--name", "digits"): ("digits", False),
    }
    for words, meant in expected.items():
        args = parse_fit(words)
        assert named(check(args.config), default_name(args.recipe)) == meant
    printed = [dumps(parse_fit([recipe]).config) for recipe in ("digits", "own.toml", "mine.toml")]
    assert ["name =" in text.partition("[")[0] for text in printed] == [False, True, False]


# ------------------------------------------------------------------ commands at the same time


def quiet(_: object) -> None: ...


def test_only_identical_simultaneous_commands_share_a_run_name(tmp_path: Path):
    """One of two identical ones exits with status 8, as always."""
    gate, done = (threading.Barrier(6, timeout=60) for _ in range(2))

    def start(lr: float) -> str | int:
        run = find_run(unnamed(tmp_path, lr))
        gate.wait()
        try:
            with driven(run, quiet) as (run, _):
                done.wait()
                return str(run.config.name)
        except RunLockedError as error:
            done.wait()
            return error.exit_status

    rates = [0.1, 0.2, 0.3] * 2
    with ThreadPoolExecutor(6) as pool:
        names = list(pool.map(start, rates))
    held = [name for name in names if name != 8]
    assert sorted(map(str, held)) == ["TinyTask", "TinyTask-2", "TinyTask-3"]
    assert names.count(8) == 3
    assert len({rate for rate, name in zip(rates, names, strict=True) if name != 8}) == 3


@contextmanager
def in_thread(function: Any, *args: Any) -> Iterator[None]:
    thread = threading.Thread(target=function, args=args)
    thread.start()
    yield
    thread.join()


def test_a_command_waits_for_a_name_that_is_locked_but_not_yet_claimed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    first, second = unnamed(tmp_path, 0.1), unnamed(tmp_path, 0.2)
    run = find_run(second)
    assert run.config.name == "TinyTask"

    taken, refused, take = [], threading.Event(), Lease.take

    def noted(*given: Any) -> Any:
        try:
            return take(*given)
        except RunLockedError:
            refused.set()
            raise

    def drive() -> None:
        with driven(run, quiet) as (other, _):
            taken.append(other.config.name)

    with Lease.take(run.folder, quiet):
        monkeypatch.setattr(Lease, "take", noted)
        with in_thread(drive):
            assert refused.wait(60)
            begin(first, "TinyTask")
    assert taken == ["TinyTask-2"]


def test_a_name_used_by_another_run_meanwhile_is_not_taken(tmp_path: Path):
    run = find_run(unnamed(tmp_path, 0.1))
    begin(unnamed(tmp_path, 0.2), "TinyTask")  # and has ended: no process holds it
    with driven(run, quiet) as (taken, _):
        assert taken.config.name == "TinyTask-2"
        assert (tmp_path / "TinyTask-2" / CLAIM_FILE).exists()
    assert os.listdir(tmp_path) == ["TinyTask"], "a run that did not begin leaves no folder"


def test_other_ranks_use_the_run_of_rank_0(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    begin(unnamed(tmp_path, 0.2), "TinyTask")
    config = unnamed(tmp_path, 0.1)
    found: list[str | None] = []
    waits = in_thread(lambda: found.append(run_of_rank_0(config, 1).config.name))
    with waits, driven(find_run(config), quiet):
        while not found:
            time.sleep(0.01)
    assert found == ["TinyTask-2"]
    monkeypatch.setattr(launched, "LIMIT_S", 0.2)
    with pytest.raises(PreflightError):
        run_of_rank_0(unnamed(tmp_path, 0.3), 1)


def fit_here(rank: int, size: int, config: TrainConfig) -> tuple[str, int]:
    os.environ.update({"RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_RANK": str(rank)})
    try:
        result = fit_locally(config, display=RecordingDisplay())
    finally:
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
            del os.environ[name]
    return Path(result.path).name, result.step


def test_three_ranks_agree_on_a_new_run_and_resume_it(workers: Group, tmp_path: Path):
    begin(unnamed(tmp_path, 0.2), "TinyTask")
    config = unnamed(tmp_path, 0.1)
    first = workers(3, fit_here, config)
    assert {name for name, _ in first} == {"TinyTask-2"}
    longer = workers(3, fit_here, replace(config, epochs=2))
    assert longer == [("TinyTask-2", 2 * first[0][1])] * 3
    assert sorted(os.listdir(tmp_path)) == ["TinyTask", "TinyTask-2"]


# ------------------------------------------------------------------ the folder is the run

SMALL = (
    *("--local", "--batch-size", "16", "--micro-batch", "8", "--log.no-tensorboard"),
    *("--data.image-size", "16"),
)
STEPS = 2  # of an epoch
NET = """
from torch import nn
def make(classes, table=""):
    return nn.Sequential(nn.Flatten(), nn.Linear(3 * 16 * 16, classes))
"""
OF_PROJECT = ("--data.source", "photos", "--model.name", "net.py:make", "--model.args", "table",
              "tables/table.bin")  # fmt: skip


def write_photos(root: Path, side: int = 16) -> None:
    for split, count in (("train", 16), ("val", 4)):
        for name in ("cat", "dog"):
            (root / split / name).mkdir(parents=True)
            for number in range(count):
                image = Image.new("RGB", (side, side), (number * 9, 80, 90))
                image.save(root / split / name / f"{number}.bmp")


@pytest.fixture(scope="module")
def trained_project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with images, the code of a model, and a run, with paths relative to it."""
    folder = tmp_path_factory.mktemp("trained") / "project"
    write_photos(folder / "photos")
    (folder / "net.py").write_text(NET)
    (folder / "tables").mkdir()
    (folder / "tables/table.bin").write_text("1")
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


@pytest.mark.parametrize("place", ["runs/photos", "elsewhere/deep/Other.2"])
def test_a_run_is_its_folder_wherever_that_lies(project: Path, place: str):
    (project / place).parent.mkdir(parents=True, exist_ok=True)
    (project / "runs/photos").rename(project / place)
    # The project has moved, and its data and code with it. A run that is moved further needs them.
    words = OF_PROJECT if place.startswith("elsewhere") else ()
    for form in ("{}", "{}/", "{}/config.toml", "./{}", "../project/{}", f"{project}/{{}}"):
        meant_run = meant(form.format(place), *words, *SMALL, "--epochs", "2")
        assert meant_run == (str(project / place), STEPS)


def test_a_moved_project_goes_on_and_is_evaluated_from_any_folder(
    project: Path, trained_project: Path
):
    twice = run_cli("fit", *OF_PROJECT, *SMALL, "--name", "whole", "--epochs", "2", cwd=project,
                    warm=True)  # fmt: skip
    assert twice.status == 0, twice.err
    (project / "runs/photos").rename(project / "runs/renamed")
    run, elsewhere = str(project / "runs/renamed"), project.parent
    longer = run_cli("fit", run, "--local", "--epochs", "2", cwd=elsewhere, warm=True)
    assert longer.status == 0, longer.err
    whole, renamed = (find_checkpoint(f"runs/{name}", "last") for name in ("whole", "renamed"))
    assert renamed.manifest.step == whole.manifest.step == 2 * STEPS
    assert renamed.read("model.safetensors") == whole.read("model.safetensors")
    for command in (("evaluate", run), ("predict", run, "--out", "p.csv"), ("report", run)):
        done = run_cli(*command, cwd=elsewhere, warm=True)
        assert done.status == 0, done.err
        assert "Error" not in done.err
    assert sorted(os.listdir(project / "runs")) == ["renamed", "whole"]


# ------------------------------------------------------------------ paths


def test_the_spelling_of_a_path_does_not_make_another_run(
    project: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("HOME", str(project))
    Path("link").symlink_to("photos")
    spellings = ["photos", "photos/", "../project/photos", "tables/../photos", "~/photos", "link"]
    spellings += [f"{project}/photos", f"file://{project}/photos"]
    calls = [("--data.source", spelling, *OF_PROJECT[2:], *SMALL) for spelling in spellings]
    for words in calls:
        assert meant(*words, "--name", "photos") == (str(project / "runs/photos"), STEPS)
    # Its checkpoint has paths of where the project was.
    done = run_cli("fit", "photos", *SMALL, "--epochs", "2", cwd=project, warm=True)
    assert done.status == 0, done.err
    for words in calls:
        if "link" not in words:  # names another run
            assert meant(*words) == (str(project / "runs/photos"), 2 * STEPS)


def test_data_that_moved_are_the_same_and_other_data_are_not(project: Path):
    words = (*OF_PROJECT[2:], *SMALL)
    run = str(project / "runs/photos")
    Path("big").mkdir()
    Path("photos").rename("big/photos")
    assert meant("--data.source", "big/photos", *words) == (run, STEPS)
    assert meant("runs/photos", "--data.source", "big/photos", *SMALL) == (run, STEPS)
    write_photos(Path("more/photos"), side=18)
    assert meant("--data.source", "more/photos", *words) == (f"{run}-2", 0)
    with pytest.raises(ConfigError, match=r"data\.source"):
        meant("runs/photos", "--data.source", "more/photos", *SMALL)
    write_photos(Path("photos"))  # of the same sizes, while the former data are still there
    done = run_cli("fit", "photos", "--data.source", "big/photos", *SMALL, "--epochs", "2",
                   cwd=project, warm=True)  # fmt: skip
    assert done.status == 0, done.err
    assert meant("--data.source", "photos", *words) == (f"{run}-2", 0)
