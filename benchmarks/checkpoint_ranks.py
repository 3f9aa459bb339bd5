"""How long several workers take to save a checkpoint durably, and to start from it, beside DCP.

    python benchmarks/checkpoint_ranks.py [--rounds N] [--millions 84] [--out FILE.md FILE.json]

A multi-layer perceptron and its AdamW state (12 bytes a parameter), equal on 3 gloo workers of
this machine, a thread each. Each round runs every way once, each time beginning with another way.

- durable: from the call on all ranks until rank 0 knows that all is on disk, after fsync
- restart: until all ranks have loaded model and optimizer; with the look for the newest checkpoint

raytrain_ddp: rank 0 writes. Each byte is hashed when it is written, and verified when it is read.
Training would wait only for the copy to host memory, which is allocated in advance: `fit` reserves
it at the first line of the log.

DCP: torch.distributed.checkpoint, `save` and `load`, with the replicated state divided among the
ranks; training would wait for all of it. Files are in the page cache when they are read. Both load
into the weights that are there and into a new optimizer, as a new process does.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from series import (
    Series,
    describe_machine,
    in_turn,
    run_to_end,
    spread,
    table,
    torchrun,
)

WAYS = {"ours": "raytrain_ddp", "dcp": "DCP"}
WORKERS, LIMIT_S, WIDTH = 3, 400.0, 4096


@dataclass(frozen=True)
class Run:
    """One run of one way."""

    way: str
    round: int
    load: float  # of the machine (1 minute) before
    durable_s: float
    restart_s: float
    peak_bytes: list[int]  # by rank


def main() -> int:
    args = parse()
    series: Series[Run] = Series(describe_machine())
    for number in range(args.rounds):
        for way in in_turn([*WAYS], number):
            measured = partial(measure, way, args, number + 1)
            series.add(f"round {number + 1}, {way}", measured, line)
    return series.publish(as_markdown(series, args), args.out)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--millions", type=int, default=84, help="parameters")
    parser.add_argument("--out", type=Path, nargs="+", default=[], help="*.json: every run")
    return parser.parse_args()


def line(run: Run) -> str:
    return (
        f"round {run.round}  {WAYS[run.way]:<12}  durable {run.durable_s:5.2f} s"
        f"  restart {run.restart_s:5.2f} s  memory {max(run.peak_bytes) / 1e9:.2f} GB"
    )


def measure(way: str, args: argparse.Namespace, number: int) -> Run:
    """Raises:
    RuntimeError: it failed.
    TimeoutExpired: it took longer than LIMIT_S.
    """
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory(prefix="ranks-") as name:
        about = f"{way} {args.millions} {name}"
        run_to_end([*torchrun(WORKERS), __file__], LIMIT_S, CHECKPOINT_RANKS=about)
        notes = [Path(name) / f"rank-{rank}.json" for rank in range(WORKERS)]
        found: list[dict[str, Any]] = [json.loads(note.read_text()) for note in notes]
    times = {key: found[0][key] for key in ("durable_s", "restart_s")}
    return Run(way, number, load, **times, peak_bytes=[each["peak_bytes"] for each in found])


def as_markdown(series: Series[Run], args: argparse.Namespace) -> list[str]:
    rows = []
    for way, name in WAYS.items():
        runs = [run for run in series.runs if run.way == way]
        if runs:
            rows.append(
                [
                    name,
                    spread([run.durable_s for run in runs], 2),
                    spread([run.restart_s for run in runs], 2),
                    spread([run.peak_bytes[0] / 1e9 for run in runs], 2),
                    spread([max(run.peak_bytes[1:]) / 1e9 for run in runs], 2),
                ]
            )
    head = ["", "durable s", "restart s", "peak memory GB, rank 0", "others"]
    return [
        "# Checkpoints of several workers",
        "`python benchmarks/checkpoint_ranks.py "
        f"--rounds {args.rounds} --millions {args.millions}`",
        series.place(),
        f"About {12 * args.millions / 1e3:.1f} GB of state (parameters and AdamW), 3 gloo workers, "
        "a thread each, one disk. Medians over the rounds (min .. max).",
        table(head, rows),
    ]


# ------------------------------------------------------------------ in a worker


def work(way: str, millions: int, folder: Path) -> None:
    import resource

    import torch
    import torch.distributed as dist
    from torch import nn

    from raytrain_ddp import TrainConfig
    from raytrain_ddp.training.runtime.world import join_world

    world = join_world(TrainConfig().scaling)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    layers = max(1, round(millions * 1e6 / WIDTH**2))
    model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(layers)])
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 1e-3)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    save, load = (of_dcp if way == "dcp" else of_ours)(model, optimizer, world, folder)

    def timed(act: Callable[[], None]) -> float:
        dist.barrier()
        started = time.monotonic()
        act()
        dist.barrier()
        return time.monotonic() - started

    before = [p.detach().clone() for p in (*model.parameters(), *moments(optimizer))]
    durable_s = timed(save)
    with torch.no_grad():
        for each in (*model.parameters(), *moments(optimizer)):
            each.zero_()
    restart_s = timed(load)
    after = [p.detach() for p in (*model.parameters(), *moments(optimizer))]
    assert all(torch.equal(one, other) for one, other in zip(before, after, strict=True))
    peak_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    note = {"durable_s": durable_s, "restart_s": restart_s, "peak_bytes": peak_bytes}
    (folder / f"rank-{world.rank}.json").write_text(json.dumps(note))
    dist.barrier()
    dist.destroy_process_group()


def moments(optimizer: Any) -> list[Any]:
    groups = optimizer.param_groups
    states = [optimizer.state[p] for group in groups for p in group["params"]]
    return [state[key] for state in states for key in ("exp_avg", "exp_avg_sq")]


def of_ours(model: Any, optimizer: Any, world: Any, folder: Path) -> Any:
    import torch

    from raytrain_ddp import TrainConfig
    from raytrain_ddp.checkpoint.checkpoints import Checkpoints
    from raytrain_ddp.checkpoint.manifest import Manifest
    from raytrain_ddp.checkpoint.metrics_log import Log
    from raytrain_ddp.checkpoint.run_folder import run_storage
    from raytrain_ddp.training.state.live_state import newest_state
    from raytrain_ddp.training.state.train_state import TrainState

    config = TrainConfig(name="run", storage=str(folder))
    state = TrainState(model, optimizer, torch.amp.GradScaler("cpu", enabled=False))
    best = ("loss", "min")

    def checkpoints() -> Checkpoints:
        return Checkpoints(config, Log(run_storage(config), {}, lambda _: None))

    first = checkpoints()
    assert newest_state(first, best, None, world) is None
    manifest = Manifest(1, 0, 1, world.size, config={}, data_fingerprint="")
    if world.is_main:
        state.snapshot(manifest, [])  # allocates its memory

    def save() -> None:
        if world.is_main:
            first.save(state.snapshot(manifest, []))
        first.drain()

    def load() -> None:
        fresh = torch.optim.AdamW(model.parameters(), fused=True)
        begun = TrainState(model, fresh, torch.amp.GradScaler("cpu", enabled=False))
        checkpoint = newest_state(checkpoints(), best, None, world, begun.existing())
        assert checkpoint is not None
        begun.load(checkpoint)
        optimizer.state = fresh.state  # for the comparison

    return save, load


def of_dcp(model: Any, optimizer: Any, world: Any, folder: Path) -> Any:
    import torch
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
    from torch.nn.parallel import DistributedDataParallel

    net = DistributedDataParallel(model)

    def states(its: Any = optimizer) -> dict[str, Any]:
        of_model, of_optimizer = get_state_dict(net, its)  # allocates what a new one lacks
        return {"model": of_model, "optimizer": of_optimizer}

    def save() -> None:
        dcp.save(states(), checkpoint_id=folder / "dcp")

    def load() -> None:
        fresh = torch.optim.AdamW(model.parameters(), fused=True)
        found = states(fresh)
        dcp.load(found, checkpoint_id=folder / "dcp")
        set_state_dict(
            net,
            fresh,
            model_state_dict=found["model"],
            optim_state_dict=found["optimizer"],
        )
        optimizer.state = fresh.state  # for the comparison

    return save, load


if __name__ == "__main__":
    given = os.environ.pop("CHECKPOINT_RANKS", "").split(" ", 2)
    if len(given) == 3:
        work(given[0], int(given[1]), Path(given[2]))
    else:
        sys.exit(main())
