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
        rows = [("", f"{name}: {self.about}")]
        for field in ("source", "expected", "gpu_hours", "reached"):
            title = "GPU hours" if field == "gpu_hours" else field
            rows += [(f"  {title:<10}", text)] if (text := getattr(self, field)) else []
        rows += [("  differs   ", f"{name}: {reason}") for name, reason in self.differs.items()]
        return _lines(rows)


def overview(recipes: Mapping[str, RecipeInfo]) -> str:
    """A few lines for each recipe: what it is, what to expect of it, and what was reached."""
    rows = []
    for name, info in recipes.items():
        result = f"Expected: {info.expected}. Reached: {info.reached}."
        rows += [("", name), ("    ", info.about), ("    ", result)]
    return _lines([*rows, ("", "All about one: python -m raytrain_ddp.fit NAME --describe")])


def _lines(rows: Iterable[tuple[str, str]]) -> str:
    """Texts, each after a title or indentation."""
    return "".join(
        textwrap.fill(
            text,
            _WIDTH,
            initial_indent=start,
            subsequent_indent=" " * len(start),
            break_on_hyphens=False,
        )
        + "\n"
        for start, text in rows
    )
