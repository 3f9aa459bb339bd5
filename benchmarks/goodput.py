"""Share of the time that makes lasting progress (ETTR), simulated from measured constants.

    python benchmarks/goodput.py [--out FILE.md FILE.json]      after checkpoint.py and recovery.py
    python benchmarks/goodput.py --quick

Reads results/checkpoint.json (what a checkpoint takes from the loop, when it is durable, what it
takes to load) and results/recovery.json (from the kill of a worker to the next step, detection
included), and simulates runs under failures at random times, event by event, with a fixed seed.
Each checkpoint's and each restart's cost is drawn from those measured; beside the simulation
stands the exact expectation for their means,

    ETTR = t / M * exp(-(c + R) / M) / (exp((t + d) / M) - 1)

with t seconds of work between checkpoints, d lost per checkpoint, c from there until it is durable,
R from a failure to the next step, M between failures. A failure throws work back to the newest
checkpoint that was durable; one during a restart begins the restart anew. The checkpoint interval
t + d is a fixed one, or Young's sqrt(2 d M) (doi:10.1145/361147.361115) and at least as long as a
checkpoint takes to become durable, or the best there is, found by search. Daly's higher-order
estimate (doi:10.1016/j.future.2004.11.016) differs from Young's by less than a tenth here.

Where fit replaces a worker and the others keep their state (today not on GPUs), nothing is thrown
back, and the expectation is (1 - d / (t + d)) * exp(-R / M). The best interval is then the longest
that is searched, 10 M: checkpoints serve only those failures that end all workers, which are not
simulated.

What it assumes: failures are independent and their rate is proportional to the number of GPUs; each
ends one worker, and training stands until the next step; a replacement stands ready. The time to
load the larger state is added to each restart. The restart was measured with two workers on
one machine: the rendezvous and placement of thousands take longer, so a table tells how much that
matters. DDP's state is the same on all workers and is written by one: no constant of a checkpoint
grows with their number.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean, median
from typing import Any

from series import HERE, table

RESULTS = HERE / "results"
HOUR_S = 3600.0
# 419 unexpected interruptions in 54 days on 16,384 GPUs: "The Llama 3 Herd of Models",
# arXiv:2407.21783, section 3.3.4.
GPU_HOURS_PER_FAILURE = 54 * 24 * 16_384 / 419
# (way of checkpoint.py, contender of recovery.py, title, whether the others keep their state)
SYSTEMS = (
    ("ours", "fit-exact", "raytrain_ddp --exact, Ray", True),
    ("ours", "fit-ray", "raytrain_ddp, Ray", True),
    ("ours", "fit-restart", "raytrain_ddp, Ray, all restarted", False),
    ("ours", "fit-torchrun", "raytrain_ddp, torchrun", False),
    ("torch-save", "torchrun", "torch.save by hand, torchrun", False),
    ("torch-save", "naive-ray", "torch.save, naive TorchTrainer", False),
)
RESTARTED = "raytrain_ddp, Ray, all restarted"  # what GPUs do
MOST_DRAWN = 20_000  # checkpoints between two failures: beyond these their mean is close enough
# As (title, seconds between failures).
SCENES = {
    "1 GPU": GPU_HOURS_PER_FAILURE * HOUR_S,
    "1,000 GPUs": GPU_HOURS_PER_FAILURE * HOUR_S / 1_000,
    "10,000 GPUs": GPU_HOURS_PER_FAILURE * HOUR_S / 10_000,
    "a failure an hour": HOUR_S,
}


@dataclass(frozen=True)
class Costs:
    """Measured seconds, a value per observation."""

    title: str
    lost_s: Sequence[float]  # by a checkpoint, from the loop
    durable_s: Sequence[float]  # after a checkpoint began
    restart_s: Sequence[float]  # from a failure to the next step
    keeps: bool = False  # the others keep their state: no work is thrown back

    def means(self) -> tuple[float, float, float]:
        """(lost, durable after what was lost, restart)"""
        lost, durable, restart = map(fmean, (self.lost_s, self.durable_s, self.restart_s))
        return lost, max(0.0, durable - lost), restart


def main() -> int:
    args = parse()
    checkpoint = json.loads(args.checkpoint.read_text(encoding="utf-8"))
    recovery = json.loads(args.recovery.read_text(encoding="utf-8"))
    found = [
        costs(*system, checkpoint, recovery, millions)
        for millions in args.millions
        for system in SYSTEMS
    ]
    systems = [system for system in found if system is not None]
    rows = []
    for title, mtbf_s in SCENES.items():
        for system in systems:
            for rule, interval in RULES.items():
                rows.append(simulated(system, title, mtbf_s, rule, interval(system, mtbf_s), args))
    largest = next(s for s in reversed(systems) if s.title.startswith(RESTARTED))
    slower = [
        simulated(
            replace(largest, restart_s=[seconds]),
            title,
            SCENES[title],
            "best",
            best_interval(replace(largest, restart_s=[seconds]), SCENES[title]),
            args,
        )
        for title in ("1,000 GPUs", "10,000 GPUs", "a failure an hour")
        for seconds in (15.0, 60.0, 300.0)
    ]
    report = as_markdown(systems, rows, slower, args, checkpoint, recovery)
    print(report)
    for path in args.out:
        path.parent.mkdir(parents=True, exist_ok=True)
        records = {
            "machine": recovery["machine"],
            "systems": [asdict(system) for system in systems],
            "rows": rows,
            "slower_restart": slower,
        }
        path.write_text(json.dumps(records, indent=1) + "\n" if path.suffix == ".json" else report)
    return 0


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--checkpoint", type=Path, default=RESULTS / "checkpoint.json")
    parser.add_argument("--recovery", type=Path, default=RESULTS / "recovery.json")
    parser.add_argument("--millions", default="25,100", help="of parameters, as measured")
    parser.add_argument("--failures", type=int, default=3000, help="that are simulated in a case")
    parser.add_argument("--events", type=int, default=400_000, help="at most in a case")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quick", action="store_true", help="a tenth of the failures")
    parser.add_argument("--out", type=Path, nargs="+", default=[])
    args = parser.parse_args()
    if args.quick:
        args.failures, args.events = args.failures // 10, args.events // 10
    args.millions = [int(text) for text in args.millions.split(",")]
    for path in (args.checkpoint, args.recovery):
        if not path.exists():
            parser.error(f"{path} is missing: run checkpoint.py and recovery.py first")
    return args


def costs(
    way: str,
    contender: str,
    title: str,
    keeps: bool,
    checkpoint: Mapping[str, Any],
    recovery: Mapping[str, Any],
    millions: int,
) -> Costs | None:
    """What was measured of a way to save and a way to restart; None if one of them was not.

    The restart was measured with a small state; the time to load this one is added to it.
    """
    saves = [r["found"] for r in checkpoint["runs"] if (r["way"], r["millions"]) == (way, millions)]
    restarts = [r["recovery_s"] for r in recovery["runs"] if r["contender"] == contender]
    if not saves or not restarts:
        return None
    load_s = median(found["load_s"] for found in saves)
    later = [(found["idle_p50_s"], save) for found in saves for save in found["saves"][1:]]
    return Costs(
        f"{title}, {millions} M",
        lost_s=[
            max(save["blocked_s"], save["whole_s"] - save["steps"] * step_s)
            for step_s, save in later
        ],
        durable_s=[save["durable_s"] for _, save in later],
        restart_s=[restart_s + load_s for restart_s in restarts],
        keeps=keeps,
    )


def expected(system: Costs, mtbf_s: float, interval_s: float) -> float:
    """ETTR by the formula. Per failure a run gets exp(-c / M) / (exp(interval / M) - 1) durable
    checkpoints, and it takes M * exp(R / M), restarts that fail included."""
    lost, durable, restart = system.means()
    if interval_s <= lost:
        return 0.0
    if system.keeps:
        return (1 - lost / interval_s) / math.exp(restart / mtbf_s)
    checkpoints = math.exp(-durable / mtbf_s) / math.expm1(interval_s / mtbf_s)
    return (interval_s - lost) * checkpoints / (mtbf_s * math.exp(restart / mtbf_s))


def young_interval(system: Costs, mtbf_s: float) -> float:
    lost, durable, _ = system.means()
    return max(math.sqrt(2 * lost * mtbf_s), lost + durable)


def best_interval(system: Costs, mtbf_s: float) -> float:
    """The interval of the highest expectation: a search over 600 from one commit to 10 M."""
    lost, durable, _ = system.means()
    least = max(lost + durable, 0.01)
    candidates = [least * (10 * mtbf_s / least) ** (n / 600) for n in range(600)]
    return max(candidates, key=lambda interval_s: expected(system, mtbf_s, interval_s))


RULES: dict[str, Callable[[Costs, float], float]] = {
    "20 s": lambda *_: 20.0,
    "1 min": lambda *_: 60.0,
    "10 min": lambda *_: 600.0,
    "Young": young_interval,
    "best": best_interval,
}


def simulate(
    system: Costs, mtbf_s: float, interval_s: float, failures: int, events: int, seed: int
) -> tuple[float, int]:
    """(ETTR, failures that were simulated), from one failure to the next.

    A checkpoint begins every `interval_s` or, if the one before is not durable by then, after it.
    """
    chance = random.Random(seed)
    lost, durable = system.lost_s, system.durable_s
    pairs = list(zip(lost, durable, strict=True))
    mean_lost = fmean(lost)
    wall = useful = 0.0
    seen = count = 0
    while seen < failures and count < events:
        seen += 1
        while True:  # the restart, which may fail as well
            restart, until_failure = chance.choice(system.restart_s), chance.expovariate(1 / mtbf_s)
            count += 1
            if until_failure >= restart:
                break
            wall += until_failure
        wall += restart
        until_failure = chance.expovariate(1 / mtbf_s)  # without memory
        wall += until_failure
        now = work = kept = 0.0
        for _ in range(MOST_DRAWN):
            count += 1
            lost_s, durable_s = chance.choice(pairs)
            period = max(interval_s, durable_s)
            # Work, then the snapshot: the loop loses lost_s of the period, durable later.
            work += period - lost_s
            now += period
            if system.keeps and now > until_failure:
                # Of this period, the snapshot comes last.
                spent = until_failure - (now - period)
                kept = work - (period - lost_s) + min(spent, period - lost_s)
                break
            if not system.keeps and now + max(0.0, durable_s - lost_s) > until_failure:
                break
            kept = work
        else:
            kept += max(0.0, until_failure - now) * (1 - mean_lost / interval_s)
        useful += kept
    return useful / wall, seen


def simulated(
    system: Costs, scene: str, mtbf_s: float, rule: str, interval_s: float, args: argparse.Namespace
) -> dict[str, Any]:
    ettr, failures = simulate(system, mtbf_s, interval_s, args.failures, args.events, args.seed)
    return {
        "system": system.title,
        "scene": scene,
        "mtbf_s": mtbf_s,
        "rule": rule,
        "interval_s": interval_s,
        "restart_s": system.means()[2],
        "simulated": ettr,
        "failures": failures,
        "expected": expected(system, mtbf_s, interval_s),
    }


def as_markdown(
    systems: Sequence[Costs],
    rows: Sequence[Mapping[str, Any]],
    slower: Sequence[Mapping[str, Any]],
    args: argparse.Namespace,
    checkpoint: Mapping[str, Any],
    recovery: Mapping[str, Any],
) -> str:
    constants = [
        [
            s.title,
            *(
                f"{value:.2f}"
                for value in (fmean(s.lost_s), fmean(s.durable_s), fmean(s.restart_s))
            ),
        ]
        for s in systems
    ]
    millions = " and ".join(map(str, args.millions))
    parts = [
        "# Share of the time that makes lasting progress (ETTR)",
        f"`python benchmarks/goodput.py --failures {args.failures} --seed {args.seed}`",
        f"- constants: models of {millions} million parameters with AdamW, "
        f"{checkpoint['machine']['machine']}, {checkpoint['machine']['date']}; restarts of two "
        f"workers, {recovery['machine']['machine']}, {recovery['machine']['date']}\n"
        f"- failures: one in {GPU_HOURS_PER_FAILURE:,.0f} GPU hours, as in Llama 3's training (419 "
        "unexpected interruptions in 54 days on 16,384 GPUs, arXiv:2407.21783)",
        "Means of what was measured (seconds):",
        table(["", "lost by a checkpoint", "durable after", "failure to next step"], constants),
        "Simulated ETTR in %, and in brackets the formula's where it differs by more than 0.05; "
        "behind the rule the interval that it gives.",
    ]
    for scene, mtbf_s in SCENES.items():
        body = []
        for system in systems:
            own = [r for r in rows if (r["scene"], r["system"]) == (scene, system.title)]
            body.append([system.title, *(cell(r) for r in own)])
        parts += [f"## {scene}: {duration(mtbf_s)} between failures", table(["", *RULES], body)]
    head = ["failure to next step", "1,000 GPUs", "10,000 GPUs", "a failure an hour"]
    body = []
    for seconds in dict.fromkeys(r["restart_s"] for r in slower):
        own = [r for r in slower if r["restart_s"] == seconds]
        body.append([duration(seconds), *(cell(r) for r in own)])
    parts += [
        f"## If the restart took longer: {slower[0]['system']}, best interval",
        "Two workers were measured; placement, imports from a shared disk and the rendezvous of "
        "thousands take longer.",
        table(head, body),
    ]
    return "\n\n".join(parts) + "\n"


def cell(row: Mapping[str, Any]) -> str:
    simulated_, expected_ = 100 * row["simulated"], 100 * row["expected"]
    text = f"{simulated_:.2f}"
    if abs(simulated_ - expected_) > 0.05:
        text += f" ({expected_:.2f})"
    return text + (f", {duration(row['interval_s'])}" if row["rule"] in ("Young", "best") else "")


def duration(seconds: float) -> str:
    for unit, length in (("years", 365 * 24 * HOUR_S), ("days", 24 * HOUR_S), ("h", HOUR_S)):
        if seconds >= 2 * length:
            return f"{seconds / length:.1f} {unit}"
    return f"{seconds / 60:.1f} min" if seconds >= 120 else f"{seconds:.3g} s"


if __name__ == "__main__":
    sys.exit(main())
