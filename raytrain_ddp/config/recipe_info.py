"""What a recipe says about itself: the table [recipe] of its file. Not part of the config."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
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
        rows = {"source": self.source, "expected": self.expected, "GPU hours": self.gpu_hours}
        rows |= {"reached": self.reached} | {f"differs: {k}": v for k, v in self.differs.items()}
        parts = [f"{title}: {text}" for title, text in rows.items() if text]
        return "".join(map(_filled, [f"{name}: {self.about}", *parts]))


def overview(recipes: Mapping[str, RecipeInfo]) -> str:
    """A few lines for each recipe: what it is, what to expect of it, and what was reached."""
    parts = ""
    for name, info in recipes.items():
        result = f"Expected: {info.expected}. Reached: {info.reached}."
        parts += f"{name}\n{_filled(f'    {info.about}')}{_filled(f'    {result}')}"
    return f"{parts}All about one: python -m raytrain_ddp.fit NAME --describe\n"


def _filled(text: str) -> str:
    return textwrap.fill(text, _WIDTH, subsequent_indent="    ", break_on_hyphens=False) + "\n"
