"""Cloud notices that a machine will be taken away, read from metadata services.

Standard library only: a process that does nothing else stays small. What cannot be read is an
error (OSError, HTTPException or ValueError), never a notice.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from datetime import datetime, timezone
from email.utils import parsedate_to_datetime
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
