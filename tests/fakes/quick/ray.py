"""Stands in for the module: its nodes are those that have reported."""

import os
from pathlib import Path

_addresses: list[str] = []


def init(address: str, **_: object) -> None:
    assert address == f"{os.environ['HEAD_IP']}:{os.environ['PORT']}"
    _addresses.append(address)


def is_initialized() -> bool:
    return bool(_addresses)


def shutdown() -> None: ...


def nodes() -> list[dict[str, bool]]:
    return [{"Alive": True} for _ in Path(os.environ["FAKE_NOTES"]).glob("ray-*.json")]
