"""The ways to save that checkpoint.py compares, and one measurement of one of them.

Run by checkpoint.py, a process each, so that peaks of memory do not mix.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.nn.functional import cross_entropy

from raytrain_ddp.checkpoint.manifest import Manifest
from raytrain_ddp.checkpoint.snapshot import encode
from raytrain_ddp.checkpoint.storage import open_storage
from raytrain_ddp.checkpoint.store import CheckpointStore
from raytrain_ddp.files import fsync
from raytrain_ddp.tasks.model_parts import nonfinite
from raytrain_ddp.training.runtime.world import World
from raytrain_ddp.training.state.shared_checkpoint import ReceivedCheckpoint, Relay
from raytrain_ddp.training.state.train_state import TrainState

FEATURES, CLASSES, BATCH = 768, 10, 8
WARM_STEPS = 5  # the first ones allocate gradients and the optimizer's state


class Ours:
    """What `Run.save` does: look for NaN, wait for the commit before, copy, commit in a thread."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, folder: Path) -> None:
        scaler = torch.amp.GradScaler(enabled=False)
        self._state = TrainState(model, optimizer, scaler)
        self._store = CheckpointStore(open_storage(str(folder)))
        self._committer = ThreadPoolExecutor(1)
        self._commit: Future[Any] | None = None

    def save(self, number: int) -> Future[Any]:
        if nonfinite(self._state.model):
            raise ValueError("weights are not finite")
        if self._commit is not None:
            self._commit.result()
        manifest = Manifest(number, 0, 1, 1, config={}, data_fingerprint="")
        snapshot = self._state.snapshot(manifest, [])

        def commit() -> None:
            self._store.commit(manifest, encode(snapshot))
            self._store.prune(2)

        self._commit = self._committer.submit(commit)
        return self._commit

    def load(self) -> None:
        device = next(iter(self._state.model.parameters())).device
        world = World(rank=0, size=1, local_rank=0, device=device, threads=1)
        relay = Relay(world, existing=self._state.existing())
        found = self._store.latest(verify=relay.read_all)
        assert found is not None
        place = found.storage
        self._state.load(ReceivedCheckpoint(found.name, found.manifest, place, relay.kept, {}))


class TorchSave:
    """`torch.save` into a temporary file, fsync, rename: blocking, whole or not there, no hash."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, folder: Path) -> None:
        self._model, self._optimizer, self._folder = model, optimizer, folder

    def save(self, number: int) -> None:
        state = {"model": self._model.state_dict(), "optimizer": self._optimizer.state_dict()}
        temp = self._folder / "temp"
        torch.save(state, temp)
        fsync(str(temp))
        temp.replace(self._folder / f"{number}.pt")
        fsync(str(self._folder))
        (self._folder / f"{number - 2}.pt").unlink(missing_ok=True)

    def load(self) -> None:
        newest = max(self._folder.glob("*.pt"), key=lambda path: int(path.stem))
        state = torch.load(newest, weights_only=True)
        self._model.load_state_dict(state["model"])
        self._optimizer.load_state_dict(state["optimizer"])


class Dcp:
    """torch.distributed.checkpoint of one process.

    Args:
        kind: "save"; "async": `async_save` as it is; "cached": with a stager that is kept, which
            uses its memory again (pinned where there is CUDA).
    """

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, folder: Path, kind: str
    ) -> None:
        self._model, self._optimizer, self._folder, self._kind = model, optimizer, folder, kind
        cuda = torch.cuda.is_available()
        options = StagingOptions(cuda, False, False, cuda)
        self._stager = DefaultStager(options) if kind == "cached" else None
        self._saved: Future[Any] | None = None

    def save(self, number: int) -> Future[Any] | None:
        if self._saved is not None:
            self._saved.result()
        model, optimizer = get_state_dict(self._model, self._optimizer)
        state, place = {"model": model, "optimizer": optimizer}, str(self._folder / str(number))
        shutil.rmtree(self._folder / str(number - 2), ignore_errors=True)
        if self._kind == "save":
            dcp.save(state, checkpoint_id=place, no_dist=True)
            return None
        saved = dcp.async_save(state, checkpoint_id=place, no_dist=True, async_stager=self._stager)
        assert isinstance(saved, Future)
        self._saved = saved
        return saved

    def load(self) -> None:
        newest = max(self._folder.iterdir(), key=lambda path: int(path.name))
        model, optimizer = get_state_dict(self._model, self._optimizer)
        state = {"model": model, "optimizer": optimizer}
        dcp.load(state, checkpoint_id=str(newest), no_dist=True)
        set_state_dict(
            self._model,
            self._optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )


# `save` blocks the loop; what it returns is done once all is durable. `load` is for a restart.
WAYS: dict[str, Callable[..., Any]] = {
    "ours": Ours,
    "torch-save": TorchSave,
    "dcp-save": partial(Dcp, kind="save"),
    "dcp-async": partial(Dcp, kind="async"),
    "dcp-cached": partial(Dcp, kind="cached"),
}


def network(parameters: int) -> nn.Sequential:
    """A multi-layer perceptron of about so many parameters; (n, FEATURES) -> (n, CLASSES)."""
    width = round((parameters / 1.5 + (FEATURES / 3) ** 2) ** 0.5 - FEATURES / 3) // 8 * 8
    return nn.Sequential(
        nn.Linear(FEATURES, width),
        nn.ReLU(),
        nn.Linear(width, width),
        nn.ReLU(),
        nn.Linear(width, width // 2),
        nn.ReLU(),
        nn.Linear(width // 2, CLASSES),
    )


def measure(
    way: str, parameters: int, checkpoints: int, idle_s: float, folder: Path, device: str = "cpu"
) -> dict[str, Any]:
    """Trains and saves; what a checkpoint costs the loop, when it is durable, what it takes."""
    torch.manual_seed(0)
    model = network(parameters).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    x, y = torch.randn(BATCH, FEATURES).to(device), torch.randint(CLASSES, (BATCH,)).to(device)
    wait = torch.cuda.synchronize if device == "cuda" else lambda: None

    def step() -> float:
        began = time.perf_counter()
        optimizer.zero_grad(set_to_none=True)
        cross_entropy(model(x), y).backward()
        optimizer.step()
        wait()
        return time.perf_counter() - began

    for _ in range(WARM_STEPS):
        step()
    state_bytes = 3 * sum(p.numel() * p.element_size() for p in model.parameters())
    saver = WAYS[way](model, optimizer, folder)
    rss = memory("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # forgets the peak so far
    idle = steps_for(step, idle_s)
    saves: list[dict[str, float]] = []
    for number in range(1, checkpoints + 1):
        began = time.perf_counter()
        saved = saver.save(number)
        blocked_s = time.perf_counter() - began
        done: list[float] = []
        steps = 0
        if saved is not None:
            saved.add_done_callback(lambda _, done=done: done.append(time.perf_counter()))
            while not done:
                step()
                steps += 1
            saved.result()
        whole_s = time.perf_counter() - began
        saves.append(
            {
                "blocked_s": blocked_s,
                "durable_s": (done[0] - began) if done else blocked_s,
                "steps": steps,
                "whole_s": whole_s,
            }
        )
        idle += steps_for(step, idle_s)
    peak = memory("VmHWM")
    began = time.perf_counter()
    saver.load()
    wait()
    load_s = time.perf_counter() - began
    usual = median(idle)
    return {
        "state_bytes": state_bytes,
        "first_blocked_s": saves[0]["blocked_s"],
        "blocked_s": median(s["blocked_s"] for s in saves[1:]),
        "durable_s": median(s["durable_s"] for s in saves[1:]),
        # what the loop did not get done meanwhile, blocked or slowed
        "lost_s": median(s["whole_s"] - s["steps"] * usual for s in saves[1:]),
        "extra_states": (peak - rss) / state_bytes,
        "load_s": load_s,
    }


def steps_for(step: Callable[[], float], seconds: float) -> list[float]:
    end, spent = time.perf_counter() + seconds, []
    while time.perf_counter() < end:
        spent.append(step())
    return spent


def memory(field: str) -> int:
    """Bytes of this process, by the kernel's name: VmRSS now, VmHWM at most."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return 1024 * int(next(line for line in lines if line.startswith(field)).split()[1])


def main() -> None:
    given = json.loads(sys.argv[1])
    torch.set_num_threads(given.pop("threads"))
    found = measure(**{**given, "folder": Path(given["folder"])})
    print(json.dumps(found), flush=True)
    os._exit(0)  # nothing is worth waiting for


if __name__ == "__main__":
    main()
