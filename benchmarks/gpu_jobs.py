"""The measurements of gpu.py, each in a process of its own: ``gpu_jobs.py JOB OPTIONS``.

OPTIONS is a JSON object. A line that begins with "= " is the result so far; the last one counts.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import timm
import torch
import torch.distributed as dist
import torchvision
from data_images import make_images, once
from torch import Tensor, nn

from raytrain_ddp.config.train_config import TrainConfig
from raytrain_ddp.data.loading.sources import Batch, Data, Source
from raytrain_ddp.data.order import runs_of
from raytrain_ddp.failpoints import FOLDER_VARIABLE, VARIABLE
from raytrain_ddp.tasks.image_classification import ImageClassification

KEPT = 64  # different images in memory
ROWS = 2**20
PACKAGES = ("torch", "torchvision", "timm", "numpy", "ray")
Options = Mapping[str, Any]


def say(result: str) -> None:
    print(f"= {result}", flush=True)


# ------------------------------------------------------------------ the machine


def machine(options: Options) -> None:
    """Reports the GPU, the versions, and the peak rates that the GPU reaches."""
    tool = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    driver = "unknown"
    with suppress(FileNotFoundError):
        done = subprocess.run(tool, capture_output=True, text=True, check=False)
        driver = done.stdout.split("\n")[0]
    cpus = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
    versions = []
    for name in PACKAGES:
        try:
            versions.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            versions.append(f"no {name}")
    told = [
        f"GPUs: {torch.cuda.device_count()} x {torch.cuda.get_device_name(0)}, driver {driver}",
        f"CUDA {torch.version.cuda}, NCCL {torch.cuda.nccl.version()}, "
        f"cuDNN {torch.backends.cudnn.version()}",
        f"{len(os.sched_getaffinity(0))} cores ({cpus[1] if cpus else platform.machine()})",
        f"Python {platform.python_version()}, {', '.join(versions)}",
    ]
    if options["tiny"]:
        told.append("--tiny: no figure below means anything")
    else:
        a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in "ab")
        product_s = _timed(lambda: a @ b, 3, 20) / 20
        copy_s = _timed(lambda: a.copy_(b), 3, 20) / 20
        told.append(
            f"bf16 products of 8192 x 8192: {2 * 8192**3 / product_s / 1e12:.0f} TFLOP/s; copies: "
            f"{2 * a.nbytes / copy_s / 1e12:.2f} TB/s"
        )
    say("; ".join(told))


def images(options: Options) -> None:
    folder = Path(options["images"])
    once(folder, lambda place: make_images(place, int(folder.name)))


# ------------------------------------------------------------------ promises


def ranks(options: Options) -> None:
    """Fits of the bundled digits on 1, 2 and 3 processes that share the GPU, over gloo, and of
    `options`' model on JPEGs on one: exact, killed, resumed."""
    steps = options["warm_up"] + options["steps"]
    exact, kill = ["--exact", "true"], f"train.after_backward:kill@rank={{}},step={2 * steps // 3}"
    bf16 = ["--compute.precision", "bf16"]
    side, batch = str(options["image_size"]), str(min(options["batch"], 64))
    large = [*bf16, "--model.name", options["model"], "--data.image-size", side]
    large += ["--data.source", options["images"], "--data.holdout", "0.1"]
    large += ["--batch-size", batch, "--micro-batch", batch]
    asked: dict[str, tuple[int, list[str], str]] = {
        **{f"exact-{n}": (n, exact, "") for n in (1, 2, 3)},
        **{f"bf16-{n}": (n, [*exact, *bf16], "") for n in (1, 3)},
        "summed": (3, [], ""),
        "killed": (3, [], kill.format(1)),
        "killed-exact": (3, exact, kill.format(1)),
        "large": (1, large, ""),
        "killed-large": (1, large, kill.format(0)),
    }
    with ThreadPoolExecutor(max(1, len(os.sched_getaffinity(0)) // 4)) as pool:
        of = partial(fit, options["storage"], steps)
        found = dict(zip(asked, pool.map(lambda name: of(name, *asked[name]), asked), strict=True))
        again = {"killed": (3, []), "killed-exact": (2, exact), "killed-large": (1, large)}
        found |= dict(zip(again, pool.map(lambda name: of(name, *again[name]), again), strict=True))
    alike = {
        "exact on 1, 2, 3 ranks": ("exact-1", "exact-2", "exact-3"),
        "exact in bf16 on 1, 3 ranks": ("bf16-1", "bf16-3"),
        "a rank of 3 killed, resumed on 3": ("summed", "killed"),
        "exact, a rank of 3 killed, resumed on 2": ("exact-1", "killed-exact"),
        f"{options['model']} killed and resumed": ("large", "killed-large"),
    }
    other = {name: len({found[each] for each in these}) > 1 for name, these in alike.items()}
    say(
        "; ".join(
            f"{name}: {'DIFFERENT' if wrong else 'same'} bits" for name, wrong in other.items()
        )
    )
    if any(other.values()):
        raise RuntimeError(f"the weights differ: {found}")


def fit(storage: str, steps: int, name: str, size: int, flags: list[str], fault: str = "") -> str:
    """Runs `raytrain fit` in `size` processes on the first GPU; returns a hash of the weights.

    Args:
        fault: the point at which a process is killed.
    """
    command = [sys.executable, "-m", "raytrain_ddp.fit", "--local", "--storage", storage]
    command += ["--name", name, "--steps", str(steps), "--limit-eval-batches", "2"]
    command += ["--checkpoint.every-steps", str(steps // 3), "--scaling.backend", "gloo", *flags]
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    group = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": str(size)}
    faults = {VARIABLE: fault, FOLDER_VARIABLE: f"{storage}/fired-{name}"} if fault else {}
    processes = [
        subprocess.Popen(
            command,
            env={**os.environ, **faults, **group, "RANK": str(rank), "LOCAL_RANK": "0"},
        )
        for rank in range(size)
    ]
    statuses = [process.wait() for process in processes]
    if (-signal.SIGKILL in statuses) != bool(fault) or (any(statuses) and not fault):
        raise RuntimeError(f"{name}: exit statuses {statuses}")
    return weights(Path(storage) / name)


def weights(run: Path) -> str:
    """Returns a hash of the weights in the newest checkpoint."""
    newest = max(run.rglob("model.safetensors"), key=lambda file: file.stat().st_mtime)
    return hashlib.sha256(newest.read_bytes()).hexdigest()[:12]


def nccl(options: Options) -> None:
    """Aborts and re-creates groups of one rank, like a worker whose peer has died."""
    from raytrain_ddp.membership.connections import Connections, end_group, let_go
    from raytrain_ddp.membership.process_group import set_for_replacing

    set_for_replacing(TrainConfig())
    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
    made, ended = list[float](), list[float]()  # seconds
    used: list[tuple[int, ...]] = []
    for number in range(options["rounds"]):
        began, connections = time.monotonic(), Connections()
        own_store = dist.PrefixStore(str(number), store)  # type: ignore[attr-defined]
        dist.init_process_group("cpu:gloo,cuda:nccl", store=own_store, rank=0, world_size=1)
        connections.opened(dist.group.WORLD, aborts=True)
        total, vote = torch.ones(1 << 20, device=device), torch.ones(1)
        dist.all_reduce(total)
        dist.all_reduce(vote)
        connections.wait_for_device()
        assert total.sum().item() == 1 << 20
        made.append(time.monotonic() - began)
        connections.cut()
        group = dist.group.WORLD
        end_group(is_aborted=True)
        ended.append(time.monotonic() - began - made[-1])
        let_go(group, connections, 0, 1)
        del group, connections
        used.append(_used())
        first, last = used[min(4, number)], used[-1]
        changes = [
            f"{name} {a} -> {b}"
            for name, a, b in zip(
                ("threads", "open files", "host MB", "device MB"), first, last, strict=True
            )
        ]
        say(
            f"{number + 1} times, made and used in {1e3 * median(made):.0f} ms, aborted in "
            f"{1e3 * median(ended):.0f} ms (medians); "
            f"from the fifth to the last: {', '.join(changes)}"
        )
    os._exit(0)  # threads of aborted groups may be left


def _used() -> tuple[int, ...]:
    status = Path("/proc/self/status").read_text(encoding="ascii")
    threads, resident = (int(re.findall(rf"{n}:\s+(\d+)", status)[0]) for n in ("Threads", "VmRSS"))
    free, whole = torch.cuda.mem_get_info()
    return threads, len(os.listdir("/proc/self/fd")), resident >> 10, (whole - free) >> 20


def on_ray(options: Options) -> None:
    """Compares runs on a new Ray, one left alone and one whose worker is killed, with a run
    without Ray."""
    storage, wheels, precision = options["storage"], options["wheels"], list[str]()
    if wheels:
        target = f"{storage}/site"
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps"]
        files = [str(file) for file in Path(wheels).glob("*.whl")]
        subprocess.run([*pip, "--no-compile", "--target", target, *files], check=True)
        os.environ["PYTHONPATH"] = os.pathsep.join([os.environ.get("PYTHONPATH", ""), target])
        sys.path.append(target)
    import ray

    cores = len(os.sched_getaffinity(0))
    ray.init(num_cpus=cores, num_gpus=1, include_dashboard=False)  # it sees no emulated GPU
    os.environ["RAY_ADDRESS"] = ray.get_runtime_context().gcs_address
    if options["tiny"]:
        precision = ["--compute.precision", "fp32", "--compute.no-channels-last"]  # nor its type
    kill = {VARIABLE: "train.after_backward:kill@rank=0,step=40", FOLDER_VARIABLE: f"{storage}/die"}
    one = ["--scaling.num-workers", "1", "--checkpoint.every-steps", "10"]
    asked = {
        "left alone": (one, {}),
        "worker killed": (one, kill),
        "--local": (["--local"], {}),
    }
    found, told = dict[str, str](), list[str]()
    for name, (flags, faults) in asked.items():
        run = f"on-ray{name.replace(' ', '-')}"
        command = [sys.executable, "-m", "raytrain_ddp.fit", "--storage", storage, "--name", run]
        command += ["--epochs", "2", "--scaling.use-gpu", "true", *precision, *flags]
        began = time.monotonic()
        done = subprocess.run(
            command, check=False, env={**os.environ, **faults}, stdout=-1, stderr=-2, text=True
        )
        took_s = time.monotonic() - began
        print(done.stdout, flush=True)
        done.check_returncode()
        found[name] = weights(Path(storage) / run)
        cold = " without warm processes" if "without warm processes" in done.stdout else ""
        told.append(f"{name} {took_s:.1f} s{cold}")
        same = "same bits" if len({*found.values()}) == 1 else "DIFFERENT BITS"
        say(f"two epochs of digits: {', '.join(told)}; {same}")
    if len({*found.values()}) > 1:
        raise RuntimeError(f"the weights differ: {found}")
    if not Path(kill[FOLDER_VARIABLE]).exists():
        raise RuntimeError("the worker was not killed")


# ------------------------------------------------------------------ speed


class InMemory(ImageClassification):
    """Images that need not be read or decoded; a micro-batch is copied as any other one."""

    def train_data(self) -> Data:
        side = self._config.data.image_size
        made = np.random.default_rng(0).integers(0, 256, (KEPT, 3, side, side), np.uint8)
        return Data(_Repeated(torch.from_numpy(made)), lambda batch, _: batch)

    def eval_data(self) -> Data | None:
        return None


class _Repeated(Source):
    def __init__(self, images: Tensor) -> None:
        self._images = images
        self.blocks = runs_of(ROWS, 1024)

    def read(self, rows: np.ndarray[Any, Any]) -> Batch:
        kept = torch.from_numpy(rows % KEPT)
        return {"image": self._images[kept], "label": kept % 10}

    def fingerprint(self) -> str:
        return f"{KEPT} images"


def plain(options: Options) -> None:
    """A hand-written loop, with DDP under torchrun: autocast, fused SGD, kernels as torch chooses
    them. Its batch is in pinned memory, or comes from a DataLoader."""
    rank, size = (int(os.environ.get(name, n)) for name, n in (("RANK", 0), ("WORLD_SIZE", 1)))
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    torch.cuda.set_device(device)
    torch.backends.cudnn.benchmark = True
    kind, _, name = options["model"].rpartition(":")
    make = timm.create_model if kind else torchvision.models.get_model
    layout = torch.contiguous_format if kind else torch.channels_last
    shape = {"img_size": options["image_size"]} if kind else {}
    model = make(name, num_classes=10, **shape).to(device, memory_format=layout).train()
    if size > 1:
        dist.init_process_group("nccl")
        model = nn.parallel.DistributedDataParallel(model, device_ids=[device.index])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, fused=True)
    batches = _loaded(options, size) if options.get("from_disk") else _pinned(options)

    def step() -> None:
        pixels, labels = (each.to(device, non_blocking=True) for each in next(batches))
        with torch.autocast("cuda", torch.bfloat16):
            pixels = pixels.to(memory_format=layout).float().div(255).sub(0.45).div(0.225)
            loss = nn.functional.cross_entropy(model(pixels), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    took_s = _timed(step, options["warm_up"], options["steps"])
    images_per_s = options["steps"] * options["batch"] * size / took_s
    if rank == 0:
        say(f"**{images_per_s:.0f} images/s**, {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB")


def _timed(step: Callable[[], Any], warm_up: int, steps: int) -> float:
    for _ in range(warm_up):
        step()
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(steps):
        step()
    torch.cuda.synchronize()
    return time.perf_counter() - began


def _pinned(options: Options) -> Iterator[tuple[Tensor, Tensor]]:
    side, count = options["image_size"], options["batch"]
    pixels = torch.randint(0, 256, (count, 3, side, side), dtype=torch.uint8).pin_memory()
    labels = (torch.arange(count) % 10).pin_memory()
    while True:
        yield pixels, labels


def _loaded(options: Options, size: int) -> Iterator[tuple[Tensor, Tensor]]:
    """torchvision's ImageFolder and transforms, in the processes of a DataLoader."""
    from torch.utils.data import DataLoader
    from torchvision.datasets import ImageFolder
    from torchvision.transforms import v2

    transform = v2.Compose(
        [v2.RandomResizedCrop(options["image_size"]), v2.RandomHorizontalFlip(), v2.PILToTensor()]
    )
    loader: DataLoader[Any] = DataLoader(
        ImageFolder(options["images"], transform),
        options["batch"],
        shuffle=True,
        num_workers=len(os.sched_getaffinity(0)) // size,
        pin_memory=True,
        drop_last=True,
        persistent_workers=True,
    )
    while True:
        yield from loader


def waits(options: Options) -> None:
    """Where the host waits for the GPU in a run, as torch's own debug mode says."""
    from raytrain_ddp.fit import main

    found: Counter[str] = Counter()

    def note(message: Any, category: Any, filename: str, line: int, *_: Any) -> None:
        if "synchronizing" in str(message):
            own = [f for f in traceback.extract_stack()[:-1] if "raytrain_ddp" in f.filename]
            found[f"{Path(own[-1].filename).name} {own[-1].name}" if own else filename] += 1

    warnings.simplefilter("always")
    warnings.showwarning = note
    torch.cuda.set_sync_debug_mode("warn")
    status = main(options["argv"])
    torch.cuda.set_sync_debug_mode("default")
    assert status == 0
    say(", ".join(f"{place} {count} x" for place, count in found.most_common()) or "none")


def checkpoint(options: Options) -> None:
    """Measures a checkpoint as checkpoint_ways.py does; AdamW's state is twice the weights."""
    from checkpoint_ways import measure

    folder = Path(options["storage"]) / options["name"]
    folder.mkdir()
    found = measure(options["way"], 10**6 * options["millions"], 4, 0.5, folder, "cuda")
    shutil.rmtree(folder)
    say(
        f"{found['state_bytes'] / 1e9:.2f} GB: stall {1e3 * found['blocked_s']:.0f} ms (first "
        f"{1e3 * found['first_blocked_s']:.0f}), in all {1e3 * found['lost_s']:.0f} ms lost, "
        f"durable after {found['durable_s']:.2f} s, loaded in {found['load_s']:.2f} s"
    )


JOBS = (machine, images, ranks, nccl, on_ray, plain, waits, checkpoint)

if __name__ == "__main__":
    {job.__name__: job for job in JOBS}[sys.argv[1]](json.loads(sys.argv[2]))
    if dist.is_initialized():
        dist.destroy_process_group()
