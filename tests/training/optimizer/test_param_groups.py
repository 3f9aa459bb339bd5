"""Frozen parameters, weight decay, and learning rates, compared with timm and torchvision."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import Group
from tiny import (
    STEPS_PER_EPOCH,
    TinyNet,
    TinyTask,
    bits,
    newest,
    plain,
    run_tiny,
    tiny_arrays,
    tiny_config,
    weights,
)
from torch import nn

from raytrain_ddp import ModelConfig, OptimConfig, TrainConfig, fit_locally
from raytrain_ddp.driver.preflight import try_model
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


def decayed_in_torchvision(
    model: nn.Module, norm: float | None, custom: dict[str, float]
) -> set[str]:
    """The names to which `set_weight_decay` of torchvision's references/classification/utils.py
    gives the common weight decay, with these --norm-weight-decay and custom keys."""
    norms = (
        nn.modules.batchnorm._BatchNorm,
        nn.LayerNorm,
        nn.GroupNorm,
        nn.modules.instancenorm._InstanceNorm,
        nn.LocalResponseNorm,
    )
    decayed = set()
    for place, module in model.named_modules():
        for name, _ in module.named_parameters(recurse=False):
            full = f"{place}.{name}" if place else name
            is_norm = norm is not None and isinstance(module, norms)
            if name not in custom and not is_norm:
                decayed.add(full)
    return decayed


REFERENCE = {"bias": 0.0, "class_token": 0.0, "relative_position_bias_table": 0.0}
# Decayed there but not here: biases with other names, and parameters that their keys miss.
DECAYED_ONLY_THERE = {
    "resnet18": set(),
    "vit_b_16": {"in_proj_bias", "pos_embedding"},
    "swin_t": set(),
    "convnext_tiny": {"layer_scale"},
}


@pytest.mark.parametrize("name", DECAYED_ONLY_THERE)
def test_the_decayed_parameters_are_those_of_torchvisions_references(name: str):
    from torchvision.models import get_model

    model = get_model(name, num_classes=5)
    theirs = decayed_in_torchvision(model, 0.0, REFERENCE)
    ours = decayed_names(model)
    assert ours < {key for key, _ in model.named_parameters()}
    assert {key.rpartition(".")[2] for key in theirs - ours} == DECAYED_ONLY_THERE[name]
    assert ours - theirs == set()
    if name == "resnet18":  # only --weight-decay
        both = decayed_names(model, decay_norms=True, decay_bias=True)
        assert (
            both
            == decayed_in_torchvision(model, None, {})
            == {k for k, _ in model.named_parameters()}
        )


@pytest.mark.parametrize(
    "name",
    ["resnet18", "vit_tiny_patch16_224", "swin_tiny_patch4_window7_224", "convnext_tiny"],
)
def test_the_decayed_parameters_are_those_of_timm(name: str):
    import timm
    from timm.optim import param_groups_weight_decay

    model = timm.create_model(name, num_classes=5)
    listed = model.no_weight_decay() if hasattr(model, "no_weight_decay") else ()
    theirs = param_groups_weight_decay(model, 0.7, no_weight_decay_list=listed)
    assert decayed_names(model) == names_by(model, theirs)[0.7]


def test_norms_and_biases_are_decayed_on_request():
    model = DigitsCNN(10)
    plain_names = {name for name, p in model.named_parameters() if p.ndim > 1}
    norms = {f"features.{i}.1.weight" for i in range(4)}
    biases = {*(f"features.{i}.1.bias" for i in range(4)), "head.bias"}
    assert decayed_names(model) == plain_names
    assert decayed_names(model, decay_norms=True) == plain_names | norms
    assert decayed_names(model, decay_bias=True) == plain_names | biases


@pytest.mark.parametrize("weight_decay", [5e-4, 0.0])
def test_a_conv_net_has_a_group_of_matrices_and_a_group_of_vectors(weight_decay: float):
    from torchvision.models import resnet18

    model = resnet18()
    groups = param_groups(model, OptimConfig(weight_decay=weight_decay))
    parameters = list(model.parameters())
    matrices = [p for p in parameters if p.ndim > 1]
    rest = [p for p in parameters if p.ndim <= 1]
    for group, wanted, decay in zip(groups, (matrices, rest), (weight_decay, 0.0), strict=True):
        assert group.keys() == {"params", "weight_decay"}
        assert [id(p) for p in group["params"]] == [id(p) for p in wanted]
        assert group["weight_decay"] == decay
    # The order in which the state is written, so that checkpoint files keep their bytes.
    assert [*map(id, build_optimizer(model, OptimConfig()).state)] == [*map(id, parameters)]


# ------------------------------------------------------------------ learning rates


def test_layer_decay_equals_that_of_timm():
    import timm
    from timm.optim import param_groups_layer_decay

    model = timm.create_model("test_vit", num_classes=5)
    optim = OptimConfig(lr=0.1, weight_decay=0.7, layer_decay=0.75)
    ours = param_groups(model, optim)
    listed = model.no_weight_decay()
    theirs = param_groups_layer_decay(model, 0.7, no_weight_decay_list=listed, layer_decay=0.75)
    for key in ("lr_scale", "weight_decay"):
        assert names_by(model, ours, key, 1.0) == names_by(model, theirs, key, 1.0)
    assert len(names_by(model, ours, "lr_scale", 1.0)) > 4
    with pytest.raises(ConfigError, match=r"has no group_matcher.*--model.name timm:NAME"):
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


@pytest.mark.parametrize(
    ("model", "optim", "reported"),
    [
        ({"freeze": ("layer5.*",)}, {}, "model.freeze: 'layer5.*' matches no parameter. The model"),
        ({"freeze": ("feature",)}, {}, "'feature' matches no parameter. Did you mean 'features'"),
        ({"freeze": ("*",)}, {}, "no parameter is left to train.*--model.freeze backbone"),
        ({}, {"groups": ("body", "lr=1")}, "optim.groups: 'body' matches no parameter"),
        ({"freeze": ("features",)}, {"groups": ("features", "lr=1")}, "'features' .* frozen"),
        ({"freeze": ("head",)}, {"head_lr": 1.0}, "optim.head_lr = 1.0: the head is frozen"),
        ({}, {"layer_decay": 0.5}, "optim.layer_decay = 0.5: the model has no group_matcher"),
    ],
)
def test_an_invalid_pattern_is_a_one_line_error_before_workers_start(
    model: dict[str, Any], optim: dict[str, Any], reported: str
):
    config = TrainConfig(model=ModelConfig(**model), optim=OptimConfig(**optim))
    with pytest.raises(ConfigError, match=reported) as caught:
        try_model(config, is_new=True)
    assert "\n" not in str(caught.value)


OWN_RATES = OptimConfig(lr=0.05, head_lr=0.2, groups=("conv", "lr=0.01", "weight_decay=0.1"))


def test_a_stopped_run_with_learning_rates_by_group_ends_with_the_same_bits(
    workers: Group, tmp_path: Path
):
    """With 3 workers; in exact mode, 1 worker gives the bits of 3."""
    for exact in (False, True):
        straight = tiny_config(tmp_path, f"straight-{exact}", optim=OWN_RATES, exact=exact)
        workers(3, run_tiny, plain(straight))
        stopped = tiny_config(tmp_path, f"stopped-{exact}", optim=OWN_RATES, exact=exact)
        workers(3, run_tiny, plain(stopped), None, 13)
        workers(1 if exact else 3, run_tiny, plain(stopped))
        assert bits(stopped) == bits(straight)
    progress = json.loads(newest(straight).read("state.json"))
    groups = progress["optimizer"]
    last = learning_rate(straight, 3 * STEPS_PER_EPOCH - 1, STEPS_PER_EPOCH)
    text = json.dumps(groups)
    for share in (1.0, 0.2 / 0.05, 0.01 / 0.05):
        assert json.dumps(last * share) in text


class UnchangedTask(TinyTask):
    """One matrix is no longer decayed."""

    def model(self) -> nn.Module:
        self.made = super().model()
        self.made.hidden.register_parameter("class_token", nn.Parameter(torch.ones(2, 2)))
        return self.made


def test_the_weights_equal_those_of_a_plain_loop_with_the_same_groups(tmp_path: Path):
    """One worker, one slot, no batch norm."""
    config = tiny_config(
        tmp_path, "rates", optim=OWN_RATES, epochs=1, batch_size=32, micro_batch=32
    )
    ran = run_tiny(0, 1, plain(config), {"norm": False, "rows": 64})
    assert ran.outcome.step == 2

    torch.manual_seed(config.seed)
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
    reported = freeze(model, ["features.0", "features.1.*", "*.bias"])
    frozen = {name for name, p in model.named_parameters() if not p.requires_grad}
    assert frozen == {
        *("features.0.0.weight", "features.0.1.weight", "features.1.0.weight"),
        *("features.1.1.weight", "head.bias", *(f"features.{i}.1.bias" for i in range(4))),
    }
    resting = {name for name, module in model.named_modules() if not module.training}
    assert {"features.0", "features.0.1", "features.1.1", "features.0.2"} <= resting
    assert not resting & {"features.2.1", "head", "dropout", "features", ""}
    count = sum(p.numel() for n, p in model.named_parameters() if n in frozen)
    assert reported == f"Frozen: {count:,} of 131,754 parameters (9 of 14 tensors)."
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
        epochs=1,
        batch_size=512,
        micro_batch=256,
        model=ModelConfig(freeze=("features.0", "features.1")),
    )
    result = fit_locally(config)
    assert result.step == 3
    from raytrain_ddp.training.runtime.seeding import seed_all

    seed_all(config.seed)
    begun = DigitsCNN(10).state_dict()
    ended = weights(config)
    same = {name for name in begun if torch.equal(begun[name], ended[name])}
    frozen = {name for name in begun if name.startswith(("features.0.", "features.1."))}
    assert same == frozen
    assert any("running_mean" in name for name in frozen)
