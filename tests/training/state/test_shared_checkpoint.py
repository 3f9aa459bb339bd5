"""A checkpoint is read once per start: rank 0 reads it and sends it to the others. And a model that
does not match it because its code was edited."""

from __future__ import annotations

import errno
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from processes import Group
from tiny import bits, plain, run_tiny, tiny_config
from torch import nn

from raytrain_ddp.checkpoint.storage import Storage
from raytrain_ddp.errors import CheckpointError, ConfigError
from raytrain_ddp.training.state.shared_checkpoint import fill


def run_counted(rank: int, size: int, config: Mapping[str, Any]) -> Counter[str]:
    """How often this rank read each file of a checkpoint during the training."""
    read, counted = Storage.read_into, Counter[str]()

    def reading(self: Storage, name: str, *given: Any) -> str:
        counted[name] += 1
        return read(self, name, *given)

    with patch.object(Storage, "read_into", reading):
        run_tiny(rank, size, config)
    return counted


def test_only_rank_0_reads_the_checkpoint_and_each_tensor_file_once(workers: Group, tmp_path: Path):
    whole, stopped = (tiny_config(tmp_path, name) for name in ("whole", "stopped"))
    workers(3, run_tiny, plain(whole))
    workers(3, run_tiny, plain(stopped), None, 7)
    first, *others = workers(3, run_counted, plain(stopped))
    assert first["model.safetensors"] == first["optimizer.safetensors"] == 1
    assert others == [{}, {}]
    assert bits(stopped) == bits(whole)


def start_failing(rank: int, size: int, config: Mapping[str, Any]) -> None:
    def reading(*_: object) -> str:
        raise OSError(errno.EACCES, "no right")

    with patch.object(Storage, "read_into", reading):
        run_tiny(rank, size, config)


def test_a_storage_that_cannot_be_read_ends_all_ranks_with_the_same_message(
    workers: Group, tmp_path: Path
):
    config = tiny_config(tmp_path, "run", epochs=1)
    workers(1, run_tiny, plain(config), None, 2)
    ended = workers.outcomes(3, start_failing, plain(config))
    assert all(each.exit_status == CheckpointError.exit_status for each in ended)
    (line,) = {each.text.splitlines()[-1] for each in ended}
    assert "no right" in line


@pytest.mark.parametrize(
    ("model", "named"),
    [
        (nn.Sequential(nn.Linear(4, 5)), "0\\.weight"),
        (nn.Sequential(nn.Linear(4, 3, bias=False)), "0.bias"),
        (nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 1)), "1.weight"),
    ],
)
def test_a_model_that_does_not_match_the_checkpoint_is_a_one_line_error(
    model: nn.Module, named: str
):
    saved = nn.Sequential(nn.Linear(4, 3)).state_dict()
    with pytest.raises(ConfigError, match=named) as caught:
        fill(model, saved)
    assert "\n" not in str(caught.value)
