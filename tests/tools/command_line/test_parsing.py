"""Flags: the values they accept, and the errors for invalid ones."""

from __future__ import annotations

import dataclasses
import json
import shlex
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from processes import module_of

from raytrain_ddp.__main__ import COMMANDS
from raytrain_ddp.command_line import Command, parse_fit, parse_with_recipe
from raytrain_ddp.command_line.suggestions import _OTHER_NAMES, meant
from raytrain_ddp.config.recipe import flat
from raytrain_ddp.config.train_config import TrainConfig
from raytrain_ddp.errors import ConfigError
from raytrain_ddp.run import parse as parse_run

# Created with the previous parser (tyro): command lines of the README, the docs, and the tests,
# and all fields that they changed from the default.
GOLDEN = json.loads((Path(__file__).parents[2] / "golden" / "command_lines.json").read_text())
TRAINING = ("fit", "doctor", "chaos", "sweep")


def command(name: str) -> Command[Any]:
    module = module_of(name)
    found = import_module(module)
    return (found if hasattr(found, "COMMAND") else import_module(f"{module}.__main__")).COMMAND


def changed(args: Any) -> dict[str, Any]:
    """The fields that differ from their default, as JSON values."""
    found: dict[str, Any] = {}
    for field in dataclasses.fields(args):
        value = getattr(args, field.name)
        if isinstance(value, TrainConfig):
            defaults = flat(TrainConfig())
            found |= {k: v for k, v in flat(value).items() if v != defaults[k]}
        elif dataclasses.is_dataclass(value):
            found |= {f"{field.name}.{k}": v for k, v in changed(value).items()}
        elif field.default is dataclasses.MISSING or value != field.default:
            found[field.name] = list(value) if isinstance(value, tuple) else value
    return found


PAIRS = "pairs of KEY and VALUE, or KEY=VALUE, each key once"


@pytest.mark.parametrize("case", GOLDEN, ids=[f"{c['command']} {c['line']}" for c in GOLDEN])
def test_golden_command_lines_give_unchanged_configs(case: dict[str, Any]):
    name, argv = case["command"], shlex.split(case["line"])
    if name == "run":
        args: Any = dataclasses.replace(parse_run(argv), notes=())
    elif name in TRAINING:
        args = parse_with_recipe(argv, command(name))
    else:
        args = command(name).parse(argv)
    assert changed(args) == case["parsed"]


def test_the_golden_command_lines_cover_all_commands():
    assert len(GOLDEN) > 200
    assert {case["command"] for case in GOLDEN} == set(COMMANDS)


# ------------------------------------------------------------------ values


@pytest.mark.parametrize(
    ("line", "field", "value"),
    [
        ("--exact true", "exact", True),
        ("--exact=Yes", "exact", True),
        ("--exact --exact false", "exact", False),
        ("--exact no", "exact", False),
        ("--optim.nesterov=no", "optim.nesterov", False),
        ("--optim.no_nesterov", "optim.nesterov", False),
        ("--scaling.use-gpu false", "scaling.use_gpu", False),
        ("--scaling.use-gpu", "scaling.use_gpu", True),
        ("--scaling.no-use-gpu", "scaling.use_gpu", False),
        ("--scaling.use-gpu auto", "scaling.use_gpu", "auto"),
        ("--data.mean 1e-3 0.5 .5", "data.mean", [0.001, 0.5, 0.5]),
        ("--scaling.max-preemptions -1", "scaling.max_preemptions", -1),
        ("--optim.betas=0.8 0.9", "optim.betas", [0.8, 0.9]),
        ("--data.classes None", "data.classes", None),
        ("--log.profile-steps 1 --log.profile-ranks", "log.profile_ranks", []),
        ("--storage=-x", "storage", "-x"),
        ("--storage -", "storage", "-"),
        ("--data.label-column=", "data.label_column", ""),
        ("--epochs 3 --epochs=4", "epochs", 4),
        ("digits --epochs 3 --", "epochs", 3),
    ],
)
def test_a_flag_value_is_parsed_as_expected(line: str, field: str, value: Any):
    config = parse_with_recipe(line.split(), command("fit")).config
    assert flat(config)[field] == value
    assert type(flat(config)[field]) is type(value)


@given(st.sampled_from(sorted(flat(TrainConfig()))), st.data())
def test_any_value_of_any_flag_gives_a_config_or_one_line(field: str, data: st.DataObject):
    words = data.draw(
        st.lists(
            st.sampled_from(["0", "-1", "0.5", "nan", "auto", "true", "None", "--", "-x", "a=b"])
            | st.sampled_from(["9" * 400, "9" * 5000])  # more digits than a float, and int(), take
            | st.text(max_size=4),
            max_size=4,
        )
    )
    flag = f"--{field.replace('_', '-')}"
    try:
        args = parse_with_recipe([flag, *words], command("fit"))
    except ConfigError as error:
        assert len(str(error).splitlines()) == 1  # noqa: PT017
    except SystemExit as stop:
        assert stop.code == 0  # noqa: PT017  ("-h")
    else:
        assert isinstance(args.config, TrainConfig)


def test_a_switch_accepts_only_a_boolean_word():
    args = command("report").parse(["--open", "a", "b"])
    assert (args.open, args.runs) == (True, ("a", "b"))
    args = command("report").parse(["a", "--open", "false", "b", "--no-predict"])
    assert (args.open, args.predict, args.runs) == (False, False, ("a", "b"))
    assert command("evaluate").parse(["--per-class", "small"]).run == "small"
    args = command("convert").parse(["a", "--workers", "2", "b", "--check=no"])
    assert (args.source, args.dest, args.workers, args.check) == ("a", "b", 2, False)


def test_run_accepts_booleans_only_after_an_equals_sign():
    order = parse_run(["--use-gpu=yes", "-n", "2", "--standalone=no", "true", "x"])
    assert (order.flags.use_gpu, order.flags.standalone) == (True, False)
    assert (order.program, order.args) == ("true", ("x",))
    order = parse_run(["--no-use-gpu", "-n", "2", "t.py"], {"PET_USE_GPU": "1"})
    assert (order.flags.use_gpu, order.program) == (False, "t.py")


# ------------------------------------------------------------------ errors in one line


@pytest.mark.parametrize(
    ("line", "reported"),
    [
        ("--optim.lr abc", "--optim.lr takes a number, not 'abc'."),
        ("--batch_size 1e2", "--batch_size takes an integer, not '1e2'."),
        ("--epochs=", "--epochs takes an integer, not ''."),
        ("--epochs", "--epochs takes an integer, but no value was given."),
        ("--optim.betas 0.9", "--optim.betas takes 2 numbers, not '0.9'."),
        ("--log.profile-ranks a", "--log.profile-ranks takes integers, not 'a'."),
        ("--data.workers x", "--data.workers takes an integer or auto, not 'x'."),
        ("--exact=1", "--exact takes true or false, not '1'."),
        ("--no-exact=1", "--no-exact takes no value: write --exact=1."),
        ("--scaling.use-gpu=x", "--scaling.use-gpu takes true, false or auto, not 'x'."),
        ("--optim.name sdg", "--optim.name takes sgd or adamw, not 'sdg'. Did you mean 'sgd'?"),
        ("--data.eval-source", "--data.eval-source takes text, but no value was given."),
        (
            "--scaling.num-workers",
            "--scaling.num-workers takes N|MIN:MAX|auto, but no value was given.",
        ),
        (
            "--storage --local",
            "--storage takes text, but no value was given. If '--local' is its value, write "
            "--storage=--local.",
        ),
        (
            "--task-options a",
            "--task-options takes pairs of KEY and VALUE, or KEY=VALUE, each key once, not 'a'.",
        ),
        ("--task-options a=1 a=2", f"--task-options takes {PAIRS}, not 'a=1 a=2'."),
        ("--exact maybe", "--exact takes true, false or no value, not 'maybe'."),
        (
            "--name digits digits",
            "unexpected argument 'digits': a recipe must be the first argument, before the flags.",
        ),
        (
            "--epochs=3 digits",
            "unexpected argument 'digits': a recipe must be the first argument, before the flags.",
        ),
        ("--=3", "there is no flag --. See --help-all."),
        ("digits cifar10", "unexpected argument 'cifar10'. See --help."),
        ("digits -- --local", "unexpected argument '--local'. See --help."),
    ],
)
def test_an_invalid_value_is_reported_with_its_flag_and_accepted_values(line: str, reported: str):
    with pytest.raises(ConfigError) as caught:
        parse_fit(line.split())
    assert str(caught.value) == reported


@pytest.mark.parametrize(
    ("wrong", "right"),
    [
        ("--optim.learning-rate", "--optim.lr"),
        ("--optim.learning_rate=3", "--optim.lr"),
        ("--lr", "--optim.lr"),
        ("-lr", "--optim.lr"),
        ("--OPTIM.LR", "--optim.lr"),
        ("--optim-lr", "--optim.lr"),
        ("--num-workers", "--scaling.num-workers"),
        ("--num_workers", "--scaling.num-workers"),
        ("--gpus", "--scaling.num-workers"),
        ("--batchsize", "--batch-size"),
        ("--batch", "--batch-size"),
        ("--epoch", "--epochs"),
        ("--weight_decay", "--optim.weight-decay"),
        ("--model", "--model.name"),
        ("--data", "--data.source"),
        ("--precision", "--compute.precision"),
        ("--train.epochs", "--epochs"),
        ("--HELP", "--help"),
        ("-help", "--help"),
        ("--every-steps", "--eval.every-steps, --checkpoint.every-steps or --log.every-steps"),
    ],
)
def test_an_unknown_flag_gets_a_suggestion(wrong: str, right: str):
    with pytest.raises(ConfigError) as caught:
        parse_fit([wrong, "1"])
    assert str(caught.value) == f"there is no flag {wrong.partition('=')[0]}. Did you mean {right}?"


def test_without_a_suggestion_the_help_is_named():
    with pytest.raises(ConfigError, match=r"^there is no flag --foo\. See --help-all\.$"):
        parse_fit(["--foo"])


def test_aliases_refer_to_existing_flags_and_shadow_none():
    known = {name.replace("_", "-") for name in flat(TrainConfig())}
    for line in _OTHER_NAMES.strip().splitlines():
        flag, *others = line.split()
        assert flag in known
        for other in others:
            assert other not in known, other
            assert meant(other, known) == [flag]


@pytest.mark.parametrize(
    ("name", "argv", "flag"),
    [
        ("fit", ["--resume-from", ""], "--resume-from"),
        ("fit", ["digits", "--storage="], "--storage"),
        ("fit", ["--data.root", ""], "--data.root"),
        ("evaluate", [""], "RUN"),
        ("export", ["r", "--out", ""], "--out"),
        ("convert", ["a", ""], "DST"),
        ("report", ["--device", ""], "--device"),
        ("run", ["--log-dir", "", "x.py"], "--log-dir"),
        ("run", ["--address", "", "x.py"], "--address"),
    ],
)
def test_an_empty_value_is_reported_as_an_unset_variable(name: str, argv: list[str], flag: str):
    parsed = {"fit": lambda words: parse_with_recipe(words, command("fit")), "run": parse_run}
    with pytest.raises(ConfigError, match=f"^{flag} is empty, as by a shell variable"):
        parsed.get(name, command(name).parse)(argv)


def test_some_values_may_be_empty():
    argv = ["--log-line-prefix-template=", "--role", "", "--signals-to-handle=", "x"]
    assert parse_run(argv).flags.log_line_prefix_template == ""
    args = parse_with_recipe(["--data.classes", "", "b", "--model.args", "a="], command("fit"))
    assert (args.config.data.classes, args.config.model.args) == (("", "b"), {"a": ""})


def test_a_missing_argument_is_named():
    with pytest.raises(ConfigError, match=r"^RUN is missing\."):
        command("evaluate").parse([])
