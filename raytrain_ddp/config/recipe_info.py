"""What a recipe says about itself: the table [recipe] of its file. Not part of the config."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from raytrain_ddp.config.field_types import Section, setting

_WIDTH = 100


@dataclass(frozen=True)
class RecipeInfo(Section, name="recipe"):
    """Where a recipe comes from and what it reaches, in words.

    Args:
        about: what is trained on what.
        source: paper, reference script and version.
        expected: result of the source.
        gpu_hours: what it needs, and how that is known.
        reached: result of this package.
        differs: arguments of the source that have another value here, each with the reason.
    """

    about: str = setting("", lines=True)
    source: str = setting("", lines=True)
    expected: str = setting("", lines=True)
    gpu_hours: str = setting("", lines=True)
    reached: str = setting("not run", lines=True, may_be_empty=True)
    differs: dict[str, str] = setting({}, lines=True)

    def page(self, name: str) -> str:
        """All of it, as lines for a terminal."""
        rows = [
            ("source", self.source),
            ("expected", self.expected),
            ("GPU hours", self.gpu_hours),
            ("reached", self.reached),
            *(("differs", f"{argument}: {reason}") for argument, reason in self.differs.items()),
        ]
        return _lines([("", f"{name}: {self.about}"), *((f"  {k:<10}", v) for k, v in rows if v)])


def overview(recipes: Mapping[str, RecipeInfo]) -> str:
    """A few lines for each recipe: what it is, what to expect of it, and what was reached."""
    rows = []
    for name, info in recipes.items():
        result = f"Expected: {info.expected}. Reached: {info.reached}."
        rows += [("", name), ("    ", info.about), ("    ", result)]
    return _lines([*rows, ("", "All about one: python -m raytrain_ddp.fit NAME --describe")])


def _lines(rows: Iterable[tuple[str, str]]) -> str:
    """Texts, each after a title or indentation."""
    filler = textwrap.TextWrapper(_WIDTH, break_on_hyphens=False)
    text = ""
    for filler.initial_indent, row in rows:
        filler.subsequent_indent = " " * len(filler.initial_indent)
        text += f"{filler.fill(row)}\n"
    return text
