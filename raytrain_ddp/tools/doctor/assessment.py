"""Turns findings into rows. Pure functions that use neither Ray nor the machine.

The findings are those of `examine._findings`: dicts of JSON values, in which a part that could
not be determined is None or has an "error".
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from raytrain_ddp.errors import first_names
from raytrain_ddp.tools.doctor.machine_rows import machine_rows, version_rows
from raytrain_ddp.tools.doctor.network_rows import network_rows
from raytrain_ddp.tools.doctor.rows import (
    Note,
    Place,
    Report,
    Row,
    describe_places,
    format_duration,
    format_rate,
    grouped,
    nodes_of,
)

_SHOWN = 3


def assess(findings: Mapping[str, Any]) -> Report:
    """All rows, in the order in which one would fix problems."""
    places, run = findings["places"], findings["run"]
    reached = [place for place in places if "error" not in place["facts"]]
    rows = [
        *worker_rows(run, places),
        *unreached_rows(places),
        *version_rows(reached, run),
        *machine_rows(nodes_of(reached), run),
        *network_rows(findings, nodes_of(reached)),
        *storage_rows(reached, run),
        *data_rows(reached, run),
    ]
    return Report(tuple(rows), findings)


def worker_rows(run: Mapping[str, Any], places: Sequence[Place]) -> list[Row]:
    """Whether the run's workers fit on the cluster."""
    count = len(nodes_of(places))
    there = f"{count} nodes" if count > 1 else "1 node"
    if "workers" not in run:
        return [Row("workers", there, _one_line(run["lacks"]), "fail", _FEWER)]
    each = " + ".join(f"{amount:g} {name}" for name, amount in run["per_worker"].items())
    wanted = f"{run['workers']}, each {each}, over {run['backend']}"
    if run["lacks"]:
        return [Row("workers", there, f"{wanted}: {_one_line(run['lacks'])}", "fail", _FEWER)]
    if run["fit"] < run["least"]:
        found = f"{wanted}: room for {run['fit']}, as a worker is on one node"
        return [Row("workers", there, found, "fail", _FEWER)]
    return [Row("workers", there, wanted)]


_FEWER = (
    "Use fewer workers (--scaling.num-workers), smaller ones (--scaling.cpus-per-worker), or add "
    "nodes; --scaling.wait-s is how long to wait for a cluster that grows automatically."
)


def unreached_rows(places: Sequence[Place]) -> list[Row]:
    """Nodes that count as alive but run no task."""
    advice = "See the raylet's log there (/tmp/ray/session_latest/logs), or remove the node."
    notes = {
        place["name"]: Note(_one_line(place["facts"]["error"]), "fail", advice)
        for place in places
        if "error" in place["facts"]
    }
    return grouped("node", notes, places)


def storage_rows(places: Sequence[Place], run: Mapping[str, Any]) -> list[Row]:
    """Whether every place can commit, and sees the commits of the others."""
    able = [place for place in places if place["facts"]["versions"].get("project")]
    uri = run["storage"]
    notes, seen, left = {}, {}, {}
    for place in able:
        tried, sees = place["storage"], place["seen"]
        if "error" in tried:
            advice = _import_advice(tried["error"]) or (
                f"storage = {uri} must be a folder or bucket that every node may read and write: "
                "check the path, the rights and the credentials there."
            )
            notes[place["name"]] = Note(_one_line(tried["error"]), "fail", advice)
            continue
        numbers = ((tried["commit_s"], format_duration), (tried["bytes_per_s"], format_rate))
        notes[place["name"]] = Note("written, renamed, read; commit {}, {}", numbers=numbers)
        if "error" in sees:
            advice = "A checkpoint must read the same on every node: see the store's own log."
            seen[place["name"]] = Note(_one_line(sees["error"]), "fail", advice)
        elif not sees["misses"]:
            seen[place["name"]] = Note(
                "sees those of all others, after {}", numbers=((sees["seconds"], format_duration),)
            )
        if "error" in place["cleaned"]:
            advice = f"Delete the folder doctor-* in {uri}."
            left[place["name"]] = Note(_one_line(place["cleaned"]["error"]), "warn", advice)
    shared = apart_rows(able, run) or grouped("shared", seen, places)
    if len(nodes_of(places)) == 1 and all(row.verdict == "ok" for row in shared):
        shared = []  # no other node to share it with
    return [*grouped("storage", notes, places), *shared, *grouped("left behind", left, places)]


def apart_rows(places: Sequence[Place], run: Mapping[str, Any]) -> list[Row]:
    """Places that do not see each other's checkpoints: one row, grouped by what they share."""
    names = [place["name"] for place in places if "error" not in place["storage"]]
    together: dict[frozenset[str], list[str]] = {}
    for place in places:
        if place["name"] in names:
            seen = frozenset(names) - set(place["seen"].get("misses", []))
            together.setdefault(seen, []).append(place["name"])
    if len(together) < 2:
        return []
    described = [describe_places(some, places) for some in together.values()]
    found = f"{len(together)} different places: {first_names(described, _SHOWN, by=' | ')}"
    advice = (
        f"storage = {run['storage']} is a separate folder there: use one that all nodes share "
        "(NFS), or a bucket (s3://, gs://)."
    )
    return [Row("shared", describe_places(names, places), found, "fail", advice)]


def data_rows(places: Sequence[Place], run: Mapping[str, Any]) -> list[Row]:
    """Whether every place has the data, and the same data."""
    able = [place for place in places if place["facts"]["versions"].get("project")]
    good = [place for place in able if "error" not in place["data"]]
    mine: Place = next((p for p in good if p["driver"]), good[0] if good else {})
    notes = {}
    for place in able:
        data = place["data"]
        if "error" in data:
            advice = _import_advice(data["error"]) or (
                f"data.source = {run['data']} must be readable on every node: at the same path "
                "everywhere, or as a URI (s3://, gs://, hf://)."
            )
            notes[place["name"]] = Note(_one_line(data["error"]), "fail", advice)
            continue
        rows = f"{data['train'][0]} + {data['eval'][0] if data['eval'] else 0} rows"
        numbers = ((data["seconds"], format_duration),)
        if any(data[part] != mine["data"][part] for part in ("train", "eval")):
            advice = "Copy them again: a run refuses nodes whose data differ."
            found = f"{rows}, but different from {mine['name']}'s"
            notes[place["name"]] = Note(_one_line(found), "fail", advice)
        else:
            notes[place["name"]] = Note(rows + ", opened in {}", numbers=numbers)
    return grouped("data", notes, places)


def _import_advice(error: str) -> str:
    if re.match(r"(ModuleNotFound|Import)Error", error):
        return "Not tested: install the driver's version of this package, and your code, there."
    return ""


def _one_line(text: str) -> str:
    return "; ".join(line.strip() for line in text.splitlines())
