"""examples/launchers: what their README says. They run in test_fit_on_ray.py and, with -m slow, in
test_ray_faults.py."""

from __future__ import annotations

from old_launchers import EXAMPLES, MANNERS


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
