"""Watches for the notice that a cloud takes this machine away, and then drains its Ray node.

    python -m raytrain_ddp.tools.spot aws|azure|gcp [--address HOST:6379]
    python -m raytrain_ddp.tools.spot now --seconds 100    # a preStop hook

One per worker node, started by the files in clusters/. It reads the cloud's metadata service and
calls `ray drain-node`; a run then makes a checkpoint and continues without the node
(`preemption.py`). It imports neither torch nor Ray. A notice that it cannot read is reported, and
drains nothing.
"""

from __future__ import annotations

import argparse
import math
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from datetime import datetime, timezone
from http.client import HTTPException

from raytrain_ddp.tools.spot.cloud_notices import CLOUDS, Cloud, Metadata, Notice

_RESERVE_S = 5.0  # `ray drain-node` counts from its own start, which takes seconds
_TRY_S = 20.0  # an answer of `ray drain-node` takes 2 to 8 s


def say(text: str) -> None:
    print(f"{datetime.now(timezone.utc):%Y-%m-%dT%H:%M:%SZ} spot: {text}", flush=True)


def await_notice(cloud: Cloud, every_s: float) -> Notice:
    """The first notice with an end; says what else there is once, also that there is no answer."""
    said: set[str] = set()
    lost = False
    while True:
        try:
            notices = cloud.look()
            if lost:
                say("the metadata service answers again")
            lost = False
        except (OSError, HTTPException, ValueError) as error:
            notices = []
            if not lost:
                say(f"no notice can be read ({type(error).__name__}: {error}); asking again")
            lost = True
        for notice in notices:
            if notice.left_s is not None:
                say(notice.text)
                return notice
            if notice.text not in said:
                say(f"{notice.text}: nothing is drained")
                said.add(notice.text)
        time.sleep(every_s)


def drain(notice: Notice, address: str, node: str | None, try_s: float | None = None) -> bool:
    """Whether Ray has accepted that this node ends; asked again until then, or until it has ended.

    Args:
        node: the node's id in hex; None: that of this machine.
        try_s: how long it is asked at most; None: until the node has ended.
    """
    left_s = notice.left_s or 0.0
    ends_at = time.monotonic() + left_s
    ask_until = ends_at if try_s is None else min(ends_at, time.monotonic() + try_s)
    command = ["ray", "drain-node", "--reason", "DRAIN_NODE_REASON_PREEMPTION"]
    command += ["--reason-message", notice.text, *(["--node-id", node] if node else [])]
    while (now := time.monotonic()) < ask_until:
        left = max(1, int(ends_at - now - _RESERVE_S))
        try:
            done = subprocess.run(
                [*command, "--deadline-remaining-seconds", str(left)],
                # Without it, Ray might ask for the node's id by starting another Ray.
                env={**os.environ, "RAY_ADDRESS": address},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
                errors="replace",
                timeout=min(_TRY_S, max(5.0, ask_until - now)),
                check=False,
            )
        except subprocess.TimeoutExpired:
            why = "no answer"
        else:
            if done.returncode == 0:
                say(f"this node is drained and ends in {left} s")
                return True
            why = (done.stderr.strip().splitlines() or [f"status {done.returncode}"])[-1]
        say(f"ray drain-node: {why}")
        time.sleep(min(1.0, max(0.0, ask_until - time.monotonic())))
    return False


def parser() -> argparse.ArgumentParser:
    """The words of the command line."""
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        "python -m raytrain_ddp.tools.spot", description=__doc__, formatter_class=form
    )
    parser.add_argument("cloud", choices=[*CLOUDS, "now"], help="cloud to watch; now: drain now")
    parser.add_argument("--address", default=os.environ.get("RAY_ADDRESS"), help="Ray address")
    parser.add_argument("--seconds", type=_seconds, help="now: seconds until the node ends")
    parser.add_argument("--every-s", type=_seconds, default=2.0, help="seconds between two checks")
    parser.add_argument("--metadata", metavar="URL", help="URL of another metadata service")
    parser.add_argument("--node-id", help="in hex; default: this machine's only node")
    return parser


def _seconds(word: str) -> float:
    value = float(word)
    if not 0 <= value < math.inf:
        raise ValueError
    return value


def main(words: Sequence[str] | None = None) -> int:
    """The exit status: 0 drained or already watched, 1 not drained, 2 called wrongly."""
    command = parser()
    options = command.parse_args(words)
    if not options.address:
        command.error("give --address HOST:PORT of Ray's head, or set RAY_ADDRESS")
    if (options.cloud == "now") != (options.seconds is not None):
        command.error("`now` needs --seconds; the clouds do not take it")
    if shutil.which("ray") is None:
        command.error("no `ray` on the PATH")
    if options.cloud == "now":
        return _drain_now(options.seconds, options.address, options.node_id)
    lock = socket.socket(socket.AF_UNIX)  # gone with this process
    try:
        lock.bind(f"\0raytrain-spot-watch {os.getuid()} {options.address} {options.node_id}")
    except OSError:
        say(f"another process watches the node of {options.address}")
        return 0
    with lock:
        cloud = CLOUDS[options.cloud]
        url = options.metadata or cloud.URL
        if not re.fullmatch(r"http://[^/]+/?", url):
            command.error(f"--metadata {url}: want http://HOST")
        say(f"looks for notices of {options.cloud} at {url} every {options.every_s:g} s")
        notice = await_notice(cloud(Metadata(url)), options.every_s)
        return 0 if drain(notice, options.address, options.node_id) else 1


def _drain_now(seconds: float, address: str, node: str | None) -> int:
    """A pod's end: its container gets SIGTERM when this returns, so it returns last.

    Without workers on it the node ends by itself at once, and this with its container. If there is
    no head any more, as when the whole cluster is taken down, nobody waits long.
    """
    ends_at = time.monotonic() + seconds
    if not drain(Notice("this pod is taken away", seconds), address, node, try_s=_TRY_S):
        return 1
    time.sleep(max(0.0, ends_at - time.monotonic()))
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)
