"""Collects facts about a machine, as a dict of JSON values.

Sent to the nodes by value, as they may have another version of this package, or none: it uses only
the standard library. Versions are read from files: importing torch or Ray takes seconds.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import json
import os
import platform
import re
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

from raytrain_ddp.tools.doctor import network_facts

SETTINGS = (
    *("OMP_NUM_THREADS", "MKL_NUM_THREADS", "CUDA_VISIBLE_DEVICES"),
    *("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "RAY_AUTH_MODE"),
)
_SMI_TIMEOUT_S = 30.0  # the driver may have to initialize the GPUs
_TORCH_TIMEOUT_S = 60.0
_TORCH_GPUS = """
import json, torch
gpus = []
for n in range(torch.cuda.device_count()):
    free, total = torch.cuda.mem_get_info(n)
    gpus.append({"name": torch.cuda.get_device_name(n), "total": total, "free": free})
print(json.dumps(gpus))
"""


def gather_machine_facts(storage: str | None, dashboard: int | None) -> dict[str, Any]:
    """The facts of this machine; None for what the system does not provide.

    Sizes are in bytes.

    Args:
        storage: a path for which the free disk space is determined, too.
        dashboard: the port of Ray's dashboard, if it has one.
    """
    parts: Mapping[str, Callable[[], Any]] = {
        "host": platform.node,
        "versions": versions,
        "gpus": gpus,
        "driver": driver,
        "cpus": cpus,
        "memory": memory,
        "shm": lambda: disk("/dev/shm"),
        "tmp": lambda: disk("/tmp"),
        "storage_disk": lambda: disk(storage) if storage is not None else None,
        "open_files": lambda: resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        "settings": settings,
        "token": token,
        "wires": lambda: network_facts.gather_network_facts(dashboard),
    }
    return {name: _known(part) for name, part in parts.items()}


def now() -> float:
    """This machine's clock, in s."""
    return time.time()


def versions() -> dict[str, str | None]:
    """Versions of Python and installed packages; for this package also a hash of its code."""
    torch, cuda = _torch()
    nccl = (_installed(f"nvidia-nccl-cu{major}") for major in (13, 12, 11))
    project = _installed("raytrain_ddp")
    code = _code("raytrain_ddp")
    return {
        "python": platform.python_version(),
        "torch": torch,
        "torch_cuda": cuda,
        "ray": _installed("ray"),
        "nccl": next((version for version in nccl if version), None),
        "project": f"{project or 'a checkout'}, code {code}" if code else None,
        "jpeg": "of the parts that are used" if _decodes_parts() else "of whole images",
    }


def _decodes_parts() -> bool:
    """Whether the package was built with _jpeg_region.c."""
    try:
        return importlib.util.find_spec("raytrain_ddp.data.pixels._jpeg_region") is not None
    except ImportError:
        return False


def gpus() -> list[dict[str, Any]]:
    """Name, total and free memory of each GPU of the machine, even those hidden from us.

    The memory is None if it is that of the CPUs (GB10, Jetson): nvidia-smi says [N/A].
    """
    ask = [
        "nvidia-smi",
        "--query-gpu=name,memory.total,memory.free",
        "--format=csv,noheader,nounits",
    ]
    output = _output(ask, _SMI_TIMEOUT_S)
    if output is None and any(Path("/dev").glob("nvidia[0-9]*")):
        # In a container without the driver's tools. Ray hides the GPUs from a task without GPUs.
        shown = {k: v for k, v in os.environ.items() if k != "CUDA_VISIBLE_DEVICES"}
        output = _output([sys.executable, "-c", _TORCH_GPUS], _TORCH_TIMEOUT_S, shown)
        found: list[dict[str, Any]] = json.loads(output) if output else []
        return found
    lines = [line.split(", ") for line in (output or "").splitlines() if line.count(", ") == 2]
    sizes = [[int(mb) * 2**20 if mb.isdigit() else None for mb in line[1:]] for line in lines]
    return [
        {"name": line[0], "total": total, "free": free}
        for line, (total, free) in zip(lines, sizes, strict=True)
    ]


def driver() -> dict[str, str | None] | None:
    """The NVIDIA driver's version, and the newest CUDA that it can run; None without a driver."""
    output = _output(["nvidia-smi"], _SMI_TIMEOUT_S)
    if output is None:
        path = Path("/proc/driver/nvidia/version")
        if not path.is_file():
            return None
        output = path.read_text(encoding="utf-8")
    version = re.search(r"(?:Driver Version:|Kernel Module\D*?)\s*(\d+\.[\d.]+)", output)
    cuda = re.search(r"CUDA[^:|]*Version:\s*(\d+\.\d+)", output)
    return {"version": version and version[1], "cuda": cuda and cuda[1]}


def cpus() -> dict[str, float | None]:
    """CPUs of the machine, those that this process may use, and the limit of its cgroup."""
    quotas = []
    for limit in _cgroup("cpu", "cpu.cfs_quota_us", "cpu.max"):
        fields = limit.read_text(encoding="ascii").split()
        if fields[0] in ("max", "-1"):
            continue
        period = fields[1] if len(fields) > 1 else (limit.parent / "cpu.cfs_period_us").read_text()
        quotas.append(int(fields[0]) / int(period))
    return {
        "machine": os.cpu_count(),
        "usable": len(os.sched_getaffinity(0)),
        "quota": min(quotas, default=None),
    }


def memory() -> dict[str, int | None]:
    """In bytes: of the machine, available, limit of the cgroup (None: no limit), and swap."""
    lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    meminfo = {line.split(":")[0]: int(line.split()[1]) * 1024 for line in lines}
    limits, available = [], [meminfo["MemAvailable"]]
    for file in _cgroup("memory", "memory.limit_in_bytes", "memory.max"):
        limit_text = file.read_text(encoding="ascii").strip()
        if limit_text.isdigit() and int(limit_text) < meminfo["MemTotal"]:
            limits.append(int(limit_text))
            available.append(limits[-1] - _used(file.parent))
    return {
        "total": meminfo["MemTotal"],
        "available": max(0, min(available)),
        "limit": min(limits, default=None),
        "swap": meminfo["SwapTotal"],
        "swapped": meminfo["SwapTotal"] - meminfo["SwapFree"],
    }


def _used(group: Path) -> int:
    """Bytes of a cgroup's memory, without the cached files that the kernel drops first."""
    files = [group / "memory.current", group / "memory.usage_in_bytes"]
    used = [int(file.read_text(encoding="ascii")) for file in files if file.is_file()]
    text = (group / "memory.stat").read_text(encoding="ascii")
    cached = re.search(r"^(?:total_)?inactive_file (\d+)$", text, re.MULTILINE)
    return sum(used) - (int(cached[1]) if cached else 0)


def disk(path: str) -> dict[str, Any]:
    """Size and free bytes of the file system of a path, which need not exist yet."""
    place = Path(path)
    there = next(folder for folder in (place, *place.parents) if folder.exists())
    used = shutil.disk_usage(there)
    return {"path": path, "total": used.total, "free": used.free}


def settings() -> dict[str, str]:
    """Environment variables that affect training.

    A Ray worker has the thread settings of its own task; for the next one, the environment that
    its raylet was started with counts.
    """
    environment: Mapping[str, str] = os.environ
    parent = Path("/proc") / str(os.getppid())
    if (parent / "comm").is_file() and (parent / "comm").read_text().strip() == "raylet":
        pairs = (parent / "environ").read_bytes().decode(errors="replace").split("\0")
        environment = dict(pair.partition("=")[::2] for pair in pairs)
    return {name: environment[name] for name in SETTINGS if environment.get(name)}


def token() -> dict[str, Any] | None:
    """The file with Ray's authentication token, its mode, and whether other users of the machine
    can read it; None without a file."""
    path = Path(os.environ.get("RAY_AUTH_TOKEN_PATH") or Path.home() / ".ray" / "auth_token")
    if not path.is_file():
        return None
    mode = path.stat().st_mode & 0o777
    open_folders = all(folder.stat().st_mode & 0o011 for folder in path.absolute().parents)
    return {"path": str(path), "mode": mode, "exposed": bool(mode & 0o044) and open_folders}


def _known(part: Callable[[], Any]) -> Any:
    try:
        return part()
    except Exception:  # a failing part must not prevent the others
        return None


def _installed(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _folder(package: str) -> Path | None:
    spec = importlib.util.find_spec(package)
    places = list(spec.submodule_search_locations or []) if spec else []
    return Path(places[0]) if places else None


def _torch() -> tuple[str | None, str | None]:
    """torch's version and the CUDA version it was built for."""
    folder = _folder("torch")
    if folder is None:
        return None, None
    text = (folder / "version.py").read_text(encoding="utf-8")
    found: dict[str, Any] = {}
    for node in ast.parse(text).body:
        target = node.targets[0] if isinstance(node, ast.Assign) else getattr(node, "target", None)
        value = getattr(node, "value", None)
        if isinstance(target, ast.Name) and isinstance(value, ast.Constant):
            found[target.id] = value.value
    return found.get("__version__") or _installed("torch"), found.get("cuda")


def _code(package: str) -> str | None:
    """Eight digits that change with the source: during development the version stays the same."""
    folder = _folder(package)
    if folder is None:
        return None
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*.py")):
        digest.update(path.relative_to(folder).as_posix().encode() + b"\0")
        digest.update(path.read_bytes())
    return digest.hexdigest()[:8]


def _output(
    command: list[str], timeout_s: float, environment: Mapping[str, str] | None = None
) -> str | None:
    """The output of a command; None if it does not exist or fails."""
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=True,
            env=None if environment is None else dict(environment),
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout


def _cgroup(controller: str, v1: str, v2: str) -> list[Path]:
    """Limit files of this process's cgroup and of its parents."""
    found = []
    for line in Path("/proc/self/cgroup").read_text(encoding="utf-8").splitlines():
        _, names, path = line.split(":", 2)
        if names and controller not in names.split(","):
            continue
        root = Path("/sys/fs/cgroup", controller if names else "")
        place = root / path.lstrip("/")
        file = v1 if names else v2
        above = [place, *place.parents]
        found += [f / file for f in above if (f / file).is_file() and root in (f, *f.parents)]
    return found
