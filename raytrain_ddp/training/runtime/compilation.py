"""Reports what a failure of torch.compile means."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager

from raytrain_ddp.errors import PreflightError, RaytrainError, TaskError

_WITHOUT = "or train with --compute.no-compile (in a task: without torch.compile)"
# Of torch._inductor, Triton and subprocess: by name, as these modules may be missing.
_OF_COMPILERS = {"InvalidCxxCompiler", "CppCompileError", "TritonMissing", "CalledProcessError"}
_SAY_MACHINE = ("Failed to find C compiler", "failed to map segment", "Permission denied")
_MAX_CHARS = 200


@contextmanager
def naming_compile_failures() -> Iterator[None]:
    """Reports failures of torch.compile in one line.

    Raises:
        PreflightError: torch.compile cannot build or load code on this machine.
        TaskError: it cannot compile the model.
    """
    try:
        yield
    except Exception as error:
        if (named := _named(error)) is not None:
            raise named from error
        raise


def _named(error: BaseException) -> RaytrainError | None:
    """Returns the error in one line, if torch.compile raised it."""
    exceptions = sys.modules.get("torch._dynamo.exc")
    if exceptions is None:
        return None
    if not isinstance(error, exceptions.TorchDynamoException):
        frames = traceback.walk_tb(error.__traceback__)
        if not isinstance(error, OSError | ImportError) or not any(
            "torch/_inductor/" in frame.f_code.co_filename for frame, _ in frames
        ):
            return None
    cause: BaseException = error
    while (inner := getattr(cause, "inner_exception", None)) is not None:
        cause = inner
    kinds, lines = {kind.__name__ for kind in type(cause).__mro__}, str(cause).splitlines() or [""]
    telling = (line for line in lines if any(text in line for text in ("error:", *_SAY_MACHINE)))
    said = next(telling, lines[0]).strip()[:_MAX_CHARS].rstrip(".")
    what = f"{type(cause).__name__}: {said}"
    of_machine = isinstance(cause, OSError | ImportError) or bool(kinds & _OF_COMPILERS)
    if of_machine or any(text in str(cause) for text in _SAY_MACHINE):
        return PreflightError(
            f"torch.compile cannot build code on this machine: {what}. Install a C++ compiler "
            "(g++) and Python's headers, and set TORCHINDUCTOR_CACHE_DIR to a writable folder that "
            f"allows execution; {_WITHOUT}."
        )
    return TaskError(f"torch.compile cannot compile the model: {what}. Change it, {_WITHOUT}.")
