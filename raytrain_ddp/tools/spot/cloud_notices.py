"""Cloud notices that a machine will be taken away, read from metadata services.

Standard library only: a process that does nothing else stays small. What cannot be read is an
error, never a notice.
"""

from __future__ import annotations

import json
import time
from datetime import datetime, timezone
from email.utils import parsedate_to_datetime
from http.client import HTTPConnection, HTTPMessage
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

ANSWER_S = 2.0  # a metadata service that takes longer is asked again
_LARGEST_BODY = 1 << 16
_NO_SUCH_PAGE = 404
_UNAUTHORIZED = 401


class Notice(NamedTuple):
    """What a cloud announces.

    Args:
        text: what, for people.
        left_s: when the machine goes; None: perhaps never, so nothing is drained.
    """

    text: str
    left_s: float | None


class Metadata:
    """A metadata service. A proxy is not used: it would ask for its own machine."""

    def __init__(self, url: str) -> None:
        self._host = urlsplit(url).netloc

    def ask(self, path: str, method: str = "GET", **headers: str) -> tuple[int, str, HTTPMessage]:
        """The status, the text and the headers of an answer; `_` in names of headers is `-`."""
        connection = HTTPConnection(self._host, timeout=ANSWER_S)
        try:
            given = {name.replace("_", "-"): value for name, value in headers.items()}
            connection.request(method, path, headers=given)
            answer = connection.getresponse()
            return answer.status, answer.read(_LARGEST_BODY).decode(), answer.headers
        finally:
            connection.close()


def _expect_ok(status: int, path: str) -> None:
    if status != 200:
        raise ValueError(f"status {status} for {path}")


def _object(text: str) -> dict[str, Any]:
    found = json.loads(text)
    if not isinstance(found, dict):
        raise ValueError(f"not a JSON object: {text[:80]!r}")
    return found


def _between(left_s: float, most_s: float) -> float:
    """The clock of this machine may be wrong by hours; the notices of a cloud are this long."""
    return min(max(left_s, 1.0), most_s)


class Aws:
    """Two minutes of notice; IMDSv2 only.

    https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/spot-instance-termination-notices.html
    """

    URL = "http://169.254.169.254"
    _MOST_S = 120.0

    def __init__(self, metadata: Metadata) -> None:
        self._metadata, self._token = metadata, ""

    def look(self) -> list[Notice]:
        found = []
        action = self._get("/latest/meta-data/spot/instance-action")
        if action is not None:
            what, when = action.get("action"), action.get("time")
            if what not in ("terminate", "stop", "hibernate") or not isinstance(when, str):
                raise ValueError(f"not an instance action: {str(action)[:80]}")
            at = datetime.strptime(when, "%Y-%m-%dT%H:%M:%SZ").replace(tzinfo=timezone.utc)
            left_s = _between(at.timestamp() - time.time(), self._MOST_S)
            found.append(Notice(f"AWS: {what} at {when}", left_s))
        if self._get("/latest/meta-data/events/recommendations/rebalance") is not None:
            found.append(Notice("AWS: rebalance recommendation, a risk but no date", None))
        return found

    def _get(self, path: str) -> dict[str, Any] | None:
        for _ in range(2):  # a token that has expired is replaced
            if not self._token:
                status, text, _ = self._metadata.ask(
                    "/latest/api/token", "PUT", X_aws_ec2_metadata_token_ttl_seconds="21600"
                )
                _expect_ok(status, "/latest/api/token")
                self._token = text
            status, text, _ = self._metadata.ask(path, X_aws_ec2_metadata_token=self._token)
            if status != _UNAUTHORIZED:
                break
            self._token = ""
        if status == _NO_SUCH_PAGE:
            return None
        _expect_ok(status, path)
        return _object(text)


class Azure:
    """At least 30 s of notice for a spot machine.

    https://learn.microsoft.com/azure/virtual-machines/linux/scheduled-events
    """

    URL = "http://169.254.169.254"
    _MOST_S = 900.0  # the longest notice of a termination that can be set
    _EVENTS = "/metadata/scheduledevents?api-version=2020-07-01"
    _NAME = "/metadata/instance/compute/name?api-version=2021-02-01&format=text"

    def __init__(self, metadata: Metadata) -> None:
        self._metadata, self._name = metadata, ""

    def look(self) -> list[Notice]:
        events = _object(self._get(self._EVENTS)).get("Events")
        if not isinstance(events, list) or not all(isinstance(event, dict) for event in events):
            raise ValueError(f"not scheduled events: {str(events)[:80]}")
        if events and not self._name:
            self._name = self._get(self._NAME).strip().lower()
        return [self._notice(event) for event in events if self._is_mine(event)]

    def _get(self, path: str) -> str:
        status, text, _ = self._metadata.ask(path, Metadata="true")
        _expect_ok(status, path)
        return text

    def _is_mine(self, event: dict[str, Any]) -> bool:
        """All machines of a scale set or an availability set get the events of all."""
        resources = event.get("Resources")
        if not isinstance(resources, list):
            raise ValueError(f"an event without resources: {str(event)[:80]}")
        return bool(self._name) and self._name in [str(name).lower() for name in resources]

    def _notice(self, event: dict[str, Any]) -> Notice:
        kind, before = str(event.get("EventType")), event.get("NotBefore")
        if kind not in ("Preempt", "Terminate"):
            return Notice(f"Azure: {kind} of this machine, not before {before or 'now'}", None)
        # Without a time it has begun.
        left_s = parsedate_to_datetime(str(before)).timestamp() - time.time() if before else 0.0
        return Notice(f"Azure: {kind} not before {before or 'now'}", _between(left_s, self._MOST_S))


class Gcp:
    """30 s of notice for a spot machine; of maintenance an hour with GPUs, a minute without.

    https://cloud.google.com/compute/docs/instances/create-use-preemptible#handle_preemption
    https://cloud.google.com/compute/docs/metadata/getting-live-migration-notice
    """

    URL = "http://metadata.google.internal"
    _INSTANCE = "/computeMetadata/v1/instance/"

    def __init__(self, metadata: Metadata, has_gpu: bool | None = None) -> None:
        self._metadata, self._looked = metadata, False
        self._has_gpu = Path("/proc/driver/nvidia").exists() if has_gpu is None else has_gpu

    def look(self) -> list[Notice]:
        preempted = self._get("preempted")
        if preempted not in ("TRUE", "FALSE"):
            raise ValueError(f"preempted is {preempted[:80]!r}")
        event = self._get("maintenance-event")
        looked, self._looked = self._looked, True
        if preempted == "TRUE":
            return [Notice("Google Cloud: preempted", 30.0)]
        if event == "TERMINATE_ON_HOST_MAINTENANCE":
            # Found at the first look, it may be as old as it can be.
            return [Notice(f"Google Cloud: {event}", 3600.0 if self._has_gpu and looked else 60.0)]
        return [] if event == "NONE" else [Notice(f"Google Cloud: {event[:80]}", None)]

    def _get(self, name: str) -> str:
        status, text, headers = self._metadata.ask(self._INSTANCE + name, Metadata_Flavor="Google")
        _expect_ok(status, name)
        if headers.get("Metadata-Flavor") != "Google":
            raise ValueError("answered by something that is not Google's metadata service")
        return text.strip()


# `look` raises OSError, HTTPException or ValueError: no answer, or one that cannot be read.
Cloud = Aws | Azure | Gcp
CLOUDS: dict[str, type[Cloud]] = {"aws": Aws, "azure": Azure, "gcp": Gcp}
