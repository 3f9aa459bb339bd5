"""A resume compares the data and the user's code with those of the checkpoint."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from raytrain_ddp.config.train_config import TrainConfig
from raytrain_ddp.data.array_source import ArraySource
from raytrain_ddp.data.loading.sources import Data
from raytrain_ddp.errors import DataError
from raytrain_ddp.training.run_identity import RunIdentity


class FakeCheckpoint:
    """The part of a checkpoint that `RunIdentity` needs."""

    name = "step-00000005-a0001"

    def __init__(self, train: str, document: dict[str, Any]) -> None:
        self.manifest = self
        self.data_fingerprint, self._document = train, document

    def read(self, name: str) -> bytes:
        assert name == "state.json"
        return json.dumps({"step": 5, **self._document}).encode()


class TaskWithClasses:
    class_names = ("ape", "bat")


def data_of(*values: int) -> Data:
    return Data(ArraySource({"x": np.array(values)}), lambda records, _: records)


def checkpoint_of(identity: RunIdentity) -> Any:
    return FakeCheckpoint(identity.train, identity.document())


TRAIN, EVAL = data_of(1, 2), data_of(3)
CONFIG = TrainConfig()
BEFORE = RunIdentity.of(CONFIG, TRAIN, EVAL, TaskWithClasses())


def test_the_same_data_are_accepted_after_a_round_trip_of_the_document():
    RunIdentity.of(CONFIG, TRAIN, EVAL, TaskWithClasses()).require_same(checkpoint_of(BEFORE))
    alone = RunIdentity.of(CONFIG, TRAIN, None, object())
    alone.require_same(checkpoint_of(alone))


@pytest.mark.parametrize(
    ("now", "named"),
    [
        (RunIdentity.of(CONFIG, data_of(1, 4), EVAL, TaskWithClasses()), "training data (2 rows"),
        (
            RunIdentity.of(CONFIG, TRAIN, data_of(3, 3), TaskWithClasses()),
            "evaluation data (2 rows",
        ),
        (RunIdentity.of(CONFIG, TRAIN, None, TaskWithClasses()), "no evaluation data"),
        (replace(BEFORE, classes=("bat", "ape")), "2 classes: bat, ape"),
    ],
)
def test_fault_29_the_data_set_that_differs_is_named(now: RunIdentity, named: str):
    with pytest.raises(DataError) as caught:
        now.require_same(checkpoint_of(BEFORE))
    assert named in str(caught.value)


def test_a_checkpoint_without_evaluation_data_is_not_resumed_with_evaluation_data():
    before = RunIdentity.of(CONFIG, TRAIN, None, TaskWithClasses())
    with pytest.raises(DataError, match="evaluation data"):
        BEFORE.require_same(checkpoint_of(before))
