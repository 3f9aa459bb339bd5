"""Formats numbers, times, sizes and messages for people."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

from raytrain_ddp.errors import printable
from raytrain_ddp.events import DataSummary

FRACTION = re.compile(r"(^|[/_.])(top\d+|acc(uracy)?)$")  # names of metrics


def format_seconds(seconds: float) -> str:
    """``0.42 s``, ``4.2 s``, ``42 s``, ``12m05s``, ``3h12m``, ``51h00m``; ``-`` if unknown."""
    if not math.isfinite(seconds):
        return "-"
    if seconds < 59.5:
        return f"{seconds:.{2 if seconds < 0.995 else 1 if seconds < 9.95 else 0}f} s"
    minutes, whole = divmod(round(seconds), 60)
    return f"{minutes}m{whole:02d}s" if minutes < 60 else f"{minutes // 60}h{minutes % 60:02d}m"


def format_count(count: float) -> str:
    """``3.2``, ``812``, ``1437``, ``25,557,032``: no separator up to four digits. ``-`` if
    unknown."""
    if not math.isfinite(count):
        return "-"
    digits = 0 if count >= 99.5 or count == int(count) else 1
    return f"{count:,.0f}" if count >= 9999.5 else f"{count:.{digits}f}"


def format_number(value: float) -> str:
    """Four significant digits with trailing zeros, so that columns stay aligned."""
    return f"{value:#.4g}".rstrip(".") if abs(value) < 9999.5 else f"{value:.3e}"


def format_metric(name: str, value: float) -> str:
    """Top-k and accuracies in [0, 1] as percent, others as numbers."""
    if FRACTION.search(name) and 0 <= value <= 1:
        return f"{format_number(100 * value)} %"
    return format_number(value)


def plural(count: int, what: str) -> str:
    return f"{count} {what}" if count == 1 else f"{count} {what}s"


def format_ranks(ranks: Sequence[int]) -> str:
    """``rank 1``, ``ranks 1 and 2``, ``no rank``."""
    if not ranks:
        return "no rank"
    *first, last = map(str, ranks)
    return f"ranks {', '.join(first)} and {last}" if first else f"rank {last}"


def format_data(data: DataSummary | None, unit: str) -> list[tuple[str, str]]:
    """(title, text) of each line about the data, from `Splits.summary`; none without data."""
    if data is None:
        return []
    what = data.predicted
    one = "class" if what == "classes" else what.removesuffix("s")
    classes = f"{format_count(data.classes)} {what if data.classes > 1 else one}"
    shown = ", ".join(data.names) + ", ..." * (data.classes > len(data.names))
    lines = [("training set", f"{format_count(data.train.rows)} {unit} of {classes}: {shown}")]
    shown = "not counted because the storage is slow"
    if data.train.smallest and data.train.largest:
        (small, least), (large, most) = data.train.smallest, data.train.largest
        shown = f"{format_count(least)} ({one} {small}) to {format_count(most)} ({one} {large})"
        if least == most:
            shown = f"{format_count(least)} each"
    if what != "targets":  # of numbers
        lines.append((f"{one} sizes", shown))
    shown = "none"
    if data.eval is not None:
        absent = data.eval.empty or 0
        some = f"{data.classes - absent} of the {classes}" if absent else classes
        shown = f"{format_count(data.eval.rows)} {unit} of {some}: {data.eval.origin}"
    lines.append(("evaluation", shown))
    lines += [("note", note) for note in data.notes]
    return [(title, printable(text)) for title, text in lines]


def format_bytes(count: float) -> str:
    """``512 MiB``, ``7.5 GiB``, ``80 GiB``, ``2.0 TiB``."""
    for unit, step in (("TiB", 2**40), ("GiB", 2**30)):
        if count >= 0.9995 * step:
            value = count / step
            return f"{value:.{1 if value < 9.95 else 0}f} {unit}"
    return f"{count / 2**20:.0f} MiB"


def format_share(share: float) -> str:
    """``38 %``; below one percent ``0.4 %``."""
    return f"{100 * share:.{0 if share >= 0.00995 or share == 0 else 1}f} %"


def error_summary(message: str) -> str:
    """The first line of an error's message. If a traceback follows, also the first line of its
    exception."""
    first, _, rest = message.strip().partition("\n")
    lines = rest.splitlines() if "Traceback" in rest else []
    frames = [number for number, line in enumerate(lines) if line.startswith("  File ")]
    behind = lines[frames[-1] + 1 :] if frames else lines[-1:]
    last = next((line for line in behind if line[:1].strip()), lines[-1].strip() if lines else "")
    return ": ".join([first.rstrip(":"), *([last] if last else [])])
