"""Watches for the notice that a cloud takes this machine away, and then drains its Ray node.

    python -m raytrain_ddp.tools.spot aws|azure|gcp [--address HOST:6379]
    python -m raytrain_ddp.tools.spot now --seconds 100    # a preStop hook

One per worker node, started by the files in clusters/. It reads the cloud's metadata service and
calls `ray drain-node`; a run then makes a checkpoint and continues without the node. It imports
neither torch nor Ray. A notice that it cannot read is reported, and drains nothing.
"""

from __future__ import annotations

import argparse
import json
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
from email.utils import parsedate_to_datetime
from functools import partial
from http.client import HTTPException
from typing import Any, NamedTuple
from urllib.error import HTTPError
from urllib.request import ProxyHandler, Request, build_opener

ANSWER_S = 2.0  # a metadata service that takes longer is asked again
_MAX_BODY_BYTES, _NO_SUCH_PAGE = 1 << 16, 404

Ask = Callable[..., str]


class Notice(NamedTuple):
    """What a cloud announces, for people, and in how many seconds the machine goes."""

    text: str
    left_s: float


def asks(url: str) -> Ask:
    """A function that gets a page. In the names of headers, `_` is `-`; `flavor`: see gcp."""
    opener = build_opener(ProxyHandler({}))  # a proxy would ask for its own machine

    def ask(path: str, flavor: str | None = None, method: str = "GET", **headers: str) -> str:
        given = {name.replace("_", "-"): value for name, value in headers.items()}
        request = Request(url + path, headers=given, method=method)
        with opener.open(request, timeout=ANSWER_S) as answer:
            if flavor not in (None, answer.headers.get("Metadata-Flavor")):
                raise ValueError("answered by something that is not Google's metadata service")
            return str(answer.read(_MAX_BODY_BYTES).decode())

    return ask


def aws(ask: Ask) -> Notice | None:
    """Two minutes of notice; IMDSv2 only.

    https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/spot-instance-termination-notices.html
    """
    token = ask("/latest/api/token", method="PUT", X_aws_ec2_metadata_token_ttl_seconds="60")
    page = "/latest/meta-data/spot/instance-action"
    try:
        action = json.loads(ask(page, X_aws_ec2_metadata_token=token))
    except HTTPError as error:
        if error.code == _NO_SUCH_PAGE:
            return None
        raise
    what, when = _get(action, "action", str), _get(action, "time", str)
    if what not in ("terminate", "stop", "hibernate"):
        raise ValueError(f"not an instance action: {str(action)[:80]}")
    at = datetime.strptime(when, "%Y-%m-%dT%H:%M:%SZ").replace(tzinfo=timezone.utc)
    return Notice(f"AWS: {what} at {when}", _left_s(at, most_s=120))


def azure(ask: Ask) -> Notice | None:
    """At least 30 s of notice for a spot machine. All machines of a set get the events of all.

    https://learn.microsoft.com/azure/virtual-machines/linux/scheduled-events
    """
    events = json.loads(ask("/metadata/scheduledevents?api-version=2020-07-01", Metadata="true"))
    name = "/metadata/instance/compute/name?api-version=2021-02-01&format=text"
    for event in _get(events, "Events", list):
        mine, machines = ask(name, Metadata="true").strip(), _get(event, "Resources", list)
        kind, before = event.get("EventType"), event.get("NotBefore")
        is_mine = mine and mine.lower() in [str(machine).lower() for machine in machines]
        if is_mine and kind in ("Preempt", "Terminate"):
            # Without a time it has begun. A notice can be set to 900 s at most.
            at = parsedate_to_datetime(str(before)) if before else datetime.now(timezone.utc)
            return Notice(f"Azure: {kind} not before {before or 'now'}", _left_s(at, most_s=900))
    return None


def gcp(ask: Ask) -> Notice | None:
    """30 s of notice for a spot machine, and at least a minute of maintenance.

    https://cloud.google.com/compute/docs/instances/create-use-preemptible#handle_preemption
    https://cloud.google.com/compute/docs/metadata/getting-live-migration-notice
    """
    preempted, event = (
        ask(f"/computeMetadata/v1/instance/{name}", "Google", Metadata_Flavor="Google").strip()
        for name in ("preempted", "maintenance-event")
    )
    if preempted not in ("TRUE", "FALSE"):
        raise ValueError(f"preempted is {preempted[:80]!r}")
    if preempted == "TRUE":
        return Notice("Google Cloud: preempted", 30.0)
    ends = event == "TERMINATE_ON_HOST_MAINTENANCE"
    return Notice(f"Google Cloud: {event}", 60.0) if ends else None


def _get(table: Any, name: str, kind: type) -> Any:
    if not isinstance(table, dict) or not isinstance(table.get(name), kind):
        raise ValueError(f"no {name} in {str(table)[:80]!r}")
    return table[name]


def _left_s(at: datetime, most_s: float) -> float:
    """The clock of this machine may be wrong by hours; the notices of a cloud are this long."""
    return min(max(at.timestamp() - time.time(), 1.0), most_s)


CLOUDS = {
    "aws": (aws, "http://169.254.169.254"),
    "azure": (azure, "http://169.254.169.254"),
    "gcp": (gcp, "http://metadata.google.internal"),
}


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
