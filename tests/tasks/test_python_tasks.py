"""Tasks defined in Python, in a script, a cell, or a test; sent by value to workers."""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path

import pytest
import warm_python
from processes import ENVIRONMENT, ROOT, run_cli
from tiny import TinyTask, tiny_config

from raytrain_ddp import TrainConfig, fit_locally
from raytrain_ddp.driver.preflight import check
from raytrain_ddp.errors import TaskError
from raytrain_ddp.ray_backend.task_transfer import pickled_task
from raytrain_ddp.tasks.task_loading import task_of

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

for epochs in (1, 2):
    log, checkpoint = LogConfig(tensorboard=False), CheckpointConfig(every_s=0.0)
    result = fit_locally(TrainConfig(task={task}, epochs=epochs, log=log, checkpoint=checkpoint))
    print("RESULT", result.status, result.step)
"""


@pytest.mark.parametrize(("task", "from_pipe"), [("Mine", False), ("'__main__:Mine'", True)])
def test_a_task_defined_in_a_script_or_a_cell_is_trained_and_resumed(
    task: str, from_pipe: bool, tmp_path: Path
):
    code = CELL.format(tests=str(Path(__file__).parents[1]), task=task)
    (tmp_path / "script.py").write_text(code)
    done = warm_python.run(
        [sys.executable, "-" if from_pipe else "script.py"],
        input=code if from_pipe else None,
        cwd=tmp_path,
        timeout=200,
    )
    said = [line for line in done.stdout.splitlines() if line.startswith("RESULT")]
    assert said == ["RESULT finished 5", "RESULT finished 10"], done.stderr
    config = tmp_path / "runs" / "Mine" / "config.toml"
    assert 'task = "__main__:Mine' in config.read_text()
    if not from_pipe:  # nothing can import it
        answer = run_cli("evaluate", "Mine", cwd=tmp_path, warm=True)
        assert (answer.status, len(answer.err.splitlines())) == (2, 1), answer.err


def local_class() -> type[TinyTask]:
    class Local(TinyTask):
        unit = "things"

    return Local


def test_a_class_or_an_object_is_trained_and_each_config_keeps_its_own(tmp_path: Path):
    for task in (local_class(), TinyTask(tiny_config(tmp_path, "given"))):
        config = tiny_config(tmp_path, type(task).__name__, task=task, epochs=1)
        assert fit_locally(config).step == 10
        assert fit_locally(config).status == "already complete"
    one, other = (TrainConfig(task=local_class()) for _ in range(2))
    assert one.task == other.task
    assert task_of(check(one)) is task_of(one) is not task_of(other)


class Holder(TinyTask):
    def __init__(self, config: TrainConfig) -> None:
        super().__init__(config)
        self.lock = threading.Lock()


LOAD = "import pickle, sys; print(pickle.load(sys.stdin.buffer).unit)"


def test_a_task_class_is_sent_by_value_where_its_module_is_missing(tmp_path: Path):
    """As to Ray's workers: nothing in this folder can be imported there except `tiny`, its base."""
    pytest.importorskip("ray")
    pickled = pickled_task(TrainConfig(task=local_class()))
    (tmp_path / "tiny.py").symlink_to(Path(__file__).parents[1] / "tiny.py")
    done = warm_python.run(
        [sys.executable, "-c", LOAD],
        input=pickled,
        cwd=tmp_path,
        env={**os.environ, **ENVIRONMENT, "PYTHONPATH": str(ROOT)},
        text=False,
    )
    assert done.stdout == b"things\n", done.stderr.decode()
    assert pickled_task(TrainConfig()) is None
    with pytest.raises(TaskError):
        pickled_task(TrainConfig(task=Holder(TrainConfig())))
    assert pickled_task(TrainConfig(task=Holder)) is not None  # each worker creates its own lock
