"""How soon Ray counts a host as lost, by its health checks, and which outages it forgives.

    python benchmarks/health.py [--out FILE.md FILE.json]

Hosts of a lab on this machine (tests/lab: Linux, root, iproute2, openssh-server, rsync), brought up
by clusters/lan.yaml with other settings of `ray start --head`; nothing trains. Each setting: the
cable of one worker is out for 3, 5 and 8 s, with 15 s between (once it was lost, it may not be back
for the next); then the other one is powered off. "Lost" is when the head's `ray.nodes()` says so.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path

TESTS = Path(__file__).resolve().parent.parent / "tests"
sys.path[:0] = [str(TESTS / "lab"), str(TESTS)]

from cluster import HOSTS, Cluster  # noqa: E402
from lab import Command, Lab, wait_until  # noqa: E402

OUTAGES_S = (3, 5, 8)
# threshold, period and timeout in ms; the file's, one between, Ray's own
SETTINGS = ((3, 1000, 2000), (5, 1000, 3000), (5, 3000, 10000))
OURS = (
    "RAY_health_check_period_ms=1000;",
    "RAY_health_check_timeout_ms=2000 RAY_health_check_failure_threshold=3;",
)
WATCH = """
import ray, time
ray.init(address="auto", log_to_driver=False, logging_level="ERROR")
while True:
    living = sorted(n["NodeManagerAddress"] for n in ray.nodes() if n["Alive"])
    print("living", *living, flush=True)
    time.sleep(0.1)
"""


def measure(shared: Path, setting: tuple[int, int, int]) -> dict[str, object]:
    threshold, period, timeout = setting
    changes = {
        OURS[0]: f"RAY_health_check_period_ms={period};",
        OURS[1]: f"RAY_health_check_timeout_ms={timeout}"
        f" RAY_health_check_failure_threshold={threshold};",
    }
    lab = Lab([shared], HOSTS)
    try:
        cluster = Cluster(lab, shared, changes)
        cluster.up()
        (lab.home("head") / "watch.py").write_text(WATCH, encoding="utf-8")
        watch = lab.start("head", "bash -ic 'exec python ~/watch.py'")
        one, other = lab.address("w1"), lab.address("w2")
        wait_until(lambda: {one, other} <= {*watch.said().split("living")[-1].split()}, 90, watch)
        lost = []
        for outage in OUTAGES_S:
            began = time.time()
            lab.cut("w2")
            time.sleep(outage)
            lab.heal("w2")
            time.sleep(15)
            lost.append(after(watch, began, other) is not None)
        began = time.time()
        lab.crash("w1")
        wait_until(lambda: after(watch, began, one) is not None, 120, watch)
        off = after(watch, began, one)
        watch.end()
    finally:
        lab.down()
    return {
        "checks": f"{threshold} x ({period / 1e3:g} + {timeout / 1e3:g}) s",
        **{
            f"out {s} s": "lost" if gone else "kept"
            for s, gone in zip(OUTAGES_S, lost, strict=True)
        },
        "powered off: lost after s": round(off or 0, 1),
    }


def after(watch: Command, since: float, address: str) -> float | None:
    """Seconds from `since` until the address was first missing."""
    for at, line in list(watch.lines):
        if at > since and line.startswith("living") and address not in line.split():
            return at - since
    return None


def table(rows: list[dict[str, object]]) -> str:
    lines = [list(rows[0]), ["---"] * len(rows[0]), *([*row.values()] for row in rows)]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", type=int, choices=range(len(SETTINGS)))
    parser.add_argument("--out", nargs=2, type=Path, metavar=("MD", "JSON"))
    options = parser.parse_args()
    rows = []
    for number, setting in enumerate(SETTINGS):
        if options.only in (None, number):
            with tempfile.TemporaryDirectory() as folder:
                rows.append(measure(Path(folder), setting))
            print(rows[-1], flush=True)
    print(table(rows))
    if options.out:
        options.out[0].write_text(table(rows) + "\n", encoding="utf-8")
        options.out[1].write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
