"""``python -m raytrain_ddp.run [flags] SCRIPT [its flags]``: torchrun on Ray."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Mapping, Sequence

from raytrain_ddp.config.command_line import Command
from raytrain_ddp.config.process import run_command
from raytrain_ddp.errors import ConfigError
from raytrain_ddp.files import is_utf8
from raytrain_ddp.launcher.run_options import RunFlags, RunOptions
from raytrain_ddp.launcher.torchrun_flags import WITHOUT_EFFECT, flags_in, split, words_of

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


def main(argv: Sequence[str]) -> int:
    """Returns the exit status."""
    order = parse(argv, os.environ)
    for note in order.notes:
        print(f"run: {note}", file=sys.stderr)
    from raytrain_ddp.launcher.script_launch import run_script

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


if __name__ == "__main__":
    run_command(main)
