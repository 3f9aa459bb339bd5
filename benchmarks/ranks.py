"""What grows with the number of workers: collectives on this machine, and Python for up to 4,000.

    python benchmarks/ranks.py [--rounds N] [--out FILE.md FILE.json]
    python benchmarks/ranks.py --quick

Real: gloo processes that do what a step, a check of the weights and an evaluation exchange. More
processes than cores take turns, so the times say how the ways compare, not what a network takes.
Simulated: what one rank computes for a log line of that many ranks, and what the mailbox and the
driver of a run on Ray compute for them, without the exchange.
"""

from __future__ import annotations

import argparse
import io
import multiprocessing as mp
import os
import pickle
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from series import Series, describe_machine, spread, table

from raytrain_ddp import events
from raytrain_ddp.checkpoint.run_folder import CONFIG_FILE
from raytrain_ddp.checkpoint.storage import open_storage
from raytrain_ddp.data.order.epoch_order import Plan
from raytrain_ddp.driver.event_log import EventLog
from raytrain_ddp.membership.roster import Member, beat_s
from raytrain_ddp.ray_backend.mailbox import Inbox, Mailbox
from raytrain_ddp.tasks.task import Task
from raytrain_ddp.tools.display.progress_display import Display
from raytrain_ddp.torch_compat import all_gather
from raytrain_ddp.training.metrics.metric_states import TreeMetrics
from raytrain_ddp.training.monitoring import step_timing
from raytrain_ddp.training.monitoring.hang_diagnosis import RankStatus
from raytrain_ddp.training.monitoring.phase_clock import EXCHANGING, PHASES
from raytrain_ddp.training.monitoring.step_timing import Stragglers
from raytrain_ddp.training.monitoring.watchdog import ask_s
from raytrain_ddp.training.runtime.world import World
from raytrain_ddp.training.steps.step_decisions import Ballot

REAL, SIMULATED = (2, 4, 8, 16), (100, 1000, 4000)
TENSORS = 161  # parameters of a ResNet-50
IMAGES = 1281167


@dataclass(frozen=True)
class Run:
    """Seconds that something takes with that many ranks, in one round."""

    what: str
    ranks: int
    round: int
    load: float  # of the machine (1 minute) before
    seconds: float


def main() -> int:
    args = parse()
    series: Series[Run] = Series(describe_machine())
    for number in range(1, args.rounds + 1):
        ways = ((exchanged, args.real), (computed, SIMULATED), (controlled, SIMULATED))
        for way, all_ranks in ways:
            for ranks in all_ranks:
                load = os.getloadavg()[0]
                for what, seconds in way(ranks, args.times).items():
                    run = Run(what, ranks, number, load, seconds)
                    series.add(what, partial(lambda run: run, run), line)
    return series.publish(as_markdown(series, args), args.out)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--times", type=int, default=50, help="of each exchange in a round")
    parser.add_argument("--quick", action="store_true", help="does it run?")
    parser.add_argument("--out", nargs=2, type=Path, default=(), metavar="FILE")
    args = parser.parse_args()
    args.real = REAL[:2] if args.quick else REAL
    args.rounds = 1 if args.quick else args.rounds
    return args


def line(run: Run) -> str:
    return f"round {run.round}  {run.ranks:5} ranks  {run.what:<44} {1e3 * run.seconds:9.3f} ms"


# ------------------------------------------------------------------ real


def exchanged(ranks: int, times: int) -> dict[str, float]:
    """Medians in seconds, of rank 0."""
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(["torch", "raytrain_ddp.training.metrics.metric_states"])
    free = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    answers = context.SimpleQueue()
    processes = [
        context.Process(target=_rank, args=(rank, ranks, free.port, times, answers))
        for rank in range(ranks)
    ]
    for process in processes:
        process.start()
    result: dict[str, float] = answers.get()
    for process in processes:
        process.join()
    return result


def _rank(rank: int, ranks: int, port: int, times: int, answers: Any) -> None:
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
    world = World(rank, ranks, rank, torch.device("cpu"), 1)
    prints = torch.arange(TENSORS)
    every = torch.empty(ranks * TENSORS, dtype=torch.int64)

    def vote(only_main_asks: bool) -> None:
        ballot = Ballot(SimpleNamespace(world=world, only_main_asks=only_main_asks))
        ballot.cast(0, False, False)
        ballot.count()

    def merged() -> None:
        metrics = TreeMetrics(_NoTask(), {"mean": _Mean()}, world.device)
        for chunk in range(4 * rank, 4 * rank + 4):
            metrics.reset()
            metrics.take(chunk, metrics.state())
        metrics.values(world)

    ways: dict[str, Callable[[], None]] = {
        "vote of a step, of all ranks (torchrun)": partial(vote, False),
        "vote of a step, of rank 0 (Ray)": partial(vote, True),
        "check of the weights (161 tensors)": lambda: all_gather(every, prints),
        "evaluation: states of 4 chunks a rank": merged,
    }
    found = {}
    for name, way in ways.items():
        took = []
        for _ in range(times):
            dist.barrier()
            began = time.perf_counter()
            way()
            took.append(time.perf_counter() - began)
        found[name] = median(took)
    if rank == 0:
        answers.put(found)
    dist.barrier()
    os._exit(0)


class _NoTask(Task):
    """Metrics name the task in their errors."""


class _Mean:
    """What `TreeMetrics` needs of a metric."""

    def __init__(self) -> None:
        self.reset()

    def to(self, _: object) -> _Mean:
        return self

    def reset(self) -> None:
        self.metric_state = {"total": torch.zeros(()), "count": torch.zeros(())}

    def merge_state(self, other: Any) -> None:
        self.metric_state = {name: v + other[name] for name, v in self.metric_state.items()}

    def compute(self) -> torch.Tensor:
        return self.metric_state["total"]


# ------------------------------------------------------------------ simulated


def computed(ranks: int, times: int) -> dict[str, float]:
    """Least seconds of a few."""
    generator = torch.Generator().manual_seed(0)
    rows = torch.rand(ranks, 2 + len(PHASES), generator=generator, dtype=torch.float64)
    plan = Plan(IMAGES, ranks, 16)
    hosts = ["host"] * ranks

    def log_line() -> None:
        readings = [step_timing.Reading(s, tuple(p), int(m)) for s, m, *p in rows.tolist()]
        slowest = step_timing.summary(readings, 10, 0.0, None).slowest
        Stragglers(plan.slots, ranks).look(1, slowest, hosts)
        for step in range(10):
            plan.samples(step)

    prints = torch.arange(TENSORS).repeat(ranks).view(ranks, -1)
    return {
        "a log line of ten steps, in each rank": _least(log_line, min(times, 7)),
        "a check of the weights (161 tensors), in each rank": _least(
            lambda: bool((prints == prints[0]).all()), min(times, 7)
        ),
    }


def controlled(ranks: int, _: int) -> dict[str, float]:
    """Seconds of the mailbox, which is one process, and of the driver."""
    members = [
        Member(rank, ranks, ranks - 1, f"token {rank}", 0, f"host {rank // 8}", f"id {rank // 8}")
        for rank in range(ranks)
    ]
    mailbox = Mailbox()

    def meet() -> None:
        for _ in range(2):  # who asks before the last one is there asks again
            for member in members:
                mailbox.meet(member)

    formed_s = _least(meet, 1)
    joined_s = _least(lambda: Inbox().sort(mailbox.take({})), 1)
    left = [replace(member, last=1) for member in members]
    beats_s = _least(lambda: [mailbox.is_over(member) for member in left], 3)
    statuses = [asdict(_status(rank)) for rank in range(ranks)]
    for rank, status in enumerate(statuses):
        mailbox.exchange_status("start", rank, status)
    hang_s = _least(lambda: pickle.dumps(mailbox.exchange_status("start", 0, statuses[0])), 3)
    mailbox.take({})
    with TemporaryDirectory() as folder, Display(Console(file=io.StringIO()), live=False) as show:
        run = open_storage(folder)
        run.write_atomic(CONFIG_FILE, b"")
        with EventLog(run, show.handle) as log:
            log(_plan(ranks))
            split = [dict.fromkeys(PHASES, 0.01)] * min(ranks, events.Ranks.MOST)

            def logged() -> None:
                for event in (_train(), events.Ranks(1, split)):
                    mailbox.push([event])
                for _, _, event in mailbox.take({}):
                    log(event)

            line_s = _least(logged, 20)
    return {
        "start: the mailbox forms a generation": formed_s,
        "start: the driver takes who has joined": joined_s,
        "the mailbox, for a second of heartbeats": beats_s / beat_s(ranks),
        "the mailbox, for a second of a hang": ranks * hang_s / ask_s(30.0, ranks),
        "the driver, for a log line": line_s,
    }


def _status(rank: int) -> RankStatus:
    place = "site-packages/torch/nn/parallel/distributed.py:1234 in forward"
    return RankStatus(rank, 1000, EXCHANGING, 12345, "all_reduce", True, place, 31.5, 30.0)


def _plan(ranks: int) -> events.Plan:
    hosts = [f"host {rank // 8}" for rank in range(ranks)]
    return events.Plan("run", 0, 100, 100, 1, world_size=ranks, device="cpu", hosts=hosts)


def _train() -> events.Train:
    return events.Train(1, 0, 1.0, 0.1, samples_per_s=1000.0, seconds=1.0)


def _least(call: Callable[[], None], times: int) -> float:
    took = []
    for _ in range(times):
        began = time.perf_counter()
        call()
        took.append(time.perf_counter() - began)
    return min(took)


def as_markdown(series: Series[Run], args: argparse.Namespace) -> list[str]:
    def rows(all_ranks: Sequence[int]) -> list[list[str]]:
        runs = [run for run in series.runs if run.ranks in all_ranks]
        found: dict[str, dict[int, list[float]]] = {}
        for run in runs:
            of_ranks = found.setdefault(run.what, {ranks: [] for ranks in all_ranks})
            of_ranks[run.ranks].append(1e3 * run.seconds)
        return [[what, *(spread(ms, 2) for ms in each.values())] for what, each in found.items()]

    return [
        "# What grows with the number of workers",
        f"`python benchmarks/ranks.py --rounds {args.rounds}`",
        series.place(),
        "Exchanges of that many processes on this machine, in ms: medians over the rounds (min .. "
        "max). More processes than cores take turns.",
        table(["ms", *(f"{ranks} ranks" for ranks in args.real)], rows(args.real)),
        "Python for that many ranks, simulated, without the exchange:",
        table(["ms", *(f"{ranks} ranks" for ranks in SIMULATED)], rows(SIMULATED)),
    ]


if __name__ == "__main__":
    sys.exit(main())
