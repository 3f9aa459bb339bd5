"""The weights of a checkpoint; one rank reads it, and sends it to the others while it reads on."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from raytrain_ddp.checkpoint.store import Checkpoint
from raytrain_ddp.checkpoint.streams import BytesLike, in_chunks, new_memory
from raytrain_ddp.checkpoint.tensor_places import Existing, TensorPlaces, view_tensors
from raytrain_ddp.errors import ConfigError
from raytrain_ddp.training.gradients.buffer_sync import own_memory
from raytrain_ddp.training.runtime.world import World, broadcast

T = TypeVar("T")


class _File(NamedTuple):
    """Announces a file, which follows in chunks. The size of each chunk precedes it, and a size of
    0 marks the end, which comes early if the file cannot be read."""

    name: str
    size_bytes: int
    head: bytes  # see `TensorPlaces`; empty: the file is kept in one piece
    is_first: bool  # of a checkpoint: what was received so far belongs to another


class Relay:
    """Keeps on all ranks the files that the rank `source` reads or has.

    Args:
        existing: see `TensorPlaces`, by the name of their file. If a file is damaged, they are
            overwritten, and those of another one must follow.

    Attributes:
        kept: file name -> content; the same on all ranks after `agree`.
    """

    def __init__(self, world: World, source: int = 0, existing: Existing | None = None) -> None:
        self._world, self._source = world, source
        self._existing = existing or {}
        self.kept: dict[str, memoryview | TensorPlaces] = {}
        self._under_way: list[tuple[Tensor, Any]] = []

    def read_all(self, checkpoint: Checkpoint) -> None:
        """Reads and verifies a checkpoint, on the source; the others are in `agree`.

        Raises:
            DamagedError, OSError: the others have received files that must not be used.
        """
        self.kept.clear()
        for number, (filename, entry) in enumerate(checkpoint.manifest.files.items()):
            head = checkpoint.head(filename) if self._existing.get(filename) else b""
            file = _File(filename, entry.size_bytes, head, is_first=not number)
            self._broadcast(file)
            try:
                checkpoint.read_into(filename, self._make_room(file), self._send)
            finally:
                self._send(memoryview(b""))

    def send(self, filename: str, pieces: Sequence[BytesLike], head: bytes = b"") -> None:
        """Sends a file that the source has already, which `kept` lacks there.

        Args:
            head: see `TensorPlaces`.
        """
        self._broadcast(_File(filename, sum(map(len, pieces)), head, False))
        for chunk in in_chunks(pieces):
            self._send(chunk)
        self._send(memoryview(b""))

    def agree(self, said: T) -> T:
        """Returns on all ranks what the source says; until then, they receive what it sends."""
        if self._world.rank == self._source:
            for _, work in self._under_way:
                work.wait()
            self._under_way.clear()
            self._broadcast((said,))
            return said
        while isinstance(found := self._broadcast(None), _File):
            if found.is_first:
                self.kept.clear()
            self._receive(self._make_room(found))
        answer: T = found[0]
        return answer

    def _broadcast(self, value: Any) -> Any:
        return broadcast(value, self._world, self._source)

    def _send(self, chunk: memoryview) -> None:
        if self._world.size == 1:
            return
        for tensor in (torch.tensor([len(chunk)]), *([_as_tensor(chunk)] if chunk else [])):
            work = dist.broadcast(tensor, self._source, async_op=True)
            self._under_way.append((tensor, work))

    def _make_room(self, file: _File) -> list[memoryview]:
        if not file.head:
            data = new_memory(file.size_bytes)
            self.kept[file.name] = data
            return [data]
        places = TensorPlaces(file.head, file.size_bytes, self._existing.get(file.name, {}))
        self.kept[file.name] = places
        return places.views

    def _receive(self, views: list[memoryview]) -> None:
        size, rest = torch.zeros(1, dtype=torch.int64), deque(views)
        while True:
            dist.broadcast(size, self._source)
            if not (got := int(size)):
                return
            # The source's tensors may lie differently in its memory.
            fits = got <= len(rest[0])
            chunk = rest[0][:got] if fits else new_memory(got)
            dist.broadcast(_as_tensor(chunk), self._source)
            while chunk:
                part = rest.popleft()
                count = min(len(part), len(chunk))
                if not fits:
                    part[:count] = chunk[:count]
                chunk = chunk[count:]
                if count < len(part):
                    rest.appendleft(part[count:])


@dataclass(frozen=True)
class ReceivedCheckpoint(Checkpoint):
    """A checkpoint in the memory of this rank.

    Args:
        files: file name -> content, as it was received; tensors are given away once.
        own: the tensors of files that this rank had itself, given away once.
    """

    files: dict[str, memoryview | TensorPlaces] = field(repr=False)
    own: dict[str, Mapping[str, Tensor]] = field(repr=False)

    def has(self, filename: str) -> bool:
        return filename in self.files or filename in self.own

    def view(self, filename: str) -> memoryview:
        content = self.files[filename]
        assert isinstance(content, memoryview)  # not one of tensors
        return content

    def tensors(self, filename: str) -> dict[str, Tensor]:
        if filename in self.own:
            return dict(self.own.pop(filename))
        content = self.files.pop(filename)
        return view_tensors(content) if isinstance(content, memoryview) else content.tensors()


def _as_tensor(data: memoryview) -> Tensor:
    return torch.frombuffer(data, dtype=torch.uint8)


def load_model(model: nn.Module, checkpoint: Checkpoint) -> None:
    """Loads the weights of `checkpoint` into `model`.

    Raises:
        ConfigError: the model has other tensors.
    """
    own_memory(model)
    fill(model, checkpoint.tensors("model.safetensors"))


def fill(model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Copies `tensors` into `model`. Raises ConfigError if these are not all that it has."""
    try:
        model.load_state_dict(tensors)
    except RuntimeError as error:
        first, *more = str(error).splitlines()[1:] or [str(error)]
        others = f" (and {len(more)} more)" if more else ""
        raise ConfigError(
            "the model is not the one of the checkpoint, so its code has changed: "
            f"{first.strip().rstrip('.')}{others}. Restore the code, or train the new model under "
            "another --name."
        ) from error
