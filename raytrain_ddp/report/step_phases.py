"""The phases of a step: their names for people, in the order in which they are drawn.

Their colours are in style.css, after Okabe and Ito, "Color Universal Design" (2008): told apart
with any kind of colour vision.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from raytrain_ddp.display.formatting import format_seconds

PHASES = {
    "compute": "forward and backward",
    "communication": "all-reduce not hidden",
    "optimizer": "optimizer",
    "data": "waiting for data",
    "copy": "copy to the device",
    "checkpoint": "checkpoint stall",
    "evaluation": "evaluation",
    "other": "other, between steps",
}
WORK = ("data", "copy", "compute", "optimizer")  # in which a rank waits for no other


def ordered(names: Iterable[str]) -> list[str]:
    """As they are drawn; those of a newer version come last."""
    known = list(PHASES)
    return sorted(names, key=lambda name: known.index(name) if name in known else len(known))


def css(phase: str) -> str:
    return f"p-{phase}" if phase in PHASES else "p-other"


def step_time(seconds: float) -> str:
    """``0.4 ms``, ``41 ms``, and from a second on as everywhere."""
    if seconds >= 0.9995:
        return format_seconds(seconds)
    return f"{1e3 * seconds:.{0 if seconds >= 0.00995 else 1}f} ms"


def shares(seconds: Mapping[str, float]) -> dict[str, float]:
    """Of their sum, in the order in which they are drawn; {} where there is none."""
    whole = sum(seconds.values())
    return {phase: seconds[phase] / whole for phase in ordered(seconds)} if whole > 0 else {}
