"""Which run a command refers to: the same command resumes its run, a different one gets a new
run."""

from __future__ import annotations

import os
import re
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from processes import Group, run_cli
from rich.console import Console
from s3 import s3_server
from tiny import tiny_config

from raytrain_ddp.checkpoint.lease import Lease
from raytrain_ddp.checkpoint.run_folder import CONFIG_FILE, run_storage
from raytrain_ddp.command_line import parse_fit
from raytrain_ddp.config.recipe import default_name, dumps
from raytrain_ddp.config.train_config import TrainConfig
from raytrain_ddp.display.progress_display import Display
from raytrain_ddp.driver.dry_run import dry_run
from raytrain_ddp.driver.fit_driver import fit_locally
from raytrain_ddp.driver.preflight import check
from raytrain_ddp.driver.run_naming import CLAIM_FILE, find_run, run_of_rank_0
from raytrain_ddp.driver.run_ownership import driven, owned
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
    assert notes == ["new run TinyTask-2: TinyTask has a different config (optim.lr 0.05 -> 0.1)"]
    # Fields that may change, such as the number of epochs, do not make a different config.
    longer = replace(config, epochs=2, checkpoint=replace(config.checkpoint, keep_last=5))
    assert trained(longer) == ("TinyTask", 2 * steps, "finished", [])
    again = replace(config, epochs=2, optim=replace(config.optim, lr=0.1))
    assert trained(again) == (
        "TinyTask-2", 2 * steps, "finished", ["continuing run TinyTask-2, which has this config"],
    )  # fmt: skip
    assert trained(replace(config, seed=1))[0] == "TinyTask-3"
    assert sorted(os.listdir(tmp_path)) == ["TinyTask", "TinyTask-2", "TinyTask-3"]
    assert not list(tmp_path.glob(f"*/{CLAIM_FILE}"))
    # With an explicit name, other configs are refused.
    with pytest.raises(ConfigError, match=r"(?s)seed  0 -> 2.*another --name, or none"):
        fit_locally(replace(config, name="TinyTask", seed=2))
    text = dry_run(replace(config, seed=2))
    assert "run            TinyTask-4 would be created (new run TinyTask-4: TinyTask has" in text
    assert f"TinyTask-3 is complete at step {steps}" in dry_run(replace(config, seed=1))
    assert sorted(os.listdir(tmp_path)) == ["TinyTask", "TinyTask-2", "TinyTask-3"]


def test_the_readmes_commands_work_in_sequence(tmp_path: Path):
    small = ("--local", "--model.dropout", "0", "--checkpoint.every-s", "0", "--log.no-tensorboard")
    first = run_cli("fit", *small, "--epochs", "1", cwd=tmp_path, warm=True)
    assert first.status == 0, first.err
    second = run_cli(
        "fit", "digits", *small, "--epochs", "1", "--optim.lr", "0.05", cwd=tmp_path, warm=True
    )
    assert second.status == 0, second.err
    said = "new run digits-2: digits has a different config (optim.lr 0.1 -> 0.05)"
    assert [line for line in second.out.splitlines() if "new run" in line] == [
        line for line in second.out.splitlines() if said in line
    ]
    assert said in second.out
    config = "runs/digits/config.toml"
    refused = run_cli("fit", config, *small, "--optim.lr", "0.05", cwd=tmp_path, warm=True)
    assert refused.status == 2
    assert re.search(r"optim\.lr +0\.1 -> 0\.05", refused.err)
    assert sorted(os.listdir(tmp_path / "runs")) == ["digits", "digits-2"]


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


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    with s3_server() as server:
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{server.port}")
        yield f"s3://{server.bucket}/runs"


def test_runs_in_a_bucket_are_named_the_same_way(bucket: str):
    config = unnamed(bucket)
    assert named(config, "digits") == ("digits", True)
    begin(config, "digits")
    other = unnamed(bucket, 0.1)
    assert named(config, "digits") == ("digits", False)
    run = find_run(other, "digits")
    with owned(run, lambda _: None):
        assert named(other, "digits") == ("digits-2", False)
    assert (run.config.name, named(other, "digits")) == ("digits-2", ("digits-2", True))


# ------------------------------------------------------------------ commands at the same time


def quiet(_: object) -> None: ...


def test_only_identical_simultaneous_commands_share_a_run_name(tmp_path: Path):
    """One of two identical ones exits with status 8, as always."""
    gate = threading.Barrier(6)
    done = threading.Barrier(6)

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


def test_a_command_waits_for_a_name_that_is_locked_but_not_yet_claimed(tmp_path: Path):
    first, second = unnamed(tmp_path, 0.1), unnamed(tmp_path, 0.2)
    run = find_run(second)
    assert run.config.name == "TinyTask"

    def claim() -> None:
        time.sleep(0.5)
        begin(first, "TinyTask")

    with Lease.take(run.folder, quiet), in_thread(claim), driven(run, quiet) as (taken, _):
        assert taken.config.name == "TinyTask-2"


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
    with in_thread(lambda: found.append(run_of_rank_0(config, 1).config.name)):
        time.sleep(0.3)
        assert not found, "before rank 0 has claimed it"
        with driven(find_run(config), quiet):
            while not found:
                time.sleep(0.01)
    assert found == ["TinyTask-2"]
    monkeypatch.setattr(launched, "LIMIT_S", 0.2)
    with pytest.raises(PreflightError, match=r"rank 0 did not start a run.*same command line"):
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
