"""How long `watch` takes for many runs and a long log: reading, a look at what is new, answers.

    python benchmarks/watch.py                       # 200 runs with 5,000 lines each
    python benchmarks/watch.py --runs 1 --lines 1000000

The runs are written to a temporary folder: 450 bytes a line. Two of ten go on. CPU seconds of the
process; the answers are those that a browser asks for every two seconds.
"""

from __future__ import annotations

import argparse
import json
import resource
import tempfile
import time
from pathlib import Path
from threading import Thread
from urllib.request import urlopen

from raytrain_ddp.tools.watch.http_server import WatchServer
from raytrain_ddp.tools.watch.watched_runs import WatchedRuns


def line(step: int) -> str:
    split = {"data": 0.01, "compute": 0.03, "communication": 0.01, "optimizer": 0.002}
    timing = {"step_s": 0.052, "split_s": split, "peak_memory_bytes": 2**30}
    timing["slowest"] = {"rank": 1, "phase": "data", "ratio": 1.4}
    known = {"kind": "train", "step": step, "epoch": step // 500, "loss": 3.0 / (1 + step % 977)}
    rest = {"lr": 0.1, "samples_per_s": 1234.5, "skipped": 0, "nonfinite": 0, "seconds": step / 20}
    return json.dumps({**known, **rest, "timing": timing}) + "\n"


def write(folder: Path, lines: int) -> None:
    folder.mkdir(parents=True)
    plan = {"kind": "plan", "time": "2026-11-20T20:00:00Z", "total_steps": 2 * lines}
    (folder / "events.jsonl").write_text(json.dumps({**plan, "world_size": 2}) + "\n")
    (folder / "config.toml").write_text(f'name = "{folder.name}"\n')
    with (folder / "metrics.jsonl").open("w") as file:
        for first in range(0, lines, 1000):
            steps = range(first + 1, min(first + 1000, lines) + 1)
            file.write("".join(map(line, steps)))


def clock(what: str, do: object, times: int = 1) -> None:
    cpu, wall = time.process_time(), time.perf_counter()
    for _ in range(times):
        do()  # type: ignore[operator]
    cpu, wall = (time.process_time() - cpu) / times, (time.perf_counter() - wall) / times
    print(f"{what:<46} {1e3 * cpu:9.1f} ms of CPU {1e3 * wall:9.1f} ms", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--runs", type=int, default=200)
    parser.add_argument("--lines", type=int, default=5000)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        folders = [Path(place, f"run-{n:04d}") for n in range(args.runs)]
        for folder in folders:
            write(folder, args.lines)
        size = sum((folder / "metrics.jsonl").stat().st_size for folder in folders)
        print(f"{args.runs} runs, {args.runs * args.lines:,} lines, {size / 2**20:.0f} MiB")
        runs = WatchedRuns(place)
        clock("first look at all runs", runs.look)
        clock("look, nothing new", runs.look, 5)
        going = folders[: max(1, len(folders) // 5)]
        number = args.lines

        def grow() -> None:
            nonlocal number
            number += 1
            for folder in going:
                with (folder / "metrics.jsonl").open("a") as file:
                    file.write(line(number))

        clock(f"look, a new line in each of {len(going)}", lambda: (grow(), runs.look()), 5)
        server = WatchServer(runs, "127.0.0.1", 0, [])
        Thread(target=server.serve_forever, daemon=True).start()
        base = server.url.partition("/?")[0]

        def ask(path: str) -> int:
            with urlopen(base + path) as answer:
                return len(answer.read())

        print(f"list: {ask('/') / 1024:.0f} KiB")
        clock("list, drawn before", lambda: ask("/"), 5)
        clock("list, after new lines", lambda: (grow(), runs.look(), ask("/")), 5)
        clock("run, read for the first time", lambda: ask("/run/run-0000"))
        clock("run, drawn before", lambda: ask("/run/run-0000"), 5)
        runs.every_s = 0.0
        clock("run, after a new line", lambda: (grow(), ask("/run/run-0000")), 5)
        server.shutdown()
    print(f"memory: {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024:.0f} MiB at most")


if __name__ == "__main__":
    main()
