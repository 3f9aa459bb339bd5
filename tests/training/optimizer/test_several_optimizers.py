"""Several optimizers that take turns: the DCGAN of examples/, killed, resized, and resumed; the
steps of a plain torch loop; and invalid tasks."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from logs import log_of
from processes import Died, Group
from tiny import ScriptedMembership, TinyTask, bits, newest, plain, run_tiny, tiny_config, weights
from torch import Tensor, nn

from raytrain_ddp.config.sections import (
    CheckpointConfig,
    ComputeConfig,
    DdpConfig,
    EmaConfig,
    OptimConfig,
    ScalingConfig,
    ScheduleConfig,
)
from raytrain_ddp.config.train_config import TrainConfig
from raytrain_ddp.data.order import EpochOrder, Plan
from raytrain_ddp.errors import TaskError
from raytrain_ddp.tasks.task_loading import check_task
from raytrain_ddp.training.optimizer.lr_schedule import learning_rate
from raytrain_ddp.training.optimizer.several_optimizers import Optimizers, turns_of
from raytrain_ddp.training.optimizer.task_optimizer import load_optimizer, optimizer_of
from raytrain_ddp.training.runtime.world import seed_slot

sys.path.insert(0, str(Path(__file__).parents[3] / "examples"))
from dcgan import DCGAN, GAN, digits

STEPS = 7  # per epoch; runs have two epochs


class StaticLoss(DCGAN):
    @staticmethod
    def loss(model: nn.Module, batch: Any, name: str) -> Any:  # type: ignore[override]
        return model(batch), name


class ClassmethodLoss(DCGAN):
    @classmethod
    def loss(cls, model: nn.Module, batch: Any, name: str) -> Any:  # type: ignore[override]
        return model(batch), name


class Watched(DCGAN):
    """The example with a scalar for tests and an optional nonfinite step."""

    def __init__(self, config: TrainConfig, width: str = "8", bad_step: int = 0) -> None:
        super().__init__(config, width)
        self.seen: list[Any] = []
        self.membership: ScriptedMembership | None = None
        self._bad_step = bad_step

    def model(self) -> nn.Module:
        self.made = super().model()
        return self.made

    def loss(self, model: nn.Module, batch: dict[str, Tensor], optimizer: str) -> Any:
        loss = super().loss(model, batch, optimizer)
        step = self.membership.step if self.membership is not None else 0
        bad = step and step == self._bad_step and optimizer == "discriminator"
        return (loss * torch.nan if bad else loss), {"seen": float(len(batch["image"]))}


class GeneratorEveryThirdStep(Watched):
    """The generator has a turn in every third step, and then it is first."""

    def turns(self, step: int) -> Sequence[str]:
        return ["generator", "discriminator"] if step % 3 == 2 else ["discriminator"]


class ClippedWeights(Watched):
    """Clips the weights of the discriminator, like a Wasserstein GAN."""

    def after_step(self, model: Any, step: int) -> None:
        for weight in model.discriminator.parameters():
            weight.clamp_(-0.05, 0.05)


def gan_config(folder: Path, name: str, **changes: Any) -> TrainConfig:
    made = {"epochs": 2, "limit_train_batches": STEPS, "schedule": ScheduleConfig("constant")}
    made |= {"checkpoint": CheckpointConfig(every_steps=3, every_s=0.0)}
    return tiny_config(folder, name, **(made | changes))


@pytest.mark.parametrize("kind", [Watched, GeneratorEveryThirdStep])
def test_a_dcgan_has_the_weights_of_a_plain_torch_loop(
    kind: type[Watched], workers: Group, tmp_path: Path
):
    """With one micro-batch per step."""
    config = gan_config(tmp_path, "ours", micro_batch=32)
    workers(1, run_tiny, plain(config), None, 0, 0, None, kind)

    torch.manual_seed(config.seed)
    model, data = GAN(8), digits("train")
    images, plan = torch.from_numpy(data.read(slice(None))["image"]), Plan(1437, 1, 32, 1, STEPS)
    optimizers = Watched(config).optimizer(model)
    for number in range(2 * STEPS):
        epoch, step = divmod(number, STEPS)
        rows = EpochOrder(data.blocks, "full", config.seed, epoch).at(
            np.arange(*plan.span(step, 0))
        )
        real = images[torch.from_numpy(rows)]
        names = kind.turns(None, number) if kind is GeneratorEveryThirdStep else [*optimizers]  # type: ignore
        for turn, name in enumerate(names):
            rate = learning_rate(config, number, STEPS) / config.optim.lr * 1e-3
            optimizers[name].param_groups[0]["lr"] = rate
            model.zero_grad()
            seed_slot(torch.device("cpu"), config.seed, number, 2 * turn)
            drawn = model.generator(torch.randn(len(real), 32, 1, 1))
            if name == "discriminator":
                answers = torch.cat(
                    [model.discriminator(real), model.discriminator(drawn.detach())]
                )
                truth = torch.cat([torch.ones(len(real)), torch.zeros(len(real))])
                scale = 2.0
            else:
                answers, truth, scale = model.discriminator(drawn), torch.ones(len(real)), 1.0
            loss = nn.functional.binary_cross_entropy_with_logits(answers, truth) * scale
            loss.backward()
            optimizers[name].step()
    for key, tensor in model.state_dict().items():
        torch.testing.assert_close(weights(config)[key], tensor, rtol=1e-3, atol=2e-5)


@pytest.mark.parametrize("kind", [GeneratorEveryThirdStep, ClippedWeights])
def test_a_killed_and_resized_gan_ends_with_the_same_bits_if_exact(
    kind: type[Watched], workers: Group, tmp_path: Path
):
    """With a weight average, clipped gradients, and a refused turn."""
    made = {"exact": True, "ema": EmaConfig(decay=0.9)}
    optim = OptimConfig(clip_norm=1.0, nonfinite="skip")
    alone = gan_config(tmp_path, "alone", optim=optim, **made)
    workers(1, run_tiny, plain(alone), {"bad_step": 5}, 0, 0, None, kind)
    config = gan_config(tmp_path, "moved", optim=optim, **made)
    *_, last = workers.outcomes(3, run_tiny, plain(config), {"bad_step": 5}, 0, 8, None, kind)
    assert last == Died(9)
    ran = workers(2, run_tiny, plain(config), {"bad_step": 5}, 0, 0, None, kind)
    assert ran[0].start_step == 7
    assert bits(config) == bits(alone)
    assert newest(config).read("state.json") == newest(alone).read("state.json")
    assert newest(config).read("trained.safetensors") == newest(alone).read("trained.safetensors")
    assert str(losses(config)) == str(losses(alone))
    assert '"nonfinite": 1' in newest(alone).read("state.json").decode()


def losses(config: TrainConfig) -> list[dict[str, float]]:
    records = [record for record in log_of(config) if record["kind"] == "train"]
    return [{"loss": record["loss"], **record["scalars"]} for record in records]


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_with_ddp_a_stopped_and_resumed_gan_ends_with_the_same_bits(
    precision: str, workers: Group, tmp_path: Path
):
    changes = {"compute": ComputeConfig(precision=precision), "ddp": DdpConfig(compression="bf16")}
    whole = gan_config(tmp_path, "whole", **changes)
    ran = workers(3, run_tiny, plain(whole), None, 0, 0, None, GeneratorEveryThirdStep)
    assert len({worker.digest for worker in ran}) == 1
    config = gan_config(tmp_path, "stopped", **changes)
    for stop in (4, 9, 0):
        workers(3, run_tiny, plain(config), None, stop, 0, None, GeneratorEveryThirdStep)
    assert bits(config) == bits(whole)


def test_each_loss_is_logged_under_the_name_of_its_optimizer(workers: Group, tmp_path: Path):
    config = gan_config(tmp_path, "logged")
    workers(3, run_tiny, plain(config), None, 0, 0, None, GeneratorEveryThirdStep)
    found = losses(config)
    assert len(found) == 2 * STEPS
    for number, each in enumerate(found):
        assert each["discriminator/seen"] == 8
        due = number % 3 == 2
        assert (each["generator"] == each["generator"]) is due  # NaN without a turn
        total = each["discriminator"] + (each["generator"] if due else 0)
        assert each["loss"] == pytest.approx(total)


# ------------------------------------------------------------------ several as one


def test_several_optimizers_have_the_state_of_one_with_all_groups():
    model = GAN(4)
    task = DCGAN(TrainConfig())
    several = optimizer_of(task, model, TrainConfig())
    assert isinstance(several, Optimizers)
    networks = (model.discriminator, model.generator)
    groups = [{"params": [*network.parameters()]} for network in networks]
    one = torch.optim.Adam(groups, lr=1e-3, betas=(0.5, 0.999), fused=True)
    for optimizer in (several, one):
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
    assert str(several.state_dict()) == str(one.state_dict())
    other = optimizer_of(task, GAN(4), TrainConfig())
    load_optimizer(other, several.state_dict())
    assert str(other.state_dict()) == str(several.state_dict())


def task_with_optimizer(make: Any) -> DCGAN:
    task = DCGAN(TrainConfig(), width="4")
    task.optimizer = make  # type: ignore[method-assign]
    return task


Adam = torch.optim.Adam


@pytest.mark.parametrize(
    ("make", "reported"),
    [
        (lambda m: {}, "returned a dict of 0 items; expected a torch.optim.Optimizer"),
        (lambda m: {"one": Adam(m.generator.parameters())}, "dict of optimizers lacks discrim"),
        (
            lambda m: {"one": Adam(m.parameters()), "two": Adam(m.generator.parameters())},
            "dict of optimizers has generator.0.weight twice",
        ),
        (
            lambda m: dict.fromkeys(("one", "two"), Adam(GAN(4).parameters())),
            "dict of optimizers has parameters that are not the model's",
        ),
        (
            lambda m: {"one": Adam(m.generator.parameters()), "two": "adam"},
            "returned a str, 'adam'; expected a torch.optim.Optimizer",
        ),
    ],
)
def test_an_invalid_result_of_optimizer_is_refused_in_one_line(make: Any, reported: str):
    task = task_with_optimizer(make)
    with pytest.raises(TaskError) as raised:
        optimizer_of(task, task.model(), TrainConfig())
    (line,) = str(raised.value).splitlines()
    assert reported in line


def test_invalid_turns_and_losses_are_refused():
    model, task = GAN(4), DCGAN(TrainConfig(), "4")
    several = optimizer_of(task, model, TrainConfig())
    assert turns_of(task, several, [0])(0) == ("discriminator", "generator")
    for given, reported in (
        ([], "expected a list of some of discriminator, generator"),
        (["generater"], "Did you mean 'generator'"),
        ("generator", "expected a list"),
        (True, "expected a list"),
        ([["generator"]], "expected a list"),
    ):
        task.turns = lambda step, given=given: given if step == 3 else ["generator"]  # type: ignore
        with pytest.raises(TaskError, match="For step 3") as raised:
            turns_of(task, several, range(5))
        assert reported in str(raised.value)
    one = torch.optim.SGD(model.parameters())
    with pytest.raises(TaskError, match="has no effect: optimizer"):
        turns_of(task, one, [0])
    drawn = iter(["generator"] * 3 + ["discriminator"])
    task.turns = lambda step: [next(drawn)]  # type: ignore[attr-defined]
    with pytest.raises(TaskError, match=r"\['discriminator'\] for step 1, but \['generator'\]"):
        turns_of(task, several, range(3))(1)
    del task.turns  # type: ignore[attr-defined]
    with pytest.raises(TaskError, match=r"must take \(model, batch\), as there is one optimizer"):
        turns_of(task, one, [0])
    with pytest.raises(TaskError, match=r"must take .*, as optimizer.. returns several"):
        turns_of(TinyTask(TrainConfig()), several, [0])


def test_check_task_accepts_every_valid_signature_of_loss():
    check_task(DCGAN)
    check_task(DCGAN(TrainConfig()))
    for kind in (StaticLoss, ClassmethodLoss):
        check_task(kind)
        check_task(kind(TrainConfig()))

    class Odd(DCGAN):
        def loss(self) -> None: ...  # type: ignore[override]

    with pytest.raises(TaskError, match="it is called with"):
        check_task(Odd)


class Free(Adam):
    def train(self) -> None: ...

    def eval(self) -> None: ...


def test_an_optimizer_that_averages_weights_cannot_be_one_of_several():
    task = task_with_optimizer(
        lambda m: {"a": Free(m.generator.parameters()), "b": Adam(m.discriminator.parameters())}
    )
    with pytest.raises(TaskError, match="Free cannot be one of several"):
        optimizer_of(task, task.model(), TrainConfig())


def test_with_static_graphs_all_ranks_end_with_the_same_weights(workers: Group, tmp_path: Path):
    often = ScalingConfig(check_every_steps=1)
    config = gan_config(tmp_path, "static", ddp=DdpConfig(static_graph=True), scaling=often)
    ran = workers(3, run_tiny, plain(config), None, 0, 0, None, Watched)
    assert ran[0].digest == ran[1].digest == ran[2].digest
