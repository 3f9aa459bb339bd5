"""Checks that all ranks have the same data, and that a resumed run has the same data as before."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from raytrain_ddp import user_code
from raytrain_ddp.checkpoint.store import Checkpoint
from raytrain_ddp.config.train_config import TrainConfig
from raytrain_ddp.data.formats.labels import some_names, were_numbers
from raytrain_ddp.data.loading.sources import Data
from raytrain_ddp.errors import DataError
from raytrain_ddp.training.runtime.world import World, broadcast

_KEY, _CODE = "data", "code"  # in a checkpoint's state.json


@dataclass(frozen=True)
class RunIdentity:
    """What a checkpoint records about the data and the user's code.

    Args:
        train, eval: fingerprints; "" if there is no evaluation set.
        train_rows, eval_rows: the number of rows of each set.
        classes: class names, if the task has any.
        code: SHA-256 of each module of the user that the config names, by module name.
        image_size: side of the training images as they are stored, in pixels; 0: unknown.
    """

    train: str
    eval: str
    train_rows: int
    eval_rows: int
    classes: tuple[str, ...]
    code: Mapping[str, str]
    image_size: int = 0

    @staticmethod
    def of(config: TrainConfig, data: Data, eval_data: Data | None, task: Any) -> RunIdentity:
        return RunIdentity(
            data.source.fingerprint(),
            eval_data.source.fingerprint() if eval_data else "",
            data.rows,
            eval_data.rows if eval_data else 0,
            _names(task.class_names),
            user_code.hashes(config.task, config.model.name),
            task.stored_image_size,
        )

    def document(self) -> dict[str, Any]:
        """The part of a checkpoint's state.json that holds this."""
        values = {**asdict(self), "classes": list(self.classes)}
        return {_CODE: dict(values.pop("code")), _KEY: values}

    def require_alike(self, world: World) -> None:
        """All ranks take part.

        Raises:
            DataError: this rank has different data than rank 0.
        """
        first: RunIdentity = broadcast(self, world)
        for what, mine, theirs, rows in (
            ("training data", self.train, first.train, self.train_rows),
            ("evaluation data", self.eval, first.eval, self.eval_rows),
            ("classes", self.classes, first.classes, 0),
        ):
            if mine != theirs:
                size = f" ({rows} rows)" if rows else ""
                raise DataError(
                    f"rank {world.of_run(world.rank)} has different {what}{size} than rank "
                    f"{world.of_run(0)}: all nodes need the same files."
                )

    def require_same(self, checkpoint: Checkpoint) -> None:
        """Raises DataError if the checkpoint was made with different data, and names them."""
        before = checkpoint.manifest.data_fingerprint
        document = json.loads(checkpoint.read("state.json"))
        if before != self.train:
            raise _other("training", self.train_rows, self.train, before, checkpoint)
        kept = document.get(_KEY)
        if kept is None:  # an older checkpoint
            return
        if kept["eval"] != self.eval:
            raise _other("evaluation", self.eval_rows, self.eval, kept["eval"], checkpoint)
        names, mine = kept["classes"], list(self.classes)
        if names and names != mine and not were_numbers(names, mine):
            raise DataError(
                f"the training data are the same, but have {some_names(mine)}; {checkpoint.name} "
                f"has {some_names(names)}. Restore data.classes or README.md; or, if this version "
                "reads as text what was read as numbers, start a new run with another --name."
            )


def _names(given: Any) -> tuple[str, ...]:
    """Class names, if these are any: a user's task may use `class_names` for anything."""
    return tuple(map(str, given)) if isinstance(given, (list, tuple)) else ()


def _other(what: str, rows: int, now: str, before: str, checkpoint: Checkpoint) -> DataError:
    remedy = "restore them, or start a new run with another --name."
    if not now:
        return DataError(
            f"there are no {what} data, but {checkpoint.name} was made with some: {remedy}"
        )
    those = f"those of {checkpoint.name} ({before[:12]})"
    there = those if before else f"{checkpoint.name}, which was made without any"
    return DataError(
        f"the {what} data ({rows} rows, fingerprint {now[:12]}) differ from {there}: {remedy}"
    )
