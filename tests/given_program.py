"""``given_program.py WORDS``, in a fork, does and ends as ``python WORDS``: -m MODULE, -c CODE, -
or a script. Its memory is not cleared, which would take longer than most programs."""

from __future__ import annotations

import atexit
import linecache
import os
import runpy
import signal
import sys
import threading
import types
from contextlib import suppress


def run(kind: str, *arguments: str) -> None:
    sys.orig_argv[:] = [sys.executable, kind, *arguments]
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    main.__dict__["__builtins__"] = __builtins__
    if kind == "-m":
        sys.argv[:], sys.path[0] = ["-m", *arguments[1:]], os.getcwd()
        runpy._run_module_as_main(arguments[0])  # type: ignore[attr-defined]
        return
    sys.path[0] = ""
    if kind == "-c":
        place, code, *arguments = ["<string>", *arguments]
    elif kind == "-":
        place, code = "<stdin>", sys.stdin.read()
    else:
        sys.path[0] = os.path.dirname(os.path.realpath(kind))
        with open(kind, encoding="utf-8") as file:
            main.__file__, place, code = os.path.abspath(kind), os.path.abspath(kind), file.read()
    sys.argv[:] = [kind, *arguments]
    if sys.version_info >= (3, 13) and kind == "-c":  # its tracebacks show the code
        linecache.cache[place] = len(code), None, code.splitlines(keepends=True), place
    exec(compile(code, place, "exec", dont_inherit=True), main.__dict__)


def end(error: BaseException | None) -> None:
    status = int(error is not None)
    if isinstance(error, SystemExit):
        status = error.code if isinstance(error.code, int) else int(error.code is not None)
        if status and error.code != status:
            print(error.code, file=sys.stderr)
    elif error is not None:
        trace = error.__traceback__
        while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
            trace = trace.tb_next
        sys.excepthook(type(error), error.with_traceback(trace), trace)
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):
            stream.flush()
    if isinstance(error, KeyboardInterrupt):
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    os._exit(status)


if __name__ == "__main__":
    raised: BaseException | None = None
    try:
        run(*sys.argv[1:])
    except BaseException as error:
        raised = error
    end(raised)
