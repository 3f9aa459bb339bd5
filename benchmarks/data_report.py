"""The tables of data.py."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from data_actor import DESIGNS
from data_probe import CONTENDERS, JOBS
from series import spread, table

if TYPE_CHECKING:
    from data import Run

BASE = "folder-pil"

Runs = Sequence["Run"]


def as_markdown(
    command: str, machine: Mapping[str, str], runs: Runs, failed: Sequence[tuple[str, str]]
) -> str:
    loads = [run.load for run in runs] or [0.0]
    parts = [
        "# Loading the same images in several ways",
        f"`{command}`",
        "\n".join(f"- {name}: {value}" for name, value in machine.items())
        + f"\n- load before a run (1 minute): {min(loads):.1f} .. {max(loads):.1f}",
        "Medians over the rounds (min .. max), ratios within a round. A random resized crop to 224,"
        " bilinear and antialiased, and a mirror; batches of 64, as uint8; files in the page cache."
        " All but those that say otherwise decode with simplejpeg, crop by a view and resize with"
        " torch, so that loaders are compared, not decoders. The bare loops do not mirror.",
    ]
    for section in (loaders, busy, start, actor, costs):
        parts += section(runs)
    if failed:
        head = ["did not run", "reason"]
        parts += ["## Failed", table(head, [[JOBS[name].title, why] for name, why in failed])]
    return "\n\n".join(parts) + "\n"


def loaders(runs: Runs) -> list[str]:
    head = ["", "images/s", "of the bare loop", "of ImageFolder, PIL", "CPU s per 1,000"]
    head += ["imports s", "first batch s", "PSS MiB", "sum of peak RSS MiB"]
    rows = []
    for name, contender in CONTENDERS.items():
        if own := of(name, runs):
            rows.append(
                [
                    contender.title,
                    values(own, "images_per_s", 0),
                    ratios(own, of(contender.limit, runs), "images_per_s"),
                    ratios(own, of(BASE, runs), "images_per_s"),
                    values(own, "cpu_s", 2),
                    values(own, "import_s", 1),
                    values(own, "first_batch_s", 2),
                    values(own, "pss_mib", 0),
                    values(own, "rss_mib", 0),
                ]
            )
    if not rows:
        return []
    return [
        "## Loaders, nothing beside them",
        "CPU seconds are those of the process and all below it. The first batch is counted from"
        " when everything is imported and nothing opened. The proportional set size (PSS) counts a"
        " shared page once; peak RSS counts it in each process.",
        table(head, rows),
    ]


def busy(runs: Runs) -> list[str]:
    head = ["", "images/s", "of ImageFolder, PIL", "loop's work, ms a batch", "slower by"]
    rows = [
        [
            contender.title,
            values(own, "busy_images_per_s", 0),
            ratios(own, of(BASE, runs), "busy_images_per_s"),
            values(own, "busy_work_ms", 1),
            quotients(own, "busy_work_ms", "alone_ms"),
        ]
        for name, contender in CONTENDERS.items()
        if (own := [run for run in of(name, runs) if "alone_ms" in run.found])
    ]
    if not rows:
        return []
    alone = [run for run in runs if "alone_ms" in run.found]
    return [
        "## Loaders beside a busy training loop",
        "After each batch the loop does small torch operations, which take and give the GIL:"
        f" {values(alone, 'alone_ms', 1)} ms where nothing else runs.",
        table(head, rows),
    ]


def start(runs: Runs) -> list[str]:
    rows = []
    for name, job in JOBS.items():
        if job.section == "start" and (own := of(name, runs)):
            rows.append([job.title, values(own, "step", 0), values(own, "first_batch_s", 3)])
    if not rows:
        return []
    steps = max((run.found["steps"] for run in runs if "steps" in run.found), default=0)
    return [
        f"## First batch of ours, at the first, middle and last of {steps} steps of an epoch",
        table(["", "step", "first batch s"], rows),
    ]


def actor(runs: Runs) -> list[str]:
    rows = []
    for name, title in DESIGNS.items():
        own = of(f"actor-{name}", runs)
        if own:
            rows.append(
                [
                    title,
                    values(own, "images_per_s", 0),
                    values(own, "cpu_s", 2),
                    values(own, "first_batch_s", 2),
                    values(own, "small_images_per_s", 0),
                    quotients(own, "small_work_ms", "small_alone_ms"),
                    values(own, "model_images_per_s", 0),
                    quotients(own, "model_work_ms", "model_alone_ms"),
                    values(own, "pss_mib", 0),
                ]
            )
    if not rows:
        return []
    head = ["", "images/s", "CPU s per 1,000", "first batch s", "beside small operations: images/s"]
    head += ["loop slower by", "beside a small model: images/s", "loop slower by", "PSS MiB"]
    first, second = (of(f"actor-{name}", runs) for name in DESIGNS)
    names = ("images_per_s", "small_images_per_s", "model_images_per_s")
    against = [ratios(first, second, name) for name in names]
    return [
        "## Threads or processes for our decoding in a Ray actor with 2 CPUs",
        table(head, rows),
        f"Threads to processes: {against[0]} idle, {against[1]} beside small operations,"
        f" {against[2]} beside a small model.",
    ]


def costs(runs: Runs) -> list[str]:
    rows = []
    for name, job in JOBS.items():
        own = of(name, runs)
        if job.section != "costs":
            continue
        for number, key in enumerate(own[0].found if own else ()):
            rows.append(["" if number else job.title, key, values(own, key, 2)])
    return ["## Costs of parts", table(["", "", ""], rows)] if rows else []


def of(job: str, runs: Runs) -> list[Run]:
    return [run for run in runs if run.job == job]


def values(own: Runs, key: str, digits: int) -> str:
    return spread([run.found[key] for run in own if key in run.found], digits)


def ratios(own: Runs, base: Runs, key: str) -> str:
    """To the run of `base` in the same round."""
    by_round: dict[int, Any] = {run.round: run.found[key] for run in base}
    return spread([run.found[key] / by_round[run.round] for run in own if run.round in by_round], 2)


def quotients(own: Runs, above: str, below: str) -> str:
    return spread([run.found[above] / run.found[below] for run in own], 2)
