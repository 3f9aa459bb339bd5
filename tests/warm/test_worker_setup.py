"""A worker of an embedded Ray is set up as Ray's own setup_worker.py does it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import ray
from ray._private import ray_constants
from ray._private.runtime_env.context import RuntimeEnvContext

from raytrain_ddp.ray_backend.ray_settings import quick_start
from raytrain_ddp.warm import worker_setup

RAYS = Path(ray.__file__).parent / "_private" / "workers" / "setup_worker.py"
SHOWS = "import json, os, sys; print(json.dumps([sys.argv[1:], os.environ.get('SET')]))"


def shown(script: Path, context: str, worker: Path, language: str = "PYTHON") -> Any:
    """The arguments and the variable that a worker gets from this script."""
    worker.write_text(SHOWS)
    options = [f"--serialized-runtime-env-context={context}", f"--language={language}"]
    command = [sys.executable, str(script), str(worker), "--a=b c", options[0], "'$x'", options[1]]
    environment = {**os.environ, "HERE": "there"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


@pytest.mark.parametrize(
    ("given", "is_simple"),
    [
        ({}, True),
        ({"env_vars": {"SET": "a b"}}, True),
        ({"env_vars": {"SET": "${HERE}-${NOWHERE}"}}, False),
        ({"command_prefix": ["export", "SET=5", "&&"]}, False),
        ({"py_executable": f"{sys.executable} -X utf8"}, True),
        ({"py_executable": f'sh -c \'SET="$0" exec {sys.executable} "$@"\' 7'}, True),
    ],
)
def test_a_worker_gets_the_same_command_as_from_ray(
    given: Any, is_simple: bool, tmp_path: Path
) -> None:
    (tmp_path / "setup_worker.py").symlink_to(RAYS)  # as beside Ray's default_worker.py
    context, worker = RuntimeEnvContext(**given).serialize(), tmp_path / "default_worker.py"
    answers = [
        shown(script, context, worker) for script in (RAYS, Path(str(worker_setup.__file__)))
    ]
    assert answers[0][0] == ["--a=b c", "'$x'"]
    assert answers[0] == answers[1]
    argv = [str(worker), f"--serialized-runtime-env-context={context}", "--language=PYTHON"]
    assert (worker_setup.usual_worker(argv)[0][0] == "bash") == is_simple


@pytest.mark.parametrize("context", ["", "{", "[]", "{}", '{"env_vars": 3, "py_executable": "x"}'])
def test_unrecognized_options_are_left_to_ray(context: str) -> None:
    argv = ["/r/default_worker.py", f"--serialized-runtime-env-context={context}", "-l"]
    command = [sys.executable, "/r/setup_worker.py", *argv]
    for options in (argv, [*argv, "--language=JAVA"], [*argv, "--language=PYTHON"]):
        assert worker_setup.usual_worker(options) == ([*command, *options[3:]], {})


def test_only_a_ray_started_within_quick_start_uses_the_setup_script() -> None:
    with quick_start(is_warm=True, has_dashboard=True):
        assert Path(ray_constants.SETUP_WORKER_FILENAME).samefile(str(worker_setup.__file__))
    assert RAYS.name == ray_constants.SETUP_WORKER_FILENAME
