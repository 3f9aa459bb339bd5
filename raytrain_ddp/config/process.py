"""The process of a command: its exit status, errors without a traceback, broken pipes; its CPUs,
and its place among those of torchrun."""

from __future__ import annotations

import errno
import gc
import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence

from raytrain_ddp.errors import ConfigError, PreflightError, RaytrainError, printable, status_of

# Libraries that print which of their objects were not freed (nanobind's).
_PRINT_REMAINS = {"jaxlib", "onnx", "triton"}
_NO_RAY = (
    "Ray is not installed: run pip install 'ray[default,train]', or train without Ray, with "
    "--local or torchrun."
)
_BROKEN_PIPE = 128 + signal.SIGPIPE


def run_command(main: Callable[[Sequence[str]], int]) -> None:
    """Runs a command's main with the command line and exits with its status.

    A RaytrainError prints its message on standard error, without a traceback; so do a full disk
    below standard output, and a word that is too long for the path that it should be. If the reader
    of the output has exited (`| head`), the status is 141, as with other Unix tools.
    """
    _open_closed_streams()
    try:
        status = _status_of(main)
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:
            print(f"error: {error.filename}: {error.strerror}.", file=sys.stderr)
            status = ConfigError.exit_status
        elif error.filename is None and (status := _lost_output(newline=True)):
            pass
        else:
            raise
    if _PRINT_REMAINS.isdisjoint(sys.modules):
        gc.freeze()  # or Python frees each object of all modules at its end: 0.8 s with torch
    lost = _lost_output()
    sys.exit(status or lost)


def _status_of(main: Callable[[Sequence[str]], int]) -> int:
    given, sys.argv[1:] = sys.argv[1:], []  # the user's modules may parse theirs
    try:
        _require_folder()
        return main(given)
    except (RaytrainError, ModuleNotFoundError) as error:
        if not isinstance(error, RaytrainError) and error.name != "ray":
            raise
        known = error if isinstance(error, RaytrainError) else PreflightError(_NO_RAY)
        lines = map(printable, str(known).split("\n"))  # such as the name of a file
        print("error:", "\n".join(lines), file=sys.stderr)
        return status_of(known)
    except KeyboardInterrupt as stop:
        print("stopped", file=sys.stderr)
        number = stop.args[0] if stop.args and isinstance(stop.args[0], int) else 2
        return 128 + number
    except SystemExit as stop:
        if isinstance(stop.__context__, BrokenPipeError):  # rich exits with status 1
            return _BROKEN_PIPE
        if isinstance(stop.code, int) or stop.code is None:
            return stop.code or 0
        print(stop.code, file=sys.stderr)
        return 1


def _require_folder() -> None:
    """Raises PreflightError if the working folder was deleted: libraries end in odd ways there."""
    try:
        os.getcwd()
    except OSError as error:
        raise PreflightError(
            f"the working folder cannot be used ({error.strerror}): change to another one."
        ) from None


def _lost_output(newline: bool = False) -> int:
    """Flushes the buffered output; the exit status if it cannot be written, which is then dropped,
    else 0.

    Args:
        newline: write one to standard output, which may keep nothing of what it could not write.
    """
    status = 0
    for stream in (sys.stdout, sys.stderr):
        try:
            print(end="\n" * (newline and stream is sys.stdout), file=stream, flush=True)
        except OSError as error:
            nothing = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nothing, stream.fileno())  # otherwise, Python tries again at exit
            is_pipe = isinstance(error, BrokenPipeError)
            if not is_pipe:
                print(f"error: cannot write the output: {error}", file=sys.stderr)
            status = status or (_BROKEN_PIPE if is_pipe else 1)
    return status


def _open_closed_streams() -> None:
    """Opens closed standard streams (`2>&-`) on /dev/null; otherwise, the next opened file would
    get their descriptor and receive printed output."""
    for fd, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(fd)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # gets the lowest number
        if getattr(sys, name) is None:
            setattr(sys, name, open(fd, "w" if fd else "r", closefd=False))  # noqa: SIM115


# ------------------------------------------------------------------ the environment


def under_torchrun() -> bool:
    """Whether torchrun (or its elastic agent) started this process. Then the workers already exist;
    also, torchrun parses a ``--local`` after the script's name as one of its own options."""
    return "TORCHELASTIC_RUN_ID" in os.environ


def ranks_of_launcher() -> tuple[int, int, int]:
    """RANK, WORLD_SIZE and LOCAL_RANK, which torchrun sets; 0, 1 and 0 without it.

    Raises:
        PreflightError: they do not fit together.
    """
    defaults = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    words = [os.environ.get(name, default) for name, default in defaults.items()]
    rank, size, local_rank = (int(w) if w.isdecimal() and len(w) < 7 else -1 for w in words)
    torch, port = sys.modules.get("torch"), os.environ.get("MASTER_PORT", "")
    is_initialized = torch is not None and torch.distributed.is_initialized()  # by the caller
    has_address = bool(os.environ.get("MASTER_ADDR")) and port.isdecimal() and int(port) < 65536
    can_meet = size == 1 or is_initialized or has_address
    if not 0 <= rank < size or local_rank < 0 or not can_meet:
        names = [*defaults, *([] if can_meet else ["MASTER_ADDR", "MASTER_PORT"])]
        given = ", ".join(f"{name} = {os.environ.get(name, 'not set')}" for name in names)
        raise PreflightError(
            f"the environment has {given}: start with torchrun, which sets these, or unset them."
        )
    return rank, size, local_rank


def usable_cpus(environ: Mapping[str, str] = os.environ) -> int:
    """The CPUs that this process may use: those of its affinity mask, and, within a Slurm job, no
    more than those of its task."""
    affinity = getattr(os, "sched_getaffinity", None)
    cpus = len(affinity(0)) if affinity else os.cpu_count() or 1
    in_step = "SLURM_STEP_ID" in environ  # else the job's script, which may use what the node gave
    given = environ.get("SLURM_CPUS_PER_TASK" if in_step else "SLURM_CPUS_ON_NODE", "")
    return min(cpus, int(given)) if given.isdecimal() and int(given) else cpus


def cpus_of_process(environ: Mapping[str, str] = os.environ) -> int:
    """This process's share of the CPUs, whatever OMP_NUM_THREADS says (torchrun sets 1)."""
    local = environ.get("LOCAL_WORLD_SIZE", "1")
    return max(1, usable_cpus(environ) // max(1, int(local) if local.isdecimal() else 1))
