"""``python -m raytrain_ddp.run [flags] SCRIPT [its flags]``: torchrun on Ray."""

from __future__ import annotations

import dataclasses
import os
import shlex
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from raytrain_ddp.command_line import Command, run_command
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
        "Script": ["env", "max-restarts", "dry-run"],
        "Output": ["show", "log-dir"],
        "Cluster": ["address", "standalone", "ship"],
    },
)
_BY_RAY = "Ray connects the nodes, and the ranks rendezvous at rank 0"
_ALONE = "each rank is a separate main process"
# torchrun's flags that have no effect here, and why; `None`: the behavior is the same anyway.
_WITHOUT_EFFECT: dict[str, str | None] = {
    "rdzv-backend": _BY_RAY,
    "rdzv-endpoint": _BY_RAY,
    "rdzv-conf": _BY_RAY,
    "master-addr": _BY_RAY,
    "local-addr": _BY_RAY,
    "node-rank": "one command starts all nodes",
    "monitor-interval": "the end of a rank is detected immediately",
    "start-method": _ALONE,
    "run-path": _ALONE,
    "event-log-handler": "there are no elastic events",
    "logs-specs": "see --log-dir",
    "duplicate-stdout-filters": "see --log-dir",
    "duplicate-stderr-filters": "see --log-dir",
    "numa-binding": "ranks are not bound to CPUs",
    "use-env": None,
}
_ALIASES = {"t": "tee", "r": "redirects", "n": "num-workers", "np": "num-workers"}
_ALIASES |= {"shutdown-timeout": "grace-s", "module": "m", "h": "help"}
_OWN = {field.name.replace("_", "-"): field for field in dataclasses.fields(RunFlags)}
_VALUELESS = {name for name, field in _OWN.items() if isinstance(field.default, bool)}
_VALUELESS |= {f"no-{name}" for name in _VALUELESS - {"no-python"}}
_VALUELESS |= {"help", "help-all", "m", "run-path", "use-env"}
_KNOWN = {*_OWN, *_WITHOUT_EFFECT, *_ALIASES, *_VALUELESS}

Flag = tuple[str, str | None]


def main(argv: Sequence[str]) -> int:
    """Returns the exit status."""
    order = parse(argv, os.environ)
    for note in order.notes:
        print(f"run: {note}", file=sys.stderr)
    from raytrain_ddp.launcher.script_launch import preview, run_script

    if order.flags.dry_run:
        print(preview(order))
        return 0
    return run_script(order)


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
    own, command = split(argv)
    given = dict(own)  # the last of a flag wins
    flags = {**dict(_defaults(environ or {}, given)), **given}
    module = flags.get("m", "0") != "0"
    kept = [flag for flag in flags.items() if flag[0] not in {*_WITHOUT_EFFECT, "m"}]
    translated = shlex.join([*_PROG.split(), *_words(kept), *["-m"] * module, *command])
    node_rank = flags.get("node-rank") or "0"
    if node_rank != "0":
        raise ConfigError(
            f"--node-rank {node_rank}: one command starts the ranks of all nodes. Run this on one "
            f"machine only: {translated}"
        )
    try:
        parsed = COMMAND.parse(_words(map(_as_show, kept)))
    except ConfigError as error:
        name = str(error).partition(" ")[0].removeprefix("--")
        if name not in flags or name in given:
            raise
        raise ConfigError(f"PET_{name.replace('-', '_').upper()}: {error}") from None
    if not command:
        raise ConfigError(f"which script? {_PROG} --num-workers 2 train.py --its-flags")
    notes = _notes(flags, translated)
    if flags.get("tee") == "0":
        notes.append(
            "--tee 0 has torchrun's meaning, so all ranks are shown; use --show 0 for rank 0 only"
        )
    notes += _behind(command, {*flags})
    return RunOptions(parsed, command[0], tuple(command[1:]), module, tuple(notes))


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


def _defaults(environ: Mapping[str, str], given: Mapping[str, str | None]) -> Iterable[Flag]:
    for variable, value in environ.items():
        name = _full(variable.removeprefix("PET_").lower().replace("_", "-"))
        if variable.startswith("PET_") and name in _KNOWN and name not in given:
            if name not in _VALUELESS:
                yield name, value
            elif value != "0":
                yield name, None


def _words(flags: Iterable[Flag]) -> list[str]:
    return [word for name, value in flags for word in (f"--{name}", value) if word is not None]


def _as_show(flag: Flag) -> Flag:
    """``--tee none`` and ``--tee 0,2`` select the ranks to show, unlike torchrun's stream
    numbers."""
    name, value = flag
    words = value is not None and (value in ("all", "none") or ("," in value and ":" not in value))
    return ("show", value) if name == "tee" and words else flag


def _notes(flags: Mapping[str, str | None], translated: str) -> list[str]:
    why: dict[str, list[str]] = {}
    for flag in flags.items():
        if reason := _WITHOUT_EFFECT.get(flag[0]):
            why.setdefault(reason, []).append(shlex.join(_words([flag])))
    if not why:
        return []
    ignored = "; ".join(f"{', '.join(names)} ({reason})" for reason, names in why.items())
    return [f"no effect here: {ignored}", f"equivalent command: {translated}"]


def _behind(command: Sequence[str], given: set[str]) -> list[str]:
    """Arguments after the script that look like our flags and do not occur in its text."""
    script = Path(command[0])
    try:  # a pipe would be waited for
        text = script.read_text(encoding="utf-8", errors="replace") if script.is_file() else None
    except OSError:
        text = None
    if text is None:  # a module, or none
        return []
    counts = {"num-workers", "nproc-per-node", "use-gpu"}
    given = given | counts if given & counts else given
    found = []
    for word in command[1:]:
        name = word.lstrip("-").partition("=")[0].replace("_", "-")
        ours = word.startswith("--") and _full(name) in {*_OWN, *_WITHOUT_EFFECT} - given
        if ours and name not in text.replace("_", "-"):
            found.append(word)
    if not found:
        return []
    return [f"passed to the script: {', '.join(found)}; flags of run must come before {command[0]}"]


if __name__ == "__main__":
    run_command(main)
