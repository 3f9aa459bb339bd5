"""The files of a run that has ended, and commands that may follow it."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

from raytrain_ddp.checkpoint.run_folder import CURVES_FILE, LOGS, METRICS_FILE, TENSORBOARD
from raytrain_ddp.config.train_config import IMAGES, TrainConfig
from raytrain_ddp.driver.result import FitResult
from raytrain_ddp.uri import below


def next_steps(config: TrainConfig, result: FitResult, flags: str) -> list[tuple[str, str]]:
    """(title, path or command) of each line at the end of a run.

    Args:
        flags: added to each training command, as ``--local``.
    """
    name, place, word = config.name, result.path, shlex.quote(result.path)
    again = f"python -m raytrain_ddp.fit {word}/config.toml{flags}"  # of a local run
    commands = []
    # No command can load an object, or a class from a script, a notebook or a function.
    is_importable = re.search(r"^__main__:|<locals>|<lambda>|\)$", config.task) is None
    if result.monitor and is_importable:
        commands.append(("evaluate", f"python -m raytrain_ddp.evaluate {word}"))
    if result.monitor and config.task == IMAGES:
        out = shlex.quote(f"{name}.csv")
        commands.append(("predict", f"raytrain predict {word} --out {out}"))
    if not is_importable:
        commands.append(("train longer", "run the same Python code again, with more epochs"))
    elif result.status == "interrupted":
        commands.append(("resume", again if "://" not in place else "the same command again"))
    elif "://" not in place:
        # Twice as long; a run may be longer than its config.
        epochs = max((record.get("epoch", 0) + 1 for record in result.history), default=1)
        longer = f"--epochs {2 * max(config.epochs, epochs)}"
        if config.steps:
            longer = f"--steps {2 * max(config.steps, result.step)}"
        commands.append(("train longer", f"{again} {longer}"))
        commands.append(("train again", f"{again} --name {shlex.quote(f'{name}-2')}"))
    commands.append(("report", f"raytrain report {word}"))
    if config.log.tensorboard and "://" not in place:
        commands.append(("see the curves", f"tensorboard --logdir {word}/{TENSORBOARD}"))
    paths = {"curves": below(place, CURVES_FILE), "metrics": below(place, METRICS_FILE)}
    if result.best_checkpoint:
        paths["best checkpoint"] = result.best_checkpoint
    if result.last_checkpoint:
        paths["last checkpoint"] = result.last_checkpoint
    if Path(place, LOGS).is_dir():
        paths["logs"] = f"{place}/{LOGS}"
    return [*paths.items(), *commands]
