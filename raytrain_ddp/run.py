"""``python -m raytrain_ddp.run [flags] SCRIPT [its flags]``: torchrun, on Ray."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import tyro

from raytrain_ddp.cli import run_door
from raytrain_ddp.errors import ConfigError
from raytrain_ddp.orchestration.run.order import Flags, Order

_PROG = "python -m raytrain_ddp.run"
_DESCRIPTION = """\
Run a distributed PyTorch script, unchanged, on the workers of a Ray cluster or on this machine:

  run [flags] SCRIPT [its arguments]      run [flags] -m PACKAGE.MODULE [its arguments]

Each worker is a main process of its own, with torchrun's environment (RANK, LOCAL_RANK ...). Flags
of run come before the script; what follows it is the script's. {rank} {local_rank} {world_size}
{node_rank} {master_addr} {master_port} {init_method} are filled in there.

  run --num-workers 8 --use-gpu train.py --lr 0.1
  run --num-workers 4 old.py --rank {rank} --world-size {world_size} --init-method {init_method}
  run --num-workers 4 --legacy-local-rank launch.py
  run --num-workers 4 --env slurm srun.py
  run --num-workers 2 --per node spawn.py --nodes {world_size} --node-rank {node_rank}

Exit status: the script's own (the first failing rank's); 128 + n if signal n ended it; 2 for a
wrong flag, 3 without room or Ray, 7 for a lost node or a lost head of Ray's. Ctrl-C ends all
processes on all machines."""

# What torchrun's users type, and what it is called here.
_TORCHRUN = {
    "nproc-per-node": "workers are counted over all nodes: --num-workers",
    "nnodes": "Ray knows the nodes: --num-workers, and --per node for one process on each",
    "node-rank": "Ray places the workers: leave it out",
    "standalone": "leave it out: it is so without --address",
    "master-addr": "rank 0's address is found by itself: leave it out",
    "master-port": "a free port is found by itself: leave it out",
    "redirects": "--log-dir for files, --tee for what is shown",
    "use-env": "leave it out: it is so",
}
_VALUELESS = {
    *(f.name.replace("_", "-") for f in dataclasses.fields(Flags) if isinstance(f.default, bool)),
    *("help", "h"),
}


def main(argv: Sequence[str]) -> int:
    """Returns the exit status."""
    order = parse(argv)
    if order.flags.dry_run:
        from raytrain_ddp.orchestration.run.preview import dry_run

        print(dry_run(order))
        return 0
    from raytrain_ddp.orchestration.run.launch import launch

    return launch(order)


def parse(argv: Sequence[str]) -> Order:
    """Raises ConfigError for a value, a missing script or torchrun's flags, SystemExit for --help
    and for a flag that is wrong."""
    own, module, command = split(argv)
    for flag in own:
        name = _name(flag)
        remedy = _TORCHRUN.get(name) or ("leave it out" if name.startswith("rdzv") else None)
        if flag.startswith("--") and remedy:
            raise ConfigError(f"{flag} is torchrun's; here {remedy}.")
    flags = tyro.cli(
        tyro.conf.FlagCreatePairsOff[Flags], prog=_PROG, description=_DESCRIPTION, args=own
    )
    if not command:
        raise ConfigError(f"which script? {_PROG} --num-workers 2 train.py --its-flags")
    return Order(flags, command[0], tuple(command[1:]), module)


def split(argv: Sequence[str]) -> tuple[list[str], bool, list[str]]:
    """Our own flags, whether there was -m, and from the first positional on the user's words."""
    own, module, at = [], False, 0
    while at < len(argv) and argv[at].startswith("-"):
        word = argv[at]
        at += 1
        if word == "--":
            break
        if word in ("-m", "--module"):
            module = True
            continue
        own.append(word)
        if "=" not in word and _name(word) not in _VALUELESS:
            own += argv[at : at + 1]
            at += 1
    return own, module, list(argv[at:])


def _name(flag: str) -> str:
    """``num-workers`` for --num_workers=3."""
    return flag.lstrip("-").partition("=")[0].replace("_", "-")


if __name__ == "__main__":
    run_door(main)
