"""The help of the commands: short, complete, plain, and fast."""

from __future__ import annotations

import dataclasses
import os
import pty
import re
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
from processes import ENVIRONMENT

from raytrain_ddp.__main__ import COMMANDS
from raytrain_ddp.command_line import help_page
from raytrain_ddp.config.recipe import flat
from raytrain_ddp.config.train_config import TrainConfig
from raytrain_ddp.evaluate import EvaluateArgs, ReadArgs
from raytrain_ddp.launcher.run_options import RunFlags

MOST_LINES, COLUMNS = 40, 80


def help_text(*argv: str, status: int = 0, module: str = "raytrain_ddp", **environ: str) -> str:
    """Standard output of ``python -m raytrain_ddp ...`` at 80 columns; standard error if it
    fails."""
    done = subprocess.run(
        [sys.executable, "-m", module, *argv],
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


def test_the_short_help_fits_on_a_screen(short: dict[str, str]):
    for name, text in short.items():
        lines = text.splitlines()
        assert len(lines) <= MOST_LINES, name
        assert max(map(len, lines)) <= COLUMNS, name
        assert lines[0].startswith(f"usage: python -m raytrain_ddp {name}")


def test_the_help_is_plain(short: dict[str, str]):
    for text in [*short.values(), help_text("fit", "--help-all"), help_text("--help")]:
        assert re.search(r"[^\n -~]|None|STR\b", text) is None
        assert re.search(r" $", text, re.MULTILINE) is None


def test_a_switch_that_is_on_shows_how_to_turn_it_off(short: dict[str, str]):
    assert "  --[no-]predict " in short["report"]
    assert "  --[no-]shuffle " in short["convert"]
    assert "  --per-class " in short["evaluate"]


def test_the_short_help_of_fit_has_the_most_used_flags(short: dict[str, str]):
    titles = re.findall(r"^(\w[\w ]+)$", short["fit"], re.MULTILINE)
    assert titles == [
        *("Data", "Model", "Optimization", "Scaling", "Run and checkpoints", "Instead of training"),
    ]
    for flag in ("data.source", "model.name", "epochs", "batch-size", "optim.lr", "dry-run"):
        assert f"  --{flag}" in short["fit"]
    assert "--describe" in short["fit"].partition("\nData\n")[0]  # lists the recipes


def test_the_full_help_has_every_flag_with_its_text_and_default():
    text = help_text("fit", "--help-all")
    words = " ".join(text.split())
    for name, value in flat(TrainConfig()).items():
        assert f"\n  --{name.replace('_', '-')}" in text, name
        if isinstance(value, int | float) and not isinstance(value, bool):
            assert f"(default: {value:g})" in words
    assert "--optim.nesterov, --optim.no-nesterov Use Nesterov momentum (SGD). (default: true)" in (
        words
    )
    assert "--data.mean FLOAT FLOAT FLOAT Mean of each channel" in words
    assert "(default: 0.485 0.456 0.406)" in words
    assert "--scaling.num-workers N|MIN:MAX|auto" in words
    assert max(map(len, text.splitlines())) <= COLUMNS


def test_the_full_help_of_other_commands_has_every_flag():
    for name, args, prefix in (
        ("evaluate", EvaluateArgs, ""),
        ("evaluate", ReadArgs, "data."),
        ("run", RunFlags, ""),
    ):
        text = help_text(name, "--help-all")
        for field in dataclasses.fields(args):
            if not {"positional", "flat"} & {*field.metadata}:
                assert f"\n  --{prefix}{field.name.replace('_', '-')}" in text, field.name


@pytest.mark.parametrize(
    ("topic", "has", "hasnt"),
    [
        (["--help", "data"], "--data.label-column", "--optim.lr"),
        (["--help=schedule"], "--schedule.gamma", "--data.source"),
        (["--help", "run"], "--micro-batch", "--data.source"),
        (["--help", "fit"], "--print-config", "--data.source"),
        (["--help", "optim.lr"], "--optim.lr", "--optim.name"),
        (["--help", "batch_size"], "--batch-size", "--epochs"),
        (["--help", "lr"], "--optim.lr", "--optim.name"),
        (["--epochs", "3", "--help", "log"], "--log.project", "--epochs"),
    ],
)
def test_help_on_a_section_or_a_flag(topic: list[str], has: str, hasnt: str):
    text = help_text("fit", *topic)
    assert f"\n  {has}" in text
    assert f"\n  {hasnt}" not in text


def test_help_on_an_unknown_topic_is_an_error_that_lists_the_sections():
    assert "sections: run, data, augment" in help_text("fit", "--help", "everything", status=2)
    assert "Did you mean 'optim'" in help_text("fit", "--help", "optmi", status=2)


def test_the_help_of_a_recipe_has_its_defaults():
    assert "[torchvision:CIFAR10]" in help_text("fit", "cifar10", "--help")
    assert "(default: 200)" in help_text("fit", "cifar10", "--help", "epochs")


def test_help_shows_the_command_as_it_was_invoked(tmp_path: Path):
    assert help_text("--help", module="raytrain_ddp.fit").startswith(
        "usage: python -m raytrain_ddp.fit [RECIPE]"
    )
    script = tmp_path / "raytrain"  # as installed
    script.write_text("from raytrain_ddp.__main__ import console_script; console_script()\n")
    done = subprocess.run(
        [sys.executable, script, "convert", "-h"], capture_output=True, text=True, check=True
    )
    assert done.stdout.startswith("usage: raytrain convert SRC DST [--FLAG VALUE ...]\n")


def test_help_uses_at_most_100_columns():
    wide, widest = (help_text("fit", "--help-all", COLUMNS=columns) for columns in ("95", "200"))
    assert 80 < max(map(len, wide.splitlines())) <= 95
    assert 80 < max(map(len, widest.splitlines())) <= 100


def on_a_terminal(**environ: str) -> str:
    """What ``fit --help`` writes to a terminal."""
    ours, theirs = pty.openpty()
    unset = {name: value for name, value in os.environ.items() if name != "NO_COLOR"}
    with subprocess.Popen(
        [sys.executable, "-m", "raytrain_ddp.evaluate", "--help"],
        stdout=theirs,
        env={**unset, "TERM": "xterm", **environ},
    ):
        os.close(theirs)
        text = b""
        try:
            while more := os.read(ours, 4096):
                text += more
        except OSError:  # closed by the other side
            os.close(ours)
    return text.decode()


def test_headings_are_bold_on_a_terminal_only_and_not_with_no_color():
    assert "\033[1mFlags\033[0m" in on_a_terminal()
    assert "\033" not in on_a_terminal(NO_COLOR="1")
    assert "\033" not in on_a_terminal(TERM="dumb")


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
    assert int(loaded.split()[-1]) < 180  # 130 when this was written, in 0.13 s of CPU time


def test_a_class_without_docstrings_has_empty_help():
    @dataclasses.dataclass
    class Bare:
        x: int = 0

    assert help_page._documented(int) == {}


# ------------------------------------------------------------------ the list of commands


def test_help_lists_the_commands():
    text = help_text("--help")
    assert help_text() == help_text("help") == text
    assert re.findall(r"^  (\w+)  ", text, re.MULTILINE) == [*COMMANDS]
    assert len(text.splitlines()) <= MOST_LINES
    assert "--print-completion fish" in text
    assert help_text("help", "evaluate") == help_text("evaluate", "--help")


def test_the_version_is_printed():
    assert help_text("--version") == f"raytrain_ddp {version('raytrain_ddp')}\n"


def test_an_unknown_command_gets_a_suggestion():
    wrong = help_text("fti", status=2)
    assert wrong == "error: there is no command 'fti'. Did you mean 'fit'?\n"
    assert "fit, evaluate, predict, export, run" in help_text("xyz", status=2)
    assert "'--fit'" in help_text("--fit", status=2)


def test_every_command_can_be_called_by_name(tmp_path: Path):
    assert "epochs = 3" in help_text("fit", "--epochs", "3", "--print-config")
    assert "there is no script" in help_text("run", "-n", "1", "nothing.py", status=2)
    assert "no checkpoint there" in help_text("evaluate", str(tmp_path), status=5)
