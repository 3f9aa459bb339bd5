"""Checks a task class: missing methods, wrong arguments, and methods that nothing calls.

Done before anything is started, from the class alone: imports no torch, calls nothing.
"""

from __future__ import annotations

import dis
import inspect
import re
import typing
from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from functools import cached_property
from types import CodeType
from typing import Any

from raytrain_ddp.config.field_types import as_text
from raytrain_ddp.errors import ConfigError, TaskError, did_you_mean
from raytrain_ddp.tasks.task import Task

_ARGUMENTS: dict[str, tuple[str, ...]] = {
    "model": (),
    "train_data": (),
    "eval_data": (),
    "loss": ("model", "batch"),
    "metrics": (),
    "evaluate": ("model", "batch", "metrics"),
}
_OPTIONAL: dict[str, tuple[str, ...]] = {
    "optimizer": ("model",),
    "schedule": ("step",),
    "turns": ("step",),
    "after_step": ("model", "step"),
}
_ATTRIBUTES = ("monitor", "goal", "unit")
_KNOWN = {*_ARGUMENTS, *_OPTIONAL, *_ATTRIBUTES, "per_class_metrics", "predict", "class_names"}
_ELSEWHERE = {
    "optimizer(model) returns an optimizer or parameter groups, if not as --optim.* says": (
        "configure_optimizers configure_optimizer optimizers get_optimizer create_optimizer "
        "make_optimizer"
    ),
    "schedule(step) returns a factor of the learning rate, if not as --schedule.* says": (
        "scheduler schedulers lr_scheduler lr_schedulers get_scheduler create_scheduler "
        "configure_scheduler lr learning_rate"
    ),
    "after_step(model, step) follows an update": (
        "on_train_batch_end on_after_step on_step_end optimizer_step after_update post_step"
    ),
    "the config sets it (--optim.clip-norm)": "configure_gradient_clipping",
    "training minimizes loss(model, batch)": (
        "training_step train_step compute_loss loss_fn loss_function criterion forward backward"
    ),
    "evaluate(model, batch, metrics) evaluates a batch": (
        "validation_step test_step eval_step validate evaluation eval compute_metrics val_step"
    ),
    "train_data() returns the training data": (
        "train_dataloader get_train_dataloader train_loader train_dataset training_data"
    ),
    "eval_data() returns the evaluation data": (
        "val_dataloader test_dataloader get_eval_dataloader val_loader val_data val_dataset "
        "valid_data validation_data test_data test_dataset eval_dataset"
    ),
    "the config sets it (--epochs, --batch-size)": "epochs max_epochs num_epochs batch_size",
    "only the protocol's methods are called; do it in one of them": (
        "setup teardown prepare_data configure_model configure_callbacks callbacks "
        "training_epoch_end validation_epoch_end training_step_end validation_step_end"
    ),
}
_FOREIGN = {name: why for why, names in _ELSEWHERE.items() for name in names.split()}
_HOOK = re.compile(r"(on|configure)_\w+")
_NO_HOOKS = "there are no hooks; do it in loss() or evaluate()"


def check_task(task: Any) -> None:
    """Checks a class or an object.

    Raises:
        TaskError: it is not a `Task`, it lacks a method, a method takes the wrong arguments, or
            nothing calls a method.
    """
    kind = task if isinstance(task, type) else type(task)
    where = _place_of_class(kind)
    lacking = [name for name in _ARGUMENTS if _own(kind, name) is None and name not in _vars(task)]
    lacking += [name for name in _ATTRIBUTES if not hasattr(task, name)]
    if lacking:
        own = [name for each in _classes(kind) for name in vars(each) if name not in _KNOWN]
        meant = "".join(
            f" Should {close[0]!r} be {name!r}?"
            for name in lacking
            if (close := get_close_matches(name, own, n=1, cutoff=0.7))
        )
        parts = ", no ".join(f"{n}()" if n in _ARGUMENTS else n for n in lacking)
        raise TaskError(
            f"{where}: {kind.__qualname__} has no {parts}, which a task requires.{meant}"
        )
    if not issubclass(kind, Task):
        raise TaskError(
            f"{where}: {kind.__qualname__} is not a subclass of raytrain_ddp.Task: derive it from "
            "raytrain_ddp.Task."
        )
    given = [name for name in _OPTIONAL if getattr(task, name) is not None]
    for name in (*_ARGUMENTS, *given):
        arguments = {**_ARGUMENTS, **_OPTIONAL}[name]
        if name == "loss" and "optimizer" in given and _takes_one_more(task, kind):
            continue  # one for each of several optimizers; which it is, is known with a model
        _check_arguments(task, kind, name, arguments)
    if not isinstance(task.monitor, str | property) or not isinstance(task.unit, str | property):
        raise TaskError(f"{where}: monitor and unit of {kind.__qualname__} must be strings.")
    if task.goal not in ("min", "max") and not isinstance(task.goal, property):
        raise TaskError(f"{where}: goal = {task.goal!r} of {kind.__qualname__} must be min or max.")
    for name in _idle(task, kind):
        close = get_close_matches(name, _KNOWN, n=1, cutoff=0.8)
        why = f"did you mean {close[0]!r}?" if close else _NO_HOOKS
        raise TaskError(
            f"{where}: nothing uses {kind.__qualname__}.{name}: {_FOREIGN.get(name, why)}. If it "
            "is for your own use, rename it."
        )


def check_options(made_by: Any, options: Mapping[str, Any]) -> None:
    """Checks that the task's constructor or factory takes the config and these options.

    Raises:
        ConfigError: an option does not exist, or a required one is missing.
        TaskError: it does not take a config.
    """
    name = getattr(made_by, "__qualname__", type(made_by).__qualname__)
    if not has_constructor(made_by):
        if options:
            raise ConfigError(
                f"task_options: {name} has no option {next(iter(options))!r}, or any other."
            )
        return
    signature = inspect.signature(made_by)
    parameters = list(signature.parameters.values())
    named = [p for p in parameters[1:] if p.kind in (p.KEYWORD_ONLY, p.POSITIONAL_OR_KEYWORD)]
    takes = [each.name for each in named]
    takes_any = any(each.kind is each.VAR_KEYWORD for each in parameters)
    for option in options:
        if option not in takes and not takes_any:
            raise ConfigError(
                f"task_options: {name} has no option {option!r}.{did_you_mean(option, takes)} "
                f"Its options: {', '.join(takes) or 'none'}."
            )
    for each in named:
        if each.default is each.empty and each.name not in options:
            raise ConfigError(
                f"task_options: {name} needs {each.name!r}: --task-options {each.name} VALUE."
            )
    typed_options(made_by, options)
    try:
        signature.bind(None, **options)
    except TypeError as error:
        where = _place_of_class(made_by)
        raise TaskError(
            f"{where}: {name} must take the config as its first argument ({error})."
        ) from None


def typed_options(made_by: Any, options: Mapping[str, Any]) -> dict[str, Any]:
    """The options as the constructor annotates them: int, float, bool, str; others stay as given,
    which is text on a command line.

    Raises:
        ConfigError: a text is no such value; names the option.
    """
    parameters = inspect.signature(made_by).parameters
    typed: dict[str, Any] = dict(options)
    for name, text in options.items():
        kind = parameters[name].annotation if name in parameters else None
        kind = kind if isinstance(kind, str) else getattr(kind, "__name__", "")
        try:
            if kind == "bool":
                typed[name] = {"true": True, "false": False}[str(text).lower()]
            elif kind in ("int", "float"):
                typed[name] = {"int": int, "float": float}[kind](str(text))
            elif kind == "str":
                typed[name] = as_text(text)
        except (ValueError, KeyError):
            takes = {"int": "an integer", "float": "a number", "bool": "true or false"}[kind]
            raise ConfigError(f"task_options.{name} = {text!r}: must be {takes}.") from None
    return typed


def has_constructor(made_by: Any) -> bool:
    """Whether it takes the config: all but a class without a constructor of its own."""
    if not isinstance(made_by, type):
        return True
    return inspect.getattr_static(made_by, "__init__") is not object.__init__


def _own(kind: type, name: str) -> Any:
    """The class's attribute of that name, unless it is the base class's."""
    found = inspect.getattr_static(kind, name, None)
    return None if found is vars(Task).get(name) else found


def _vars(task: Any) -> Mapping[str, Any]:
    return {} if isinstance(task, type) else getattr(task, "__dict__", {})


def _check_arguments(task: Any, kind: type, name: str, arguments: tuple[str, ...]) -> None:
    method = getattr(task, name)
    is_unbound = _is_unbound(task, kind, name)
    if isinstance(method, property) or isinstance(_own(kind, name), property | cached_property):
        return  # dynamic: what it returns is called later
    if not callable(method):
        raise TaskError(
            f"{_place_of_class(kind)}: {kind.__qualname__}.{name} is a {type(method).__name__}; "
            "expected a method."
        )
    try:
        signature = inspect.signature(method)
    except ValueError:
        return  # written in C: it has none
    try:
        signature.bind(*([None] if is_unbound else []), *arguments)
    except TypeError as error:
        code = _code(_own(kind, name))
        where = f"{code.co_filename}:{code.co_firstlineno}" if code else _place_of_class(kind)
        hint = " Is self missing?" if is_unbound and "self" not in signature.parameters else ""
        raise TaskError(
            f"{where}, in {kind.__qualname__}.{name}: it takes {signature}, but "
            f"it is called with ({', '.join(arguments)}): {error}.{hint}"
        ) from None


def _is_unbound(task: Any, kind: type, name: str) -> bool:
    """Whether the method takes self: the task is a class, and it is neither static nor bound."""
    return isinstance(task, type) and inspect.isfunction(_own(kind, name))


def _takes_one_more(task: Any, kind: type) -> bool:
    arguments = [None] * _is_unbound(task, kind, "loss")
    try:
        inspect.signature(task.loss).bind(*arguments, "model", "batch", "optimizer")
    except (TypeError, ValueError):
        return False
    return True


def _idle(task: Any, kind: type) -> Iterator[str]:
    """Names that look like hooks of other frameworks and that the task's own code does not use
    either. Other names are ignored."""
    classes = _classes(kind)
    beneath = {
        name
        for each in kind.__mro__
        if each not in classes and "lightning" not in each.__module__
        for name in vars(each)
    }
    used = {name for each in classes for code in _codes(each) for name in _used(code)}
    for name in dict.fromkeys(name for each in classes for name in vars(each)):
        if name.startswith("_") or name in _KNOWN or name in used or name in beneath:
            continue
        close = get_close_matches(name, _KNOWN, n=1, cutoff=0.8)
        if close or name in _FOREIGN or _HOOK.fullmatch(name):
            yield name
    for name in _vars(task):
        if name.startswith("_") or name in _KNOWN or name in used:
            continue
        if get_close_matches(name, _ATTRIBUTES, n=1, cutoff=0.8):
            yield name


def _classes(kind: type) -> list[type]:
    """The user-defined classes among its bases."""
    return [
        each
        for each in kind.__mro__
        if (each is kind or Task in each.__mro__)
        and not each.__module__.startswith("raytrain_ddp.")
    ]


def _codes(kind: type) -> Iterator[CodeType]:
    for value in vars(kind).values():
        parts = [value]
        if isinstance(value, property):
            parts = [value.fget, value.fset]
        elif isinstance(value, cached_property):
            parts = [value.func]
        for part in parts:
            code = _code(part)
            if code is not None:
                yield code


def _code(function: Any) -> CodeType | None:
    plain = inspect.unwrap(getattr(function, "__func__", function)) if function else None
    return getattr(plain, "__code__", None)


def _used(code: CodeType) -> Iterator[str]:
    """The attributes that it reads, and its strings, which may be used with getattr."""
    for step in dis.get_instructions(code):
        reads = step.opname.startswith(("LOAD_ATTR", "LOAD_METHOD", "LOAD_SUPER"))
        if isinstance(step.argval, str) and (reads or step.opname == "LOAD_CONST"):
            yield step.argval
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _used(constant)


def _place_of_class(kind: Any) -> str:
    """``file.py:12``, or the part of it that is known."""
    try:
        return f"{inspect.getsourcefile(kind)}:{inspect.getsourcelines(kind)[1]}"
    except (OSError, TypeError):
        codes = _codes(kind) if isinstance(kind, type) else filter(None, [_code(kind)])
        code = next((each for each in codes if each.co_filename != typing.__file__), None)
        return code.co_filename if code else str(getattr(kind, "__module__", type(kind).__module__))
