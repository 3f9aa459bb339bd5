"""A model that does not match the checkpoint because its code was edited."""

from __future__ import annotations

import pytest
from torch import nn

from raytrain_ddp.errors import ConfigError
from raytrain_ddp.training.state.shared_checkpoint import fill


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
