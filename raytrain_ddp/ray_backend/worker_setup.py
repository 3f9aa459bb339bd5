"""What Ray's setup_worker.py does for a usual worker, without its import of Ray (half a second).

An embedded Ray runs ``python worker_setup.py default_worker.py ARGUMENTS``. With a runtime
environment that is not as simple as ours, this process becomes Ray's own setup_worker.py by exec.
"""

from __future__ import annotations

import json
import os
import shlex
import sys
from typing import Any

_CONTEXT, _LANGUAGE = "--serialized-runtime-env-context", "--language"
_SIMPLE = {"env_vars", "py_executable"}  # the only fields that have a value


def main(argv: list[str]) -> None:
    command, environment = usual_worker(argv)
    os.environ.update(environment)
    os.execvp(command[0], command)


def usual_worker(argv: list[str]) -> tuple[list[str], dict[str, str]]:
    """The command of the worker, and variables to set."""
    options = dict(each.partition("=")[::2] for each in argv)
    worker = [each for each in argv if each.partition("=")[0] not in (_CONTEXT, _LANGUAGE)]
    try:
        context: dict[str, Any] = json.loads(options[_CONTEXT])
        given = {name for name, value in context.items() if value}
        executable, environment = context["py_executable"], dict(context["env_vars"])
        expands = any("$" in value for value in environment.values())
        if options[_LANGUAGE] == "PYTHON" and given <= _SIMPLE and not expands:
            text = " ".join(["exec", executable, *map(shlex.quote, worker)])
            return ["bash", "-c", text], environment
    except (KeyError, ValueError, TypeError, AttributeError):
        pass
    own = os.path.join(os.path.dirname(worker[0]), "setup_worker.py")
    return [sys.executable, own, *argv], {}


if __name__ == "__main__":
    main(sys.argv[1:])
