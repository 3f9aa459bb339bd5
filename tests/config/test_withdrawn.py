"""Names that earlier versions had: each way of using one ends with what to use instead."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tomli_w
import torch
from tiny import TinyTask

from raytrain_ddp.__main__ import main
from raytrain_ddp.checkpoint.manifest import Manifest
from raytrain_ddp.checkpoint.run_folder import checkpoint_store, run_storage
from raytrain_ddp.config.recipe import to_dict
from raytrain_ddp.config.train_config import TrainConfig
from raytrain_ddp.config.withdrawn import DECIDING, DEFAULTS, WITHDRAWN
from raytrain_ddp.driver.dry_run import dry_run
from raytrain_ddp.driver.run_naming import find_run
from raytrain_ddp.errors import ConfigError, TaskError
from raytrain_ddp.fit import parse_fit
from raytrain_ddp.tasks.task_loading import check_task
from raytrain_ddp.training.optimizer.task_optimizer import optimizer_of

OTHERS = {
    "data.cache": "/x",
    "data.cache_gib": 3.0,
    "ddp.powersgd_rank": 2,
    "ddp.shard_optimizer": True,
    "eval.asynchronous": True,
    "model.unfreeze_epoch": 2,
    "scaling.max_preemptions": 2,
    "scaling.on_divergence": "resync",
    "scaling.spares": 2,
}


def field_of(name: str) -> tuple[str, Any]:
    """(the field, a value that it no longer has)."""
    field, _, value = name.partition("=")
    return field, value or OTHERS[field]


def tables_of(config: TrainConfig, *fields: tuple[str, Any]) -> dict[str, Any]:
    """The tables of a recipe with these fields besides."""
    tables = without_none(to_dict(config))
    for field, value in fields:
        section, _, last = field.rpartition(".")
        (tables[section] if section else tables)[last] = value
    return tables


def write(file: Path, *fields: tuple[str, Any]) -> str:
    """A config.toml."""
    file.parent.mkdir(parents=True, exist_ok=True)
    config = TrainConfig(name=file.parent.name, storage=str(file.parents[1]))
    file.write_text(tomli_w.dumps(tables_of(config, *fields)))
    return str(file)


def without_none(table: dict[str, Any]) -> dict[str, Any]:
    inner = {k: without_none(v) if isinstance(v, dict) else v for k, v in table.items()}
    return {name: value for name, value in inner.items() if value is not None}


def begun(folder: Path, *fields: tuple[str, Any]) -> TrainConfig:
    """The config of a run that has a checkpoint with these fields besides."""
    config = TrainConfig(name="begun", storage=str(folder))
    store = checkpoint_store(run_storage(config))
    store.claim(None, {})
    store.commit(Manifest(3, 0, 1, 1, tables_of(config, *fields), ""), {"state.json": b"{}"})
    return config


def ways(name: str, folder: Path) -> list[list[str]]:
    """Command lines of `fit` that use it."""
    if name == "allow_change":
        return [["--resume-from", "x", "--allow-change", "optim.lr"], ["--allow-change=optim.lr"]]
    if "." not in name and "=" not in name:
        return [[name], [name, "--describe"]]
    field, value = field_of(name)
    recipe = write(folder / "recipes" / "mine.toml", (field, value))
    config = write(folder / "runs" / "old" / "config.toml", (field, value))
    word = field.replace("_", "-")
    section, _, last = word.rpartition(".")
    found = [[f"--{word}", str(value)], [f"--{field}={value}"], [recipe], [config, "--dry-run"]]
    return [*found, [f"--{word}"], [f"--{section}.no-{last}"]] if value is True else found


TOOLS = {
    "emit=ray-up": "fit --emit ray-up",
    "format=hf": "export r --format hf",
    "format=timm": "export r --format timm",
    "format=torchscript": "export r --format torchscript",
    "license": "export r --license mit",
    "node_kills": "chaos digits --node-kills 1",
    "nodes": "chaos digits --nodes 2",
    "per_trial": "sweep digits --space optim.lr=1,2 --per-trial cpus=4",
    "print_completion": "--print-completion bash",
    "scheduler": "sweep digits --space optim.lr=1,2 --scheduler asha",
    "search=grid": "sweep digits --space optim.lr=1,2 --search grid",
    "stats_images": "convert a b --stats-images 5",
    "tta": "predict r --tta flip --out p.csv",
    "verify": "convert a b --verify",
    "watch": "watch runs",
}


def test_a_withdrawn_name_of_a_tool_is_refused_with_what_to_use_instead():
    for name, line in TOOLS.items():
        with pytest.raises(ConfigError) as caught:
            main(line.split())
        assert str(caught.value).endswith(f"{WITHDRAWN[name]}."), line


def test_a_withdrawn_name_is_refused_with_what_to_use_instead(tmp_path: Path):
    for name, instead in WITHDRAWN.items() - {n: WITHDRAWN[n] for n in {*TOOLS, "turns"}}.items():
        for command in ways(name, tmp_path):
            with pytest.raises(ConfigError) as caught:
                dry_run(parse_fit([*command, "--local"]).config, local=True)
            assert str(caught.value).endswith(f"{instead}."), command


def test_a_task_with_several_optimizers_is_refused_with_what_to_use_instead(tmp_path: Path):
    class Turns(TinyTask):
        def turns(self, step: int) -> list[str]:
            return ["generator"]

    with pytest.raises(TaskError) as caught:
        check_task(Turns)
    assert WITHDRAWN["turns"] in str(caught.value)
    task = TinyTask(TrainConfig())
    task.optimizer = lambda model: {"all": torch.optim.SGD(model.parameters())}
    with pytest.raises(TaskError) as caught:
        optimizer_of(task, task.model(), TrainConfig())
    assert str(caught.value).endswith(f"{WITHDRAWN['turns']}.")


def test_a_run_goes_on_without_a_withdrawn_field_that_did_not_decide_its_result(tmp_path: Path):
    others = [{name: OTHERS[name]} for name in OTHERS.keys() - DECIDING]
    for number, fields in enumerate([DEFAULTS, *others]):
        config = begun(tmp_path / str(number), *fields.items())
        assert find_run(config, None).manifest is not None
        found = find_run(TrainConfig(storage=str(tmp_path / str(number))), "begun")
        assert found.config.name == "begun"
    for field in (("ddp.compression", "powersgd"), *((n, OTHERS[n]) for n in DECIDING)):
        decided = begun(tmp_path / field[0], field)
        with pytest.raises(ConfigError, match="withdrawn"):
            find_run(decided, None)
