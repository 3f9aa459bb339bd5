"""The `Task` protocol: the extension point for your own model, data and loss."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Literal, Protocol

from raytrain_ddp.data.loading.sources import Batch, Data

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torchmetrics import Metric


class Task(Protocol):
    """A model, its data, its loss and its metrics. Subclass it; the constructor receives the config
    and `task_options` as keyword arguments.

    Each worker builds its own task, and all must be equal: torch's, numpy's and Python's generators
    are seeded with the run's seed before the constructor, `model()`, `train_data()` and
    `eval_data()`.

    It may also have these methods:

    - ``optimizer(model)`` returns any `torch.optim.Optimizer` that needs no closure, or parameter
      groups for the configured one. A group's ``lr`` is its peak.
      Or several by name, each for its own parameters (a GAN), which take turns in each step: each
      makes ``loss(model, batch, name)`` smaller, while all other parameters are frozen.
    - ``turns(step)`` returns the names of the optimizers that take a turn in `step` (from 0), in
      order; all, if there is no such method.
    - ``schedule(step)`` returns the factor of these learning rates in `step` (from 0), or one for
      each parameter group, instead of ``--schedule.*``.
    - ``predict(model, batch)`` returns what ``raytrain predict`` writes for a batch of the data: a
      dict of tensors or lists by name, with an entry for each sample.
    - ``after_step(model, step)`` follows each update that was applied, once for all slots, without
      gradients; `step` is from 1. It may change weights and buffers, equally on all workers.
    """

    monitor: str = "loss"
    """The metric by which the best checkpoint is chosen."""
    goal: Literal["min", "max"] = "min"
    """Whether a smaller ("min") or larger ("max") `monitor` is better."""
    unit: str = "samples"
    """What the display calls samples."""

    def model(self) -> nn.Module:
        """The model, on the CPU. Modules in evaluation mode stay in it."""

    def train_data(self) -> Data:
        """The training set."""

    def eval_data(self) -> Data | None:
        """The evaluation set; None: the run is not evaluated."""

    def loss(
        self, model: nn.Module, batch: Batch
    ) -> Tensor | tuple[Tensor, Mapping[str, Tensor | float]]:
        """The mean loss over the batch's samples, shape (); `batch` is on the model's device.

        Or (loss, scalars): a dict of means over the samples by name, logged with the loss. The
        names must be the same in each step.

        Draw random numbers only from torch's, numpy's or Python's global generators: they are
        seeded for each micro-batch, also in `evaluate`.
        """

    def metrics(self) -> dict[str, Metric]:
        """New torchmetrics metrics by name, or a MetricCollection; `monitor` must be a number."""

    def evaluate(self, model: nn.Module, batch: Batch, metrics: Mapping[str, Metric]) -> None:
        """Updates each metric with one batch. Called without gradients, in evaluation mode."""
