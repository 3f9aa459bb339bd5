"""What it costs to know where the time of a step goes.

    python benchmarks/timing.py [--rounds N] [--out FILE.md FILE.json]
    python benchmarks/timing.py --quick

Each round times what a step adds: the marks of the phases, the callback in the backward pass, and a
tenth of a log line's summary over 16 ranks (by default a line is written every ten steps); and the
same training steps without any of it: the network of the digits, the smallest there is, and
ResNet-18 on images of 64 pixels. On a GPU, if there is one, marks are events in its stream. The
exchange between ranks that a log line takes was there before, and is not counted.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from series import Series, describe_machine, spread, table
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from raytrain_ddp.tasks.small_networks import DigitsCNN
from raytrain_ddp.training.monitoring.step_timing import PHASES, Clock, summary

RANKS, STEPS_A_LINE = 16, 10


@dataclass(frozen=True)
class Run:
    """One round on one network: seconds of a step without any timing, and what that adds."""

    network: str
    round: int
    load: float  # of the machine (1 minute) before
    step_s: float
    added_s: float


def main() -> int:
    args = parse()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    machine = describe_machine()
    del machine["bytecode"]
    machine["device"] = torch.cuda.get_device_name() if device.type == "cuda" else "cpu, 1 thread"
    series: Series[Run] = Series(machine)
    networks = steppers(device, args.quick)
    for number in range(args.rounds):
        for network, step in networks.items():
            measured = partial(measure, network, number + 1, step, device, args)
            series.add(f"round {number + 1}, {network}", measured, line)
    return series.publish(as_markdown(series, args), args.out)


def measure(
    network: str,
    number: int,
    step: Callable[[], None],
    device: torch.device,
    args: argparse.Namespace,
) -> Run:
    load = os.getloadavg()[0]
    step_s, added_s = seconds(step, device, args.steps), added(device, args.marks)
    return Run(network, number, load, step_s, added_s)


def line(run: Run) -> str:
    return (
        f"round {run.round}  {run.network:<34}  step {1e3 * run.step_s:6.1f} ms"
        f"  timing adds {1e6 * run.added_s:4.0f} us"
    )


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=10, help="of each network in a round")
    parser.add_argument("--marks", type=int, default=2000, help="steps whose marks are timed")
    parser.add_argument("--quick", action="store_true", help="one round, the small network only")
    parser.add_argument("--out", type=Path, nargs="+", default=[], help="*.json: every run")
    args = parser.parse_args()
    if args.quick:
        args.rounds, args.marks = 1, 200
    return args


def steppers(device: torch.device, quick: bool) -> dict[str, Callable[[], None]]:
    """A training step of each network, by name."""
    digits = step_of(DigitsCNN(10), torch.randn(64, 3, 8, 8), device)
    if quick:
        return {"digits-cnn, 64 images": digits}
    from torchvision.models import resnet18

    larger = step_of(resnet18(num_classes=10), torch.randn(16, 3, 64, 64), device)
    return {"digits-cnn, 64 images": digits, "resnet18, 16 images of 64 pixels": larger}


def step_of(model: nn.Module, images: Tensor, device: torch.device) -> Callable[[], None]:
    model, images = model.to(device), images.to(device)
    labels = torch.arange(len(images), device=device) % 10
    optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9)

    def step() -> None:
        optimizer.zero_grad()
        cross_entropy(model(images), labels).backward()
        optimizer.step()

    return step


def seconds(step: Callable[[], None], device: torch.device, steps: int) -> float:
    """Of one step, the device's work included."""
    step()
    wait(device)
    began = time.perf_counter()
    for _ in range(steps):
        step()
    wait(device)
    return (time.perf_counter() - began) / steps


def added(device: torch.device, steps: int) -> float:
    """Seconds that the timing adds to a step: what it takes with a backward pass of next to
    nothing, less that pass without it."""
    clock = Clock(device)
    weight = torch.ones((), device=device, requires_grad=True)

    def marked() -> None:
        clock.mark("other")
        clock.mark("data")
        if device.type == "cuda":
            clock.mark("copy")
        loss = weight * 1
        clock.after_backward(loss)
        loss.backward()
        for phase in ("communication", "communication", "optimizer"):
            clock.mark(phase)

    def plain() -> None:
        (weight * 1).backward()

    measured = torch.full((RANKS, 2 + len(PHASES)), 0.1, dtype=torch.float64)

    def line() -> None:
        clock.window()
        summary(measured, STEPS_A_LINE, 1e12, 1e15)

    steps_s = seconds(marked, device, steps) - seconds(plain, device, steps)
    return steps_s + seconds(line, device, steps) / STEPS_A_LINE


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def as_markdown(series: Series[Run], args: argparse.Namespace) -> list[str]:
    runs = series.runs
    rows = []
    for network in dict.fromkeys(run.network for run in runs):
        own = [run for run in runs if run.network == network]
        rows.append(
            [
                network,
                spread([1e3 * run.step_s for run in own], 1),
                spread([1e6 * run.added_s for run in own], 0),
                spread([100 * run.added_s / run.step_s for run in own], 2),
            ]
        )
    head = ["network", "step ms", "timing adds us", "% of the step"]
    return [
        "# What it costs to know where the time of a step goes",
        f"`python benchmarks/timing.py --rounds {args.rounds} --steps {args.steps}`",
        series.place(),
        "Medians over the rounds (min .. max).",
        table(head, rows),
    ]


if __name__ == "__main__":
    sys.exit(main())
