"""Builds the emulated CUDA runtime, and starts processes that use it instead of the real one."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
_NVIDIA_SMI = """#!/bin/sh
case "$*" in
    *query-gpu*) for n in $(seq "$EMULATED_GPUS"); do echo "Emulated H100, 81920, 81000"; done ;;
    *) echo "Driver Version: 999.0  CUDA Version: {cuda}" ;;
esac
"""


class CannotBuild(Exception):
    """There is no compiler or no CUDA build of torch; the message states which."""


def build(folder: Path) -> None:
    """Writes the two libraries into a folder, and a stand-in for nvidia-smi."""
    import torch

    if torch.version.cuda is None:
        raise CannotBuild("this build of torch is without CUDA")
    compiler = shutil.which("g++") or shutil.which("clang++")
    if compiler is None or shutil.which("nm") is None:
        raise CannotBuild("there is no C++ compiler (g++, clang++) or no nm")
    packages = Path(torch.__file__).parents[1]
    found = [
        next((file.parent for root in roots for file in packages.glob(root)), None)
        for roots in (
            [f"nvidia/{name}/include/cuda_runtime_api.h" for name in ("cu*", "cuda_runtime")],
            [
                f"{place}/include/crt/host_defines.h"
                for place in ("nvidia/cu*", "*/backends/nvidia", "nvidia/cuda_*")
            ],
        )
    ]
    if None in found:
        raise CannotBuild("torch's wheels brought no headers of the CUDA runtime")
    include = [f"-I{found[0]}", f"-I{found[1].parent}"]
    common = [compiler, "-std=c++17", "-O1", "-w", "-shared", "-fPIC"]
    driver = folder / "driver.cpp"
    driver.write_text(_driver_stub(Path(torch.__file__).parent / "lib"))
    _call([*common, *include, "-o", str(folder / "libemulated.so"), str(HERE / "runtime.cpp")])
    _call([*common, "-o", str(folder / "libcuda.so.1"), str(driver)])
    tool = folder / "nvidia-smi"
    tool.write_text(_NVIDIA_SMI.format(cuda=torch.version.cuda))
    tool.chmod(0o755)


def _driver_stub(libraries: Path) -> str:
    """A driver with every symbol that torch links to; none of them does anything."""
    symbols = _call(["nm", "-D", "--undefined-only", str(libraries / "libcaffe2_nvrtc.so")])
    names = sorted(
        {word for word in symbols.split() if word.startswith("cu") and word[2].isupper()}
    )
    bodies = {
        "cuDevicePrimaryCtxGetState": "(int, unsigned* flags, int* active) "
        "{ if (flags) *flags = 0; *active = 1; return 0; }",
        "cuGetErrorString": '(int, const char** text) { *text = "emulated"; return 0; }',
    }
    return "\n".join(f'extern "C" int {n}{bodies.get(n, "(...) { return 0; }")}' for n in names)


def _call(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def built(folder: Path) -> Path:
    """The folder in which they are built; skips the test if they cannot be."""
    try:
        build(folder)
    except CannotBuild as reason:
        pytest.skip(f"GPUs cannot be emulated: {reason}")
    return folder


def output_of_tests(libraries: Path, folder: Path, gpus: int, *words: str) -> str:
    """Of pytest, whose tests for real GPUs run on emulated ones and must pass."""
    command = [sys.executable, "-m", "pytest", "-m", "gpu", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [*command, f"--basetemp={folder / 'inner'}", *words],
        env=environment(libraries, gpus, install=True),
        cwd=HERE.parents[1],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:]
    return done.stdout


def environment(folder: Path, gpus: int = 1, install: bool = False) -> dict[str, str]:
    """Of a process with `gpus` emulated GPUs.

    Args:
        install: each Python below it that imports torch calls `emulated.install()`.
    """
    first = [str(HERE / "site")] if install else []
    paths = [*first, str(HERE), str(HERE.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    base = {n: v for n, v in os.environ.items() if not n.startswith(("RAY_", "PYTEST"))}
    return {
        **base,
        "PYTHONPATH": os.pathsep.join(paths),
        "PATH": f"{folder}{os.pathsep}{base.get('PATH', os.defpath)}",
        "LD_LIBRARY_PATH": str(folder),
        "LD_PRELOAD": str(folder / "libemulated.so"),
        "EMULATED_GPUS": str(gpus),
        "OMP_NUM_THREADS": "1",
    }
