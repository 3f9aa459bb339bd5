"""Assesses each machine: GPUs, CPUs, threads, memory, disks, limits, clock, installed versions."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from raytrain_ddp.tools.display.formatting import format_bytes
from raytrain_ddp.tools.doctor.rows import (
    GIB,
    Note,
    Place,
    Row,
    Verdict,
    format_duration,
    grouped,
    nodes_of,
)

_LEAST_SHM = GIB  # with GPUs: NCCL uses it between ranks on one node
_LEAST_SHM_CPU = 100 * 2**20
_LEAST_FREE = 5 * GIB
_FULL = 0.95  # Ray refuses to write beyond this
_LEAST_MEMORY = 2 * GIB
# Ray's recommendations: in its own warning, and in its guide to large clusters.
_LEAST_FILES, _LEAST_FILES_LARGE, _LARGE_NODES = 8192, 65535, 10
_CLOCK_S = 1.0
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


def machine_rows(nodes: Sequence[Place], run: Mapping[str, Any]) -> list[Row]:
    """The rows of all nodes that responded."""
    large = len(nodes) > _LARGE_NODES
    cpus_per_worker = run["cpus_per_worker"]
    checks: list[tuple[str, str, Callable[[Any, Place], Note]]] = [
        ("GPUs", "gpus", lambda found, place: assess_gpus(found, place, run["use_gpu"])),
        ("CPUs", "cpus", assess_cpus),
        ("threads", "settings", lambda found, _: assess_threads(found, cpus_per_worker)),
        ("memory", "memory", lambda found, _: assess_memory(found)),
        ("/dev/shm", "shm", assess_shared_memory),
        ("/tmp", "tmp", lambda found, _: assess_disk(found, "Ray logs and spills there")),
        ("disk", "storage_disk", lambda found, _: assess_disk(found, "checkpoints go there")),
        ("open files", "open_files", lambda found, _: assess_open_files(found, large)),
    ]
    rows = []
    for check, key, assess in checks:
        known = [place for place in nodes if place["facts"][key] is not None]
        notes = {place["name"]: assess(place["facts"][key], place) for place in known}
        rows += grouped(check, notes, nodes)
    return rows + clock_rows(nodes)


def assess_gpus(there: Sequence[Mapping[str, Any]], place: Place, wanted: bool) -> Note:
    counted = int(place["resources"].get("GPU", 0))
    if not there:
        if not counted:
            return Note("none")
        advice = "Ray was configured with GPUs that do not exist: check --num-gpus and nvidia-smi."
        return Note(f"none, Ray counts {counted}", "fail" if wanted else "warn", advice)
    names = ", ".join(dict.fromkeys(gpu["name"] for gpu in there))
    known = [gpu for gpu in there if None not in (gpu["free"], gpu["total"])]
    free, total = (min((gpu[key] for gpu in known), default=0) for key in ("free", "total"))
    numbers = ((free, format_bytes), (total, format_bytes)) if known else ()
    found = f"{len(there)} x {names}" + (", {} free of {}" if known else "")
    if counted != len(there):
        advice = "Start Ray with all GPUs (--num-gpus, CUDA_VISIBLE_DEVICES), if they are yours."
        return Note(f"{found}; Ray counts {counted}", "warn", advice, numbers)
    if free < 0.9 * total:
        advice = "Another process uses a GPU: nvidia-smi shows which."
        return Note(found, "warn", advice, numbers)
    return Note(found, numbers=numbers)


def assess_cpus(facts: Mapping[str, Any], place: Place) -> Note:
    counted = place["resources"].get("CPU", 0)
    usable = min(facts["usable"], facts["quota"] or facts["usable"])
    found = f"{usable:g} usable, Ray counts {counted:g}"
    if counted > usable + 0.5:
        advice = f"Workers would share cores: start Ray there with --num-cpus {int(usable) or 1}."
        return Note(found, "warn", advice)
    return Note(found)


def assess_threads(settings: Mapping[str, str], cpus_per_worker: float) -> Note:
    """`fit` sets torch's threads itself; other libraries in a worker use the environment."""
    given = {
        name: settings[name] for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS") if name in settings
    }
    if not given:
        return Note(f"{max(1, int(cpus_per_worker))} per worker, as scaling.cpus_per_worker says")
    found = ", ".join(f"{name}={value}" for name, value in given.items())
    few = [v for v in given.values() if v.isdigit() and int(v) < int(cpus_per_worker)]
    if few:
        advice = (
            f"Unset it before `ray start` (`ray up` sets 1): a worker has {cpus_per_worker:g} CPUs."
        )
        return Note(found, "warn", advice)
    return Note(found)


def assess_memory(facts: Mapping[str, Any]) -> Note:
    most = facts["limit"] or facts["total"]
    free = min(facts["available"], most)
    numbers = ((free, format_bytes), (most, format_bytes))
    found = "{} free of {}" + (", a limit of its cgroup" if facts["limit"] else "")
    found += "" if facts["swap"] else ", no swap"
    if free < _LEAST_MEMORY:
        advice = "A worker needs 1 GiB or more even without a model: stop other programs there."
        return Note(found, "warn", advice, numbers)
    if facts["swapped"] > 0.1 * facts["total"]:
        advice = "The machine swaps, which slows all workers down: stop other programs there."
        return Note(found + ", swapping", "warn", advice, numbers)
    return Note(found, numbers=numbers)


def assess_shared_memory(facts: Mapping[str, Any], place: Place) -> Note:
    numbers = ((facts["free"], format_bytes), (facts["total"], format_bytes))
    least = _LEAST_SHM if place["facts"]["gpus"] else _LEAST_SHM_CPU
    if facts["free"] < least:
        advice = (
            f"Use {format_bytes(least)} or more (docker run --shm-size, Kubernetes: an "
            "emptyDir of medium Memory): Ray's objects and NCCL need it."
        )
        return Note("{} free of {}", "warn", advice, numbers)
    return Note("{} free of {}", numbers=numbers)


def assess_disk(facts: Mapping[str, Any], why: str) -> Note:
    numbers = ((facts["free"], format_bytes), (facts["total"], format_bytes))
    if facts["free"] < _LEAST_FREE or facts["free"] < (1 - _FULL) * facts["total"]:
        verdict: Verdict = "fail" if facts["free"] < _LEAST_FREE / 50 else "warn"
        return Note("{} free of {}", verdict, f"Free space in {facts['path']}: {why}.", numbers)
    return Note("{} free of {}", numbers=numbers)


def assess_open_files(limit: int, large: bool) -> Note:
    least = _LEAST_FILES_LARGE if large else _LEAST_FILES
    if 0 <= limit < least:  # -1: no limit
        advice = "`ulimit -n 65536` before `ray start`; in a service, LimitNOFILE."
        return Note(f"{limit}", "warn", advice)
    return Note(f"{limit}" if limit >= 0 else "no limit")


def clock_rows(nodes: Sequence[Place]) -> list[Row]:
    """Compares clocks with that of the driver's machine."""
    if len(nodes) < 2:
        return []
    known = {p["name"]: p["clock"] for p in nodes if "error" not in p["clock"]}
    apart_s = {name: abs(c["ahead_s"]) - c["within_s"] for name, c in known.items()}
    good = [name for name in known if apart_s[name] <= _CLOCK_S]
    bound_s = max((abs(known[n]["ahead_s"]) + known[n]["within_s"] for n in good), default=0.0)
    advice = (
        "Enable NTP (timedatectl set-ntp true): preemption notices contain times, and object "
        "stores refuse clocks that are minutes off."
    )
    notes = {}
    for name, measured in known.items():
        if name in good:
            notes[name] = Note(f"less than {format_duration(bound_s)} apart")
        else:
            way = "ahead" if measured["ahead_s"] > 0 else "behind"
            ahead = format_duration(abs(measured["ahead_s"]))
            within = format_duration(measured["within_s"])
            notes[name] = Note(f"{ahead} {way} (within {within})", "warn", advice)
    return grouped("clock", notes, nodes)


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
