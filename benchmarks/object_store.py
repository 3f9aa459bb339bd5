"""How fast a file of a checkpoint is written to and read from an object store over a slow network.

    python benchmarks/object_store.py [--rounds N] [--mb 1024] [--out FILE.md FILE.json]

The store is a process of this machine with the S3 protocol; each request waits --delay-ms, and each
connection has --mb-per-s. Each round writes the file once, and reads it once in each way, each time
beginning with another one. The bytes are hashed in all of them, and the hashes compared.

- ranges at once: as the package reads, 8 requests of 16 MiB at a time
- one stream: the same requests one after another, as Arrow's input stream makes them
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

from series import HERE, Series, describe_machine, in_turn, spread, table

WAYS = {"ranges": "read, ranges at once", "stream": "read, one stream"}
SETTINGS = {
    "AWS_ACCESS_KEY_ID": "test",
    "AWS_SECRET_ACCESS_KEY": "test",
    "AWS_EC2_METADATA_DISABLED": "true",
    "AWS_REQUEST_CHECKSUM_CALCULATION": "when_required",  # the store does not know others
}


@dataclass(frozen=True)
class Run:
    """One file, written or read once."""

    way: str
    round: int
    load: float  # of the machine (1 minute) before
    seconds: float
    size_bytes: int
    requests: int
    at_once: int


def main() -> int:
    args = parse()
    os.environ.update(SETTINGS)
    series: Series[Run] = Series(describe_machine())
    with store_server(args.delay_ms, args.mb_per_s) as port:
        for number in range(args.rounds):
            runs = measure(port, args.mb * 2**20, number)
            for run in runs:
                series.add(run.way, lambda run=run: run, line)  # type: ignore[misc]
    return series.publish(as_markdown(series, args), args.out)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--mb", type=int, default=1024, help="MiB of the file")
    parser.add_argument("--delay-ms", type=float, default=30.0)
    parser.add_argument("--mb-per-s", type=float, default=40.0, help="of each connection")
    parser.add_argument("--out", type=Path, nargs="+", default=[], help="*.json: every run")
    return parser.parse_args()


@contextmanager
def store_server(delay_ms: float, mb_per_s: float) -> Iterator[int]:
    command = [sys.executable, str(HERE / "object_store_server.py"), str(delay_ms), str(mb_per_s)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield int(process.stdout.readline())
        finally:
            process.kill()


def uri_of(port: int) -> str:
    endpoint = quote(f"http://127.0.0.1:{port}", safe="")
    return f"s3://bucket/x?endpoint_override={endpoint}&region=us-east-1"


def measure(port: int, size_bytes: int, number: int) -> list[Run]:
    from raytrain_ddp.checkpoint import read_ahead
    from raytrain_ddp.checkpoint.storage import open_storage
    from raytrain_ddp.checkpoint.streams import new_memory

    folder = open_storage(uri_of(port))
    view = new_memory(size_bytes)
    view[:] = os.urandom(size_bytes)
    counts(port)

    def run(way: str) -> tuple[Run, str]:
        load, started = os.getloadavg()[0], time.monotonic()
        if way == "write":
            _, digest = folder.write("file", view)
        else:
            usual = read_ahead.is_ranged
            if way == "stream":
                read_ahead.is_ranged = lambda *_: False
            try:
                digest = folder.read_into("file", [view])
            finally:
                read_ahead.is_ranged = usual
        seconds = time.monotonic() - started
        return Run(way, number + 1, load, seconds, size_bytes, *counts(port)), digest

    found = [run(way) for way in ("write", *in_turn([*WAYS], number))]
    assert len({digest for _, digest in found}) == 1
    return [each for each, _ in found]


def counts(port: int) -> list[int]:
    """Requests since the last call, and how many of them there were at once."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/-/counts") as answer:
        return [int(word) for word in answer.read().split()]


def line(run: Run) -> str:
    return (
        f"round {run.round}  {run.way:<7} {run.seconds:6.2f} s  {rate(run):4.0f} MB/s"
        f"  {run.requests} requests, {run.at_once} at once"
    )


def rate(run: Run) -> float:
    return run.size_bytes / 1e6 / run.seconds


def as_markdown(series: Series[Run], args: argparse.Namespace) -> list[str]:
    rows = []
    for way, name in {"write": "write", **WAYS}.items():
        runs = [run for run in series.runs if run.way == way]
        if runs:
            row = [spread([r.seconds for r in runs], 2), spread([rate(r) for r in runs], 0)]
            most = max(run.at_once for run in runs)
            rows.append([name, *row, str(runs[0].requests), str(most)])
    return [
        "# A file in an object store",
        f"`python benchmarks/object_store.py --rounds {args.rounds} --mb {args.mb} "
        f"--delay-ms {args.delay_ms:g} --mb-per-s {args.mb_per_s:g}`",
        series.place(),
        f"A file of {args.mb} MiB; each request waits {args.delay_ms:g} ms, each connection has "
        f"{args.mb_per_s:g} MB/s. The store runs on the same machine. Medians (min .. max).",
        table(["", "s", "MB/s", "requests", "at once"], rows),
    ]


if __name__ == "__main__":
    sys.exit(main())
