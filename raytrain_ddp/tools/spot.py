"""Watches for the notice that a cloud takes this machine away, and then drains its Ray node.

    python -m raytrain_ddp.tools.spot aws|azure|gcp [--address HOST:6379]
    python -m raytrain_ddp.tools.spot now --seconds 100    # a preStop hook

One per worker node, started by the files in clusters/. It reads the cloud's metadata service and
calls `ray drain-node`; a run then makes a checkpoint and continues without the node. It imports
neither torch nor Ray. A notice that it cannot read is reported, and drains nothing.
"""

from __future__ import annotations

import argparse
import math
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from datetime import datetime, timezone
from functools import partial
from http.client import HTTPException

from raytrain_ddp.tools.spot.cloud_notices import CLOUDS, Notice, asks

_RESERVE_S = 5.0  # `ray drain-node` counts from its own start, which takes seconds
_TRY_S = 20.0  # an answer of `ray drain-node` takes 2 to 8 s


def say(text: str) -> None:
    print(f"{datetime.now(timezone.utc):%Y-%m-%dT%H:%M:%SZ} spot: {text}", flush=True)


def await_notice(look: Callable[[], Notice | None], every_s: float) -> Notice:
    """The first notice; says once why none can be read."""
    said = ""
    while True:
        try:
            if notice := look():
                say(notice.text)
                return notice
        except (OSError, HTTPException, ValueError) as error:
            text = f"no notice can be read ({type(error).__name__}: {error}); asking again"
            if text != said:
                say(text)
            said = text
        time.sleep(every_s)


def drain(notice: Notice, node: str | None, try_s: float = math.inf) -> bool:
    """Whether Ray has accepted that this node ends; asked again until then, for `try_s` at most.

    Args:
        node: the node's id in hex; None: that of this machine.
    """
    ends_at = time.monotonic() + notice.left_s
    ask_until = min(ends_at, time.monotonic() + try_s)
    command = ["ray", "drain-node", "--reason", "DRAIN_NODE_REASON_PREEMPTION"]
    command += ["--reason-message", notice.text, *(["--node-id", node] if node else [])]
    while (now := time.monotonic()) < ask_until:
        left = max(1, int(ends_at - now - _RESERVE_S))
        words = [*command, "--deadline-remaining-seconds", str(left)]
        limit_s = min(_TRY_S, max(5.0, ask_until - now))
        try:
            subprocess.run(words, capture_output=True, timeout=limit_s, check=True)
            say(f"this node is drained and ends in {left} s")
            return True
        except subprocess.TimeoutExpired:
            say("ray drain-node: no answer")
        except subprocess.CalledProcessError as error:
            said = error.stderr.decode(errors="replace").strip().splitlines()
            say(f"ray drain-node: {(said or [error])[-1]}")
        time.sleep(min(1.0, max(0.0, ask_until - time.monotonic())))
    return False


def parser() -> argparse.ArgumentParser:
    """The words of the command line."""
    name, form = "python -m raytrain_ddp.tools.spot", argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(name, description=__doc__, formatter_class=form)
    parser.add_argument("cloud", choices=[*CLOUDS, "now"], help="cloud to watch; now: drain now")
    parser.add_argument("--address", default=os.environ.get("RAY_ADDRESS"), help="Ray address")
    parser.add_argument("--seconds", type=_seconds, help="now: seconds until the node ends")
    parser.add_argument("--every-s", type=_seconds, default=2.0, help="seconds between two checks")
    parser.add_argument("--metadata", metavar="URL", help="URL of another metadata service")
    parser.add_argument("--node-id", help="in hex; default: this machine's only node")
    return parser


def _seconds(word: str) -> float:
    if not 0 <= float(word) < math.inf:
        raise ValueError
    return float(word)


def main(words: Sequence[str] | None = None) -> int:
    """The exit status: 0 drained or already watched, 1 not drained, 2 called wrongly."""
    command = parser()
    options = command.parse_args(words)
    address, node = options.address, options.node_id
    if not address:
        command.error("give --address HOST:PORT of Ray's head, or set RAY_ADDRESS")
    if (options.cloud == "now") != (options.seconds is not None):
        command.error("`now` needs --seconds; the clouds do not take it")
    if shutil.which("ray") is None:
        command.error("no `ray` on the PATH")
    os.environ["RAY_ADDRESS"] = address  # or Ray might ask for the node's id by starting another
    if options.cloud == "now":
        # A pod's container gets SIGTERM when this returns, so it returns last. If there is no head
        # any more, as when the whole cluster is taken down, nobody waits long.
        ends_at = time.monotonic() + options.seconds
        is_drained = drain(Notice("this pod is taken away", options.seconds), node, _TRY_S)
        time.sleep(max(0.0, ends_at - time.monotonic()) if is_drained else 0.0)
        return 0 if is_drained else 1
    look, url = CLOUDS[options.cloud][0], options.metadata or CLOUDS[options.cloud][1]
    with socket.socket(socket.AF_UNIX) as lock:  # gone with this process
        try:
            lock.bind(f"\0raytrain-spot-watch {os.getuid()} {address} {node}")
        except OSError:
            say(f"another process watches the node of {address}")
            return 0
        say(f"looks for notices of {options.cloud} at {url} every {options.every_s:g} s")
        return 0 if drain(await_notice(partial(look, asks(url)), options.every_s), node) else 1


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)
