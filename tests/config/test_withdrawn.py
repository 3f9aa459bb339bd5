"""Names that earlier versions had: each way of using one ends with what to use instead."""

from __future__ import annotations

from pathlib import Path

import pytest
from processes import run_cli

from raytrain_ddp.config.recipe import dumps
from raytrain_ddp.config.train_config import TrainConfig
from raytrain_ddp.config.withdrawn import WITHDRAWN


@pytest.mark.parametrize("name", WITHDRAWN)
def test_a_withdrawn_name_is_refused_in_one_line_with_what_to_use_instead(
    name: str, tmp_path: Path
):
    recipe, begun = tmp_path / "mine.toml", tmp_path / "runs" / "old" / "config.toml"
    begun.parent.mkdir(parents=True)
    commands = [[name], [name, "--describe"]]
    if ":" in name:  # a task
        recipe.write_text(f"epochs = 3\ntask = {name!r}\n")
        begun.write_text(dumps(TrainConfig(name="old", task=name)))
        commands = [["--task", name], [str(recipe)], [str(begun)], [str(begun), "--dry-run"]]
    for command in commands:
        answer = run_cli("fit", *command, cwd=tmp_path)
        assert answer.status == 2
        assert name in answer.err
        assert f"{WITHDRAWN[name]}.\n" in answer.err
        assert answer.err.count("\n") == 1
