"""Names that earlier versions had: each way of using one ends with what to use instead."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tomli_w
from processes import run_cli

from raytrain_ddp.checkpoint.manifest import Manifest
from raytrain_ddp.checkpoint.run_folder import checkpoint_store, config_of, run_storage
from raytrain_ddp.config.recipe import load, to_dict
from raytrain_ddp.config.train_config import TrainConfig
from raytrain_ddp.config.withdrawn import DECIDING, DEFAULTS, WITHDRAWN
from raytrain_ddp.driver.run_naming import find_run

OTHERS = {
    "ddp.powersgd_rank": 2,
    "ddp.shard_optimizer": True,
    "eval.asynchronous": True,
    "model.unfreeze_epoch": 2,
    "scaling.on_divergence": "resync",
}


def field_of(name: str) -> tuple[str, Any]:
    """(the field, a value that it no longer has)."""
    field, _, value = name.partition("=")
    return field, value or OTHERS[field]


def tables_of(config: TrainConfig, *fields: tuple[str, Any]) -> dict[str, Any]:
    """The tables of a recipe with these fields besides."""
    tables = {k: v for k, v in to_dict(config).items() if v is not None}
    for field, value in fields:
        section, _, last = field.rpartition(".")
        (tables[section] if section else tables)[last] = value
    return tables


def write(file: Path, *fields: tuple[str, Any]) -> str:
    """A config.toml."""
    file.parent.mkdir(parents=True, exist_ok=True)
    storage = str(file.parents[1])
    tables = tables_of(TrainConfig(name=file.parent.name, storage=storage), *fields)
    sections = {k: without_none(v) if isinstance(v, dict) else v for k, v in tables.items()}
    file.write_text(tomli_w.dumps(sections))
    return str(file)


def without_none(table: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in table.items() if value is not None}


def begun(folder: Path, *fields: tuple[str, Any]) -> TrainConfig:
    """The config of a run that has a checkpoint with these fields besides."""
    config = TrainConfig(name="begun", storage=str(folder))
    store = checkpoint_store(run_storage(config))
    store.claim(None, {})
    store.commit(Manifest(3, 0, 1, 1, tables_of(config, *fields), ""), {"state.json": b"{}"})
    return config


def ways(name: str, folder: Path) -> list[list[str]]:
    """Commands that use it."""
    if name == "allow_change":
        return [["--resume-from", "x", "--allow-change", "optim.lr"], ["--allow-change=optim.lr"]]
    if "." not in name:
        return [[name], [name, "--describe"]]
    field, value = field_of(name)
    recipe = write(folder / "recipes" / "mine.toml", (field, value))
    config = write(folder / "runs" / "old" / "config.toml", (field, value))
    word = field.replace("_", "-")
    found = [[f"--{word}", str(value)], [f"--{field}={value}"]]
    found += [[recipe], [config], [config, "--dry-run"]]
    if value is True:
        section, _, last = word.rpartition(".")
        found += [[f"--{word}"], [f"--{section}.no-{last}"], [f"--{field}", "false"]]
    if field not in DEFAULTS.keys() - DECIDING:
        begun(folder, (field, value))
        found.append(["--name", "begun", "--storage", str(folder)])
    return found


@pytest.mark.parametrize("name", WITHDRAWN)
def test_a_withdrawn_name_is_refused_in_one_line_with_what_to_use_instead(
    name: str, tmp_path: Path
):
    for command in ways(name, tmp_path):
        answer = run_cli("fit", *command, "--local", cwd=tmp_path)
        assert answer.status == 2, command
        assert name.partition("=")[2] in answer.err
        assert answer.err.endswith(f"{WITHDRAWN[name]}.\n")
        assert answer.err.count("\n") == 1


def test_a_space_of_a_sweep_is_refused_alike(tmp_path: Path):
    answer = run_cli("sweep", "digits", "--space", "ddp.powersgd-rank=1,2", cwd=tmp_path)
    assert answer.status == 2
    assert answer.err.endswith(f"{WITHDRAWN['ddp.powersgd_rank']}.\n")


def test_files_and_runs_with_the_defaults_of_withdrawn_fields_are_used(tmp_path: Path):
    written = write(tmp_path / "runs" / "old" / "config.toml", *DEFAULTS.items())
    assert load(written) == TrainConfig(name="old", storage=str(tmp_path / "runs"))
    config = begun(tmp_path, *DEFAULTS.items())
    assert find_run(config, None).manifest is not None


@pytest.mark.parametrize("name", OTHERS.keys() - DECIDING)
def test_a_run_goes_on_without_a_withdrawn_field_that_did_not_decide_its_result(
    name: str, tmp_path: Path
):
    config = begun(tmp_path, (name, OTHERS[name]))
    assert find_run(config, None).manifest is not None
    assert find_run(TrainConfig(storage=str(tmp_path)), "begun").config.name == "begun"


def test_the_model_of_a_run_with_withdrawn_fields_can_be_used(tmp_path: Path):
    config = begun(tmp_path, ("ddp.compression", "powersgd"), *OTHERS.items())
    store = checkpoint_store(run_storage(config))
    assert config_of(store.open(store.names()[0])) == config
