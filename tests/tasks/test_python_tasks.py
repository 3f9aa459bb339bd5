"""Tasks defined in Python, in a script, a cell, or a test; sent by value to workers."""

from __future__ import annotations

import os
import pickle
import re
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import warm_python
from processes import ENVIRONMENT, ROOT, run_cli
from tiny import TinyTask, tiny_config

from raytrain_ddp import TrainConfig, fit_locally
from raytrain_ddp.config.recipe import dumps, to_dict
from raytrain_ddp.config.train_config import TaskName
from raytrain_ddp.driver.preflight import check
from raytrain_ddp.driver.run_naming import find_run
from raytrain_ddp.errors import ConfigError, TaskError
from raytrain_ddp.ray_backend.task_transfer import pickled_task
from raytrain_ddp.tasks.task_loading import check_task_name, load_task, task_of

# A cell: no guard, no file to import, and no source if it is read from a pipe.
CELL = """
import sys
sys.path.insert(0, {tests!r})
import torch
from tiny import TinyTask
from raytrain_ddp import CheckpointConfig, LogConfig, TrainConfig, fit_locally

class Mine(TinyTask):
    def model(self):
        return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(16, 5))

log, checkpoint = LogConfig(tensorboard=False), CheckpointConfig(every_s=0.0)
result = fit_locally(TrainConfig(task={task}, epochs={epochs}, log=log, checkpoint=checkpoint))
print("RESULT", result.status, result.step)
"""


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("argparse.ArgumentParser().parse_args(['--wrong'])", "parser refuses"),
        ("sys.exit('usage')", "sys.exit"),
    ],
)
def test_a_module_that_ends_the_process_is_named(line: str, said: str, tmp_path: Path) -> None:
    file = tmp_path / "ends.py"
    file.write_text(f"import argparse, sys\n{line}\nclass Mine: pass\n")
    done = run_cli("fit", "--task", f"{file}:Mine", "--local", cwd=tmp_path)
    assert done.status == 1
    assert re.search(f"error: task = .*: {file}, line 2 ends the process .*{said}", done.err)


def test_the_users_modules_do_not_see_this_commands_arguments(tmp_path: Path) -> None:
    file = tmp_path / "sees.py"
    saved = "open(__file__[:-2] + 'txt', 'w').write(f'saw {sys.argv[1:]}')"
    file.write_text(f"import sys\n{saved}\nsys.exit()\nclass Mine: pass\n")
    done = run_cli("fit", "--task", f"{file}:Mine", "--local", cwd=tmp_path)
    assert (done.status, "saw []" in file.with_suffix(".txt").read_text()) == (1, True)


def test_commands_run_the_package_of_this_tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("PYTHONPATH", raising=False)
    saved = "open('place', 'w').write(raytrain_ddp.__file__)"
    (tmp_path / "own.py").write_text(f"import raytrain_ddp\n{saved}\nclass Mine: pass\n")
    run_cli("fit", "--task", "own.py:Mine", "--local", cwd=tmp_path)
    assert (tmp_path / "place").read_text() == str(ROOT / "raytrain_ddp" / "__init__.py")


@pytest.mark.parametrize(
    ("task", "from_pipe"),
    [
        ("Mine", False),
        ("Mine", True),
        ("'__main__:Mine'", True),
        ("Mine(TrainConfig())", False),
    ],
)
def test_a_task_defined_in_a_script_or_a_cell_is_trained_and_resumed(
    task: str, from_pipe: bool, tmp_path: Path
):
    for epochs in (1, 2):
        code = CELL.format(tests=str(Path(__file__).parents[1]), task=task, epochs=epochs)
        (tmp_path / "script.py").write_text(code)
        done = warm_python.run(
            [sys.executable, "-" if from_pipe else "script.py"],
            input=code if from_pipe else None,
            cwd=tmp_path,
            env={**os.environ, **ENVIRONMENT},
            capture_output=True,
            text=True,
            timeout=200,
        )
        assert f"RESULT finished {5 * epochs}" in done.stdout, done.stderr
        assert "run the same Python code again" in done.stdout
        assert "raytrain_ddp.fit" not in done.stdout
    config = tmp_path / "runs" / "Mine" / "config.toml"
    assert 'task = "__main__:Mine' in config.read_text()
    if task == "Mine" and not from_pipe:
        for argv in (["fit", str(config), "--local"], ["evaluate", "Mine"]):
            answer = run_cli(argv[0], *argv[1:], cwd=tmp_path, warm=True)
            assert answer.status == 2, answer.err
            assert "was defined in a script or notebook" in answer.err
            assert len(answer.err.splitlines()) == 1


def local_class() -> type[TinyTask]:
    class Local(TinyTask):
        unit = "things"

    return Local


def test_a_task_class_defined_in_a_test_is_trained_and_resumed(tmp_path: Path):
    config = tiny_config(tmp_path, "local", task=local_class(), epochs=1)
    assert fit_locally(config).step == 10
    assert fit_locally(config).status == "already complete"
    with pytest.raises(ConfigError, match="was defined in a script or notebook"):
        check_task_name(str(config.task))


def test_each_config_keeps_its_own_class_of_the_same_name():
    one, other = (TrainConfig(task=local_class()) for _ in range(2))
    assert one.task == other.task
    assert task_of(one) is not task_of(other)
    assert task_of(check(one)) is task_of(one)


def test_a_task_object_is_a_plain_name_in_files_and_other_processes():
    config = TrainConfig(task=TinyTask)
    assert config.task == "tiny:TinyTask"
    assert isinstance(config.task, TaskName)
    assert type(to_dict(config)["task"]) is str
    assert 'task = "tiny:TinyTask"' in dumps(config)
    assert type(pickle.loads(pickle.dumps(config)).task) is str
    assert find_run(check(config)).config.name == "TinyTask"
    given = TrainConfig(task=TinyTask(config))
    assert re.fullmatch(r"tiny:TinyTask\([0-9a-f]{8}\)", given.task)
    assert find_run(check(given)).config.name == "TinyTask"
    assert find_run(check(TrainConfig(task=local_class()))).config.name == "Local"


class Holder(TinyTask):
    def __init__(self, config: TrainConfig) -> None:
        super().__init__(config)
        self.lock = threading.Lock()


LOAD = "import pickle, sys; print(pickle.load(sys.stdin.buffer).unit)"


def test_a_task_class_is_sent_by_value_where_its_module_is_missing(tmp_path: Path):
    """As to Ray's workers: nothing in this folder can be imported there except `tiny`, its base."""
    pickled = pickled_task(TrainConfig(task=local_class()))
    assert pickled is not None
    there = tmp_path / "there"
    there.mkdir()
    (there / "tiny.py").symlink_to(Path(__file__).parents[1] / "tiny.py")
    environment = {**os.environ, **ENVIRONMENT, "PYTHONPATH": str(ROOT)}
    done = warm_python.run(
        [sys.executable, "-c", LOAD],
        input=pickled,
        cwd=there,
        env=environment,
        capture_output=True,
    )
    assert done.stdout == b"things\n", done.stderr.decode()
    assert pickled_task(TrainConfig()) is None
    with pytest.raises(TaskError, match="cannot be sent to the workers: TypeError"):
        pickled_task(TrainConfig(task=Holder(TrainConfig())))
    assert pickled_task(TrainConfig(task=Holder)) is not None  # each worker creates its own lock


def test_a_task_factory_is_accepted():
    def make(config: TrainConfig, rows: str) -> Any:
        return TinyTask(config, rows=int(rows))

    task = load_task(TrainConfig(task=make, task_options={"rows": "7"}))
    assert task.train_data().rows == 7
    with pytest.raises(TaskError, match="int has no model"):
        load_task(TrainConfig(task=lambda config: 5))
