"""The `Task` base class: the extension point for your own model, data and loss."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from raytrain_ddp.data.loading.sources import Batch, Data

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torchmetrics import Metric


class Task:
    """A model, its data, its loss and its metrics. Subclass it; the constructor receives the config
    and `task_options` as keyword arguments.

    Each worker builds its own task, and all must be equal: torch's, numpy's and Python's generators
    are seeded with the run's seed before the constructor, `model()`, `train_data()` and
    `eval_data()`.

    Each attribute that is None here may be a method of that name in a subclass.
    """

    monitor: str = "loss"
    """The metric by which the best checkpoint is chosen."""
    goal: Literal["min", "max"] = "min"
    """Whether a smaller ("min") or larger ("max") `monitor` is better."""
    unit: str = "samples"
    """What the display calls samples."""
    class_names: Sequence[str] = ()
    """Names of the classes, if there are any; a checkpoint records them."""
    pretrained: bool = True
    """False when `model()` is called: its weights are replaced by those of a checkpoint."""
    notes: Sequence[str] = ()
    """Lines that are shown before the first step; read after `model()`."""
    splits: Any = None
    """The `Splits` that the data come from, if any: the display summarizes them."""

    @property
    def stored_image_size(self) -> int:
        """Side length of the training images as they are stored, in pixels; 0: unknown."""
        return 0

    def model(self) -> nn.Module:
        """The model, on the CPU. Modules in evaluation mode stay in it."""
        raise NotImplementedError

    def train_data(self) -> Data:
        """The training set."""
        raise NotImplementedError

    def eval_data(self) -> Data | None:
        """The evaluation set; None: the run is not evaluated."""
        raise NotImplementedError

    def loss(
        self, model: nn.Module, batch: Batch
    ) -> Tensor | tuple[Tensor, Mapping[str, Tensor | float]]:
        """The mean loss over the batch's samples, shape (); `batch` is on the model's device.

        Or (loss, scalars): a dict of means over the samples by name, logged with the loss. The
        names must be the same in each step.

        Draw random numbers only from torch's, numpy's or Python's global generators: they are
        seeded for each micro-batch, also in `evaluate`.
        """
        raise NotImplementedError

    def metrics(self) -> dict[str, Metric]:
        """New torchmetrics metrics by name, or a MetricCollection; `monitor` must be a number."""
        raise NotImplementedError

    def evaluate(self, model: nn.Module, batch: Batch, metrics: Mapping[str, Metric]) -> None:
        """Updates each metric with one batch. Called without gradients, in evaluation mode."""
        raise NotImplementedError

    optimizer: Any = None
    """``optimizer(model)`` returns any `torch.optim.Optimizer` that needs no closure, or parameter
    groups for the configured one. A group's ``lr`` is its peak."""
    schedule: Any = None
    """``schedule(step)`` returns the factor of the learning rates in `step` (counted from 0), or a
    factor for each parameter group. It replaces ``--schedule.*``."""
    after_step: Any = None
    """``after_step(model, step)`` runs after each update that was applied, once for all slots,
    without gradients; `step` counts from 1. It may change weights and buffers, equally on all
    workers."""
    predict: Any = None
    """``predict(model, batch)`` returns what ``raytrain predict`` writes for a batch of the data: a
    dict of tensors or lists by name, with an entry for each sample."""
    per_class_metrics: Any = None
    """``per_class_metrics()`` returns metrics, as `metrics()` does, for ``raytrain evaluate
    --per-class``."""


class OwnLoop(Task):
    """A train function in place of a task; see `raytrain_ddp.launch`."""

    def __init__(self, train: Callable[[Any], object]) -> None:
        self.train = train
