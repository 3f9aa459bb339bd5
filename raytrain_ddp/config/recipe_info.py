"""What a recipe says about itself: the table [recipe] of its file. Not part of the config."""

from __future__ import annotations

import dataclasses
import textwrap
from dataclasses import dataclass, field
from typing import Any

from raytrain_ddp.errors import ConfigError, did_you_mean

_WIDTH = 100


@dataclass(frozen=True)
class RecipeInfo:
    """Where a recipe comes from and what it reaches, in words.

    Args:
        about: what is trained on what.
        source: paper, reference script and version.
        expected: result of the source.
        gpu_hours: what it needs, and how that is known.
        reached: result of this package; empty if it was not run.
        differs: arguments of the source that have another value here, each with the reason.
    """

    about: str = ""
    source: str = ""
    expected: str = ""
    gpu_hours: str = ""
    reached: str = ""
    differs: dict[str, str] = field(default_factory=dict)

    @staticmethod
    def of(table: Any, where: str) -> RecipeInfo:
        """Raises ConfigError for a field that does not exist, or that is not a text."""
        known = {f.name for f in dataclasses.fields(RecipeInfo)}
        if not isinstance(table, dict):
            raise ConfigError(f"{where}: recipe = {table!r}: must be a table [recipe].")
        wrong = [
            f"{where}: there is no field recipe.{name}.{did_you_mean(name, known)}"
            for name in table
            if name not in known
        ]
        for name in sorted(known & {*table}):
            value, rule = table[name], "a table of texts" if name == "differs" else "a text"
            parts = value.values() if name == "differs" and isinstance(value, dict) else [value]
            is_text = all(isinstance(part, str) for part in parts)
            if not is_text or (name == "differs" and not isinstance(value, dict)):
                wrong.append(f"{where}: recipe.{name} = {value!r}: must be {rule}.")
        if wrong:
            raise ConfigError("\n".join(wrong))
        return RecipeInfo(**table)

    def page(self, name: str) -> str:
        """All of it, as lines for a terminal."""
        rows = [
            ("source", self.source),
            ("expected", self.expected),
            ("GPU hours", self.gpu_hours),
            ("reached", self.reached or "not run"),
            *(("differs", f"{argument}: {reason}") for argument, reason in self.differs.items()),
        ]
        lines = _wrapped(f"{name}: {self.about}", "")
        for title, shown in rows:
            lines += _wrapped(shown, f"  {title:<10}", " " * 12) if shown else []
        return "\n".join([*lines, ""])


def overview(recipes: dict[str, RecipeInfo]) -> str:
    """A few lines for each recipe: what it is, what to expect of it, and what was reached."""
    lines = []
    for name, info in recipes.items():
        shown = f"Expected: {info.expected}. Reached: {info.reached or 'not run'}."
        lines += [name, *_wrapped(info.about, "    "), *_wrapped(shown, "    ")]
    return "\n".join([*lines, "All about one: python -m raytrain_ddp.fit NAME --describe", ""])


def _wrapped(text: str, first: str, later: str | None = None) -> list[str]:
    later = first if later is None else later
    return textwrap.wrap(
        text, _WIDTH, initial_indent=first, subsequent_indent=later, break_on_hyphens=False
    )
