"""Seeds of the global random generators: for a run, and for each slot of a step."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from raytrain_ddp.data.order.sample_rng import hash64, kept_globals, seed_globals


def seed_all(seed: int) -> None:
    """Seeds torch's generators of all devices, numpy's and Python's."""
    seed_globals(seed)
    torch.manual_seed(seed)


def slot_seed(seed: int, step: int, slot: int) -> int:
    """The seed of all generators for one micro-batch of a global step, from 0. Below 2^63."""
    return hash64(seed, step, slot) >> 1


def seed_slot(device: torch.device, seed: int, step: int, slot: int) -> None:
    """Seeds torch's, numpy's and Python's generators for one micro-batch (dropout and the like)."""
    key = slot_seed(seed, step, slot)
    seed_globals(key)
    if device.type == "cuda":
        torch.cuda.default_generators[torch.cuda.current_device()].manual_seed(key)


@contextmanager
def keeping_generators(device: torch.device) -> Iterator[None]:
    """Restores torch's, numpy's and Python's generators afterward."""
    gpus = [torch.cuda.current_device()] if device.type == "cuda" else []
    with kept_globals(), torch.random.fork_rng(gpus):
        yield
