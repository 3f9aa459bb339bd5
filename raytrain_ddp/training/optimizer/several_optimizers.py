"""Several optimizers, each over its own parameters, which take turns within a step."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

from torch.optim import Optimizer

from raytrain_ddp.errors import TaskError, did_you_mean
from raytrain_ddp.tasks.task import Task
from raytrain_ddp.tasks.task_check import place_of, refused
from raytrain_ddp.training.optimizer.lr_schedule import unchanging


class Optimizers(Optimizer):
    """Several optimizers as one: groups, state and state_dict are those of one optimizer over all
    their groups, in order.

    Attributes:
        named: the optimizers by name.
    """

    def __init__(self, named: Mapping[str, Optimizer]) -> None:
        self.named = dict(named)
        self.defaults: dict[str, Any] = {}

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        return [group for each in self.named.values() for group in each.param_groups]

    @property
    def state(self) -> dict[Any, Any]:  # type: ignore[override]
        return {key: value for each in self.named.values() for key, value in each.state.items()}

    def state_dict(self) -> dict[str, Any]:
        state: dict[int, Any] = {}
        groups: list[dict[str, Any]] = []
        for each in self.named.values():
            own, first = each.state_dict(), sum(len(group["params"]) for group in groups)
            state |= {first + key: value for key, value in own["state"].items()}
            for group in own["param_groups"]:
                groups.append({**group, "params": [first + key for key in group["params"]]})
        return {"state": state, "param_groups": groups}

    def split(self, saved: Mapping[str, Any]) -> Iterator[tuple[Optimizer, dict[str, Any]]]:
        """Each optimizer with its part of a state_dict of all."""
        rest = iter(saved["param_groups"])
        parts = [(each, [*islice(rest, len(each.param_groups))]) for each in self.named.values()]
        parts[-1][1].extend(rest)  # groups of others: loading refuses them
        for each, groups in parts:
            keys = {key for group in groups for key in group["params"]}
            state = {key: value for key, value in saved["state"].items() if key in keys}
            yield each, {"state": state, "param_groups": groups}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        for each, part in self.split(state_dict):
            each.load_state_dict(part)

    def zero_grad(self, set_to_none: bool = True) -> None:
        for each in self.named.values():
            each.zero_grad(set_to_none)

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for each in self.named.values():
            each.step()


def named_optimizers(optimizer: Optimizer) -> dict[str, Optimizer]:
    """Returns the optimizers by name; the name of a single one is ""."""
    return optimizer.named if isinstance(optimizer, Optimizers) else {"": optimizer}


def turns_of(
    task: Task, optimizer: Optimizer, steps: Sequence[int]
) -> Callable[[int], Sequence[str]]:
    """The names of the optimizers that take a turn in a step, from 0; in order. "" is the only one.

    Args:
        steps: for which they are checked now.

    Raises:
        TaskError: the task's `turns`, or its `loss`, does not fit its optimizers.
    """
    turns = task.turns
    if not isinstance(optimizer, Optimizers):
        if turns is not None:
            problem = "has no effect: optimizer() must return a dict of optimizers by name"
            raise TaskError(f"{place_of(turns)}: {problem}.")
        _require_loss_of(task, "model", "batch")
        return lambda step: ("",)
    _require_loss_of(task, "model", "batch", "optimizer")
    names = (*optimizer.named,)
    if turns is None:
        return lambda step: names

    def checked(step: int) -> Sequence[str]:
        given = turns(step)
        listed = given if isinstance(given, list | tuple) else []
        unknown = [each for each in listed if each not in names]
        if unknown or not listed:
            hint = did_you_mean(str(unknown[0]), names) if unknown else ""
            at = f" For step {step}: {given!r}.{hint}"
            raise refused(turns, given, f"a list of some of {', '.join(names)}", at)
        return [*listed]

    return unchanging(turns, checked, steps)


def _require_loss_of(task: Task, *arguments: str) -> None:
    try:
        inspect.signature(task.loss).bind(*arguments)
    except TypeError:
        several = len(arguments) > 2
        why = "optimizer() returns several" if several else "there is one optimizer"
        raise TaskError(
            f"{place_of(task.loss)}: must take ({', '.join(arguments)}), as {why}."
        ) from None
    except ValueError:
        pass  # written in C: it has no signature
