"""A config as plain data: dicts (between processes), TOML files (for people), and what changed.

Imports nothing heavy; the fields themselves are in train_config.py.
"""

from __future__ import annotations

import dataclasses
import json
import re
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, cast

from raytrain_ddp.config.automatic import settled_if_alike
from raytrain_ddp.config.field_types import Section, as_text, checked, facts, setting
from raytrain_ddp.config.paths import (
    absolute_path,
    changed_path,
    moved_with,
    with_paths,
)
from raytrain_ddp.config.train_config import TrainConfig
from raytrain_ddp.config.withdrawn import DECIDING, DEFAULTS, is_ignored, withdrawn
from raytrain_ddp.errors import ConfigError, did_you_mean, in_one_line
from raytrain_ddp.uri import shareable, without_secrets

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

_WIDTH = 100


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
        rows = {name: self.about, "source": self.source, "expected": self.expected}
        rows |= {"GPU hours": self.gpu_hours, "reached": self.reached}
        rows |= {f"differs: {key}": why for key, why in self.differs.items()}
        return "".join(_filled(f"{title}: {text}") for title, text in rows.items() if text)


def to_dict(config: TrainConfig) -> dict[str, Any]:
    """Nested dicts, lists and scalars; `from_dict` is the inverse."""
    plain: dict[str, Any] = json.loads(json.dumps(dataclasses.asdict(config)))
    return plain


def from_dict(values: Mapping[str, Any], where: str = "config") -> TrainConfig:
    """Raises ConfigError that lists every unknown field and every wrong type in `values`."""
    config: TrainConfig = _read(TrainConfig, values, where)
    return config


def _read(section: type[Section], values: Mapping[str, Any], where: str, prefix: str = "") -> Any:
    wrong: list[str] = []
    built = _built(section, values, wrong, prefix)
    if wrong:
        raise ConfigError(f"{where}: {' '.join(wrong)}")
    return built


def _built(section: type[Section], values: Mapping[str, Any], wrong: list[str], prefix: str) -> Any:
    """A section of `values`; `wrong` receives a sentence for each error."""
    kinds, given = section.kinds(), dict[str, Any]()
    for name, value in values.items():
        if is_ignored(prefix + name, value):
            continue
        if name not in kinds:
            hint = withdrawn(prefix + name) or did_you_mean(
                prefix + name, [prefix + kind for kind in kinds]
            )
            wrong.append(f"there is no field {in_one_line(prefix + name)}.{hint}")
        elif dataclasses.is_dataclass(kinds[name]) and isinstance(value, Mapping):
            given[name] = _built(cast(Any, kinds[name]), value, wrong, f"{prefix}{name}.")
        else:
            given[name] = value
    try:
        if not wrong:  # sections are compared only once each is right
            return section(**given)
        wrong += checked(section, given)[1]
    except ConfigError as error:
        wrong.append(str(error))
    return section()


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
    info: RecipeInfo = _read(RecipeInfo, about, where, "recipe.")
    return from_dict(values, where=where), info


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
