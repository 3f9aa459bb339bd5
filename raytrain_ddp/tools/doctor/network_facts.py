"""Collects network facts: interfaces, name resolution, listening ports, connections.

Sent to the nodes by value, like machine_facts.py: uses only the standard library.
"""

from __future__ import annotations

import fcntl
import json
import os
import socket
import struct
import urllib.request
from collections.abc import Iterator
from http.client import HTTPException
from pathlib import Path
from typing import Any

_SIOCGIFADDR = 0x8915  # of <linux/sockios.h>
_LISTENING, _ESTABLISHED = "0A", "01"
_ANSWER_S = 3.0

Endpoint = tuple[str, int]  # address, port


def gather_network_facts(dashboard: int | None) -> dict[str, Any]:
    """Host name, the addresses it resolves to, and the machine's interfaces.

    Args:
        dashboard: the port on which Ray's dashboard listens on one of the nodes.
    """
    name = socket.gethostname()
    try:
        found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
        resolves = list(dict.fromkeys(str(address[0]) for *_, address in found))
    except OSError:
        resolves = []
    listens = listening(dashboard) if dashboard is not None else []
    mode = _authentication_mode(listens[0], dashboard) if listens and dashboard else None
    return {
        "name": name,
        "resolves": resolves,
        "interfaces": interfaces(),
        "dashboard": listens,
        "dashboard_mode": mode,
    }


def interfaces() -> dict[str, dict[str, Any]]:
    """Addresses and speed in Mbit/s (None: unknown) of each interface that is up."""
    found: dict[str, dict[str, Any]] = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            try:
                answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)
            except OSError:  # it has no IPv4 address
                continue
            address = socket.inet_ntoa(answer[20:24])
            found[name] = {"addresses": [address], "mbit_per_s": _speed(name)}
    for line in _lines("/proc/net/if_inet6"):
        digits, *_, name = line.split()
        entry = found.setdefault(name, {"addresses": [], "mbit_per_s": _speed(name)})
        entry["addresses"].append(socket.inet_ntop(socket.AF_INET6, bytes.fromhex(digits)))
    return found


def listening(port: int) -> list[str]:
    """The addresses on which some process of this machine listens at a port."""
    return sorted({here[0] for here, _, _ in _sockets("/proc/net", _LISTENING) if here[1] == port})


def connections() -> set[tuple[Endpoint, Endpoint]]:
    """(here, there) of each TCP connection of this process."""
    own = set()
    for number in os.listdir("/proc/self/fd"):
        try:
            own.add(os.readlink(f"/proc/self/fd/{number}"))
        except OSError:  # the descriptor by which the folder was read
            continue
    found = _sockets("/proc/self/net", _ESTABLISHED)
    return {(here, there) for here, there, inode in found if f"socket:[{inode}]" in own}


def address_of(digits: str) -> str:
    """``0100007F`` is 127.0.0.1: words of 4 bytes, each in the machine's order."""
    count = len(digits) // 8
    raw = struct.pack(f"!{count}I", *struct.unpack(f"={count}I", bytes.fromhex(digits)))
    if count == 1:
        return socket.inet_ntoa(raw)
    if raw[:12] == bytes(10) + b"\xff\xff":
        return socket.inet_ntoa(raw[12:])
    return socket.inet_ntop(socket.AF_INET6, raw)


def _sockets(folder: str, state: str) -> Iterator[tuple[Endpoint, Endpoint, str]]:
    for file in ("tcp", "tcp6"):
        for line in _lines(f"{folder}/{file}")[1:]:
            fields = line.split()
            if fields[3] == state:
                yield _endpoint(fields[1]), _endpoint(fields[2]), fields[9]


def _endpoint(text: str) -> Endpoint:
    digits, _, port = text.partition(":")
    return address_of(digits), int(port, 16)


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text(encoding="ascii").splitlines()
    except OSError:
        return []


def _speed(name: str) -> int | None:
    try:
        speed = int(Path(f"/sys/class/net/{name}/speed").read_text(encoding="ascii"))
    except (OSError, ValueError):  # loopback and many virtual ones have none
        return None
    return speed if speed > 0 else None


def _authentication_mode(address: str, port: int) -> str | None:
    """The authentication mode that the dashboard reports: token, disabled ...; None: no answer."""
    host = {"0.0.0.0": "127.0.0.1", "::": "127.0.0.1"}.get(address, address)
    host = f"[{host}]" if ":" in host else host
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        url = f"http://{host}:{port}/api/authentication_mode"
        with opener.open(url, timeout=_ANSWER_S) as answer:
            mode = json.load(answer).get("authentication_mode")
    except (OSError, HTTPException, ValueError, AttributeError):  # also of another service
        return None
    return str(mode).lower() if mode else None
