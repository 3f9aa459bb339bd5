"""Turns the findings of examine.py into rows, and shows them as a table. Without Ray.

A row says what was checked, where, what was found, and what to do. A finding has only an "error" if
it could not be determined.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple
from zlib import crc32

from rich.console import Console
from rich.table import Table
from rich.text import Text

from raytrain_ddp.errors import first_names
from raytrain_ddp.tools.doctor.storage_probe import DRIVER, PAYLOAD_MIB
from raytrain_ddp.tools.formatting import format_bytes, format_seconds, plural

Verdict = Literal["ok", "warn", "fail"]
_STYLES: Mapping[Verdict, str] = {"fail": "bold red", "warn": "yellow", "ok": "green"}
_NAMES_SHOWN, _WHERE, _MAX_WIDTH = 3, 18, 110


@dataclass(frozen=True)
class Row:
    """One line of the table. `advice` is empty if nothing is wrong."""

    check: str
    where: str
    found: str
    verdict: Verdict = "ok"
    advice: str = ""


class Report(NamedTuple):
    """All rows, the JSON values that they were made from, and what failures mean."""

    rows: Sequence[Row]
    findings: Mapping[str, Any]
    if_good: str
    if_bad: str

    def count(self, verdict: Verdict) -> int:
        return sum(row.verdict == verdict for row in self.rows)


def merged(rows: Iterable[Row], nodes: Sequence[str]) -> list[Row]:
    """One row for all places of which the same is found; of each check, the worst come first.

    Args:
        nodes: the names of all nodes, that of the driver first.
    """
    places: dict[Row, list[str]] = {}
    for row in rows:
        places.setdefault(replace(row, where=""), []).append(row.where)
    checks, worst = [*dict.fromkeys(row.check for row in places)], [*_STYLES]
    order = sorted(places, key=lambda row: (checks.index(row.check), worst.index(row.verdict)))
    return [replace(row, where=_described(places[row], nodes)) for row in order]


def _described(names: Sequence[str], nodes: Sequence[str]) -> str:
    """``all 3 nodes``, ``w1, w2`` or ``w1, w2, w3 and 4 more``; no driver beside its node."""
    shown = [name for name in names if name != DRIVER or nodes[0] not in names]
    is_all = len(nodes) > 1 and {*nodes} <= {*shown}
    return f"all {len(nodes)} nodes" if is_all else first_names(shown, _NAMES_SHOWN)


def show(report: Report, console: Console) -> None:
    """Prints the table, with what to do below each finding that is not ok, and a conclusion."""
    table = Table(box=None, pad_edge=False, expand=True, padding=(0, 2, 0, 0))
    table.add_column("check", no_wrap=True)
    table.add_column("where", max_width=_WHERE)
    table.add_column("found", ratio=1)
    table.add_column("", no_wrap=True)
    before = ""
    for row in report.rows:
        style, found = _STYLES[row.verdict], Text(row.found, overflow="fold")
        found.append(f"\n-> {row.advice}" if row.advice else "", style)
        check, before = Text("" if row.check == before else row.check), row.check
        table.add_row(check, Text(row.where, overflow="fold"), found, Text(row.verdict, style))
    console.print(table, width=min(console.width, _MAX_WIDTH))
    failures, warnings = report.count("fail"), report.count("warn")
    text = "No problems found."
    if failures or warnings:
        means = report.if_bad if failures else report.if_good
        text = f"{plural(failures, 'failure')}, {plural(warnings, 'warning')}: {means}."
    console.print(Text(text, "bold"), soft_wrap=True)


def format_duration(seconds: float) -> str:
    """``0.12 ms``, ``8.0 ms``, ``0.42 s``, ``12m05s``; ``-`` if unknown."""
    value, is_short = seconds * 1e3, seconds < 0.0995
    return f"{value:.{2 if value < 0.995 else 1}f} ms" if is_short else format_seconds(seconds)


Found = Mapping[str, Any]

_SLOW_BYTES_PER_S = 150e6
_SLOW = (
    "The gradients of 25 million parameters (100 MB) take a second or more each step: a larger "
    "--batch-size means fewer steps, --ddp.compression bf16 halves the bytes; best is a faster "
    "network."
)
_NODE = "See `ray status` (other jobs may hold its GPUs), and the raylet's log there."
_STORAGE = (
    "storage = {} must be one folder or bucket that all nodes may read and write (NFS, s3://, "
    "gs://): check the path, the rights and the credentials there."
)
_DATA = (
    "data.source = {} must be readable on every node: at the same path everywhere, or as a URI "
    "(s3://, gs://, hf://)."
)


def assess(findings: Found, storage: str, data: str) -> Report:
    """All rows, in the order in which one would fix problems."""
    nodes, lacks = findings["nodes"], findings["lacks"]
    reached = {name: node for name, node in nodes.items() if "error" not in node}
    workers, where = lacks or findings["workers"], plural(len(nodes), "node")
    rows = [Row("workers", where, workers, "fail" if lacks else "ok")]
    rows += [row for row in _each("node", nodes, lambda _: "", _NODE) if row.advice]
    rows += _versions(reached, findings["versions"])
    rows += [_gpus(name, node, findings["all_reduce"]) for name, node in reached.items()]
    rows += [_all_reduce(each, reached) for each in findings["all_reduce"]]
    slowest = max(each.get("commit_s", 0.0) for each in findings["storage"].values())
    good = f"{PAYLOAD_MIB} MiB committed in {format_duration(slowest)} or less, and seen by others"
    rows += _each("storage", findings["storage"], lambda _: good, _STORAGE.format(storage))
    rows += _each("data", findings["data"], _data, _DATA.format(data))
    different = {_data(each) for each in findings["data"].values() if "error" not in each}
    if len(different) > 1:
        advice = "Copy them again: a run refuses nodes whose data differ."
        rows.append(Row("data", "", f"{len(different)} different data sets", "fail", advice))
    return Report(merged(rows, [*nodes]), findings, "a run would start", "a run would not get far")


def _each(
    check: str, places: Mapping[str, Found], describe: Callable[[Found], str], advice: str
) -> Iterator[Row]:
    for name, found in places.items():
        if "error" in found:
            yield Row(check, name, found["error"], "fail", advice)
        else:
            yield Row(check, name, describe(found))


def _data(found: Found) -> str:
    """With eight digits that differ for other data."""
    rows = f"{found['train'][0]} + {found['eval'][0] if found['eval'] else 0} rows"
    return f"{rows}, fingerprint {crc32(str(found).encode()):08x}"


def _versions(nodes: Mapping[str, Found], wanted: Mapping[str, str | None]) -> Iterator[Row]:
    """Compared with the driver's."""
    for package, other in wanted.items():
        for name, node in nodes.items():
            version = node["versions"][package]
            if version != other:
                advice = (
                    f"The driver has {other or 'none'}: install the same on all nodes. Ray refuses "
                    "other versions of Python and Ray, and a run those of torch."
                )
                yield Row(package, name, version or "not installed", "fail", advice)
            elif version:
                yield Row(package, name, version)


def _gpus(name: str, node: Found, reduced: Sequence[Found]) -> Row:
    """What the machine has, Ray counts, and the all-reduce used."""
    devices, counted = node["devices"], int(node["ray"].get("GPU", 0))
    used = [gpu for each in reduced if each["nodes"] == [name] for gpu in each.get("gpus", ())]
    found, advice = f"{devices or 'none'}", ""
    if used:
        kind, free, total = min(used, key=lambda gpu: gpu[1] / gpu[2])
        found = f"{devices} x {kind}, {format_bytes(free)} free of {format_bytes(total)}"
        if free < 0.9 * total:
            advice = "Another process uses a GPU: nvidia-smi shows which."
    if counted != devices:
        found += f"; Ray counts {counted}"
        advice = "Check nvidia-smi there, and --num-gpus and CUDA_VISIBLE_DEVICES of `ray start`."
    return Row("GPUs", name, found, "warn" if advice else "ok", advice)


def _all_reduce(result: Found, nodes: Mapping[str, Found]) -> Row:
    """Latency and bandwidth, within a node or across nodes."""
    where = result["where"]
    if "error" in result:
        advice = _no_connection({name: nodes[name] for name in result["nodes"]})
        return Row("all-reduce", where, result["error"], "fail", advice)
    rate, latency = result["bus_bytes_per_s"], format_duration(result["latency_s"])
    if not rate:
        return Row("all-reduce", where, "1 rank: nothing to measure")
    found = f"{result['ranks']} ranks: 8 bytes {latency} on CPUs, 25 MiB at {format_bytes(rate)}/s"
    is_slow = rate < _SLOW_BYTES_PER_S
    return Row("all-reduce", where, found, "warn" if is_slow else "ok", _SLOW if is_slow else "")


def _no_connection(nodes: Mapping[str, Found]) -> str:
    """gloo announces the address of GLOO_SOCKET_IFNAME, or else that of the host's name."""
    if len(nodes) == 1:
        return "See nvidia-smi and `ray status` there, and NCCL_DEBUG=INFO."
    odd = [
        f"The name of {name} resolves to {node['resolves'] or 'nothing'}, Ray uses {node['ip']}. "
        for name, node in nodes.items()
        if node["resolves"] != node["ip"]
    ]
    return "".join(odd[:3]) + (
        "All ports must be open between the nodes, and each must reach the others' addresses: set "
        "GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME before `ray start` to the interface with the "
        "address that Ray uses (`ip -brief address`), or put that into /etc/hosts."
    )
