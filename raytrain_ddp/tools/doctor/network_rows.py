"""Assesses the network: names, all-reduces, and who could reach Ray."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from ipaddress import ip_address
from typing import Any

from raytrain_ddp.tools.doctor.rows import Note, Place, Row, format_duration, format_rate, grouped

_GRADIENTS_BYTES = 100e6  # of 25 million parameters in fp32
_MOST_S = 1.0  # for these, per step
_LEAST_GPU_BYTES_PER_S = 2e9


def network_rows(findings: Mapping[str, Any], nodes: Sequence[Place]) -> list[Row]:
    """The rows of the nodes that responded."""
    nodes = [node for node in nodes if node["facts"]["wires"]]
    met = {
        name
        for each in findings["all_reduce"]
        if each["kind"] == "across" and "error" not in each
        for name in each["nodes"]
    }
    names = {n["name"]: assess_host_name(n, len(nodes), n["name"] in met) for n in nodes}
    return [
        *grouped("host name", names, nodes),
        *all_reduce_rows(findings, nodes),
        *dashboard_rows(findings, nodes),
        *authentication_rows(nodes),
        *token_rows(nodes),
    ]


def assess_host_name(node: Place, count: int, met: bool) -> Note:
    """gloo announces the address of GLOO_SOCKET_IFNAME, or else that of the host name.

    Args:
        met: whether the all-reduce across nodes worked there. Of two ranks the one with the lower
            address listens, so a single wrong address may be harmless until another node has one.
    """
    wires, ip = node["facts"]["wires"], node["ip"]
    interface = (node["facts"]["settings"] or {}).get("GLOO_SOCKET_IFNAME")
    if interface:
        if interface.split(",")[0] in wires["interfaces"]:
            return Note(f"GLOO_SOCKET_IFNAME={interface}")
        advice = f"There is no such interface; there are {', '.join(wires['interfaces'])}."
        return Note(f"GLOO_SOCKET_IFNAME={interface}", "fail", advice)
    first = next(iter(wires["resolves"]), None)
    found = f"resolves to {first}" if first else "does not resolve"
    if count == 1:
        return Note(found)
    own = _interface_of(ip, wires) or "eth0"
    set_it = f"set GLOO_SOCKET_IFNAME={own} (and NCCL_SOCKET_IFNAME) before `ray start` there"
    offered = _interface_of(first, wires) if first and not _is_loopback(first) else None
    if offered is None:
        advice = (
            f"gloo would announce it to the other nodes, which cannot reach it: {set_it}, or put "
            "the right address into /etc/hosts."
        )
        return Note(found, "warn" if met else "fail", advice)
    if offered != own:
        advice = f"Gradients would go over {offered}; if {own} is the faster one, {set_it}."
        return Note(f"{found} ({offered}), Ray uses {ip} ({own})", "warn", advice)
    return Note("resolves to its own address")


def all_reduce_rows(findings: Mapping[str, Any], nodes: Sequence[Place]) -> list[Row]:
    """Latency and bandwidth, within nodes and across them."""
    results = findings["all_reduce"]
    nothing = {node["name"]: Note("nothing to measure") for node in nodes}
    rows = [_all_reduce(each, findings["run"], nodes) for each in results]
    return rows or grouped("all-reduce", nothing, nodes)


def _all_reduce(result: Mapping[str, Any], run: Mapping[str, Any], nodes: Sequence[Place]) -> Row:
    across = result["kind"] == "across"
    place = f"across {len(result['nodes'])} nodes" if across else f"within {result['nodes'][0]}"
    if "error" in result:
        advice = (
            "All ports must be open between the nodes, and each must reach the others' addresses; "
            "with several networks, or after 'connectFullMesh', set GLOO_SOCKET_IFNAME and "
            "NCCL_SOCKET_IFNAME before `ray start`."
        )
        if "did not start" in result["error"]:
            advice = "Other jobs may hold the GPUs or the memory: see `ray status`."
        return Row("all-reduce", place, result["error"], "fail", advice)
    rates = result["bus_bytes_per_s"]
    bus = list(rates.values())[-1]
    sizes = ", ".join(f"{mib} MiB {format_rate(value)}" for mib, value in rates.items())
    found = f"{result['ranks']} ranks: 8 bytes {format_duration(result['latency_s'])}"
    if result.get("cpu_latency_s") is not None:
        found += f" (on CPUs {format_duration(result['cpu_latency_s'])})"
    found += f"; bus {sizes}"
    ways = _ways(result, nodes) if across else ""
    found += f"; over {ways}" if ways else ""
    step_s = _GRADIENTS_BYTES * 2 * (result["ranks"] - 1) / result["ranks"] / bus
    if across and step_s > _MOST_S:
        advice = (
            f"The gradients of 25 million parameters (100 MB) take {format_duration(step_s)} each "
            "step: a larger --batch-size means fewer steps, --ddp.compression bf16 halves the "
            "bytes; best is a faster network."
        )
        return Row("all-reduce", place, found, "warn", advice)
    if not across and run["use_gpu"] and bus < _LEAST_GPU_BYTES_PER_S:
        advice = "Slow for GPUs of one machine: see `nvidia-smi topo -m`, and NCCL_DEBUG=INFO."
        return Row("all-reduce", place, found, "warn", advice)
    return Row("all-reduce", place, found)


def _ways(result: Mapping[str, Any], nodes: Sequence[Place]) -> str:
    """``eth0 (1000 Mbit/s)``: the interfaces that the ranks used."""
    own = set(result["nodes"])
    ways: dict[str, None] = {}
    for node in nodes:
        wires = node["facts"]["wires"]
        for here, _ in result["talks"] if node["name"] in own else []:
            name = _interface_of(here, wires)
            if name is not None and (name != "lo" or len(own) == 1):
                speed = wires["interfaces"][name]["mbit_per_s"]
                ways[f"{name} ({speed} Mbit/s)" if speed else name] = None
    return ", ".join(ways)


def dashboard_rows(findings: Mapping[str, Any], nodes: Sequence[Place]) -> list[Row]:
    """Anyone who reaches the dashboard can run code as its user, unless it requires a token."""
    dashboard = findings["dashboard"]
    if dashboard is None:
        return [Row("dashboard", "cluster", "none")]
    host, port = dashboard
    node = next((node for node in nodes if node["facts"]["wires"]["dashboard"]), None)
    addresses = node["facts"]["wires"]["dashboard"] if node else [host]
    mode = _mode_text(nodes) or (_own_mode(node) if node else "")
    place = node["name"] if node else "cluster"
    found = f"on {', '.join(addresses)}, port {port}"
    if all(map(_is_loopback, addresses)):
        return [Row("dashboard", place, found)]
    if mode == "token":
        return [Row("dashboard", place, f"{found}, requires a token")]
    advice = (
        "Anyone who reaches it can run code as you: start Ray with RAY_AUTH_MODE=token on all "
        "nodes, or with --dashboard-host 127.0.0.1 and reach it through ssh."
    )
    return [Row("dashboard", place, f"{found}, requires no token", "fail", advice)]


def authentication_rows(nodes: Sequence[Place]) -> list[Row]:
    notes = {}
    for node in nodes:
        mode = _own_mode(node) or _mode_text(nodes)
        advice = (
            "Anyone who reaches Ray's ports can run code as you: `ray get-auth-token --generate`, "
            "copy ~/.ray/auth_token to all nodes, and start Ray with RAY_AUTH_MODE=token."
        )
        ok = Note(f"RAY_AUTH_MODE={mode}")
        notes[node["name"]] = ok if mode not in ("", "disabled") else Note("none", "warn", advice)
    return grouped("authentication", notes, nodes)


def token_rows(nodes: Sequence[Place]) -> list[Row]:
    """The token in the file is a password."""
    notes = {}
    for node in nodes:
        token = node["facts"]["token"]
        if token is None:
            continue
        mode = f"{token['mode']:03o}"
        advice = f"Other users of that machine can read it: chmod 600 {token['path']}"
        exposed = Note(f"mode {mode}", "warn", advice)
        notes[node["name"]] = exposed if token["exposed"] else Note(f"mode {mode}")
    return grouped("token file", notes, nodes)


def _mode_text(nodes: Sequence[Place]) -> str:
    """The mode that the dashboard reports for the whole cluster."""
    modes = (node["facts"]["wires"]["dashboard_mode"] for node in nodes)
    return next((mode for mode in modes if mode), "")


def _own_mode(node: Place) -> str:
    """The mode that its raylet was started with."""
    return str((node["facts"]["settings"] or {}).get("RAY_AUTH_MODE", "")).lower()


def _is_loopback(address: str) -> bool:
    try:
        return ip_address(address.partition("%")[0]).is_loopback
    except ValueError:
        return address == "localhost"


def _interface_of(address: str, wires: Mapping[str, Any]) -> str | None:
    bare = address.partition("%")[0]
    found = (n for n, each in wires["interfaces"].items() if bare in each["addresses"])
    return next(found, None)
