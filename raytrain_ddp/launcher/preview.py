"""Previews each worker's environment and command, without Ray."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path

from raytrain_ddp.launcher.capacity import layout_for
from raytrain_ddp.launcher.rank_environment import (
    Placement,
    RankedGroup,
    assign_ranks,
    base_environment,
    placeholder_values,
    rank_variables,
    rendezvous_address,
)
from raytrain_ddp.launcher.run_options import RunOptions
from raytrain_ddp.ray_backend.placement import local_resources

_NOTE = """\
# Shown as if all workers ran on this machine; Ray decides the placement. MASTER_PORT is chosen
# at the start. Variables that are the same in this shell are omitted."""


def preview(options: RunOptions, driver: Mapping[str, str]) -> str:
    """Shell commands, one per worker.

    Raises:
        ConfigError, PreflightError: as in a real run, as far as this machine can tell.
    """
    options.require_script(Path.cwd())
    flags = options.flags
    layout = layout_for(flags, [local_resources()])
    gpus = int(layout.per_worker.get("GPU", 0))
    seats = []
    for n in range(layout.least):
        node, first = divmod(n, layout.each) if layout.apart else (0, n)
        seats.append(
            Placement(
                number=n,
                node=f"node-{node}",
                ip=f"NODE{node}" if layout.apart else "127.0.0.1",
                host="",
                gpus=[str(gpu + first * gpus) for gpu in range(gpus)],
            )
        )
    workers = assign_ranks(seats)
    group = RankedGroup(workers, rendezvous_address(workers), flags.master_port or 29500, "0" * 32)
    base = base_environment(driver, {}, local=True)
    lines = [_NOTE]
    for worker in workers:
        env = rank_variables(flags, group, worker, base, error_file="error.json")
        added = {k: v for k, v in sorted(env.items()) if driver.get(k) != v}
        command = options.command(sys.executable, placeholder_values(group, worker))
        lines += ["", f"# rank {worker.rank}"]
        lines += [f"{name}={shlex.quote(value)} \\" for name, value in added.items()]
        lines.append(shlex.join(command))
    return "\n".join(lines)


def preview_here(options: RunOptions) -> str:
    """`preview` for this process."""
    return preview(options, os.environ)
