"""Assesses installed versions: the same everywhere, and compatible with the drivers."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from raytrain_ddp.doctor.rows import Note, Place, Row, Verdict, grouped, nodes_of

_SAME = {
    "python": ("Python", "Ray refuses to mix versions of Python: make the environments the same."),
    "ray": ("Ray", "Ray refuses to mix its versions: install the same on all nodes."),
    "project": (
        "project",
        "Workers would run different code than the driver: install the same wheel on all nodes.",
    ),
    "torch": ("torch", "Install the same torch on all nodes: sums may differ between builds."),
    "nccl": ("NCCL", "Install the same torch on all nodes: it brings NCCL with it."),
    "jpeg": (
        "JPEG decoding",
        "A damaged image may be refused on some nodes only: build the package on all of them with "
        "a C compiler and libjpeg-turbo's headers, or on none.",
    ),
}
_MAY_DIFFER_A_LITTLE = ("torch", "nccl")


def version_rows(places: Sequence[Place], run: Mapping[str, Any]) -> list[Row]:
    """A row for each package; several if nodes differ from the driver."""
    if not places:
        return []
    driver = next((p for p in places if p["driver"]), places[0])["facts"]["versions"]
    gpus = any(place["facts"]["gpus"] for place in places)
    rows = []
    for key, (check, advice) in _SAME.items():
        if key == "nccl" and not gpus:
            continue
        notes = {p["name"]: _note(key, p["facts"]["versions"], driver, advice) for p in places}
        rows += grouped(check, notes, places)
    return rows + cuda_rows(nodes_of(places), run)


def _note(
    key: str, own: Mapping[str, str | None], driver: Mapping[str, str | None], advice: str
) -> Note:
    version, wanted = own.get(key), driver.get(key)
    if version is None:
        return Note("not installed", "ok" if key == "nccl" and not wanted else "fail", advice)
    if wanted is None or version == wanted:
        return Note(version)
    close = key == "jpeg" or (
        key in _MAY_DIFFER_A_LITTLE and _release(version)[:2] == _release(wanted)[:2]
    )
    verdict: Verdict = "warn" if close else "fail"
    return Note(version, verdict, f"The driver has {wanted}. {advice}")


def cuda_rows(nodes: Sequence[Place], run: Mapping[str, Any]) -> list[Row]:
    """On nodes with GPUs: whether torch is built for them, and the driver is new enough for it."""
    notes = {}
    for place in nodes:
        facts = place["facts"]
        built, driver = facts["versions"].get("torch_cuda"), facts["driver"] or {}
        if not facts["gpus"] and not driver:
            continue
        version, newest = driver.get("version") or "unknown", driver.get("cuda")
        found = f"driver {version}"
        found += f" (CUDA up to {newest})" if newest else ""
        if built is None:
            advice = "Install a torch that is built for CUDA."
            verdict: Verdict = "fail" if run["use_gpu"] else "warn"
            notes[place["name"]] = Note(f"{found}; torch is built for CPUs", verdict, advice)
            continue
        found += f"; torch is built for CUDA {built}"
        if newest and _release(built)[0] > _release(newest)[0]:
            advice = "Update the NVIDIA driver, or install a torch for its CUDA version."
            notes[place["name"]] = Note(found, "fail", advice)
        else:
            notes[place["name"]] = Note(found)
    return grouped("CUDA", notes, nodes)


def _release(version: str) -> tuple[int, ...]:
    """(2, 15, 0) for ``2.15.0+cu132``."""
    return tuple(map(int, re.findall(r"\d+", version.partition("+")[0])[:3])) or (0,)
