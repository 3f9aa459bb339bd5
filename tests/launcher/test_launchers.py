"""examples/launchers: each script gives the same result on Ray as under its own launcher.

Two of them by default, in test_fit_on_ray.py, on the Ray of that file.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from old_launchers import EXAMPLES, MANNERS, compare
from ray_cluster import two_nodes


@pytest.fixture(scope="module")
def cluster(unchanged_process: None) -> Iterator[Any]:
    with two_nodes() as made:
        yield made


def test_every_launcher_example_is_tested_and_in_the_readme():
    scripts = {path.name for path in EXAMPLES.glob("*.py")}
    assert scripts == {*MANNERS}
    readme = (EXAMPLES / "README.md").read_text()
    for name, manner in MANNERS.items():
        assert "raytrain_ddp" not in (EXAMPLES / name).read_text()
        command = f"python -m raytrain_ddp.run {manner.flags} {name} {manner.args}".replace(
            "{size}", "2"
        ).strip()
        assert command in " ".join(readme.replace("\\\n", " ").split()), command


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("name", MANNERS)
def test_each_script_has_the_same_result_as_under_its_own_launcher(
    name: str, size: int, cluster: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    compare(name, size, tmp_path, monkeypatch)
