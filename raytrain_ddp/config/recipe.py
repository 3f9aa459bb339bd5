"""A config as plain data: dicts (between processes), TOML files (for people), and what changed;
what auto becomes; where its paths are.

Imports nothing heavy; the fields themselves are in train_config.py. The fact ``path`` of a field
gives the kind of path: folder, data, code, weights or options.
"""

from __future__ import annotations

import dataclasses
import glob
import json
import os
import re
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar, cast

from raytrain_ddp.config.field_types import (
    Section,
    as_text,
    facts,
    own_fields,
    setting,
    value_of,
    with_values,
)
from raytrain_ddp.config.train_config import TrainConfig
from raytrain_ddp.config.withdrawn import DECIDING, DEFAULTS, is_ignored, withdrawn
from raytrain_ddp.errors import ConfigError, did_you_mean, in_one_line
from raytrain_ddp.files import absolute
from raytrain_ddp.uri import shareable, without_secrets

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

S = TypeVar("S", bound=Section)
_WIDTH = 100
Change = Callable[[str], str]
# Ampere and later, by the names that Ray gives accelerators. Others count as without bf16.
_HAS_BF16 = re.compile(r"(A|H|L|B|GH|GB)\d+[A-Z]?(-.*)?|GeForce-RTX-[3-5]0.*|RTX-(A|PRO).*")


@dataclasses.dataclass(frozen=True)
class RecipeInfo(Section, name="recipe"):
    """Where a recipe comes from and what it reaches, in words.

    Args:
        about: what is trained on what.
        source: paper, reference script and version.
        expected: result of the source.
        gpu_hours: how many it needs, and how that is known.
        reached: result of this package.
        differs: arguments of the source that have a different value here, each with the reason.
    """

    about: str = setting("", lines=True)
    source: str = setting("", lines=True)
    expected: str = setting("", lines=True)
    gpu_hours: str = setting("", lines=True)
    reached: str = setting("not run", lines=True, may_be_empty=True)
    differs: dict[str, str] = setting({}, lines=True)

    def page(self, name: str) -> str:
        """All fields, as lines for a terminal."""
        rows = {name: self.about} | {k.replace("gpu_", "GPU "): v for k, v in vars(self).items()}
        rows |= {f"differs: {key}": why for key, why in rows.pop("differs").items()}
        del rows["about"]
        return "".join(_filled(f"{title}: {text}") for title, text in rows.items() if text)


def to_dict(config: TrainConfig) -> dict[str, Any]:
    """Nested dicts, lists and scalars; `from_dict` is the inverse."""
    plain: dict[str, Any] = json.loads(json.dumps(dataclasses.asdict(config)))
    return plain


def from_dict(
    values: Mapping[str, Any], where: str = "config", for_training: bool = True
) -> TrainConfig:
    """The inverse of `to_dict`.

    Args:
        where: names the values in messages.
        for_training: otherwise, withdrawn fields, which affected only training, are passed over.

    Raises:
        ConfigError: lists every unknown field and every wrong type in `values`.
    """
    return _read(TrainConfig, values, where, for_training)


def _read(kind: type[S], values: Mapping[str, Any], where: str, for_training: bool = True) -> S:
    wrong: list[str] = []
    built = _built(kind, values, wrong, for_training)
    if wrong:
        raise ConfigError(f"{where}: {' '.join(wrong)}")
    return built


def _built(kind: type[S], values: Mapping[str, Any], wrong: list[str], for_training: bool) -> S:
    """A section of `values`; `wrong` receives a sentence for each error."""
    fields, given = own_fields(kind), dict[str, Any]()  # type: ignore[arg-type]
    for key, value in values.items():
        field, name = fields.get(key), f"{kind.section}.{key}".lstrip(".")
        try:
            if is_ignored(name, value, for_training):
                continue
            if field is None:
                hint = withdrawn(name) or did_you_mean(name, [f.name for f in fields.values()])
                wrong.append(f"there is no field {in_one_line(name)}.{hint}")
            elif dataclasses.is_dataclass(field.kind) and isinstance(value, Mapping):
                given[key] = _built(cast(Any, field.kind), value, wrong, for_training)
            else:
                given[key] = field.checked(value)
        except ConfigError as error:
            wrong.append(str(error))
    try:
        return kind() if wrong else kind(**given)  # compared only once each value is right
    except ConfigError as error:
        wrong.append(str(error))
        return kind()


def load(path_or_name: str) -> TrainConfig:
    """A recipe from a TOML file, or one of those that ship with the package, by name."""
    return load_with_info(path_or_name)[0]


def load_with_info(path_or_name: str) -> tuple[TrainConfig, RecipeInfo]:
    """A recipe, and what it says about itself in its table [recipe]."""
    shipped = shipped_recipes()
    path = shipped.get(path_or_name, Path(path_or_name))
    flag = f"--task {path}:CLASS" if path.suffix == ".py" else f"--data.source {path}"
    hint = "" if path.suffix == ".toml" else f" Did you mean {flag}?"
    try:
        return loads(path.read_text(encoding="utf-8-sig"), str(path))
    except (FileNotFoundError, NotADirectoryError):
        runs = [run.parent.name for run in Path("runs").glob("*/config.toml")]
        hint = withdrawn(path_or_name) or did_you_mean(path_or_name, [*shipped, *runs])
    except IsADirectoryError:
        pass
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}.") from None
    except ConfigError as error:
        raise ConfigError(f"{error}{hint}") from None
    except ValueError as error:
        raise ConfigError(f"{path} is not valid TOML: {error}.{hint}") from None
    raise ConfigError(
        f"there is no recipe {path_or_name!r}: give a .toml file, the folder of a run, or one of "
        f"{', '.join(shipped)}.{hint}"
    )


def loads(text: str, where: str) -> tuple[TrainConfig, RecipeInfo]:
    """Like `load_with_info`, for the text of a file; `where` names it in messages."""
    try:
        values = tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # or an integer with too many digits
        raise ConfigError(f"{where} is not valid TOML: {error}.") from None
    about = values.pop("recipe", {})
    if not isinstance(about, dict):
        raise ConfigError(f"{where}: recipe = {about!r}: must be a table [recipe].")
    info = _read(RecipeInfo, about, where)
    return from_dict(values, where), info


def described(path_or_name: str | None) -> str:
    """What a recipe says about itself, or a few lines for each that ships with the package."""
    if path_or_name is not None:
        return load_with_info(path_or_name)[1].page(default_name(path_or_name) or path_or_name)
    parts = ""
    for name in shipped_recipes():
        info = load_with_info(name)[1]
        result = f"Expected: {info.expected}. Reached: {info.reached}."
        parts += f"{name}\n{_filled(f'    {info.about}')}{_filled(f'    {result}')}"
    return f"{parts}For details of a recipe: python -m raytrain_ddp.fit NAME --describe\n"


def _filled(text: str) -> str:
    return textwrap.fill(text, _WIDTH, subsequent_indent="    ", break_on_hyphens=False) + "\n"


def default_name(path_or_name: str | None) -> str | None:
    """What a run of this recipe is called where the recipe has no `name`: as its file."""
    if path_or_name is None:
        return None
    path = Path(path_or_name).absolute()
    name = path.parent.name if path.name == "config.toml" else path.stem
    return re.sub(r"[^A-Za-z0-9._-]+", "-", name)[:100].strip("-.") or None


def dumps(config: TrainConfig, default: TrainConfig | None = None) -> str:
    """The config as TOML; `load` reads it back. Fields that are None are left out.

    Args:
        default: leave out the fields that are the same in it.
    """
    import tomli_w

    same = flat(default) if default else {}
    tables: dict[str, Any] = {}
    for name, value in flat(config).items():
        section, _, field = name.rpartition(".")
        if value is not None and value != same.get(name):
            (tables.setdefault(section, {}) if section else tables)[field] = value
    return tomli_w.dumps(tables)


def parse(text: str) -> dict[str, Any]:
    """The tables of a TOML file; ValueError if it is none."""
    return tomllib.loads(text)


def shipped_recipes() -> dict[str, Path]:
    """Name -> file of the recipes in this package."""
    folder = Path(__file__).parents[1] / "recipes"
    return {path.stem: path for path in sorted(folder.glob("*.toml"))}


def flat(config: TrainConfig) -> dict[str, Any]:
    """``{"optim.lr": 0.1, ...}`` in the order of the fields."""
    return dict(fields_of(to_dict(config)))


def publishable(config: TrainConfig) -> TrainConfig:
    """The config as it is written down: its URIs without what may be secret of them.

    Whoever resumes from it has the credentials in the environment.
    """
    return with_paths(config, shareable)


def changed_fields(
    old: Mapping[str, Any], new: TrainConfig, folder: str = ""
) -> list[tuple[str, Any, Any]]:
    """(field, then, now) for each field that decides the result and differs from a checkpoint's.

    Fields that did not exist when the checkpoint was written count as their default. Different
    spellings of one path are equal. The query of a URI may change: it says where data are served
    from, and the fingerprint of the data is compared, too.

    Args:
        folder: of the checkpoint's run. The run may have moved together with its data.
    """
    new = settled_if_alike(new, old)
    free = {*facts(TrainConfig, "free"), *(DEFAULTS.keys() - DECIDING)}
    begun = {name: value for name, value in fields_of(old) if not is_ignored(name, value)}
    if new.exact:  # as many threads sum in another order
        free -= {"scaling.cpus_per_worker"}
    place = moved_with(f"{begun.get('storage')}/{begun.get('name')}", folder)
    then = _comparable({**flat(TrainConfig()), **begun}, lambda path: absolute_path(place(path)))
    now = _comparable(flat(new), absolute_path)
    fixed = [name for name in {**now, **then} if name not in free]
    return [(n, then.get(n), now.get(n)) for n in fixed if then.get(n) != now.get(n)]


def _comparable(fields: Mapping[str, Any], place: Callable[[str], str]) -> dict[str, Any]:
    """The fields with one spelling for what means the same."""
    kinds = facts(TrainConfig, "path")
    same = {name: changed_path(kinds.get(name, ""), each, place) for name, each in fields.items()}
    same = {k: without_secrets(v) if isinstance(v, str) else v for k, v in same.items()}
    options = same["task_options"]
    if isinstance(options, Mapping):  # a command line gives text, a file or Python also numbers
        same["task_options"] = {name: as_text(value) for name, value in options.items()}
    if same["scaling.cpus_per_worker"] == "auto":  # on CPUs, where it decides the result, 1
        same["scaling.cpus_per_worker"] = 1.0
    return same


def fields_of(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(name, value) of each field in a recipe's tables, as ``optim.lr``."""
    for key, value in values.items():
        if isinstance(value, dict) and prefix + key not in ("task_options", "model.args"):
            yield from fields_of(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value


# ------------------------------------------------------------------ what auto becomes


def settled(config: TrainConfig, has_bf16: bool) -> TrainConfig:
    """The config with values for fields that say auto, before workers start: bf16 and channels_last
    on GPUs that have bf16 in hardware; fp32 and contiguous elsewhere.

    The same command finds the run again, and continues it with the same values.
    """
    chosen = {"precision": "bf16" if has_bf16 else "fp32", "channels_last": has_bf16}
    return settled_as_begun(config, {"compute": chosen})


def settled_as_begun(config: TrainConfig, begun: Mapping[str, Any]) -> TrainConfig:
    """The config with each auto replaced by the run's value; `begun` holds nested tables."""
    then = begun.get("compute", {})
    values = {f"compute.{name}": then.get(name, "auto") for name in _automatic(config)}
    return with_values(config, values)


def settled_if_alike(config: TrainConfig, begun: Mapping[str, Any]) -> TrainConfig:
    """Like `settled_as_begun` if auto could have chosen the run's values; else the same config."""
    then, names = begun.get("compute", {}), _automatic(config)
    both = (settled(config, has_bf16) for has_bf16 in (False, True))
    alike = (c for c in both if all(then.get(n) == getattr(c.compute, n) for n in names))
    return next(alike, config)


def _automatic(config: TrainConfig) -> list[str]:
    return [n for n in ("precision", "channels_last") if getattr(config.compute, n) == "auto"]


def settled_note(before: TrainConfig, after: TrainConfig) -> str:
    """What was chosen for GPUs; "" if nothing was."""
    layout = "channels_last" if after.compute.channels_last else "contiguous"
    text = f"On these GPUs: {after.compute.precision}, {layout} images (auto)."
    return text if before.compute != after.compute else ""


def have_bf16(nodes: Iterable[Mapping[str, float]]) -> bool:
    """Whether all GPUs have bf16 in hardware, by the resources of each node of a Ray cluster."""
    kinds = [
        [name.partition(":")[2] for name in node if name.startswith("accelerator_type:")]
        for node in nodes
        if node.get("GPU", 0) > 0
    ]
    return bool(kinds) and all(of and all(map(_HAS_BF16.fullmatch, of)) for of in kinds)


# ------------------------------------------------------------------ paths


def with_paths(config: TrainConfig, change: Change) -> TrainConfig:
    """Returns a copy in which each path and URI is replaced by what `change` returns for it."""
    made: dict[str, Any] = {}
    for name, kind in facts(TrainConfig, "path").items():
        value = value_of(config, name)
        new = changed_path(kind, value, change)
        if new != value:
            made[name] = new
    return with_values(config, made)


def changed_path(kind: str, value: Any, change: Change) -> Any:
    """Returns the value of a field of this kind, its path replaced by what `change` returns."""
    if isinstance(value, Mapping) and kind == "options":
        return {name: changed_path("option", each, change) for name, each in value.items()}
    if not isinstance(value, str):
        return value
    if kind == "code":
        place, colon, name = value.rpartition(":")
        return f"{change(place)}{colon}{name}" if place.endswith(".py") else value
    return change(value) if _is_path(kind, value) else value


def _is_path(kind: str, value: str) -> bool:
    if kind == "data":
        return not is_by_name(value)
    if kind == "weights":  # names of runs and files have become absolute: see check_weights
        return os.path.isabs(value) or "://" in value
    if kind == "option":  # the user's task decides what it means
        looks_like_one = "/" in value or os.path.splitext(value)[1][1:].isalpha()
        return os.path.isabs(value) or (looks_like_one and _exists(value))
    return kind == "folder"


def is_by_name(source: str) -> bool:
    """Whether data are found by their name, on any machine."""
    return source == "digits" or (
        source.startswith(("torchvision:", "hf:")) and "://" not in source
    )


def absolute_path(path: str) -> str:
    """Makes a path absolute like `absolute`; removes the trailing slash of a URI."""
    if "://" in path:
        place, mark, query = path.partition("?")
        return f"{place.rstrip('/') if place[-3:] != '://' else place}{mark}{query}"
    is_pattern = glob.escape(path) != path and not os.path.lexists(path)
    if is_pattern and not path.startswith(("/", "~")):
        return absolute(os.path.join(glob.escape(os.getcwd()), path))
    return absolute(path)


def moved_with(before: str, now: str) -> Change:
    """Returns a function that finds the paths of a run whose folder was `before` and is now `now`.

    If a path no longer exists, the one at the same place relative to the run's folder is used.
    Relative paths, of earlier versions, started in the folder that held the storage.
    """
    if "://" in now or not os.path.isabs(before):
        return lambda path: path

    def find(path: str) -> str:
        if "://" in path or _exists(path):
            return path
        start = os.path.join(os.path.dirname(os.path.dirname(before)), os.path.expanduser(path))
        beside = os.path.normpath(os.path.join(now, os.path.relpath(start, before)))
        return beside if _exists(beside) else path

    return find


def _exists(path: str) -> bool:
    path = os.path.expanduser(path)
    return os.path.exists(path) or any(glob.iglob(path, recursive=True))
