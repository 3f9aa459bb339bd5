"""``raytrain COMMAND`` and ``python -m raytrain_ddp COMMAND``: all commands, by name."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from importlib import import_module
from typing import Any

from raytrain_ddp.config.process import run_command
from raytrain_ddp.config.train_config import TrainConfig
from raytrain_ddp.config.withdrawn import withdrawn
from raytrain_ddp.errors import ConfigError, did_you_mean
from raytrain_ddp.library_imports import protect

COMMANDS = {
    "fit": "Train a model: from a recipe, flags, or both",
    "evaluate": "Compute the metrics of a checkpoint",
    "predict": "Write the predictions of a checkpoint to a file",
    "export": "Export a checkpoint to ONNX, torch.export or safetensors",
    "run": "Run a torchrun script on Ray, unchanged",
    "sweep": "Train with many configs, and find the best",
    "convert": "Convert images to Parquet shards",
    "doctor": "Check a cluster before a run, or a run in progress",
    "report": "Write a report of runs, or a page of all, to an HTML file",
    "chaos": "Kill processes of a run, and compare the result",
}


def main(argv: Sequence[str]) -> int:
    """Returns the exit status of the command."""
    name, *rest = argv or ["--help"]
    if name in ("-h", "--help", "help"):
        if not rest:
            print(_help())
            return 0
        name, rest = rest[0], ["--help", *rest[1:]]
    if name in ("-V", "--version"):
        from importlib.metadata import version  # 40 ms

        print(f"raytrain_ddp {version('raytrain_ddp')}")
        return 0
    if name not in COMMANDS:
        hint = (
            withdrawn(name.lstrip("-"))
            or did_you_mean(name, COMMANDS)
            or f" The commands: {', '.join(COMMANDS)}."
        )
        raise ConfigError(f"there is no command {name!r}.{hint}")
    status: int = _module(name).main(rest)
    return status


def console_script() -> None:
    """The entry point of ``raytrain``. Modules are found in the current folder, as they are by
    ``python -m``."""
    if not getattr(sys.flags, "safe_path", False):
        with suppress(OSError):  # deleted; `run_command` reports it
            sys.path.insert(0, os.getcwd())
        protect()
    run_command(main)


def _module(name: str) -> Any:
    place = name if name in ("fit", "evaluate", "run") else f"tools.{name}.__main__"
    return import_module(f"raytrain_ddp.{place}")


def command_of(name: str) -> Any:
    """The flags of a command."""
    return _module(name).COMMAND


def parser() -> argparse.ArgumentParser:
    """All commands with their flags, for shtab, which makes shells complete them."""
    whole = argparse.ArgumentParser("raytrain")
    commands = whole.add_subparsers()
    for name, about in COMMANDS.items():
        command = commands.add_parser(name, help=about)
        for flag in command_of(name).flags(config=TrainConfig()):
            action = flag.add_to(command)
            if not flag.choices:  # files, as shtab.FILE
                action.complete = {"bash": "_shtab_compgen_files", "zsh": "_files"}
    return whole


def _help() -> str:
    commands = "\n".join(f"  {name:<10} {about}" for name, about in COMMANDS.items())
    return f"""usage: raytrain COMMAND [ARGUMENT ...]

Distributed PyTorch training on Ray.

{commands}

raytrain COMMAND --help shows the flags of a command, and --version the version."""


if __name__ == "__main__":
    run_command(main)
