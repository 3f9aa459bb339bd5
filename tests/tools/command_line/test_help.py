"""The help of the commands: short, complete, plain, and fast."""

from __future__ import annotations

import dataclasses
import os
import re
import subprocess
import sys
from importlib.metadata import version

import pytest
from processes import ENVIRONMENT

from raytrain_ddp.__main__ import COMMANDS, parser
from raytrain_ddp.config.recipe import flat
from raytrain_ddp.config.train_config import TrainConfig
from raytrain_ddp.evaluate import EvaluateArgs, ReadArgs
from raytrain_ddp.launcher.run_options import RunFlags

MOST_LINES, COLUMNS = 40, 80


def help_text(*argv: str, status: int = 0, **environ: str) -> str:
    """Standard output of ``raytrain ...`` at 80 columns; standard error if it fails."""
    done = subprocess.run(
        [sys.executable, "-m", "raytrain_ddp", *argv],
        env={**os.environ, **ENVIRONMENT, "COLUMNS": str(COLUMNS), **environ},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == status, done.stderr
    return done.stderr if status else done.stdout


@pytest.fixture(scope="module")
def short() -> dict[str, str]:
    """``raytrain COMMAND --help`` of each command."""
    return {name: help_text(name, "--help") for name in COMMANDS}


def test_the_short_help_fits_on_a_screen_and_is_plain(short: dict[str, str]):
    whole = help_text("fit", "--help-all")
    for name, text in short.items():
        lines = text.splitlines()
        assert len(lines) <= MOST_LINES, name
        assert lines[0].startswith(f"usage: raytrain {name}")
    for text in [*short.values(), whole, help_text("--help")]:
        assert re.search(r"[^\n -~]|None|STR\b", text) is None
        assert re.search(r" $", text, re.MULTILINE) is None
        assert max(map(len, text.splitlines())) <= COLUMNS


def test_the_short_help_has_the_most_used_flags_and_their_defaults(short: dict[str, str]):
    titles = re.findall(r"^(\w[\w ]+):$", short["fit"], re.MULTILINE)
    assert titles == [
        *("Data", "Model", "Optimization", "Scaling", "Run and checkpoints", "Instead of training"),
    ]
    for flag in ("data.source", "model.name", "epochs", "batch-size", "optim.lr", "dry-run"):
        assert f"  --{flag}" in short["fit"]
    assert "--describe" in short["fit"].partition("\nData:\n")[0]  # lists the recipes
    assert "[0.1]" in short["fit"]
    assert "  --[no-]shuffle " in short["convert"]  # a switch that is on
    assert "  --per-class " in short["evaluate"]


def test_the_full_help_has_every_flag_with_its_text_and_default():
    text = help_text("fit", "--help-all")
    words = " ".join(text.split())
    for name, value in flat(TrainConfig()).items():
        flag = name.replace("_", "-")
        assert f"\n  --{flag}" in text, name
        if isinstance(value, int | float) and not isinstance(value, bool):
            assert f"[{value:g}]" in words
    assert "--optim.nesterov, --optim.no-nesterov Use Nesterov momentum (SGD). [true]" in words
    assert "--data.mean FLOAT FLOAT FLOAT Mean of each channel" in words
    assert "[0.485 0.456 0.406]" in words
    assert "--scaling.num-workers N|MIN:MAX|auto" in words
    for command, args, prefix in (
        ("evaluate", EvaluateArgs, ""),
        ("evaluate", ReadArgs, "data."),
        ("run", RunFlags, ""),
    ):
        text = help_text(command, "--help-all")
        for field in dataclasses.fields(args):
            if not {"positional", "flat"} & {*field.metadata}:
                assert f"\n  --{prefix}{field.name.replace('_', '-')}" in text, field.name


@pytest.mark.parametrize(
    ("topic", "has", "hasnt"),
    [
        (["--help", "data"], "--data.label-column", "--optim.lr"),
        (["--help=schedule"], "--schedule.gamma", "--data.source"),
        (["--help", "--optim.lr"], "--optim.lr", "--optim.name"),
        (["--help", "lr"], "--optim.lr", "--optim.name"),
        (["--epochs", "3", "-h", "log"], "--log.project", "--epochs"),
    ],
)
def test_help_on_a_section_or_a_flag(topic: list[str], has: str, hasnt: str):
    text = help_text("fit", *topic)
    assert f"\n  {has}" in text
    assert f"\n  {hasnt}" not in text


def test_help_on_an_unknown_topic_is_an_error_that_lists_the_sections():
    assert "sections: run, data, augment" in help_text("fit", "--help", "everything", status=2)
    assert "Did you mean 'optim'" in help_text("fit", "--help", "optmi", status=2)
    assert "[200]" in help_text("fit", "cifar10", "--help", "epochs")  # defaults of the recipe


def test_help_uses_at_most_100_columns():
    for columns, most in (("0", 80), ("95", 95), ("200", 100)):
        widest = max(map(len, help_text("fit", "--help-all", COLUMNS=columns).splitlines()))
        assert most - 15 < widest <= most, columns


def test_help_imports_nothing_heavy():
    code = (
        "import sys; from raytrain_ddp.__main__ import main\n"
        "try: main(['fit', '--help'])\n"
        "except SystemExit: print([*sys.modules], len(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = done.stdout.rpartition("[")[2]
    for heavy in ("torch", "ray", "numpy", "pydantic", "rich", "pyarrow", "asyncio"):
        assert f"'{heavy}'" not in loaded
    assert int(loaded.split()[-1]) < 180  # 0.1 s of CPU time


# ------------------------------------------------------------------ the list of commands


def test_help_lists_the_commands():
    text = help_text("--help")
    assert help_text() == help_text("help") == text
    assert re.findall(r"^  (\w+)  ", text, re.MULTILINE) == [*COMMANDS]
    assert help_text("help", "evaluate") == help_text("evaluate", "--help")
    assert help_text("--version") == f"raytrain_ddp {version('raytrain_ddp')}\n"


def test_an_unknown_command_gets_a_suggestion():
    wrong = help_text("fti", status=2)
    assert wrong == "error: there is no command 'fti'. Did you mean 'fit'?\n"
    assert "fit, evaluate, predict, export, run" in help_text("xyz", status=2)
    assert "'--fit'" in help_text("--fit", status=2)


def test_shtab_completes_commands_flags_and_values():
    shtab = pytest.importorskip("shtab")
    code = shtab.complete(parser(), "bash") + (
        "\n"
        "COMP_WORDS=(raytrain fit --emit s); COMP_CWORD=3\n"
        "_shtab_raytrain raytrain s; echo ${COMPREPLY[@]}\n"
        "COMP_WORDS=(raytrain fit --optim.m); COMP_CWORD=2\n"
        "_shtab_raytrain raytrain --optim.m; echo ${COMPREPLY[@]}\n"
    )
    done = subprocess.run(["bash", "-c", code], capture_output=True, text=True, check=True)
    slurm, *flags = done.stdout.split()
    assert (slurm, {*flags}) == ("slurm", {"--optim.momentum", "--optim.max-nonfinite"})
