"""Checks a task class: missing methods, wrong arguments, and methods that nothing calls.

Done before anything is started, from the class alone: imports no torch, calls nothing.
"""

from __future__ import annotations

import dis
import inspect
import re
import typing
from collections.abc import Iterator, Mapping, Sequence
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
_ELSEWHERE = {  # names of other frameworks
    r"\w*optimizers?": "optimizer(model) replaces --optim.*; it returns one or parameter groups",
    r"\w*schedulers?|lr|learning_rate": (
        "schedule(step) replaces --schedule.*; it returns a factor of the learning rate"
    ),
    r"on_train_batch_end|on_(after_)?step(_end)?|optimizer_step|after_update|post_step": (
        "after_step(model, step) is called after each update"
    ),
    r"train(ing)?_step|(compute_)?loss(_fn|_function)?|criterion|forward|backward": (
        "training minimizes loss(model, batch)"
    ),
    r"(val|validation|test|eval)_step|validate|evaluation|eval|compute_metrics": (
        "evaluate(model, batch, metrics) evaluates a batch"
    ),
    r"(get_)?train(ing)?_(data)?(loader|set)?": "train_data() returns the training data",
    r"(get_)?(val|valid|validation|test|eval)_(data)?(loader|set)?": (
        "eval_data() returns the evaluation data"
    ),
    r"(max_|num_)?epochs|batch_size|configure_gradient_clipping": "the config sets it",
    r"setup|teardown|prepare_data|callbacks|(on|configure)_\w+|\w+_(epoch|step)_end": (
        "there are no hooks; do it in loss(), evaluate() or the constructor"
    ),
}


def check_task(task: Any) -> None:
    """Checks a class or an object.

    Raises:
        TaskError: it is not a `Task`, it lacks a method, a method takes the wrong arguments, or
            nothing calls a method.
    """
    kind = task if isinstance(task, type) else type(task)
    what = f"{_place_of_class(kind)}: {kind.__qualname__}"
    if not issubclass(kind, Task):
        raise TaskError(
            f"{what} is not a subclass of raytrain_ddp.Task: derive it from raytrain_ddp.Task."
        )
    own = [name for each in _classes(kind) for name in vars(each) if name not in _KNOWN]
    lacking = [name for name in _ARGUMENTS if _static(task, name) in (None, vars(Task)[name])]
    if lacking:
        close = {name: get_close_matches(name, own, n=1, cutoff=0.7) for name in lacking}
        meant = "".join(f" Should {c[0]!r} be {name!r}?" for name, c in close.items() if c)
        raise TaskError(f"{what} has no {'(), no '.join(lacking)}(), which a task requires.{meant}")
    for name, arguments in {**_ARGUMENTS, **_OPTIONAL}.items():
        if getattr(task, name) is not None:
            _check_arguments(task, kind, name, arguments)
    if not isinstance(task.monitor, str | property) or not isinstance(task.unit, str | property):
        raise TaskError(f"{what}: monitor and unit must be strings.")
    if task.goal not in ("min", "max") and not isinstance(task.goal, property):
        raise TaskError(f"{what}: goal = {task.goal!r} must be min or max.")
    for name, meant in _idle(task, kind):
        raise TaskError(
            f"{_place_of_class(kind)}: nothing uses {kind.__qualname__}.{name}: {meant}. If it is "
            "for your own use, rename it."
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
    first, *takes = [*signature.parameters, ""]
    try:
        signature.bind(None, **options)
    except TypeError as error:
        if not first:
            text = f"{_place_of_class(made_by)}: {name} must take the config as its first argument."
            raise TaskError(text) from None
        unknown = next((each for each in options if each not in takes), "")
        problem = f"has no option {unknown!r}" if unknown else f"cannot be called: {error}"
        own = ", ".join(filter(None, takes)) or "none"
        hint = did_you_mean(unknown, takes) if unknown else ""
        raise ConfigError(f"task_options: {name} {problem}.{hint} Its options: {own}.") from None
    typed_options(made_by, options)


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
    """Whether it takes the config, as all do except a class without a constructor of its own."""
    if not isinstance(made_by, type):
        return True
    return inspect.getattr_static(made_by, "__init__") is not object.__init__


def _static(task: Any, name: str) -> Any:
    """The attribute of an object or a class as it is stored; None: there is none."""
    return inspect.getattr_static(task, name, None)


def _check_arguments(task: Any, kind: type, name: str, arguments: Sequence[str]) -> None:
    found, method = _static(task, name), getattr(task, name)
    if isinstance(found, property | cached_property):
        return  # dynamic: what it returns is called later
    is_unbound = isinstance(task, type) and inspect.isfunction(found)
    try:
        signature = inspect.signature(method)
        if name == "loss" and len(signature.parameters) > len(arguments) + is_unbound:
            arguments = (*arguments, "name")  # of one of several optimizers
        signature.bind(*(["self"] if is_unbound else []), *arguments)
    except ValueError:
        return  # written in C: it has no signature
    except TypeError as error:
        code = _code(found)
        where = f"{code.co_filename}:{code.co_firstlineno}" if code else _place_of_class(kind)
        hint = " Is self missing?" if is_unbound and "self" not in signature.parameters else ""
        raise TaskError(
            f"{where}, in {kind.__qualname__}.{name}: it is called with ({', '.join(arguments)}): "
            f"{error}.{hint}"
        ) from None


def _idle(task: Any, kind: type) -> Iterator[tuple[str, str]]:
    """Names that are almost the protocol's or those of other frameworks, and that the task's own
    code does not use either; with what may be meant. Other names are ignored."""
    classes = _classes(kind)
    used = {name for each in classes for code in _codes(each) for name in _used(code)}
    for each in kind.__mro__:
        if each not in classes and "lightning" not in each.__module__:
            used |= {*vars(each)}
    names = dict.fromkeys(name for each in classes for name in vars(each))
    own = {} if kind is task else dict.fromkeys(getattr(task, "__dict__", {}))
    for name in {**names, **own}:
        if name.startswith("_") or name in _KNOWN or name in used:
            continue
        known, patterns = (_KNOWN, _ELSEWHERE) if name in names else (_ATTRIBUTES, {})
        meant = [why for pattern, why in patterns.items() if re.fullmatch(pattern, name)]
        meant += [f"did you mean {each!r}?" for each in get_close_matches(name, known, 1, 0.8)]
        if meant:
            yield name, meant[0]


def _classes(kind: type) -> list[type]:
    """The user-defined classes among its bases."""
    return [
        each
        for each in kind.__mro__
        if (each is kind or Task in each.__mro__)
        and not each.__module__.startswith("raytrain_ddp.")
    ]


def _codes(kind: type) -> Iterator[CodeType]:
    """The code of a class's methods and properties."""
    for value in vars(kind).values():
        parts = (getattr(value, name, None) for name in ("fget", "fset", "func"))
        yield from filter(None, map(_code, (value, *parts)))


def _code(function: Any) -> CodeType | None:
    plain = inspect.unwrap(getattr(function, "__func__", function)) if function else None
    return getattr(plain, "__code__", None)


def _used(code: CodeType) -> Iterator[str]:
    """The names that the code reads, and its strings, which may be used with getattr."""
    for step in dis.get_instructions(code):
        if isinstance(step.argval, CodeType):
            yield from _used(step.argval)
        elif isinstance(step.argval, str) and not step.opname.startswith("STORE"):
            yield step.argval


def _place_of_class(kind: Any) -> str:
    """``file.py:12``, or the part of it that is known."""
    try:
        return f"{inspect.getsourcefile(kind)}:{inspect.getsourcelines(kind)[1]}"
    except (OSError, TypeError):
        codes = _codes(kind) if isinstance(kind, type) else filter(None, [_code(kind)])
        code = next((each for each in codes if each.co_filename != typing.__file__), None)
        return code.co_filename if code else str(getattr(kind, "__module__", type(kind).__module__))
