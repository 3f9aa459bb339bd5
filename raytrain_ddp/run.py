"""``python -m raytrain_ddp.run [flags] SCRIPT [its flags]``: torchrun on Ray."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from raytrain_ddp.config.process import run_command
from raytrain_ddp.launcher.torchrun_flags import COMMAND, parse

__all__ = ["COMMAND", "main"]


def main(argv: Sequence[str]) -> int:
    """Returns the exit status."""
    order = parse(argv, os.environ)
    for note in order.notes:
        print(f"run: {note}", file=sys.stderr)
    from raytrain_ddp.launcher.script_launch import run_script

    return run_script(order)


if __name__ == "__main__":
    run_command(main)
