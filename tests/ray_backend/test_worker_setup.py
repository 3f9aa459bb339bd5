"""A worker of an embedded Ray is set up as Ray's own setup_worker.py does it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from raytrain_ddp.ray_backend import worker_setup

ray = pytest.importorskip("ray")
RAYS = Path(ray.__file__).parent / "_private" / "workers" / "setup_worker.py"
SHOWS = "import json, os, sys; print(json.dumps([sys.argv[1:], os.environ.get('SET')]))"
ANY_PYTHON = f'sh -c \'SET="$0" exec {sys.executable} "$@"\' 7'


@pytest.mark.parametrize(
    ("given", "is_simple"),
    [
        ({"env_vars": {"SET": "a b"}, "py_executable": ANY_PYTHON}, True),
        ({"env_vars": {"SET": "${HERE}-${NOWHERE}"}}, False),
        ({"command_prefix": ["export", "SET=5", "&&"]}, False),
    ],
)
def test_a_worker_gets_the_same_command_as_from_ray(
    given: Any, is_simple: bool, tmp_path: Path
) -> None:
    (tmp_path / "setup_worker.py").symlink_to(RAYS)  # as beside Ray's default_worker.py
    (worker := tmp_path / "default_worker.py").write_text(SHOWS)
    whole = {"command_prefix": [], "env_vars": {}, "py_executable": sys.executable, **given}
    context = f"--serialized-runtime-env-context={json.dumps(whole)}"
    options, environment = [context, "--language=PYTHON"], {**os.environ, "HERE": "there"}
    answers = []
    for script in (RAYS, Path(str(worker_setup.__file__))):
        command = [sys.executable, str(script), str(worker), "--a=b c", "'$x'", *options]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        answers.append(json.loads(done.stdout))
    assert answers[0][0] == ["--a=b c", "'$x'"]
    assert answers[0] == answers[1]
    assert (worker_setup.usual_worker([str(worker), *options])[0][0] == "bash") == is_simple
