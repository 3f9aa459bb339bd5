"""What a recipe says about itself: the table [recipe] of its file. Not part of the config."""

from __future__ import annotations

import textwrap
from dataclasses import dataclass, field

from raytrain_ddp.config.field_types import Section

_WIDTH = 100


@dataclass(frozen=True)
class RecipeInfo(Section, name="recipe"):
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
