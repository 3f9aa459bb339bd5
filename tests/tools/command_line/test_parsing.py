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
from raytrain_ddp.config.command_line import Command
from raytrain_ddp.config.field_types import facts
from raytrain_ddp.config.recipe import flat
from raytrain_ddp.config.train_config import TrainConfig
from raytrain_ddp.driver.recipe_args import parse_with_recipe
from raytrain_ddp.errors import ConfigError
from raytrain_ddp.fit import parse_fit
from raytrain_ddp.launcher.torchrun_flags import parse as parse_run

# Command lines of the README, the docs, and the tests, and all fields that they change from the
# default.
GOLDEN = json.loads((Path(__file__).parents[2] / "golden" / "command_lines.json").read_text())
TRAINING = ("fit", "doctor", "chaos", "sweep")


def command(name: str) -> Command[Any]:
    module = module_of(name)
    found = import_module(module)
    return (found if hasattr(found, "COMMAND") else import_module(f"{module}.__main__")).COMMAND


def parsed(name: str, argv: list[str]) -> Any:
    if name == "run":
        return dataclasses.replace(parse_run(argv), notes=())
    if name in TRAINING:
        return parse_with_recipe(argv, command(name))
    return command(name).parse(argv)


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


def test_golden_command_lines_give_unchanged_configs():
    assert len(GOLDEN) > 190
    assert {case["command"] for case in GOLDEN} == set(COMMANDS)
    for case in GOLDEN:
        args = parsed(case["command"], shlex.split(case["line"]))
        assert changed(args) == case["parsed"], case["line"]


# ------------------------------------------------------------------ values


def test_a_flag_value_is_parsed_as_expected():
    for line, field, value in [
        ("--exact=Yes", "exact", True),
        ("--exact --exact false", "exact", False),
        ("--optim.nesterov=no", "optim.nesterov", False),
        ("--optim.no_nesterov", "optim.nesterov", False),
        ("--scaling.use-gpu", "scaling.use_gpu", True),
        ("--scaling.no-use-gpu", "scaling.use_gpu", False),
        ("--scaling.use-gpu auto", "scaling.use_gpu", "auto"),
        ("--scaling.num-workers 2", "scaling.num_workers", 2),
        ("--scaling.num-workers 2:4", "scaling.num_workers", "2:4"),
        ("--data.mean 1e-3 0.5 .5", "data.mean", [0.001, 0.5, 0.5]),
        ("--data.classes None", "data.classes", None),
        ("--data.classes=-1 2", "data.classes", ["-1", "2"]),
        ("--log.profile-steps 1 --log.profile-ranks", "log.profile_ranks", []),
        ("--storage=-x", "storage", "-x"),
        ("--storage -", "storage", "-"),
        ("--data.label-column=", "data.label_column", ""),
        ("--model.args a=1 b=x", "model.args", {"a": 1, "b": "x"}),
        ("--model.args a 1", "model.args", {"a": 1}),
        ("digits --epochs 3 --", "epochs", 3),
    ]:
        found = flat(parse_with_recipe(line.split(), command("fit")).config)[field]
        assert (found, type(found)) == (value, type(value)), line


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


def test_a_switch_takes_only_a_boolean_word_and_words_by_place_may_lie_between_flags():
    args = command("report").parse(["--open", "a", "b"])
    assert (args.open, args.runs) == (True, ("a", "b"))
    args = command("report").parse(["a", "--open", "false", "b", "--no-predict"])
    assert (args.open, args.predict, args.runs) == (False, False, ("a", "b"))
    assert command("evaluate").parse(["--per-class", "small"]).run == "small"
    assert command("evaluate").parse(["--", "-x"]).run == "-x"
    args = command("convert").parse(["a", "--workers", "2", "b", "--check=no"])
    assert (args.source, args.dest, args.workers, args.check) == ("a", "b", 2, False)


# ------------------------------------------------------------------ errors in one line

INVALID = [  # (command line, words of the error)
    ("fit --optim.lr abc", "--optim.lr takes a number, not 'abc'."),
    ("fit --batch_size 1.5", "--batch-size takes an integer, not '1.5'."),
    ("fit --epochs", "--epochs takes an integer: expected 1 argument."),
    ("fit --optim.lr=inf", "optim.lr = inf: must be finite"),
    ("fit --log.profile-ranks a", "--log.profile-ranks integers 'a'"),
    ("fit --exact=1", "--exact true false '1'"),
    ("fit --no-exact=1", "--no-exact '1'"),
    ("fit --scaling.use-gpu=x", "--scaling.use-gpu true false auto 'x'"),
    ("fit --optim.name sdg", "--optim.name takes sgd or adamw, not 'sdg'. Did you mean 'sgd'?"),
    ("fit --scaling.num-workers", "--scaling.num-workers N|MIN:MAX|auto"),
    ("fit --storage --local", "--storage text"),
    ("fit --task-options a", "--task-options KEY=VALUE 'a'"),
    ("fit --task-options a=1 a=2", "--task-options KEY=VALUE each key once 'a=1 a=2'"),
    ("fit --name digits digits", "'digits' recipe must be the first argument, before the flags"),
    ("fit --=3", "there is no flag --. See --help-all."),
    ("fit digits cifar10", "unexpected argument 'cifar10'. See --help."),
    ("fit digits -- --local", "unexpected argument '--local'."),
    ("fit --print-config --dry-run", "--dry-run --print-config"),
    ("fit --local --dashboard", "--dashboard --local"),
    ("fit digits --describe --local", "--local --describe"),
    ("evaluate", "RUN is missing."),
    ("fit --resume-from ''", "--resume-from is empty"),
    ("fit digits --storage=", "--storage is empty"),
    ("evaluate ''", "RUN is empty"),
    ("run --log-dir '' x.py", "--log-dir is empty"),
]


@pytest.mark.parametrize(("line", "words"), INVALID)
def test_an_invalid_value_is_reported_with_its_flag_and_accepted_values(line: str, words: str):
    name, *argv = shlex.split(line)
    with pytest.raises(ConfigError) as caught:
        parse_fit(argv) if name == "fit" else parsed(name, argv)
    said = str(caught.value)
    assert "\n" not in said
    assert words in said or [word for word in words.split() if word not in said] == [], said


def test_an_unknown_flag_gets_a_suggestion():
    for wrong, right in [
        ("--optim.learning_rate=3", "--optim.lr"),
        ("--lr", "--optim.lr"),
        ("-lr", "--optim.lr"),
        ("--OPTIM.LR", "--optim.lr"),
        ("--optim-lr", "--optim.lr"),
        ("--num_workers", "--scaling.num-workers"),
        ("--gpus", "--scaling.num-workers"),
        ("--batch", "--batch-size"),
        ("--data", "--data.source"),
        ("--no-nesterov", "--optim.nesterov"),
        ("--HELP", "--help"),
        ("-help", "--help"),
        ("--every-steps", "--eval.every-steps, --checkpoint.every-steps or --log.every-steps"),
    ]:
        with pytest.raises(ConfigError) as caught:
            parse_fit([wrong, "1"])
        assert str(caught.value).endswith(f" Did you mean {right}?"), wrong


def test_names_of_other_trainers_shadow_no_flag_and_suggest_theirs():
    known = {name.replace("_", "-") for name in flat(TrainConfig())}
    for field, others in facts(TrainConfig, "aka").items():
        for other in others.split():
            assert other not in known, other
            with pytest.raises(ConfigError, match=f"mean --{field.replace('_', '-')}[?]"):
                parse_fit([f"--{other}", "1"])


def test_some_values_may_be_empty():
    argv = ["--log-line-prefix-template=", "--role", "", "--signals-to-handle=", "x"]
    assert parse_run(argv).flags.log_line_prefix_template == ""
    args = parse_with_recipe(["--data.classes", "", "b", "--model.args", "a="], command("fit"))
    assert (args.config.data.classes, args.config.model.args) == (("", "b"), {"a": ""})
