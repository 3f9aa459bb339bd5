"""Checks the promises on a machine with GPUs, and measures its speed.

    python benchmarks/gpu.py [--minutes 4|8|12] [--out gpu.md]
    python benchmarks/gpu.py --tiny          # a smoke test; the figures mean nothing

The first checks share the GPU: the tests marked gpu, and fits of several ranks that are killed and
resumed. Then, one after another: NCCL groups that are aborted and re-created; forks of a warm
process; a fit on Ray, if it is installed or its wheels are given; ResNet-50 and ViT-S in bf16,
compared with a hand-written loop; a checkpoint of 1 GB, compared with DCP; where the host waits.
With several GPUs, NCCL scaling, too.

Each measurement is a process with a time limit. The report is rewritten after each one, and lists
what failed and what was left out. The output of failed measurements is next to it, in FILE.log.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import suppress
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
PLANS = (4, 8, 12)  # minutes
GPUS = (2, 4, 8)
FULL = {"image_size": 224, "steps": 60, "warm_up": 40, "every": 10, "batch": 256}
TINY = {"image_size": 32, "steps": 2, "warm_up": 2, "every": 1, "batch": 4}
MODELS = {"ResNet-50": "resnet50", "ViT-S": "timm:vit_small_patch16_224"}
TINY_MODELS = {"ResNet-50": "resnet18", "ViT-S": "timm:vit_tiny_patch16_224"}
NO_TESTS = 5  # the status of pytest
# Emulated GPUs lack NCCL, and are never busy; some tests are slow on a CPU.
NOT_EMULATED = "not (nccl or low_precision or slots_reach or flag_comes or phases_are)"
FEW = "gloo and plain and loss"

running: set[int] = set()  # process groups


@dataclass(frozen=True)
class Job:
    """A measurement.

    Args:
        command: after `python`; its last line that begins with "= " is the result, or its `log`
            has it, after `warm_up` steps.
        plan: the shortest one, in minutes, that has it.
        together: with others at the same time; no figure of it is a speed.
        lacks: why it cannot be measured here.
    """

    name: str
    command: Sequence[str]
    limit_s: float
    plan: int = 4
    together: bool = False
    lacks: str = ""
    log: Path | None = None
    warm_up: int = 0


class Report:
    """The Markdown file, rewritten after each measurement."""

    def __init__(self, path: Path) -> None:
        self._path, self._head = path, f"# On GPUs\n\n- date: {datetime.date.today()}\n"
        self._rows, self._left_out = list[str](), list[str]()
        self.failed = 0
        path.with_suffix(".log").write_text("")

    def head(self, lines: Sequence[str]) -> None:
        self._head += "".join(f"- {line}\n" for line in lines)
        self._write("\n".join(lines))

    def add(self, job: Job, result: str, took_s: float, output: str) -> None:
        """Adds a row; `output` is "" unless the measurement failed."""
        self._rows.append(f"| {job.name} | {result} | {took_s:.0f} |\n")
        if output:
            self.failed += 1
            with self._path.with_suffix(".log").open("a") as log:
                log.write(f"\n==== {job.name}: {result}\n{output}\n")
        self._write(f"{job.name}: {result} ({took_s:.0f} s)")

    def leave_out(self, job: Job, why: str) -> None:
        self._left_out.append(f"- {job.name}: {why}\n")
        self._write(f"{job.name}: left out, {why}")

    def _write(self, news: str) -> None:
        rows = "| measurement | result | s |\n| --- | --- | --- |\n" + "".join(self._rows)
        left_out = f"\nLeft out:\n\n{''.join(self._left_out)}" if self._left_out else ""
        self._path.write_text(f"{self._head}\n{rows}{left_out}")
        print(news, flush=True)


def main() -> int:
    args = parse()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, end_all)
    until = time.monotonic() + (float("inf") if args.tiny else 60 * args.minutes)
    report = Report(args.out)
    with tempfile.TemporaryDirectory(prefix="raytrain-gpu-") as folder:
        machine, _, output = call(work("", "machine", {"tiny": args.tiny}, 60).command, 60)
        if not machine:
            sys.exit(f"error: there is no working GPU: {last_error(output)}")
        report.head(machine.split("; "))
        gpus = int(machine.removeprefix("GPUs: ").split()[0])
        images = {"images": images_of(args)}
        call(work("", "images", images, 0).command, 120)
        if args.timm_train or args.torchvision_train:
            repeat_images(Path(images["images"]), Path(folder), 1 if args.tiny else 10)
        chosen = []
        for each in jobs(args, Path(folder), gpus):
            if why := left_out(each, args):
                report.leave_out(each, why)
            else:
                chosen.append(replace(each, limit_s=1800) if args.tiny else each)
        at_once = max(1, len(os.sched_getaffinity(0)) // 4)
        with ThreadPoolExecutor(at_once) as pool:
            begun = {pool.submit(measure, each, until): each for each in chosen if each.together}
            for done in as_completed(begun):
                tell(report, begun[done], done.result())
        for each in chosen:
            if not each.together:
                tell(report, each, measure(each, until))
    return 1 if report.failed else 0


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=minutes, default=12, help="time limit for all [12]")
    parser.add_argument("--out", type=Path, default=Path("gpu.md"), help="the report [gpu.md]")
    parser.add_argument("--only", nargs="+", default=[], help="words in names of measurements")
    parser.add_argument("--images", type=images, default=2000, help="JPEGs to make [2000]")
    parser.add_argument(
        "--ray-wheels", type=wheels, help="folder with the wheels of Ray and its dependencies"
    )
    parser.add_argument("--timm-train", type=script, help="train.py of a checkout of timm")
    parser.add_argument(
        "--torchvision-train", type=script, help="references/classification/train.py of torchvision"
    )
    parser.add_argument("--tiny", action="store_true", help="small networks and images, few steps")
    args = parser.parse_args()
    names = [job.name for job in jobs(args, Path(), max(GPUS))]
    if args.out.is_dir():
        parser.error(f"--out {args.out}: is a folder")
    for word in args.only:
        if not any(word in name for name in names):
            parser.error(f"--only {word}: no measurement has it in its name: {'; '.join(names)}")
    try:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.touch()
    except OSError as error:
        parser.error(f"--out {args.out}: cannot be written: {error.strerror}")
    return args


def minutes(text: str) -> float:
    number = float(text)
    if not 0 < number < float("inf"):
        raise argparse.ArgumentTypeError(f"{text}: give a number above 0")
    return number


def images(text: str) -> int:
    number = int(text)
    if number < 60:
        raise argparse.ArgumentTypeError(f"{text}: give 60 or more")
    return number


def wheels(text: str) -> Path:
    if not [*Path(text).glob("ray-*.whl")]:
        raise argparse.ArgumentTypeError(f"{text}: is not a folder with a file ray-*.whl")
    return Path(text).resolve()


def script(text: str) -> Path:
    if not Path(text).is_file():
        raise argparse.ArgumentTypeError(f"{text}: there is no such file")
    return Path(text).resolve()


# ------------------------------------------------------------------ what is measured


def jobs(args: argparse.Namespace, storage: Path, gpus: int) -> list[Job]:
    """What is worth most first."""
    models = TINY_MODELS if args.tiny else MODELS
    base: dict[str, Any] = {**(TINY if args.tiny else FULL)}
    base |= {"storage": str(storage), "tiny": args.tiny, "images": images_of(args)}
    few = args.minutes < max(PLANS)  # the promises took 6 minutes on an H200
    base |= {"rounds": 2 if args.tiny else 10 if few else 50, "millions": 1 if args.tiny else 85}
    resnet, vit = ({**base, "model": models[name]} for name in ("ResNet-50", "ViT-S"))
    forks = 2 if args.tiny else 5 if few else 20
    one_step = {"argv": flags_of({**resnet, "warm_up": 0, "steps": 1, "every": 1}), "forks": forks}
    disk = {**resnet, "from_disk": True}
    exact, loose = ["--exact", "true"], ["--compute.no-deterministic"]
    compiled = [*loose, "--compute.compile"]
    has_ray = find_spec("ray") or args.ray_wheels
    no_ray = "" if has_ray else "Ray is not installed; give its wheels with --ray-wheels"
    no_triton = "its kernels cannot be emulated" if args.tiny else ""
    longest, *others = tests(args, storage)
    found = [
        longest,
        work("ranks that share a GPU, over gloo", "ranks", resnet, 180, together=True),
        *others,
        work("NCCL aborted and made again", "nccl", base, 90),
        work("forks of a warm process", "forks", {**base, **one_step}, 150),
        work(
            *("fit on Ray, one GPU", "on_ray", {**base, "wheels": str(args.ray_wheels or "")}),
            *(200, 8),
            lacks=no_ray,
        ),
        fit("ResNet-50, JPEGs from disk", disk),
        work("ResNet-50, ImageFolder + DataLoader", "plain", disk, 90),
        fit("ResNet-50", resnet),
        work("ResNet-50, hand-written loop", "plain", resnet, 60),
        fit("ViT-S", vit, plan=8),
        fit("ViT-S, not deterministic", vit, loose, plan=8),
        work("ViT-S, hand-written loop", "plain", vit, 60, 8),
        fit("ResNet-50, not deterministic", resnet, loose, plan=8),
        fit("ResNet-50, exact", resnet, exact, plan=8),
        work("host waits in a run", "waits", {**base, "argv": flags_of(resnet)}, 60, 8),
        work("checkpoint of 1 GB", "checkpoint", {**base, "way": "ours"}, 90, 8),
        work("checkpoint of 1 GB, DCP", "checkpoint", {**base, "way": "dcp-async"}, 90, 8),
        fit("ViT-S, JPEGs from disk", {**vit, "from_disk": True}, plan=12),
        fit("ResNet-50, compiled", resnet, compiled, plan=12, lacks=no_triton),
        fit("ViT-S, compiled", vit, compiled, plan=12, lacks=no_triton),
        peer("timm", args.timm_train, storage, resnet),
        peer("torchvision", args.torchvision_train, storage, resnet),
    ]
    for several in GPUS:
        if several <= gpus:
            name = f"ResNet-50, {several} GPUs"
            found += [
                fit(name, resnet, gpus=several),
                work(f"{name}, hand-written loop", "plain", resnet, 90, gpus=several),
                fit(f"{name}, exact", resnet, exact, gpus=several),
            ]
    return found


def images_of(args: argparse.Namespace) -> str:
    """The folder of the JPEGs, made once."""
    return str(HERE.parent / "build" / "bench-gpu" / str(60 if args.tiny else args.images))


def fit(
    name: str, options: Mapping[str, Any], flags: Sequence[str] = (), gpus: int = 1, **more: Any
) -> Job:
    """`raytrain fit`, whose log has the figures."""
    slug = re.sub(r"\W+", "-", name)
    argv = [*flags_of(options, gpus), *flags, "--name", slug]
    command = [*by_torchrun(gpus), "-m", "raytrain_ddp.fit", *argv]
    log = Path(options["storage"]) / slug / "metrics.jsonl"
    return Job(name, command, 150, log=log, warm_up=options["warm_up"], **more)


def flags_of(of: Mapping[str, Any], gpus: int = 1) -> list[str]:
    """Of a run on images in memory, or on JPEGs."""
    data = ["--task", f"{HERE / 'gpu_jobs.py'}:InMemory"]
    if of.get("from_disk"):
        data = ["--data.source", of["images"], "--data.holdout", "0.02", "--augment.crop", "random"]
        data += ["--eval.every-epochs", "0", "--limit-eval-batches", "1"]
    numbers = {
        "steps": of["warm_up"] + of["steps"],
        "batch-size": of["batch"] * gpus,
        "micro-batch": of["batch"],
        "data.image-size": of["image_size"],
        "log.every-steps": of["every"],
        "checkpoint.every-epochs": 0,
        "checkpoint.every-s": 0,
    }
    flags = [word for name, number in numbers.items() for word in (f"--{name}", str(number))]
    if of["model"].startswith("timm:"):
        flags += ["--model.args", f"img_size={of['image_size']}", "--compute.no-channels-last"]
    else:
        flags += ["--compute.channels-last"]
    flags += ["--log.no-tensorboard", "--augment.flip", "--compute.precision", "bf16"]
    flags += ["--model.name", of["model"]]
    return ["--storage", of["storage"], *([] if gpus > 1 else ["--local"]), *data, *flags]


def work(
    name: str,
    kind: str,
    options: Mapping[str, Any],
    limit_s: float,
    plan: int = 4,
    together: bool = False,
    lacks: str = "",
    gpus: int = 1,
) -> Job:
    """A measurement of gpu_jobs.py or gpu_forks.py."""
    file = ["gpu_forks.py"] if kind == "forks" else ["gpu_jobs.py", kind]
    given = json.dumps({**options, "name": re.sub(r"\W+", "-", name)})
    command = [*by_torchrun(gpus), str(HERE / file[0]), *file[1:], given]
    return Job(name, command, limit_s, plan, together, lacks)


def by_torchrun(gpus: int) -> list[str]:
    start = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={gpus}"]
    return start if gpus > 1 else []


def peer(name: str, script: Path | None, storage: Path, of: Mapping[str, Any]) -> Job:
    """Makes a measurement of timm's or torchvision's own script: one epoch of the JPEGs."""
    command = [str(script), "--model", of["model"], "-b", str(of["batch"]), "--epochs", "1"]
    command += ["--amp", "-j", str(len(os.sched_getaffinity(0)))]
    if name == "torchvision":
        command += ["--data-path", str(storage), "--print-freq", "1"]
    else:
        command += ["--data-dir", str(storage), "--val-split", "val"]
        command += ["--num-classes", "10", "--img-size", str(of["image_size"]), "--channels-last"]
        command += ["--amp-dtype", "bfloat16", "--log-interval", "1", "--output", str(storage)]
    lacks = "" if script else f"give the path of its script with --{name}-train"
    return Job(f"ResNet-50, {name}'s script", command, 120, 12, lacks=lacks)


def repeat_images(images: Path, storage: Path, times: int = 10) -> None:
    """Links the JPEGs into an epoch that is long enough to measure."""
    for image in images.glob("*/*"):
        (storage / "train" / image.parent.name).mkdir(parents=True, exist_ok=True)
        for number in range(times):
            link = storage / "train" / image.parent.name / f"{number}-{image.name}"
            link.symlink_to(image.resolve())
    (storage / "val").symlink_to(images.resolve())


def tests(args: argparse.Namespace, storage: Path) -> list[Job]:
    """Returns one measurement per test file, the longest first."""
    found = []
    files = [*(HERE.parent / "tests").rglob("test_*.py")]
    for file in sorted(files, key=lambda file: ("generations" not in file.name, file.name)):
        if "mark.gpu" in file.read_text("utf-8") and file.parent.name != "fakecuda":
            command = ["-m", "pytest", "-m", "gpu", "-vv", "-rs", "--tb=short"]
            command += ["-p", "no:cacheprovider", "--basetemp", str(storage / file.stem), str(file)]
            if args.tiny:
                command += ["-k", FEW if "generations" in file.name else NOT_EMULATED]
            found.append(Job(f"tests: {file.stem}", command, 200, together=True))
    return found


def left_out(job: Job, args: argparse.Namespace) -> str:
    """Returns why it is not measured; "" if it is."""
    if args.only and not any(word in job.name for word in args.only):
        return "not in --only"
    if not args.tiny and job.plan > args.minutes:
        return f"in the plan of {job.plan} minutes"
    return job.lacks


# ------------------------------------------------------------------ measuring


def measure(job: Job, until: float) -> tuple[str, float, str] | None:
    """Returns the result, the seconds, and the output of a failure; None if no time is left."""
    left_s = until - time.monotonic()
    if left_s < 15:
        return None
    began, limit_s = time.monotonic(), min(job.limit_s, left_s)
    result, status, output = call(job.command, limit_s)
    if "pytest" in job.command:
        result = of_tests(output)
    elif job.log and job.log.exists():
        result = of_log(job.log, job.warm_up)
    failed = ""
    if status is None:
        failed = output[-20_000:]
        result = f"CUT after {limit_s:.0f} s. {result}"
    elif status and (status != NO_TESTS or "pytest" not in job.command):
        result = f"FAILED ({status}): {last_error(output)}. {result}"
        failed = output[-20_000:]
    return result, time.monotonic() - began, failed


def call(command: Sequence[str], limit_s: float) -> tuple[str, int | None, str]:
    """Returns the result, the exit status (None after the time limit), and all output."""
    path = os.pathsep.join([str(HERE.parent), *filter(None, [os.environ.get("PYTHONPATH")])])
    variables = {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", "PYTHONPATH": path}
    with tempfile.TemporaryFile("w+") as out:
        process = subprocess.Popen(
            [sys.executable, *command],
            env={**os.environ, **variables},
            cwd=HERE.parent,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        running.add(process.pid)
        try:
            status: int | None = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            status = None
        end(process.pid)
        process.wait()
        running.remove(process.pid)
        out.seek(0)
        output = out.read()
    results = [line[2:] for line in output.splitlines() if line.startswith("= ")]
    rates = re.findall(
        r"(?:img/s: [\d.]+ \(|s,\s*)([\d.]+)(?:/s)?\)", output
    )  # torchvision's, timm's
    results = results or [f"**{float(rate):.0f} images/s**" for rate in rates]
    return results[-1] if results else "", status, output


def last_error(output: str) -> str:
    """Returns the last line that names an error."""
    lines = r"^(?:\[rank\d+\]: |E +)?([\w.]*Error\b.*|error: .*)"
    errors = re.findall(lines, output, re.MULTILINE)
    return errors[-1][:300].replace("|", "/") if errors else "no error was printed"


def end(group: int) -> None:
    """Kills a measurement, and any processes that it left behind."""
    with suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)


def end_all(number: int, _: object) -> None:
    for group in [*running]:
        end(group)
    os._exit(128 + number)


def of_tests(output: str) -> str:
    """Counts the tests that have passed so far, and names those that have failed."""
    ended = re.findall(r"(\S+::\S.*?) (PASSED|FAILED|ERROR|SKIPPED)\b", output)
    count = {kind: sum(each == kind for _, each in ended) for kind in ("PASSED", "SKIPPED")}
    bad = [name.rpartition("::")[2] for name, kind in ended if kind in ("FAILED", "ERROR")]
    reasons = {*re.findall(r"^SKIPPED \[\d+\] [^:]+:\d+: (.*)", output, re.MULTILINE)}
    skipped = f", {count['SKIPPED']} skipped: {'; '.join(reasons)}" if reasons else ""
    return f"{count['PASSED']} passed{skipped}" + (f", FAILED: {', '.join(bad)}" if bad else "")


def of_log(log: Path, warm_up: int) -> str:
    """images/s, MFU, memory, and the parts of a step."""
    records = [json.loads(line) for line in log.read_text().splitlines()]
    begun, *lines = [r for r in records if r["kind"] == "train" and r["step"] >= warm_up]
    if not lines:
        return f"{begun['step']} steps"
    spent_s = sum(line["timing"]["step_s"] for line in lines)
    rate = sum(line["samples_per_s"] * line["timing"]["step_s"] for line in lines) / spent_s
    timing, split = lines[-1]["timing"], Counter[str]()
    for line in lines:
        split.update({k: 1e3 * s / len(lines) for k, s in line["timing"]["split_s"].items()})
    mfu = f", MFU {timing['mfu']:.1%}" if timing.get("mfu") else ""
    parts = ", ".join(f"{phase} {ms:.1f}" for phase, ms in split.most_common() if ms >= 0.05)
    return (
        f"**{rate:.0f} images/s**{mfu}, {timing['peak_memory_bytes'] / 2**30:.1f} GiB; ms: {parts}"
    )


def tell(report: Report, job: Job, measured: tuple[str, float, str] | None) -> None:
    if measured is None:
        report.leave_out(job, "no time was left")
    else:
        report.add(job, *measured)


if __name__ == "__main__":
    sys.exit(main())
