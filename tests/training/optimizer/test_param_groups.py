"""Frozen parameters, weight decay, and learning rates, compared with timm and torchvision."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import TinyNet, weights
from torch import nn

from raytrain_ddp import ModelConfig, OptimConfig, TrainConfig, fit_locally
from raytrain_ddp.errors import ConfigError
from raytrain_ddp.tasks.model_parts import freeze
from raytrain_ddp.tasks.small_networks import DigitsCNN
from raytrain_ddp.training.optimizer.task_optimizer import param_groups
from raytrain_ddp.training.runtime.world import seed_all


def decayed_names(model: nn.Module, **optim: Any) -> set[str]:
    return names_by(model, param_groups(model, OptimConfig(weight_decay=0.7, **optim)))[0.7]


def names_by(
    model: nn.Module, groups: list[dict[str, Any]], key: str = "weight_decay", default: float = 0
) -> dict[float, set[str]]:
    """Value of a group -> names of its parameters; each parameter is in one group."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    found: dict[float, set[str]] = {0.0: set(), 0.7: set()} if key == "weight_decay" else {}
    for group in groups:
        mine = {names.pop(id(parameter)) for parameter in group["params"]}
        found.setdefault(group.get(key, default), set()).update(mine)
    assert names == {}
    return found


def test_norms_and_biases_are_decayed_on_request():
    model = DigitsCNN(10)
    plain_names = {name for name, p in model.named_parameters() if p.ndim > 1}
    norms = {f"features.{i}.1.weight" for i in range(4)}
    biases = {*(f"features.{i}.1.bias" for i in range(4)), "head.bias"}
    assert decayed_names(model) == plain_names
    assert decayed_names(model, decay_norms=True) == plain_names | norms
    assert decayed_names(model, decay_bias=True) == plain_names | biases


# ------------------------------------------------------------------ learning rates


def test_layer_decay_equals_that_of_timm():
    timm, theirs_in = (pytest.importorskip(name) for name in ("timm", "timm.optim"))
    model = timm.create_model("test_vit", num_classes=5)
    optim = OptimConfig(lr=0.1, weight_decay=0.7, layer_decay=0.75)
    ours = param_groups(model, optim)
    listed = model.no_weight_decay()
    theirs = theirs_in.param_groups_layer_decay(
        model, 0.7, no_weight_decay_list=listed, layer_decay=0.75
    )
    for key in ("lr_scale", "weight_decay"):
        assert names_by(model, ours, key, 1.0) == names_by(model, theirs, key, 1.0)
    assert len(names_by(model, ours, "lr_scale", 1.0)) > 4
    with pytest.raises(ConfigError, match="layer_decay"):
        param_groups(TinyNet(), optim)


def test_the_head_and_groups_have_their_own_learning_rates_and_weight_decay():
    groups = ("conv", "lr=0.02", "norm.*", "weight_decay=0.3", "*.bias", "lr=0.4")
    optim = OptimConfig(lr=0.1, weight_decay=0.7, head_lr=0.2, groups=groups)
    model = TinyNet()
    made = param_groups(model, optim)
    shares = names_by(model, made, "lr_scale", 1.0)
    assert {round(share, 9): names for share, names in shares.items()} == {
        0.2: {"conv.weight"},
        4.0: {"conv.bias", "norm.bias", "hidden.bias", "head.bias"},
        1.0: {"norm.weight", "hidden.weight"},
        2.0: {"head.weight"},
    }
    assert names_by(model, made) == {
        0.7: {"conv.weight", "hidden.weight", "head.weight"},
        0.3: {"norm.weight", "norm.bias"},
        0.0: {"conv.bias", "hidden.bias", "head.bias"},
    }


# ------------------------------------------------------------------ freezing


def test_frozen_parameters_are_reported_and_frozen_modules_stay_in_evaluation_mode():
    model = DigitsCNN(10, dropout=0.5)
    freeze(model, ["features.0", "features.1.*", "*.bias"])
    frozen = {name for name, p in model.named_parameters() if not p.requires_grad}
    assert frozen == {
        *("features.0.0.weight", "features.0.1.weight", "features.1.0.weight"),
        *("features.1.1.weight", "head.bias", *(f"features.{i}.1.bias" for i in range(4))),
    }
    resting = {name for name, module in model.named_modules() if not module.training}
    assert {"features.0", "features.0.1", "features.1.1", "features.0.2"} <= resting
    assert not resting & {"features.2.1", "head", "dropout", "features", ""}
    model = DigitsCNN(10, dropout=0.5)
    freeze(model, ["backbone"])
    trained = [n for n, p in model.named_parameters() if p.requires_grad]
    assert trained == ["head.weight", "head.bias"]
    assert model.dropout.training
    assert not model.features.training


def test_frozen_weights_and_statistics_do_not_change(tmp_path: Path):
    config = TrainConfig(
        name="frozen",
        storage=str(tmp_path),
        steps=2,
        limit_eval_batches=1,
        model=ModelConfig(freeze=("features.0", "features.1")),
    )
    result = fit_locally(config)
    assert result.step == 2
    seed_all(config.seed)
    begun = DigitsCNN(10).state_dict()
    ended = weights(config)
    same = {name for name in begun if torch.equal(begun[name], ended[name])}
    frozen = {name for name in begun if name.startswith(("features.0.", "features.1."))}
    assert same == frozen
    assert any("running_mean" in name for name in frozen)
