"""Metrics over chunks: one merge tree on any number of workers, little memory, all values kept."""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import Group
from tiny import CLASSES, EVAL_ROWS, TinyNet, TinyTask, tiny_config
from torch import Tensor, nn

from raytrain_ddp import TrainConfig, fit_locally
from raytrain_ddp.checkpoint.run_folder import read_history, run_storage
from raytrain_ddp.config.sections import ComputeConfig, EvalConfig
from raytrain_ddp.data.loading.loader import LoaderThreads
from raytrain_ddp.data.loading.sources import Batch
from raytrain_ddp.data.order import items_of_rank
from raytrain_ddp.evaluate import main as evaluate_main
from raytrain_ddp.events import Eval
from raytrain_ddp.records import json_of, to_record
from raytrain_ddp.training.build import Build
from raytrain_ddp.training.evaluation import MAX_NUMBERS, TreeMetrics, evaluate, tables
from raytrain_ddp.training.runtime.world import World


class TracedMetric:
    """A metric whose state records the order of merges."""

    def __init__(self) -> None:
        self.metric_state: dict[str, Any] = {"tree": []}

    def to(self, _: object) -> None: ...
    def reset(self) -> None:
        self.metric_state = {"tree": []}

    def update(self, chunk: int) -> None:
        self.metric_state = {"tree": [chunk]}

    def merge_state(self, other: Mapping[str, Any]) -> None:
        mine, theirs = self.metric_state["tree"], other["tree"]
        self.metric_state = {"tree": [[*theirs, *mine]] if mine else theirs}

    def compute(self) -> Tensor:
        return torch.tensor(0.0)


def merge_tree(rank: int, size: int, chunks: int, empty: list[int]) -> Any:
    """The merge tree of a worker; `empty` chunks have no samples."""
    world = World(rank, size, rank, torch.device("cpu"), threads=1)
    scores = TreeMetrics(TinyTask(TrainConfig()), {"loss": TracedMetric()}, world.device)
    for chunk in items_of_rank(chunks, size, rank):
        scores.reset()
        scores.given["loss"].update(chunk)
        scores.take(chunk, None if chunk in empty else scores.state())
    scores.values(world)
    return scores.given["loss"].metric_state["tree"]


@pytest.mark.parametrize(
    ("chunks", "empty"), [(1, []), (2, []), (7, []), (13, [0, 5, 12]), (100, [3]), (3, [0, 1, 2])]
)
def test_states_are_merged_along_the_same_tree_on_any_number_of_workers(
    chunks: int, empty: list[int], workers: Group
):
    found = [tree for size in (1, 2, 3) for tree in workers(size, merge_tree, chunks, empty)]
    assert found == [found[0]] * 6
    flat = json.dumps(found[0]).replace("[", "").replace("]", "")
    left = [chunk for chunk in range(chunks) if chunk not in empty]
    assert [int(each) for each in flat.split(",") if each.strip()] == left
    if chunks == 7:
        assert found[0] == [[[[0, 1], [2, 3]], [[4, 5], 6]]]


class Collected(TinyTask):
    """A MetricCollection, alone or in a dict, or separate metrics; not all values are scalars."""

    def __init__(self, config: TrainConfig, form: str = "dict", **options: Any) -> None:
        super().__init__(config, **options)
        self._form = form

    def metrics(self) -> Any:
        from torchmetrics import MeanMetric, MetricCollection
        from torchmetrics.classification import (
            MulticlassAccuracy,
            MulticlassAUROC,
            MulticlassConfusionMatrix,
            MulticlassPrecision,
        )

        made = {
            "accuracy": MulticlassAccuracy(CLASSES),
            "precision": MulticlassPrecision(CLASSES),
            "classes": MulticlassAccuracy(CLASSES, average=None),
            "confusion": MulticlassConfusionMatrix(CLASSES),
            "auroc": MulticlassAUROC(CLASSES),  # its states are lists of all predictions
        }
        if self._form == "collection":
            return MetricCollection(made)
        if self._form == "inside":
            return {"loss": MeanMetric(), "all": MetricCollection(made, prefix="my_")}
        return {"loss": MeanMetric(), **made}

    def evaluate(self, model: nn.Module, batch: Any, metrics: Any) -> None:
        logits = model(batch["x"])
        if "loss" in metrics:
            loss = nn.functional.cross_entropy(logits, batch["y"], reduction="none")
            metrics["loss"].update(loss)
        if self._form == "collection":
            metrics.update(logits, batch["y"])
        elif self._form == "inside":
            metrics["all"].update(logits, batch["y"])
        else:
            for name in metrics.keys() - {"loss"}:
                metrics[name].update(logits, batch["y"])


def evaluate_form(rank: int, size: int, form: str, rows: int) -> dict[str, Any]:
    """The values, as texts."""
    torch.manual_seed(3)
    world = World(rank, size, rank, torch.device("cpu"), threads=1)
    config = TrainConfig(eval=EvalConfig(micro_batch=7))
    build = Build(config, world, Collected(config, form, eval_rows=rows))
    build.model = model = TinyNet()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torchmetrics on classes without a sample
        values = evaluate(build, LoaderThreads(2))
    assert model.training
    assert all(torch.equal(t, before[name]) for name, t in model.state_dict().items())
    return {name: str(value.tolist()) for name, value in values.items()}


@pytest.mark.parametrize("rows", [EVAL_ROWS, 2])
def test_evaluation_gives_bitwise_equal_metrics_on_1_2_and_3_workers_as_a_collection_or_apart(
    rows: int, workers: Group
):
    """Promise 2, also with a remainder or fewer chunks than workers; sums, counts, and lists.
    Compute groups of a collection depend on a worker's first batch."""
    apart = workers(1, evaluate_form, "dict", rows)[0]
    for size in (1, 2, 3):
        for form, before in (("dict", ""), ("collection", ""), ("inside", "all/my_")):
            for found in workers(size, evaluate_form, form, rows):
                assert found.pop("loss", apart["loss"]) == apart["loss"]
                expected = {f"{before}{n}": v for n, v in apart.items() if n != "loss"}
                assert found == expected


def test_the_log_has_the_shape_of_large_values_and_null_for_nonfinite_ones(tmp_path: Path):
    large = torch.zeros(MAX_NUMBERS + 1)
    assert tables({"one": torch.ones(()), "large": large}) == {"large": {"shape": [len(large)]}}
    line = json_of(to_record(Eval(3, tables={"c": [[1.0, math.nan], [math.inf, 2.0]]})))
    assert json.loads(line)["tables"] == {"c": [[1.0, None], [None, 2.0]]}


def test_all_values_are_in_the_log_and_written_by_the_command_evaluate(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    config = tiny_config(tmp_path, "run", epochs=1, task="test_evaluation:Collected")
    result = fit_locally(config)
    assert result.status == "finished"
    assert set(result.last) == {"step", "loss", "accuracy", "precision", "auroc"}
    (logged,) = [r for r in read_history(run_storage(config)) if r["kind"] == "eval"]
    assert {"step": 10, **logged["metrics"]} == result.last
    assert len(logged["tables"]["classes"]) == CLASSES
    assert sum(map(sum, logged["tables"]["confusion"])) == EVAL_ROWS

    out = tmp_path / "values.json"
    assert evaluate_main([str(tmp_path / "run"), "--device", "cpu", "--out", str(out)]) == 0
    assert "confusion" in capsys.readouterr().out
    reported = json.loads(out.read_text())
    assert reported["samples"] == EVAL_ROWS
    assert reported["metrics"]["confusion"] == logged["tables"]["confusion"]
    assert reported["metrics"]["accuracy"] == pytest.approx(result.last["accuracy"])


class RecordsDtypes(TinyTask):
    """Records the dtype in which the model computes in evaluations."""

    types: list[torch.dtype] = []  # noqa: RUF012

    def evaluate(self, model: nn.Module, batch: Batch, metrics: Mapping[str, Any]) -> None:
        super().evaluate(model, batch, metrics)
        self.types.append(model(batch["x"]).dtype)


@pytest.mark.parametrize(
    ("precision", "dtype"), [("bf16", torch.bfloat16), ("fp32", torch.float32)]
)
def test_evaluations_compute_in_the_precision_of_the_training(
    precision: Any, dtype: torch.dtype, tmp_path: Path
):
    """Including the command `evaluate`."""
    RecordsDtypes.types.clear()
    compute = ComputeConfig(precision=precision)
    config = tiny_config(
        tmp_path, "run", task="test_evaluation:RecordsDtypes", steps=1, compute=compute
    )
    assert fit_locally(config).step == 1
    assert evaluate_main([str(tmp_path / "run")]) == 0
    assert {*RecordsDtypes.types} == {dtype}
