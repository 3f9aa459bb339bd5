"""Checks what a task returns: a TaskError names the user's function and what is expected."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from contextlib import suppress
from numbers import Real
from types import CodeType
from typing import TYPE_CHECKING, Any

from raytrain_ddp.data.loading.sources import Data, Source
from raytrain_ddp.data.order import kept_globals
from raytrain_ddp.errors import DataError, TaskError, first_names
from raytrain_ddp.tasks.model_parts import nonfinite
from raytrain_ddp.tasks.task import Task

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torchmetrics import Metric, MetricCollection

_OF_LOG = ("loss", "lr", "samples_per_s", "seconds", "seconds_total")
_OF_RESULT = ("step", "skipped")  # keys next to the metrics in an evaluation result
_WRAPPERS = {"DataParallel", "DistributedDataParallel", "FullyShardedDataParallel", "FSDPModule"}
_OF_METRIC = ("reset", "update", "compute", "merge_state", "metric_state", "to")


def model_of(task: Task, pretrained: bool = True) -> nn.Module:
    """`task.model()`, with at least one trainable parameter.

    Args:
        pretrained: False: a checkpoint will be loaded, so a built-in task need not load weights.
    """
    from torch import nn

    if not pretrained:
        with suppress(AttributeError):  # it may be frozen
            task.pretrained = False
    model = task.model()
    if not isinstance(model, nn.Module):
        hint = f" Return {model.__name__}()." if isinstance(model, type) else ""
        raise refused(task.model, model, "a torch.nn.Module", hint)
    for name, module in model.named_modules():
        called = name or type(module).__name__
        if wrapper := _WRAPPERS & {kind.__name__ for kind in type(module).__mro__}:
            hint = f" {called} is a {wrapper.pop()}: return the module inside; it is wrapped later."
            raise refused(task.model, model, "a model that is not wrapped", hint)
        tensors = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
        if any(nn.parameter.is_lazy(each) or each.is_meta for each in tensors):
            hint = f" {called} is lazy, or on the meta device: call the model once, or to_empty()."
            raise refused(task.model, model, "a model with weights", hint)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        wanted = "a model with at least one parameter to train"
        hint = " All parameters are frozen (requires_grad is False), or there are none."
        raise refused(task.model, model, wanted, hint)
    if pretrained and (names := nonfinite(model)):
        raise TaskError(
            f"{place_of(task.model)}: not finite before the first step: {first_names(names)}. "
            "Initialize parameters with finite values, and buffers with values other than nan."
        )
    return model


def require_dense(task: Task, model: nn.Module) -> None:
    """Raises TaskError for gradients that the configured optimizers cannot take."""
    from torch import nn

    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse:
            called = name or type(module).__name__
            hint = f" {called} has sparse gradients: set sparse=False, or train with --exact."
            raise refused(task.model, model, "a model with dense gradients", hint)


def train_data_of(task: Task, seed: int) -> Data:
    """`task.train_data()`, with at least one row. The global generators are seeded before it,
    so that the data are the same on all workers and in all starts."""
    with kept_globals(seed):
        data = task.train_data()
    return _data(task.train_data, data, "the training set has 0 rows.")


def eval_data_of(task: Task, seed: int) -> Data | None:
    """`task.eval_data()`; if not None, with at least one row. Seeded as in
    `train_data_of`, so both methods get the same random split."""
    with kept_globals(seed):
        data = task.eval_data()
    if data is None:
        return None
    empty = "the evaluation set has 0 rows: provide rows, or return None in eval_data()."
    return _data(task.eval_data, data, empty)


def _data(function: Any, data: Any, empty: str) -> Data:
    source = data.source if isinstance(data, Data) else data
    if not isinstance(data, Data) or not isinstance(source, Source):
        hint = ""
        if hasattr(source, "dataset"):  # a DataLoader
            hint = " Batches are made later: return Data(MapSource(loader.dataset), collate)."
        elif hasattr(source, "__getitem__"):
            hint = " Return Data(MapSource(dataset), collate)."
        elif hasattr(source, "__iter__"):
            hint = " Return Data(IterableSource(dataset), collate)."
        raise refused(function, source, "a raytrain_ddp.Data of a raytrain_ddp.Source", hint)
    if not data.rows:
        raise DataError(empty)
    return data


def metrics_of(task: Task, per_class: bool = False) -> Mapping[str, Metric] | MetricCollection:
    """`task.metrics()`: at least one, each with the methods of a metric."""
    function = task.per_class_metrics if per_class else task.metrics
    metrics: Any = function()
    wanted = "a dict of torchmetrics metrics by name, or a MetricCollection"
    if not isinstance(metrics, Mapping) and not hasattr(metrics, "items"):
        raise refused(function, metrics, wanted)
    if not len(metrics):
        raise refused(function, metrics, wanted, " Without evaluation, return None in eval_data().")
    for name, metric in metrics.items():
        if name in _OF_RESULT:
            free = f"metrics with names other than {name!r}, which is reserved"
            raise refused(function, metrics, free)
        is_metric = hasattr(metric, "items") or all(hasattr(metric, each) for each in _OF_METRIC)
        if isinstance(metric, type) or not is_metric:
            raise refused(function, metrics, wanted, f" {name!r} is {_described(metric)}.")
    return metrics  # type: ignore[no-any-return]


def loss_of_task(task: Task, result: Any, needs_gradient: bool) -> tuple[Tensor, dict[str, Tensor]]:
    """The parts of the result of `task.loss`: a mean loss that supports a backward pass; and
    scalars to be logged beside it, of shape (), detached."""
    import torch

    has_scalars = isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], Mapping)
    loss, given = result if has_scalars else (result, {})
    is_loss = isinstance(loss, torch.Tensor) and not loss.ndim and loss.is_floating_point()
    if not is_loss or (needs_gradient and not loss.requires_grad):
        hint = (
            " Take the mean over the samples; do not detach it (.item(), torch.no_grad()). To log "
            "scalars with it, return (loss, {name: scalar})."
        )
        wanted = "a floating-point tensor of shape (), which depends on parameters that are trained"
        raise refused(task.loss, loss, wanted, hint)
    scalars = {}
    for name, value in given.items():
        number = value
        if isinstance(value, Real):
            number = torch.as_tensor(value if isinstance(value, int | float) else float(value))
        if not isinstance(number, torch.Tensor) or number.numel() != 1 or number.is_complex():
            hint = f" The value of {name!r} is {_described(value)}."
            raise refused(task.loss, result, "a loss and a dict of scalars by name", hint)
        if not isinstance(name, str) or name in _OF_LOG:
            raise refused(task.loss, result, f"other names of scalars than {', '.join(_OF_LOG)}")
        scalars[name] = number.detach().reshape(())
    return loss, scalars


def refused(function: Any, got: object, wanted: str, hint: str = "") -> TaskError:
    """The error for an invalid result of the user's `function`."""
    return TaskError(f"{place_of(function)}: returned {_described(got)}; expected {wanted}.{hint}")


def place_of(function: Any) -> str:
    """``file.py:12, in MyTask.loss``"""
    name, code = getattr(function, "__qualname__", type(function).__qualname__), code_of(function)
    return f"{code.co_filename}:{code.co_firstlineno}, in {name}" if code else name


def code_of(function: Any) -> CodeType | None:
    """The code of a function or method; None if it has none."""
    plain = inspect.unwrap(getattr(function, "__func__", function)) if function else None
    return getattr(plain, "__code__", None)


def _described(value: Any) -> str:
    import torch

    if isinstance(value, torch.Tensor):
        kind = str(value.dtype).removeprefix("torch.")
        gradient = "" if value.requires_grad else ", without a gradient"
        return f"a tensor of shape {tuple(value.shape)}, {kind}{gradient}"
    if value is None:
        return "None"
    if isinstance(value, type):
        return f"the class {value.__qualname__}"
    kind = type(value).__qualname__
    noun = f"{'an' if kind[0].lower() in 'aeiou' else 'a'} {kind}"
    if isinstance(value, int | float | str):
        return f"{noun}, {repr(value)[:80]}"
    if isinstance(value, Mapping) and value:
        return f"{noun} of {', '.join(map(repr, [*value][:5]))}"
    return f"{noun} of {len(value)} items" if isinstance(value, list | tuple | dict) else noun
