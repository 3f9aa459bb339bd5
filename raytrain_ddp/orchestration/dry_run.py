"""``--dry-run``: what would be done, in numbers. Takes no worker and starts no Ray."""

from __future__ import annotations

from raytrain_ddp.config import TrainConfig
from raytrain_ddp.orchestration.naming import open_run
from raytrain_ddp.orchestration.preflight import check, is_complete
from raytrain_ddp.orchestration.resources import choose_layout, missing, this_machine
from raytrain_ddp.recipe import dumps, publishable


def dry_run(config: TrainConfig, default_name: str | None = None) -> str:
    """The resolved config, then the arithmetic that follows from it.

    Raises:
        RaytrainError: whatever `fit` would raise before it takes workers, but for their number.
    """
    run = open_run(check(config), default_name)
    config, manifest = run.config, run.manifest
    have = this_machine()
    layout = choose_layout(config, have)
    import torch

    from raytrain_ddp.data.plan import Plan, deal
    from raytrain_ddp.tasks.load import load_task
    from raytrain_ddp.training.optim import build_optimizer, learning_rate

    task = load_task(config)
    data, eval_data = task.train_data(), task.eval_data()
    repeats = config.augment.repeats
    plan = Plan(data.rows, config.slots, config.micro_batch, repeats)
    steps, per_epoch = config.epochs * plan.steps_per_epoch, plan.steps_per_epoch
    model = task.model()
    optimizer = build_optimizer(model, config.optim)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()  # makes the optimizer's state, which has most of a checkpoint's bytes
    size = _tensor_bytes(model.state_dict()) + _tensor_bytes(optimizer.state_dict())
    least = min(layout.least, layout.most)
    per_worker = [len(deal(config.slots, least, rank)) for rank in range(least)]
    rates = {
        f"{epoch:g}": learning_rate(config, min(steps - 1, int(epoch * per_epoch)), per_epoch)
        for epoch in _epochs_to_show(config)
    }
    times = f" x {repeats}" if repeats > 1 else ""
    lines = [
        dumps(publishable(config)).rstrip(),
        "",
        f"batch          {config.batch_size} = {config.slots} slots x {config.micro_batch} "
        f"{task.unit}",
        f"workers        {layout.said}, each {_resources(layout.per_worker)}, over "
        f"{layout.backend}; slots per worker: {', '.join(map(str, per_worker))}",
        f"training set   {data.rows} {task.unit}{times}, {per_epoch} steps an epoch (the last with "
        f"{plan.samples(per_epoch - 1)}), {steps} steps in {config.epochs} epochs",
        f"evaluation     {eval_data.rows if eval_data else 0} {task.unit}",
        "learning rate  " + ", ".join(f"epoch {e}: {r:.3g}" for e, r in rates.items()),
        f"model          {sum(p.numel() for p in model.parameters()):,} parameters",
        f"checkpoint     {size / 2**20:.1f} MiB, in {run.folder}",
    ]
    state = "would be new"
    if manifest is not None:
        done = is_complete(config, manifest)
        state = f"{'is complete' if done else 'would go on'} at step {manifest.step}"
    lines.append(f"run            {config.name} {state}{f' ({run.note})' if run.note else ''}")
    lacking = missing(layout, have)
    if lacking:
        lines.append(f"this machine lacks\n{lacking}")
    return "\n".join(lines)


def _tensor_bytes(state: object) -> int:
    import torch

    if isinstance(state, torch.Tensor):
        return state.numel() * state.element_size()
    if isinstance(state, dict):
        return sum(_tensor_bytes(value) for value in state.values())
    return sum(map(_tensor_bytes, state)) if isinstance(state, list) else 0


def _epochs_to_show(config: TrainConfig) -> list[float]:
    warmup = config.schedule.warmup_epochs
    points = {0.0, min(warmup, config.epochs), config.epochs / 2, float(config.epochs)}
    return sorted(points)


def _resources(per_worker: object) -> str:
    assert isinstance(per_worker, dict)
    return " + ".join(f"{amount:g} {name}" for name, amount in per_worker.items())
