"""Finds the task that a config names, and checks it before anything is started.

The name is checked before importing anything. The class is checked from the class alone, which
imports no torch and calls nothing: missing methods, wrong arguments, methods that nothing calls.
"""

from __future__ import annotations

import dis
import importlib
import importlib.util
import inspect
import re
import sys
import typing
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from difflib import get_close_matches
from functools import cached_property
from operator import attrgetter
from pathlib import Path
from types import CodeType
from typing import Any, cast

from raytrain_ddp import user_code
from raytrain_ddp.config.field_types import as_text
from raytrain_ddp.config.train_config import TaskName, TrainConfig, watched
from raytrain_ddp.config.withdrawn import WITHDRAWN, withdrawn
from raytrain_ddp.data.order import kept_globals
from raytrain_ddp.errors import ConfigError, TaskError, did_you_mean
from raytrain_ddp.tasks.task import OwnLoop, Task
from raytrain_ddp.tasks.task_check import code_of

BUILT_IN = {"image-classification": "raytrain_ddp.tasks.image_classification:ImageClassification"}
_KINDS = {"task": "class", "model.name": "function"}

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
    r"turns": f"it was withdrawn: {WITHDRAWN['turns']}",
    r"(max_|num_)?epochs|batch_size|configure_gradient_clipping": "the config sets it",
    r"setup|teardown|prepare_data|callbacks|(on|configure)_\w+|\w+_(epoch|step)_end": (
        "there are no hooks; do it in loss(), evaluate() or the constructor"
    ),
}


def load_task(config: TrainConfig, reads: set[str] | None = None) -> Task:
    """Builds the task of a config. The global generators are seeded before a user's task is
    built.

    Args:
        reads: receives the fields of the config that the task reads, now and later.

    Raises:
        ConfigError: the module, file or class does not exist, or it has no such options.
        TaskError: it is not a task; see `check_task`. Errors raised by the task's own code are
            passed through unchanged.
    """
    given = task_of(config)
    if isinstance(given, OwnLoop):
        return given
    if callable(given):
        is_own, options = config.task not in BUILT_IN, options_of(given, config.task_options)
        seen = watched(config, reads) if is_own and reads is not None else config
        with kept_globals(config.seed) if is_own else nullcontext():  # seeding imports torch
            given = given() if options is None else given(seen, **options)
    check_task(given)
    return cast(Task, given)


def task_of(config: TrainConfig) -> Any:
    """The task class, factory function or instance that `config.task` names or holds.

    Raises:
        ConfigError, TaskError: like `load_task`.
    """
    check_task_name(config.task)
    if isinstance(config.task, TaskName):
        given = config.task.target
        if isinstance(given, OwnLoop):
            return given
    else:
        given = imported("task", BUILT_IN.get(config.task) or config.task)
    if isinstance(given, type) or not callable(given):
        check_task(given)
    if callable(given):
        options_of(given, config.task_options)
    elif config.task_options:
        raise ConfigError(
            f"task_options = {config.task_options}: the task is already an instance. Pass its "
            "class instead, or set the options when you create it."
        )
    return given


def imported(field: str, name: str) -> Any:
    """What ``module:Class`` or ``file.py:Class`` names; `field` of the config has it.

    Raises:
        ConfigError: there is no such object. Errors of the module's code are passed through.
        TaskError: the module's code ends the process.
    """
    place, _, object_name = name.rpartition(":")
    if place == "__main__":
        module: Any = sys.modules["__main__"]
    else:
        in_file, file = place.endswith(".py"), Path(place)
        own, folder = file.stem if in_file else place, str(file.resolve().parent)
        # On another machine the file is elsewhere: Ray has put its folder on the import path there.
        if in_file and file.is_file() and folder not in sys.path:
            sys.path.insert(0, folder)
        try:
            module = importlib.import_module(own)  # so that its objects can be pickled
        except ModuleNotFoundError as error:
            if error.name is None or not f"{own}.".startswith(f"{error.name}."):
                raise  # of a module that it imports itself
            raise _absent(field, name) from None
        except SystemExit as error:
            raise TaskError(
                f"{field} = {name!r}: its module ends the process while it is imported "
                "(sys.exit(), or arguments that a parser refuses). Put what a script does under "
                'if __name__ == "__main__".'
            ) from error
        except ImportError as error:
            if not in_file or "no known parent package" not in str(error):
                raise
            module_name = ".".join(file.with_suffix("").parts)
            raise ConfigError(
                f"{field} = {name!r}: the file has relative imports, which need its package: name "
                f"the module, such as {module_name}:{object_name}."
            ) from error
    with suppress(AttributeError):
        return attrgetter(object_name)(module)
    raise ConfigError(
        f"{field} = {name!r}: {place} has no {_KINDS[field]} {object_name!r}."
        f"{did_you_mean(object_name, vars(module))}"
    )


def check_task_name(name: str) -> None:
    """Raises ConfigError if `name` cannot be a task's; does not import it."""
    if name in BUILT_IN or isinstance(name, TaskName):
        return
    if hint := withdrawn(f"task={name}"):
        raise ConfigError(f"there is no task {name!r}.{hint}")
    if name.endswith("(run)"):
        raise ConfigError(
            f"task = {name!r} is a loop of your own: only its script can call it. Run that again; "
            "the weights are in the *.safetensors of its checkpoints."
        )
    place, colon, class_name = name.rpartition(":")
    from_python = class_name.endswith(")") or "<" in class_name
    if from_python or (place == "__main__" and not hasattr(sys.modules["__main__"], class_name)):
        raise ConfigError(
            f"task = {name!r} was defined in a script or notebook and cannot be imported. Run "
            "that again: fit(TrainConfig(...)) continues the run. Or put the class into a file: "
            "--task path/to/file.py:Class."
        )
    if not colon or not all(part.isidentifier() for part in class_name.split(".")):
        raise ConfigError(
            f"task = {name!r}: expected {', '.join(BUILT_IN)}, package.module:Class or "
            f"path/to/file.py:Class.{did_you_mean(name, BUILT_IN)}"
        )
    check_place("task", name)


def check_place(field: str, name: str) -> None:
    """Raises ConfigError if there is no such module or file, or a file does not define, assign or
    import the name; does not run it."""
    place, _, object_name = name.rpartition(":")
    file, in_file, defined = Path(place), place.endswith(".py"), object_name.partition(".")[0]
    if user_code.has(file.stem if in_file else place) or place == "__main__":
        return  # the driver has checked it
    if not in_file:
        if importlib.util.find_spec(place.partition(".")[0]) is None:
            raise _absent(field, name)
        return
    if not file.is_file():
        raise _absent(field, name)
    try:
        names = compile(file.read_bytes(), place, "exec", dont_inherit=True).co_names
    except (SyntaxError, ValueError) as error:
        raise ConfigError(f"{field} = {name!r}: {place} is not valid Python: {error}.") from None
    if defined not in names:
        raise ConfigError(
            f"{field} = {name!r}: {place} has no {_KINDS[field]} {defined!r}."
            f"{did_you_mean(defined, names)}"
        )


def _absent(field: str, name: str) -> ConfigError:
    place = name.rpartition(":")[0]
    kind = "file" if place.endswith(".py") else "module"
    return ConfigError(f"{field} = {name!r}: there is no {kind} {place!r} in {Path.cwd()}.")


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


def options_of(made_by: Any, options: Mapping[str, Any]) -> dict[str, Any] | None:
    """The options with which to call the task's constructor or factory, besides the config, as it
    annotates them: int, float, bool, str; others stay as given, which is text on a command line.
    None: it takes no config either, as a class without a constructor of its own.

    Raises:
        ConfigError: an option does not exist or has a wrong value, or a required one is missing.
        TaskError: it does not take a config.
    """
    name = getattr(made_by, "__qualname__", type(made_by).__qualname__)
    if isinstance(made_by, type) and _static(made_by, "__init__") is object.__init__:
        for option in options:
            raise ConfigError(f"task_options: {name} has no option {option!r}, or any other.")
        return None
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
    typed: dict[str, Any] = dict(options)
    for option, text in options.items():
        parameter = signature.parameters.get(option)
        kind: Any = parameter.annotation if parameter else None
        kind = kind if isinstance(kind, str) else getattr(kind, "__name__", "")
        try:
            if kind == "bool":
                typed[option] = {"true": True, "false": False}[str(text).lower()]
            elif kind in ("int", "float"):
                typed[option] = {"int": int, "float": float}[kind](str(text))
            elif kind == "str":
                typed[option] = as_text(text)
        except (ValueError, KeyError):
            wanted = {"int": "an integer", "float": "a number", "bool": "true or false"}[kind]
            raise ConfigError(f"task_options.{option} = {text!r}: must be {wanted}.") from None
    return typed


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
        signature.bind(*(["self"] if is_unbound else []), *arguments)
    except ValueError:
        return  # written in C: it has no signature
    except TypeError as error:
        code = code_of(found)
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
        yield from filter(None, map(code_of, (value, *parts)))


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
        codes = _codes(kind) if isinstance(kind, type) else filter(None, [code_of(kind)])
        code = next((each for each in codes if each.co_filename != typing.__file__), None)
        return code.co_filename if code else str(getattr(kind, "__module__", type(kind).__module__))
