"""Frozen parameters, weight decay, and learning rates, compared with timm and torchvision."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import (
    TinyNet,
    plain,
    run_tiny,
    tiny_arrays,
    tiny_config,
    weights,
)
from torch import nn

from raytrain_ddp import ModelConfig, OptimConfig, TrainConfig, fit_locally
from raytrain_ddp.errors import ConfigError
from raytrain_ddp.tasks.model_parts import freeze
from raytrain_ddp.tasks.small_networks import DigitsCNN
from raytrain_ddp.training.optimizer.lr_schedule import build_optimizer, learning_rate
from raytrain_ddp.training.optimizer.param_groups import param_groups
from raytrain_ddp.training.runtime.seeding import seed_all


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


# Decayed there but not here: biases with other names, and parameters that their keys miss.


@pytest.mark.parametrize(
    "name",
    ["resnet18", "vit_tiny_patch16_224", "swin_tiny_patch4_window7_224"],
)
def test_the_decayed_parameters_are_those_of_timm(name: str):
    timm, optim = (pytest.importorskip(name) for name in ("timm", "timm.optim"))
    with torch.device("meta"):
        model = timm.create_model(name, num_classes=5)
    listed = model.no_weight_decay() if hasattr(model, "no_weight_decay") else ()
    theirs = optim.param_groups_weight_decay(model, 0.7, no_weight_decay_list=listed)
    assert decayed_names(model) == names_by(model, theirs)[0.7]


def test_norms_and_biases_are_decayed_on_request():
    model = DigitsCNN(10)
    plain_names = {name for name, p in model.named_parameters() if p.ndim > 1}
    norms = {f"features.{i}.1.weight" for i in range(4)}
    biases = {*(f"features.{i}.1.bias" for i in range(4)), "head.bias"}
    assert decayed_names(model) == plain_names
    assert decayed_names(model, decay_norms=True) == plain_names | norms
    assert decayed_names(model, decay_bias=True) == plain_names | biases


def test_a_conv_net_has_a_group_of_matrices_and_a_group_of_vectors():
    model = DigitsCNN(10)
    parameters = list(model.parameters())
    matrices, rest = param_groups(model, OptimConfig(weight_decay=5e-4))
    assert [*map(id, matrices["params"])] == [id(p) for p in parameters if p.ndim > 1]
    assert [*map(id, rest["params"])] == [id(p) for p in parameters if p.ndim <= 1]
    assert (matrices["weight_decay"], rest["weight_decay"]) == (5e-4, 0.0)
    # The order in which the state is written, so that checkpoint files keep their bytes.
    assert [*map(id, build_optimizer(model, OptimConfig()).state)] == [*map(id, parameters)]


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


OWN_RATES = OptimConfig(lr=0.05, head_lr=0.2, groups=("conv", "lr=0.01", "weight_decay=0.1"))


def test_the_weights_equal_those_of_a_plain_loop_with_the_same_groups(tmp_path: Path):
    """One worker, one slot, no batch norm."""
    config = tiny_config(
        tmp_path, "rates", optim=OWN_RATES, epochs=1, batch_size=32, micro_batch=32
    )
    ran = run_tiny(0, 1, plain(config), {"norm": False, "rows": 64})
    assert ran.outcome.step == 2
    seed_all(config.seed)
    model = TinyNet(norm=False)
    body = {"conv.weight": (0.01, 0.1), "conv.bias": (0.01, 0.1)}
    body |= {"hidden.weight": (0.05, 5e-4), "hidden.bias": (0.05, 0.0)}
    body |= {"head.weight": (0.2, 5e-4), "head.bias": (0.2, 0.0)}
    named = dict(model.named_parameters())
    sgd = torch.optim.SGD(
        [{"params": [named[n]], "lr": lr, "weight_decay": wd} for n, (lr, wd) in body.items()],
        momentum=0.9,
        nesterov=True,
    )
    arrays = tiny_arrays(64, 0)
    for step, rows in ran.seen:
        for group, (lr, _) in zip(sgd.param_groups, body.values(), strict=True):
            group["lr"] = lr * learning_rate(config, step - 1, 2) / 0.05
        sgd.zero_grad()
        x, y = torch.from_numpy(arrays["x"][rows]), torch.from_numpy(arrays["y"][rows])
        nn.functional.cross_entropy(model(x), y).backward()
        sgd.step()
    for name, tensor in weights(config).items():
        torch.testing.assert_close(tensor, named[name].detach(), rtol=1e-6, atol=1e-7)


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
    assert [n for n, p in model.named_parameters() if p.requires_grad] == [
        "head.weight",
        "head.bias",
    ]
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
