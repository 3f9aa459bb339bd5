"""Divides the optimizer's state among the workers: ZeRO stage 1 (Rajbhandari et al., SC'20,
arXiv:1910.02054).

Each worker has the state of the parameters that are dealt to it, updates them with the whole
gradient, and gets the others from their owners. Parameters are dealt whole, so an optimizer that
updates each by itself takes the same steps, to the bit. Who owns what follows from the sizes and
the number of workers, and is not stored: a checkpoint has the whole state, as without shares.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from raytrain_ddp.checkpoint.snapshot import flatten_state, unflatten_state
from raytrain_ddp.config.train_config import TrainConfig
from raytrain_ddp.training.gradients.tree_sum import start_gather
from raytrain_ddp.training.optimizer.optimizer_state import parameters_of
from raytrain_ddp.training.optimizer.several_optimizers import Optimizers
from raytrain_ddp.training.runtime.world import World, broadcast_tensor

_ROUND_BYTES, _LEAST_BYTES = 1 << 26, 1 << 20  # of all ranks, and of one at least
_MESSAGE_BYTES = 1 << 26  # on the way to rank 0; one tensor may be larger
_BYTE = torch.uint8
_ALIGNED = 16  # bytes
_MOST_EXCHANGES = 8  # of other parameters, or in other memory; each keeps memory for a round


class WholeState(NamedTuple):
    """The state of an optimizer over all parameters, as `flatten_state` gives it.

    Args:
        tensors: not copied, as far as they are this rank's.
        received: the names of the others. They are on the host, and valid until the next call of
            `Shares.whole`.
        rest: the structure.
    """

    tensors: Mapping[str, Tensor]
    received: Collection[str] = ()
    rest: Any = None


class Shares:
    """Which rank has the state of which parameters.

    Args:
        optimizer: what it has allocated already of other ranks' state is freed.
        world: None: this rank has all of it.
    """

    def __init__(self, optimizer: Optimizer, world: World | None = None) -> None:
        self._world = world
        self._rank, self._size = (world.rank, world.size) if world else (0, 1)
        parameters = parameters_of(optimizer)
        owners = deal([each.nbytes for each in parameters], self._size)
        self._owners = dict(zip(parameters, owners, strict=True))
        # The order in a checkpoint: that in which a whole optimizer would have made the state.
        self._order: dict[Any, None] = dict.fromkeys(optimizer.state)
        for each in optimizer.named.values() if isinstance(optimizer, Optimizers) else [optimizer]:
            for parameter in [p for p in each.state if self._owner(p) != self._rank]:
                del each.state[parameter]
        self._exchanges: dict[tuple[int, ...], _Exchange] = {}
        self._room: dict[tuple[int, str], Tensor] = {}

    @property
    def is_divided(self) -> bool:
        """Whether other ranks have state that this one lacks."""
        return self._size > 1

    def step(self, optimizer: Optimizer, mark: Callable[[str], None]) -> None:
        """Takes a step of this optimizer, which is all of that of the shares or one of several; all
        ranks take part. Gradients, learning rates and `found_inf` must be equal on all ranks.

        Args:
            mark: receives what has taken time: see `Clock.mark`.
        """
        if self._world is None or not self.is_divided:
            optimizer.step()
            return
        trained = [each for each in parameters_of(optimizer) if each.requires_grad]
        self._order |= dict.fromkeys(each for each in trained if each.grad is not None)
        with self._only_own(optimizer):
            optimizer.step()
        mark("optimizer")
        memory = tuple(each.data_ptr() for each in trained)
        if memory not in self._exchanges:
            if len(self._exchanges) >= _MOST_EXCHANGES:
                self._exchanges.clear()
            dealt: list[list[nn.Parameter]] = [[] for _ in range(self._size)]
            for each in trained:
                dealt[self._owner(each)].append(each)
            self._exchanges[memory] = _Exchange(dealt, self._world)
        self._exchanges[memory]()
        mark("communication")

    def own(self, optimizer: Optimizer, saved: Mapping[str, Any]) -> dict[str, Any]:
        """The part of a whole `state_dict()` that this rank loads."""
        keys = [key for group in saved["param_groups"] for key in group["params"]]
        parameters = dict(zip(keys, parameters_of(optimizer), strict=False))  # loading checks it
        known = {key: parameters[key] for key in saved["state"] if key in parameters}
        self._order = dict.fromkeys(known.values())
        others = {key for key, each in known.items() if self._owner(each) != self._rank}
        state = {key: value for key, value in saved["state"].items() if key not in others}
        if others:  # on a CPU, loading would keep the memory of all
            state = deepcopy(state)
        return {**saved, "state": state}

    def whole(self, optimizer: Optimizer) -> WholeState:
        """The whole state, on rank 0; all ranks take part."""
        state = optimizer.state_dict()
        if not self.is_divided:
            tensors, rest = flatten_state(state)
            return WholeState(tensors, rest=rest)
        if self._rank:
            _send(state)
            return WholeState({})
        states = [state, *(self._receive(rank) for rank in range(1, self._size))]
        parameters, groups, first = parameters_of(optimizer), [], 0
        for number, group in enumerate(state["param_groups"]):
            # A rank without any of a group may not count its steps.
            owner = self._owner(parameters[first]) if group["params"] else 0
            groups.append(states[owner]["param_groups"][number])
            first += len(group["params"])
        found = {key: value for each in states for key, value in each["state"].items()}
        known = {parameters[key]: key for key in found}
        in_order = [known[each] for each in self._order if each in known]
        ordered = {key: found[key] for key in (*in_order, *found)}
        tensors, rest = flatten_state({**state, "state": ordered, "param_groups": groups})
        others = {key: found[key] for key in ordered if key not in state["state"]}
        return WholeState(tensors, {*flatten_state({"state": others})[0]}, rest)

    def _owner(self, parameter: Any) -> int:
        return self._owners.get(parameter, 0)

    @contextmanager
    def _only_own(self, optimizer: Optimizer) -> Iterator[None]:
        """Other ranks' parameters have no gradient; afterward, they have theirs again."""
        others = [each for each in parameters_of(optimizer) if self._owner(each) != self._rank]
        gradients = [each.grad for each in others]
        for each in others:
            each.grad = None
        try:
            yield
        finally:
            for each, gradient in zip(others, gradients, strict=True):
                each.grad = gradient
                optimizer.state.pop(each, None)  # some make it without a gradient

    def _receive(self, rank: int) -> dict[str, Any]:
        """The state that `rank` sends, in memory that is kept for the next time."""
        box: list[Any] = [None]
        dist.recv_object_list(box, rank, device=torch.device("cpu"))
        rest, kinds = box[0]
        tensors: dict[str, Tensor] = {}
        for name, (shape, dtype) in kinds.items():
            kept = self._room.get((rank, name))
            if kept is None or (kept.shape, kept.dtype) != (shape, dtype):
                kept = self._room[rank, name] = torch.empty(shape, dtype=dtype)
            tensors[name] = kept
        for names in _messages(tensors):
            parts = [_as_bytes(tensors[name]) for name in names]
            data = parts[0] if len(parts) == 1 else torch.empty(sum(map(len, parts)), dtype=_BYTE)
            dist.recv(data, rank)
            if len(parts) > 1:
                for part, piece in zip(parts, data.split([*map(len, parts)]), strict=True):
                    part.copy_(piece)
        found: dict[str, Any] = unflatten_state(tensors, rest)
        return found


def shares_of(config: TrainConfig, optimizer: Optimizer, world: World) -> Shares:
    """The shares of the ranks, or one of all if the config does not divide the state."""
    return Shares(optimizer, world if config.ddp.shard_optimizer else None)


def deal(sizes: Sequence[int], ranks: int) -> list[int]:
    """The rank of each item: the largest first, each to the rank that has the least so far."""
    owners = [0] * len(sizes)
    loads = [(0, rank) for rank in range(ranks)]
    for item in sorted(range(len(sizes)), key=lambda item: (-sizes[item], item)):
        load, owners[item] = loads[0]
        heapq.heapreplace(loads, (load + sizes[item], owners[item]))
    return owners


def _send(state: Mapping[str, Any]) -> None:
    """Sends a state to rank 0, see `Shares._receive`; a device's memory is copied bit by bit."""
    tensors, rest = flatten_state(state)
    kinds = {name: (tensor.shape, tensor.dtype) for name, tensor in tensors.items()}
    dist.send_object_list([(rest, kinds)], 0, device=torch.device("cpu"))
    for names in _messages(tensors):
        parts = [_as_bytes(tensors[name].detach().to("cpu").contiguous()) for name in names]
        dist.send(parts[0] if len(parts) == 1 else torch.cat(parts), 0)


def _messages(tensors: Mapping[str, Tensor]) -> Iterator[list[str]]:
    """The names of the tensors of each message, in order; empty ones are in none."""
    names: list[str] = []
    size_bytes = 0
    for name, tensor in tensors.items():
        if names and size_bytes + tensor.nbytes > _MESSAGE_BYTES:
            yield names
            names, size_bytes = [], 0
        if tensor.nbytes:
            names.append(name)
            size_bytes += tensor.nbytes
    if names:
        yield names


def _as_bytes(tensor: Tensor) -> Tensor:
    """A view of a contiguous tensor, shape (bytes,)."""
    return tensor.view(-1).view(_BYTE)


class _Exchange:
    """Copies parameters from their owners to all ranks, bit by bit.

    The parameters of a rank are one stream of bytes, of which each round sends a piece: so the
    memory that it takes does not depend on the size of a parameter.

    Args:
        dealt: those of each rank.
    """

    def __init__(self, dealt: Sequence[Sequence[nn.Parameter]], world: World) -> None:
        self._world, size = world, world.size
        streams = [_Stream([p for p in each if _is_dense(p)]) for each in dealt]
        self._others = [(p, r) for r, each in enumerate(dealt) for p in each if not _is_dense(p)]
        longest = max(stream.size_bytes for stream in streams)
        piece = min(longest, max(_LEAST_BYTES, _ROUND_BYTES // size // _ALIGNED * _ALIGNED))
        device = next(parameter.device for each in dealt for parameter in each)
        memory = torch.empty(size * piece, dtype=_BYTE, device=device)
        # Of each round: the rows of all ranks, and what is copied to and from them.
        self._rounds: list[tuple[Tensor, _Copies, _Copies]] = []
        for start in range(0, longest, max(1, piece)):
            length = min(piece, longest - start)
            rows = memory[: size * length].view(size, length)
            own, theirs = _Copies([], []), _Copies([], [])
            for rank, (stream, row) in enumerate(zip(streams, rows, strict=True)):
                stream.find(row, start, own if rank == world.rank else theirs)
            self._rounds.append((rows, own, theirs))

    @torch.no_grad()
    def __call__(self) -> None:
        for rows, own, theirs in self._rounds:
            _copy(own.pieces, own.places)
            for work in start_gather(rows, rows[self._world.rank], self._world):
                work.wait()
            _copy(theirs.places, theirs.pieces)
        for parameter, owner in self._others:
            broadcast_tensor(parameter, owner)


class _Copies(NamedTuple):
    """Pieces of parameters, and their places in a row; views."""

    pieces: list[Tensor]
    places: list[Tensor]


def _copy(source: list[Tensor], target: list[Tensor]) -> None:
    if source:
        torch._foreach_copy_(target, source)


class _Stream:
    """Parameters of one rank one after another, in the order of memory and aligned."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self._parts: list[tuple[int, Tensor]] = []
        self.size_bytes = 0
        for parameter in parameters:
            flat = parameter.detach().as_strided((parameter.numel(),), (1,)).view(_BYTE)
            self._parts.append((self.size_bytes, flat))
            self.size_bytes += -(-len(flat) // _ALIGNED) * _ALIGNED

    def find(self, row: Tensor, start: int, found: _Copies) -> None:
        """Adds what lies in `row`, which begins at byte `start` of the stream."""
        for first, flat in self._parts:
            low, high = max(first, start), min(first + len(flat), start + len(row))
            if low < high:
                found.pieces.append(flat[low - first : high - first])
                found.places.append(row[low - start : high - start])


def _is_dense(parameter: Tensor) -> bool:
    """Whether its elements fill their memory, without gaps, in any order of the dimensions."""
    return torch.empty_like(parameter, device="meta").stride() == parameter.stride()
