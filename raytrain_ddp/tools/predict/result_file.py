"""Outputs as tables, with a row for each row of the input: how the parts are made, in this process
or by workers of a cluster, and the file, of which parts are kept in a hidden folder until it is
complete.

.NAME.predicting/            see `Staging`
  part-00000000.parquet      the rows of a few chunks
"""

from __future__ import annotations

import json
import socket
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from pyarrow import csv
from torch import Tensor

from raytrain_ddp.checkpoint.run_folder import config_of, find_checkpoint
from raytrain_ddp.data.loading.loader import LoaderThreads
from raytrain_ddp.errors import (
    ConfigError,
    DataError,
    PreflightError,
    RaytrainError,
    TaskError,
    first_line,
)
from raytrain_ddp.files import replace_with
from raytrain_ddp.ray_backend.task_transfer import import_paths
from raytrain_ddp.ray_backend.worker import enter_folder
from raytrain_ddp.tools.inference.inputs import Column, open_input
from raytrain_ddp.tools.inference.loaded_model import Outputs, columns_of, loaded, outputs
from raytrain_ddp.tools.staging import Staging, different
from raytrain_ddp.training.runtime.world import World, choose_device, set_up

if TYPE_CHECKING:
    from raytrain_ddp.tools.predict.__main__ import PredictArgs

_ROWS_PER_PART = 2048
_DECIDING = ("image_column", "image_size", "top", "probabilities", "layer")
_MAX_RETRIES = 2  # per part
_MAX_PARTS = 4  # per call; fewer at the end, so that all workers end together
_START_S = 300.0  # time limit for a worker to start, while none is ready
_KEPT = "Finished work is kept: the same command continues."

Part = tuple[int, Any]  # its number and its table


class PartMaker:
    """The model and the rows of a job, opened in this process.

    Args:
        job: the command, with the folder or URI of one checkpoint as its run; the same on all
            nodes. Its inputs are relative to the driver's working folder.
        threads: that compute on CPUs, and that load images.

    Attributes:
        parts: their number; each has `_ROWS_PER_PART` rows, rounded down to whole batches.

    Raises:
        ConfigError, DataError, CheckpointError: the job cannot be done here.
    """

    def __init__(self, job: PredictArgs, device: torch.device, threads: int) -> None:
        self._job, self._threads = job, threads
        found = find_checkpoint(job.run)
        config = config_of(found)
        set_up(World(0, 1, device.index or 0, device, threads), config.compute)
        self.model = model = loaded(found, config, device)
        self._bad: dict[int, str] = {}
        note_bad, size = self._bad.__setitem__, job.image_size or 0
        self.given = open_input(job.inputs, model, note_bad, job.image_column, size)
        self.rows = self.given.data.rows
        classes = len(model.class_names) * model.classes(1)
        if job.top > max(1, classes) or (job.probabilities and not classes):
            given = f"--top {job.top}" if job.top > 1 else "--probabilities"
            raise ConfigError(f"{given} has no effect: the run predicts {classes} classes.")
        self._said = model.class_names, model.classes(job.top), job.probabilities
        self._form = flat if str(job.out).lower().endswith(".csv") else list
        self._batch = job.batch_size or config.eval_micro_batch
        self._each = max(1, _ROWS_PER_PART // self._batch)  # batches of a part
        self.parts = -(-self.rows // (self._each * self._batch))

    def plan(self) -> dict[str, Any]:
        """Everything that decides the bytes of the output, except the kind of device."""
        weights = self.model.checkpoint.manifest.files["model.safetensors"].sha256
        flags = {name: getattr(self._job, name) for name in _DECIDING}
        source = {"input": self.given.data.source.fingerprint(), "rows": self.rows}
        return {"weights": weights, **source, **flags, "batch_size": self._batch}

    def rows_of(self, part: int) -> int:
        size = self._each * self._batch
        return min(size, self.rows - part * size)

    def made(
        self, parts: Sequence[int], tell: Callable[[int], object] = lambda _: None
    ) -> Generator[Part, None, None]:
        """Yields each of these parts, in order.

        Args:
            tell: called with the number of rows after each batch.

        Raises:
            ConfigError, DataError, TaskError: see `outputs`.
        """
        each, last = self._each, -(-self.rows // self._batch)
        wanted = [n for part in parts for n in range(part * each, min(part * each + each, last))]
        given = wanted, self._bad, LoaderThreads(self._threads), self._batch, self._job.layer
        tables = []
        for done in outputs(self.model, self.given.data, *given):
            places, said = self.given.places(done.rows), columns_of(done.values, *self._said)
            tables.append(table_of(done, self._form(places), self._form(said), self._bad))
            tell(len(done.rows))
            part, place = divmod(done.rows.start // self._batch, each)
            if place == each - 1 or done.rows.stop == self.rows:
                yield part, joined(tables)
                tables = []


class Places(NamedTuple):
    """Where workers run: their number, and the share of its node that each has."""

    workers: int
    cpus: int
    device: str


def places_for(nodes: Sequence[Mapping[str, float]], workers: int | None, device: str) -> Places:
    """`workers` that share nodes with these resources; by default one for each GPU or, without
    GPUs, for each node.

    Raises:
        PreflightError: there is no such device.
    """
    with_gpus = [n for n in nodes if n.get("GPU", 0) >= 1 and device in ("auto", "cuda")]
    usable = with_gpus or [n for n in nodes if n.get("CPU", 0) >= 1 and device in ("auto", "cpu")]
    if not usable:
        raise PreflightError(f"--device {device}: no node of the cluster has such a device.")
    gpus = [int(node["GPU"]) for node in with_gpus]
    count = workers or sum(gpus) or len(usable)
    on_a_node = max(gpus, default=-(-count // len(usable)))
    cpus = int(min(node.get("CPU", 0) for node in usable) // on_a_node)
    return Places(count, cpus, "cuda") if gpus else Places(count, max(1, cpus), "cpu")


class PartActor:
    """A worker, which has the model on its device.

    Args:
        plan: the plan of the driver; `folder` and the import `paths` are also the driver's.
    """

    def __init__(
        self,
        job: PredictArgs,
        plan: Mapping[str, Any],
        places: Places,
        folder: str,
        paths: Sequence[str],
    ) -> None:
        self._job, self._plan, self._places = job, plan, places
        enter_folder(folder, paths)

    @cached_property
    def _maker(self) -> PartMaker:
        device, threads = choose_device(self._places.device), max(1, self._places.cpus)
        try:
            maker = PartMaker(self._job, device, threads)
            if changes := "; ".join(different(self._plan, maker.plan())):
                raise DataError(f"sees different files than this machine ({changes}).")
        except RaytrainError as error:
            remedy = "All nodes must see the same files: use a shared folder or URIs."
            raise type(error)(f"node {socket.gethostname()}: {error} {remedy}") from None
        return maker

    def made(self, parts: Sequence[int]) -> list[Part]:
        """These parts; raises RaytrainError, naming the node, if the job cannot be done here."""
        return [*self._maker.made(parts)]


def made_on_cluster(
    job: PredictArgs, maker: PartMaker, places: Places, parts: Sequence[int]
) -> Generator[Part, None, None]:
    """Yields these parts, in any order. Close it to end the workers.

    Raises:
        RaytrainError: the job cannot be done, or a worker dies again and again.
    """
    import ray

    restarts = {"max_restarts": -1, "max_task_retries": _MAX_RETRIES}  # retries of each call
    gpus = int(places.device == "cuda")
    kind = ray.remote(num_cpus=places.cpus, num_gpus=gpus, **restarts)(PartActor)
    given = job, maker.plan(), places, str(Path.cwd()), import_paths(maker.model.config)
    started = (kind.remote(*given) for _ in range(min(places.workers, len(parts))))
    calls = {actor.made.remote([]): actor for actor in started}
    waiting, begun = deque(parts), 0
    try:
        while waiting or begun:
            ready, _ = ray.wait([*calls], timeout=None if begun else _START_S)
            if not ready:
                raise PreflightError(
                    f"no worker started on the cluster within {_START_S:g} s: `ray status` shows "
                    f"what it lacks. {_KEPT}"
                )
            done, actor = ray.get(ready[0]), calls.pop(ready[0])
            begun -= len(done)
            share = min(len(waiting), max(1, len(waiting) // (2 * places.workers)), _MAX_PARTS)
            if share:  # a worker without parts ends, and makes room for one that restarts
                calls[actor.made.remote([waiting.popleft() for _ in range(share)])] = actor
                begun += share
            yield from done
    except ray.exceptions.RayTaskError as error:
        raise error.cause from None
    except ray.exceptions.RayError as error:
        text = f"a worker died {_MAX_RETRIES + 1} times: {first_line(error)}. {_KEPT}"
        raise RaytrainError(text) from None
    finally:
        for actor in calls.values():
            with suppress(Exception):  # the actor or the cluster is lost
                ray.kill(actor)


ERROR = "error"
_ONE_OF = {"probabilities": "probability", "values": "value"}


class ResultFile(Staging):
    """The file `out`. Nothing is written before `held()`.

    Raises:
        ConfigError: the format is unknown, there is no such folder, or the file exists already.
    """

    def __init__(self, out: Path, overwrite: bool = False) -> None:
        super().__init__(out, "predicting", f"--out {out}")
        self._form = out.suffix.lower()
        if self._form not in _WRITERS:
            raise ConfigError(f"--out {out}: must end with .parquet or .csv.")
        self.require_place(overwrite, "is a folder" if out.is_dir() else "")

    def part(self, number: int) -> Path:
        return self.folder / f"part-{number:08d}.parquet"

    def write_part(self, number: int, table: Any) -> None:
        """Raises ConfigError if a column cannot be in the file."""
        lists = [field.name for field in table.schema if pa.types.is_nested(field.type)]
        if lists and self._form == ".csv":
            raise ConfigError(f"--out {self.out}: the column {lists[0]!r} has lists: use .parquet.")
        with self.writing(), replace_with(self.part(number), self.folder) as temp:
            pq.write_table(table, temp, compression="zstd")

    def complete(self, parts: int, about: Mapping[str, str]) -> int:
        """Writes the file from all parts, in order, a part in memory at a time; returns how many
        rows cannot be read."""
        schemas = [pq.read_schema(self.part(number)) for number in range(parts)]
        whole = joined([schema.empty_table() for schema in schemas])
        schema, bad = whole.schema.with_metadata(about), 0
        with self.writing(), _WRITERS[self._form](self.result, schema) as writer:
            for number in range(parts):
                table = joined([whole, pq.read_table(self.part(number))])
                writer.write_table(table)
                bad += len(table) - table[ERROR].null_count
        self.finish()
        return bad


def _parquet(path: Path, schema: Any) -> Any:
    return pq.ParquetWriter(path, schema, compression="zstd")


_WRITERS = {".parquet": _parquet, ".csv": csv.CSVWriter}


def table_of(
    chunk: Outputs, places: Iterable[Column], said: Iterable[Column], bad: Mapping[int, str]
) -> Any:
    """The rows of a chunk: `places`, what the model says of them, and the errors of bad ones.

    Args:
        said: what the model says of the rows without an error.

    Raises:
        TaskError: a value of the task cannot be a column.
    """
    where = {row: place for place, row in enumerate(chunk.kept)}
    chosen = pa.array([where.get(row) for row in chunk.rows], pa.int32())
    errors = pa.array([bad.get(row) for row in chunk.rows], pa.string())
    columns = [(name, _array(name, each), names) for name, each, names in places]
    columns += [(name, _array(name, each).take(chosen), names) for name, each, names in said]
    columns.append((ERROR, errors, ()))
    fields = [
        pa.field(name, array.type, metadata={"names": json.dumps(names)} if names else None)
        for name, array, names in columns
    ]
    return pa.table([array for _, array, _ in columns], schema=pa.schema(fields))


def flat(columns: Iterable[Column]) -> Iterator[Column]:
    """The same columns, with one for each number that has a name, such as ``probability:cat``."""
    for name, value, names in columns:
        for place, one in enumerate(names):
            yield f"{_ONE_OF.get(name, name)}:{one}", torch.as_tensor(value)[:, place], ()
        if not names:
            yield name, value, ()


def _array(name: str, value: Any) -> Any:
    if isinstance(value, Tensor):
        numbers = value.numpy()
        value = numbers if numbers.ndim == 1 else [*numbers.reshape(len(numbers), -1)]
    else:  # bytes of a path that are not valid UTF-8 are escaped
        odd = "backslashreplace"
        value = [e.encode("utf-8", odd).decode() if isinstance(e, str) else e for e in value]
    try:
        return pa.array(value)
    except (pa.ArrowInvalid, pa.ArrowTypeError) as error:
        raise TaskError(f"the value of {name!r} cannot be a column: {error}.") from None


def joined(tables: Sequence[Any]) -> Any:
    """One table with the columns of all tables, in the order of the widest, with types that hold
    all values. Columns that a table lacks are null: for example, all outputs if all rows are bad.

    Raises:
        TaskError: a column has values of types that have no common type.
    """
    widest = max(tables, key=lambda table: len(table.schema))
    try:
        made = pa.concat_tables([widest[:0], *tables], promote_options="permissive")
    except (pa.ArrowInvalid, pa.ArrowTypeError) as error:
        raise TaskError(f"the outputs cannot be stored as columns: {error}.") from None
    return made.combine_chunks()
