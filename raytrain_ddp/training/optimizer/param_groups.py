"""Parameter groups: which parameters are decayed, and their share of the learning rate."""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from raytrain_ddp.config.sections import OptimConfig
from raytrain_ddp.config.validation import group_rules
from raytrain_ddp.errors import ConfigError
from raytrain_ddp.tasks.model_parts import head_of, matching, require_matches

# Last parts of names in torchvision and in models of one's own; those of timm have a list.
_NOT_DECAYED = {
    *("class_token", "cls_token", "pos_embedding", "pos_embed", "position_embedding"),
    *("relative_position_bias_table", "layer_scale", "logit_scale"),
}


_NORMS = (nn.modules.batchnorm._NormBase, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)


def param_groups(model: nn.Module, config: OptimConfig) -> list[dict[str, Any]]:
    """Groups of the parameters that are trained: first those with the learning rate of the
    schedule, and of these first those with weight decay.

    A group whose learning rate is not that of the schedule has its share as "lr_scale", as in
    timm.

    Raises:
        ConfigError: a pattern matches nothing, or the model has no layers to decay by.
    """
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    decayed = decayed_parameters(model, config)
    decay = {name: config.weight_decay * (name in decayed) for name in trained}
    scale = _layer_scales(model, config.layer_decay)
    if config.head_lr is not None:
        head = trained.keys() & set(head_of(model))
        if not head:
            raise ConfigError(f"optim.head_lr = {config.head_lr}: the head is frozen.")
        scale |= dict.fromkeys(head, config.head_lr / config.lr)
    for pattern, values in group_rules(config.groups):
        found = matching(pattern, trained)
        if not found and matching(pattern, dict(model.named_parameters())):
            raise ConfigError(
                f"optim.groups: all parameters that {pattern!r} matches are frozen (model.freeze)."
            )
        for name in found or require_matches("optim.groups", pattern, trained):
            decay[name] = values.get("weight_decay", decay[name])
            if "lr" in values:
                scale[name] = values["lr"] / config.lr
    groups: dict[tuple[bool, float, float], dict[str, Any]] = {}
    for name in sorted(trained, key=lambda name: (scale.get(name, 1.0) != 1, name not in decayed)):
        kind = name in decayed, decay[name], scale.get(name, 1.0)
        groups.setdefault(kind, {"params": []})["params"].append(trained[name])
    for (_, weight_decay, share), group in groups.items():
        group["weight_decay"] = weight_decay
        if share != 1:
            group["lr_scale"] = share
    return list(groups.values())


def decayed_parameters(model: nn.Module, config: OptimConfig) -> set[str]:
    """Names of the parameters that weight decay applies to; `optim.groups` may still change it."""
    given: Any = getattr(model, "no_weight_decay", tuple)
    listed = given()
    of_norms = {
        f"{name}.{key}".removeprefix(".")
        for name, module in model.named_modules()
        if isinstance(module, _NORMS)
        for key, _ in module.named_parameters(recurse=False)
    }

    def is_decayed(name: str, parameter: nn.Parameter) -> bool:
        last = name.rpartition(".")[2]
        if last in _NOT_DECAYED or any(fnmatchcase(name, each) for each in listed):
            return False
        if last.endswith("bias") or last.startswith("bias"):  # also those of LSTMs and attention
            return config.decay_bias
        if name in of_norms:
            return config.decay_norms
        return parameter.ndim > 1 or (config.decay_norms and last == "weight")

    return {name for name, parameter in model.named_parameters() if is_decayed(name, parameter)}


def _layer_scales(model: nn.Module, layer_decay: float) -> dict[str, float]:
    """Name -> share of the learning rate, for models that know the depth of their layers."""
    if layer_decay == 1:
        return {}
    if not hasattr(model, "group_matcher"):
        raise ConfigError(
            f"optim.layer_decay = {layer_decay}: the model has no group_matcher, which says how "
            "deep a layer is, as timm's models have: --model.name timm:NAME."
        )
    from timm.optim import param_groups_layer_decay  # seconds

    names = {id(parameter): name for name, parameter in model.named_parameters()}
    groups = param_groups_layer_decay(model, layer_decay=layer_decay)
    return {names[id(p)]: group["lr_scale"] for group in groups for p in group["params"]}
