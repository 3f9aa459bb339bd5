"""The command line of `run`: torchrun's flags by their full names, the script, its arguments."""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Iterable, Mapping, Sequence

from raytrain_ddp.config.command_line import Command
from raytrain_ddp.errors import ConfigError
from raytrain_ddp.files import is_utf8
from raytrain_ddp.launcher.run_options import RunFlags, RunOptions

_PROG = "python -m raytrain_ddp.run"
COMMAND = Command(
    "run",
    RunFlags,
    "[--FLAG VALUE ...] [-m] SCRIPT [ARGUMENT ...]",
    {
        "Workers": ["num-workers", "nproc-per-node", "nnodes", "use-gpu", "cpus-per-worker", "per"],
        "Script": ["env", "max-restarts"],
        "Output": ["show", "log-dir"],
        "Cluster": ["address", "standalone", "ship"],
    },
)

WITHOUT_EFFECT = {  # flags of torchrun
    *("rdzv-backend", "rdzv-endpoint", "rdzv-conf", "master-addr", "local-addr", "node-rank"),
    *("monitor-interval", "start-method", "run-path", "event-log-handler", "logs-specs"),
    *("duplicate-stdout-filters", "duplicate-stderr-filters", "numa-binding", "use-env"),
}
_ALIASES = {"t": "tee", "r": "redirects", "n": "num-workers", "np": "num-workers"}
_ALIASES |= {"shutdown-timeout": "grace-s", "module": "m", "h": "help"}
_OWN = {field.name.replace("_", "-"): field for field in dataclasses.fields(RunFlags)}
_VALUELESS = {name for name, field in _OWN.items() if isinstance(field.default, bool)}
_VALUELESS |= {f"no-{name}" for name in _VALUELESS - {"no-python"}}
_VALUELESS |= {"help", "help-all", "m", "run-path", "use-env"}
_KNOWN = {*_OWN, *WITHOUT_EFFECT, *_ALIASES, *_VALUELESS}
_SWITCHED_OFF = {(name, "0") for name in _VALUELESS}

Flag = tuple[str, str | None]


def parse(argv: Sequence[str], environ: Mapping[str, str] | None = None) -> RunOptions:
    """Parses a command line; torchrun's flags have torchrun's meaning.

    Args:
        environ: supplies the defaults of torchrun's flags, as torchrun does: PET_NNODES and so on.

    Raises:
        ConfigError: for a value, a missing script, or one of torchrun's flags that would start
            something else here. SystemExit (0) for --help.
    """
    for word in argv:
        if not is_utf8(word):
            raise ConfigError(f"{word!r}: Ray takes words in UTF-8 only.")
    variables = flags_in(environ or {})
    own, command = split([*variables.values(), *argv])
    flags = dict(own)  # the last of a flag wins
    is_module = flags.get("m", "0") != "0"
    kept = [flag for flag in own if flag[0] not in {*WITHOUT_EFFECT, "m"}]
    equivalent = shlex.join([*_PROG.split(), *words_of(kept), *["-m"] * is_module, *command])
    node_rank = flags.get("node-rank") or "0"
    if node_rank != "0":
        raise ConfigError(
            f"--node-rank {node_rank}: one command starts the ranks of all nodes. Run this on one "
            f"machine only: {equivalent}"
        )
    try:
        parsed = COMMAND.parse(words_of(kept))
    except ConfigError as error:
        if not variables:
            raise
        raise ConfigError(f"{error} Also given: {', '.join(variables)}.") from None
    if not command:
        raise ConfigError(f"which script? {_PROG} --num-workers 2 train.py --its-flags")
    notes = []
    if ignored := [flag for flag in own if flag[0] in WITHOUT_EFFECT - {"use-env"}]:
        notes.append(f"no effect here: {shlex.join(words_of(ignored))}; equivalent: {equivalent}")
    return RunOptions(parsed, command[0], tuple(command[1:]), is_module, tuple(notes))


def split(argv: Sequence[str]) -> tuple[list[Flag], list[str]]:
    """Splits the arguments: our flags by their full names, and everything from the script on."""
    own: list[Flag] = []
    at = 0
    while at < len(argv) and argv[at].startswith("-") and argv[at] != "-":
        word = argv[at]
        at += 1
        if word == "--":
            break
        if word[1] != "-" and word[1] in "trn" and word[:3] != "-np":
            name, value = word[1], word[2:].removeprefix("=") or None  # -t3
        else:
            name, equals, text = word.lstrip("-").partition("=")
            value = text if equals else None
        name = _full(name.replace("_", "-"))
        if value is None and name not in _VALUELESS and at < len(argv):
            value = argv[at]
            at += 1
        own.append((name, value))
    return own, list(argv[at:])


def _full(name: str) -> str:
    """A flag's full name, from an alias or an unambiguous prefix."""
    if name not in _KNOWN and len(name) > 1:
        begun = {known for known in _KNOWN if known.startswith(name)}
        name = begun.pop() if len(begun) == 1 else name
    return _ALIASES.get(name, name)


def flags_in(environ: Mapping[str, str]) -> dict[str, str]:
    """The variables that set torchrun's flags, and the words that they stand for."""
    words = {}
    for variable, value in environ.items():
        name = _full(variable.removeprefix("PET_").lower().replace("_", "-"))
        if variable.startswith("PET_") and name in _KNOWN and (name, value) not in _SWITCHED_OFF:
            words[variable] = f"--{name}" if name in _VALUELESS else f"--{name}={value}"
    return words


def words_of(flags: Iterable[Flag]) -> list[str]:
    return [word for name, value in flags for word in (f"--{name}", value) if word is not None]
