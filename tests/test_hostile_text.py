"""Text in a config stays text: it has no other effect in any emitted file or command."""

from __future__ import annotations

import dataclasses
import shlex
import subprocess
from collections.abc import Iterable
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest
from cluster_checks import check_shell, configs

from raytrain_ddp.command_line import parse_fit
from raytrain_ddp.config.sections import LogConfig
from raytrain_ddp.config.train_config import TrainConfig
from raytrain_ddp.driver.cluster_files import emit
from raytrain_ddp.errors import ConfigError

yaml = pytest.importorskip("yaml")

PRINTABLE = [
    *("a b", "a'b", 'a"b', "a\\b", "$HOME", "$(touch pwned)", "`touch pwned`", "a # b", "#a"),
    *("a: b", "{a: b}", "[a, b]", "a;b", "a|b", "a>b", "a&b", "!a", "*a", "%a", "@a", "~a", "- a"),
    *("--a", "-a", "a=b", "\u00e9\u4e16", "\\1", "\\g<0>", "{BUCKET}", "BUCKET", "ACCOUNT"),
    *("lan.yaml", "EOF", "'\\''", "a\u00a0b", "  # a comment", "'; touch pwned; '", '"$@x'),
    *("a)", "(a", "&& touch pwned", "\\"),
]
# Other texts are known names, or allow only few characters.
FREE_TEXTS = {
    *("storage", "task", "task_options", "data.source", "data.eval_source", "data.root"),
    *("data.image_column", "data.label_column", "data.cache", "model.name", "model.weights"),
    *("data.train_split", "data.eval_split", "data.config", "data.classes", "log.project"),
    *("model.args", "model.freeze"),
}


def value_with(field: str, text: str) -> Any:
    """A value of the field that contains the text."""
    of_field = {
        "task_options": {text: text},
        "data.classes": (text, "b"),
        "model.args": {"key": text},
        "model.freeze": (text,),
    }
    return of_field.get(field, text)


def with_text(fields: Iterable[str], text: str, config: TrainConfig | None = None) -> TrainConfig:
    """An option has it as its name and as its value."""
    cpus = dataclasses.replace(TrainConfig().scaling, use_gpu=False, num_workers=2)
    config = config or TrainConfig(scaling=cpus, log=LogConfig(wandb=True))  # reads log.project
    for field in fields:
        section, _, name = field.rpartition(".")
        value = value_with(field, text)
        if section:
            inner = dataclasses.replace(getattr(config, section), **{name: value})
            name, value = section, inner
        config = dataclasses.replace(config, **{name: value})
    return config


@pytest.mark.parametrize("turn", range(4))
def test_every_emitted_file_preserves_hostile_texts_exactly(turn: int):
    """Each field has another text each time, and each text is in several fields."""
    config = with_text([], "")
    for place, field in enumerate(sorted(FREE_TEXTS)):
        text = PRINTABLE[(len(FREE_TEXTS) * turn + place) % len(PRINTABLE)]
        if field in ("task_options", "model.args") and text.startswith("-"):
            read_by = {"task_options": ("task", "a:Mine"), "model.args": ("model.name", "resnet50")}
            base = with_text([read_by[field][0]], read_by[field][1])
            with pytest.raises(ConfigError, match=field):
                emit(with_text([field], text, base), "command")
            continue
        config = with_text([field], text, config)
    line, _ = emit(config, "command")
    assert line.count("\n") == 1
    assert parse_fit(shlex.split(line)[3:]).config == config
    for kind in ("slurm", "kuberay", "ray-up"):
        reported = read(kind, emit(config, kind)[0])  # type: ignore[arg-type]
        expected = config
        if kind == "slurm":
            place = Path(config.storage).expanduser().absolute()
            expected = dataclasses.replace(config, storage=str(place))
        for field in FREE_TEXTS:
            assert attrgetter(field)(reported) == attrgetter(field)(expected), (kind, field)


def read(kind: str, text: str) -> TrainConfig:
    """The config that the file's command would train; otherwise, it is as without hostile texts."""
    photos = with_text(["data.source"], "photos")  # their memory differs from that of the digits
    plain, _ = emit(photos, kind)  # type: ignore[arg-type]
    if kind == "slurm":
        check_shell(text)
        run = next(line for line in text.splitlines() if line.startswith("run=("))
        assert len(text.splitlines()) == len(plain.splitlines())
        script = f"{run}; printf '%s\\0' \"${{run[@]}}\""
        words = subprocess.run(["bash", "-c", script], capture_output=True, check=True).stdout
        return parse_fit(words.decode().split("\0")[3:-1]).config
    loaded, usual = yaml.safe_load(text), yaml.safe_load(plain)
    if kind == "kuberay":
        command = loaded["spec"].pop("entrypoint")
        assert usual["spec"].pop("entrypoint")
        assert loaded == usual
        return parse_fit(shlex.split(command)[3:]).config
    assert loaded == usual
    (config,) = configs(text)
    return config
