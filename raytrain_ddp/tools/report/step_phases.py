"""The phases of a step: display names, and the order in which they are drawn.

Their colors are in style.css, after Okabe and Ito, "Color Universal Design" (2008): they can be
distinguished with any kind of color vision.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from raytrain_ddp.tools.display.formatting import format_seconds

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
WORK = ("data", "copy", "compute", "optimizer")  # phases in which a rank does not wait for others


def ordered(names: Iterable[str]) -> list[str]:
    """In drawing order; phases of a newer version come last."""
    known = list(PHASES)
    return sorted(names, key=lambda name: known.index(name) if name in known else len(known))


def css(phase: str) -> str:
    return f"p-{phase}" if phase in PHASES else "p-other"


def step_time(seconds: float) -> str:
    """``0.4 ms``, ``41 ms``; from one second on as `format_seconds`."""
    if seconds >= 0.9995:
        return format_seconds(seconds)
    return f"{1e3 * seconds:.{0 if seconds >= 0.00995 else 1}f} ms"


def shares(seconds: Mapping[str, float]) -> dict[str, float]:
    """Shares of their sum, in drawing order; {} if it is 0."""
    whole = sum(seconds.values())
    return {phase: seconds[phase] / whole for phase in ordered(seconds)} if whole > 0 else {}
