"""One command for a machine with GPUs: how fast, how full, and whether all promises hold there.

    python benchmarks/gpu.py [--out gpu.md gpu.json] [--minutes 10] [--only WORD ...]
    python benchmarks/gpu.py --tiny          # does all of it run? The figures mean nothing

On one GPU, with made-up JPEGs, in under ten minutes: ResNet-50 and ViT-S in bf16 with images from
memory and from disk; a hand-written loop beside them; deterministic kernels and exact sums off and
on; the loader alone; what a checkpoint costs; a run that is killed and goes on to the same bits;
and the tests that need a GPU. With several GPUs also NCCL scaling, by torchrun. The scripts of timm
and torchvision are measured where they are given: --timm-train and --torchvision-train.

Each measurement is a process of its own; what fails, or comes too late, is named in the report.
docs/how-to/gpu-results.md says how to send the results.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from data_images import make_images, once
from series import HERE, Series, describe_machine, table

from raytrain_ddp.failpoints import FOLDER_VARIABLE, VARIABLE

RESNET = {"model": "resnet50", "args": {}, "batch": 256}
VIT = {"model": "timm:vit_small_patch16_224", "args": {}, "batch": 256}
FULL = {"image_size": 224, "steps": 40, "warm_up": 20, "every": 10, "precision": "bf16"}
TINY = {"image_size": 32, "steps": 2, "warm_up": 2, "every": 1, "precision": "bf16", "batch": 4}
TINY_RESNET = {"model": "resnet18", "args": {}}
TINY_VIT = {"model": "timm:vit_tiny_patch16_224", "args": {"img_size": 32}}
JOB_S, TESTS_S = 240.0, 300.0
# Tests that are nothing for --tiny: there may be no NCCL, and some keep the device busy on purpose.
LARGE = "nccl or low_precision or slots_reach or flag_comes or phases_are"


@dataclass(frozen=True)
class Job:
    """A measurement: `kind` is a job of gpu_jobs.py, or one of the functions below."""

    name: str
    kind: str
    options: Mapping[str, Any]
    gpus: int = 1


@dataclass(frozen=True)
class Run:
    name: str
    load: float  # of the machine (1 minute) before
    seconds: float  # that it took
    gpus: int
    found: dict[str, Any] = field(default_factory=dict)


def main() -> int:
    args = parse()
    machine = describe_machine()
    del machine["bytecode"]
    series: Series[Run] = Series({**machine, **describe_gpus()})
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="raytrain-gpu-") as folder:
        args.storage = Path(folder)
        jpegs = HERE.parent / "build" / "bench-gpu" / f"{args.images}"
        once(jpegs, lambda place: make_images(place, args.images))
        for job in jobs(args, jpegs):
            if args.only and not any(word in job.name for word in args.only):
                continue
            if time.monotonic() - began > 60 * args.minutes:
                series.failed.append(
                    f"{job.name}: not measured, as {args.minutes:g} minutes are up"
                )
                continue
            series.add(job.name, lambda job=job: measure(job, args), line)  # type: ignore[misc]
    for name in ("timm", "torchvision"):
        if not getattr(args, f"{name}_train"):
            print(f"not measured: {name}'s own script; give it by --{name}-train PATH/train.py")
    return series.publish(as_markdown(series), args.out)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, nargs="+", default=[Path("gpu.md"), Path("gpu.json")])
    parser.add_argument("--minutes", type=float, default=10, help="after which no more is begun")
    parser.add_argument("--only", nargs="+", default=[], help="words in names of measurements")
    parser.add_argument("--images", type=int, default=2000, help="JPEGs to make")
    parser.add_argument("--timm-train", type=Path, help="train.py of a checkout of timm")
    parser.add_argument("--torchvision-train", type=Path, help="references/classification/train.py")
    parser.add_argument("--tiny", action="store_true", help="small networks and images, few steps")
    args = parser.parse_args()
    if args.tiny:
        args.images, args.minutes = 60, 60.0
    return args


def describe_gpus() -> dict[str, str]:
    count = torch.cuda.device_count()
    if not count:
        return {"GPUs": "none: these figures are a CPU's"}
    name, version = torch.cuda.get_device_name(0), torch.cuda.nccl.version()
    reported = {"GPUs": f"{count} x {name}", "CUDA": f"{torch.version.cuda}, NCCL {version}"}
    if "Emulated" in name:
        reported["ATTENTION"] = "the GPU is emulated: no figure means anything"
    return reported


# ------------------------------------------------------------------ measurements


def jobs(args: argparse.Namespace, jpegs: Path) -> list[Job]:
    """What is most wanted first, in case the time is up."""
    base = TINY if args.tiny else FULL
    resnet, vit = (TINY_RESNET, TINY_VIT) if args.tiny else (RESNET, VIT)
    name = "ResNet-50" if not args.tiny else "ResNet-18 (tiny)"
    of_resnet, of_vit = {**base, **resnet}, {**base, **vit}
    disk = {"jpegs": str(jpegs)}
    fast = {"changes": {"compute": {"deterministic": False}}}
    saves = {"changes": {"checkpoint": {"every_steps": base["every"]}}}
    found = [
        Job(f"{name}", "ours", of_resnet),
        Job(f"{name}, hand-written loop", "plain", of_resnet),
        Job(f"{name}, not deterministic", "ours", {**of_resnet, **fast}),
        Job("ViT-S", "ours", of_vit),
        Job("ViT-S, hand-written loop", "plain", of_vit),
        Job(f"{name}, JPEGs from disk", "ours", {**of_resnet, **disk}),
        Job("the loader alone", "loader", {**of_resnet, **disk}),
        Job(f"{name}, exact", "ours", {**of_resnet, "changes": {"exact": True}}),
        Job(f"{name}, checkpoints", "ours", {**of_resnet, **saves}),
        Job("tests of GPUs", "tests", {"select": f"not ({LARGE})" if args.tiny else ""}),
        Job(f"{name}, killed", "killed", {**of_resnet, **saves}),
        Job("ViT-S, JPEGs from disk", "ours", {**of_vit, **disk}),
        Job(f"{name}, hand-written loop, ImageFolder + DataLoader", "plain", {**of_resnet, **disk}),
    ]
    for peer in ("timm", "torchvision"):
        script = getattr(args, f"{peer}_train")
        if script:
            found.append(Job(f"{name}, {peer}", peer, {**of_resnet, **disk, "script": str(script)}))
    for gpus in (2, 4, 8):
        if gpus <= torch.cuda.device_count():
            for kind, label in (("ours", ""), ("plain", ", hand-written loop")):
                found.append(Job(f"{name}, {gpus} GPUs{label}", kind, of_resnet, gpus))
            exact = {**of_resnet, "changes": {"exact": True}}
            found.append(Job(f"{name}, {gpus} GPUs, exact", "ours", exact, gpus))
    return found


def measure(job: Job, args: argparse.Namespace) -> Run:
    load, began = os.getloadavg()[0], time.monotonic()
    options = {**job.options, "storage": str(args.storage), "name": f"run-{int(1e3 * began)}"}
    special = {"tests": tests, "killed": killed, "timm": timm, "torchvision": torchvision}
    found = special[job.kind](options) if job.kind in special else child(job, options)
    return Run(job.name, load, time.monotonic() - began, job.gpus, found)


def child(job: Job, options: Mapping[str, Any], **variables: str) -> dict[str, Any]:
    start = [sys.executable]
    if job.gpus > 1:
        start += ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={job.gpus}"]
    done = call([*start, str(HERE / "gpu_jobs.py"), job.kind, json.dumps(options)], **variables)
    if done.returncode:
        raise failure(done)
    found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


def call(
    command: Sequence[str], limit_s: float = JOB_S, **variables: str
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command,
        env={**os.environ, "OMP_NUM_THREADS": "1", **variables},
        cwd=HERE.parent,
        capture_output=True,
        text=True,
        timeout=limit_s,
        check=False,
    )


def failure(done: subprocess.CompletedProcess[str]) -> RuntimeError:
    """The report has its first line: the exit status, and the last error."""
    errors = re.findall(r"^(?:\[rank\d+\]: )?([\w.]*Error: .*)", done.stderr, re.MULTILINE)
    why = errors[-1][:300] if errors else "no error was printed"
    return RuntimeError(f"exit status {done.returncode}, {why}\n{done.stderr[-3000:]}")


def killed(options: Mapping[str, Any]) -> dict[str, Any]:
    """A run that is killed, and started again: has it the bits of one that was left alone?"""
    job = Job("", "ours", options)
    whole = child(job, {**options, "name": "whole"})
    at = options["warm_up"] + options["every"]
    faults = {
        VARIABLE: f"train.after_backward:kill@step={at}",
        FOLDER_VARIABLE: str(Path(options["storage"]) / "fired"),
    }
    done = call([sys.executable, str(HERE / "gpu_jobs.py"), "ours", json.dumps(options)], **faults)
    if done.returncode != -signal.SIGKILL:
        raise failure(done)
    resumed = child(job, options)
    if resumed["bits"] != whole["bits"]:
        raise RuntimeError("the weights differ from those of a run that was not killed")
    return {"verdict": f"killed at step {at}: the same bits"}


def tests(options: Mapping[str, Any]) -> dict[str, Any]:
    command = [sys.executable, "-m", "pytest", "-m", "gpu", "-k", options["select"], "tests"]
    command += ["-p", "no:cacheprovider", "--basetemp", f"{options['storage']}/tests"]
    done = call(command, TESTS_S)
    last = (done.stdout.strip().splitlines() or ["no output"])[-1]
    if done.returncode:
        lines = [row for row in done.stdout.splitlines() if row.startswith(("FAILED", "ERROR"))]
        raise RuntimeError("; ".join([last, *lines]))
    return {"verdict": re.sub(r",? \d+ deselected| in .*", "", last)}


def timm(options: Mapping[str, Any]) -> dict[str, Any]:
    """The rate of the last line of its log, over all steps so far."""
    folder, model = options["jpegs"], options["model"].removeprefix("timm:")
    command = [sys.executable, options["script"], "--data-dir", folder, "--model", model]
    command += ["--train-split", "", "--val-split", "", "--num-classes", "10", "--amp"]
    command += [
        "--amp-dtype",
        "bfloat16",
        "--channels-last",
        "--epochs",
        "1",
        "--log-interval",
        "1",
    ]
    command += ["-b", str(options["batch"]), "-j", str(len(os.sched_getaffinity(0)))]
    command += ["--output", options["storage"], "--img-size", str(options["image_size"])]
    return rate_of(command, r"\(\s*[\d.]+s,\s*([\d.]+)/s\)")


def torchvision(options: Mapping[str, Any]) -> dict[str, Any]:
    root = Path(options["storage"]) / "imagefolder"
    root.mkdir()
    for split in ("train", "val"):
        (root / split).symlink_to(options["jpegs"])
    command = [sys.executable, options["script"], "--data-path", str(root), "--amp"]
    command += ["--model", options["model"], "-b", str(options["batch"]), "--epochs", "1"]
    command += ["-j", str(len(os.sched_getaffinity(0))), "--print-freq", "1"]
    return rate_of(command, r"img/s: [\d.]+ \(([\d.]+)\)")


def rate_of(command: Sequence[str], pattern: str) -> dict[str, Any]:
    done = call(command)
    rates = re.findall(pattern, done.stdout + done.stderr)
    if done.returncode or not rates:
        raise failure(done)
    return {"images_per_s": float(rates[-1])}


# ------------------------------------------------------------------ report


def line(run: Run) -> str:
    figure = run.found.get("verdict") or f"{run.found['images_per_s']:.0f} images/s"
    return f"{run.name:<60}  {figure}  (took {run.seconds:.0f} s)"


def as_markdown(series: Series[Run]) -> list[str]:
    rates = [run for run in series.runs if "images_per_s" in run.found]
    head = ["", "images/s", "per GPU", "MFU", "peak GiB", "step ms: where it goes"]
    rows = [
        [
            run.name,
            f"{run.found['images_per_s']:.0f}",
            f"{run.found['images_per_s'] / run.gpus:.0f}",
            f"{run.found['mfu']:.1%}" if run.found.get("mfu") else "",
            f"{run.found['peak_gib']:.1f}" if run.found.get("peak_gib") else "",
            split_of(run),
        ]
        for run in rates
    ]
    verdicts = [f"- {run.name}: {run.found['verdict']}" for run in series.runs if run not in rates]
    saved = [run for run in rates if run.found.get("checkpoints", 0) > 1]
    verdicts += [
        f"- {run.name}: {run.found['checkpoints']} checkpoints, each committed within "
        f"{run.found['commit_s']:.2f} s in the background"
        for run in saved
    ]
    return [
        "# On GPUs",
        "`python benchmarks/gpu.py`, bf16; images from memory unless it says otherwise.",
        series.place(),
        table(head, rows),
        "\n".join(verdicts),
    ]


def split_of(run: Run) -> str:
    split = sorted(run.found.get("split_s", {}).items(), key=lambda item: -item[1])
    shown = [f"{phase} {1e3 * seconds:.1f}" for phase, seconds in split if seconds >= 5e-5]
    return ", ".join(shown)


if __name__ == "__main__":
    sys.exit(main())
