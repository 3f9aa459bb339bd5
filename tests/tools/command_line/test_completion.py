"""Tab completion, in real shells where they are installed."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from raytrain_ddp.__main__ import COMMANDS, _command
from raytrain_ddp.command_line.completion import complete, script
from raytrain_ddp.config.recipe import shipped_recipes
from raytrain_ddp.errors import ConfigError


def offered(line: str) -> list[str]:
    """The completions of the last word of a command line after ``raytrain``."""
    words = line.split(" ")
    return [reported.partition("\t")[0] for reported in complete(words, COMMANDS, _command)]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("", [*COMMANDS]),
        ("fi", ["fit"]),
        ("--v", ["--version"]),
        ("--print-completion ", ["bash", "zsh", "fish"]),
        ("fit ", [*shipped_recipes()]),
        ("fit ci", ["cifar10"]),
        ("fit digits ", []),
        ("fit --optim.l", ["--optim.lr", "--optim.label-smoothing", "--optim.layer-decay"]),
        (
            "fit --optim.no",
            [
                "--optim.nonfinite",
                "--optim.no-nesterov",
                "--optim.no-decay-norms",
                "--optim.no-decay-bias",
            ],
        ),
        ("fit --emit s", ["slurm"]),
        ("fit --emit = k", ["kuberay"]),  # as bash splits --emit=k
        ("fit --emit=k", ["--emit=kuberay"]),
        ("fit --emit =", ["slurm", "kuberay", "ray-up", "command"]),
        ("fit --scaling.use_gpu ", ["auto", "true", "false"]),
        ("fit --exact t", ["true"]),
        ("fit --help sc", ["schedule", "scaling"]),
        ("fit --storage ", []),
        ("convert --workers ", []),
        ("run --env ", ["torchrun", "slurm"]),
        ("run --nproc", ["--nproc-per-node"]),
        ("nothing --x", []),
    ],
)
def test_completion_offers_the_expected_words(line: str, words: list[str]):
    assert sorted(offered(line)) == sorted(words)


def test_completion_offers_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    for name in ("digits", "mine"):
        (tmp_path / "runs" / name).mkdir(parents=True)
        (tmp_path / "runs" / name / "config.toml").touch()
    monkeypatch.chdir(tmp_path)
    assert offered("evaluate ") == offered("report digits ") == ["digits", "mine"]
    assert offered("doctor --run m") == ["mine"]
    assert offered("report --open d") == ["digits"]


def test_another_shell_is_refused():
    with pytest.raises(ConfigError, match="bash, zsh or fish, not 'tcsh'"):
        script("tcsh")


@pytest.fixture
def path(tmp_path: Path) -> str:
    """A PATH with this Python's `raytrain` first."""
    there = tmp_path / "bin"
    there.mkdir()
    program = there / "raytrain"
    call = f"import sys; sys.path[:] = {sys.path!r}\n"
    call += "from raytrain_ddp.__main__ import console_script; console_script()"
    program.write_text(f"#!{sys.executable}\n{call}\n")
    program.chmod(0o755)
    return f"{there}:/usr/bin:/bin"


def replies(path: str, shell: str, code: str, folder: Path) -> list[str]:
    found = shutil.which(shell)
    if found is None:
        pytest.skip(f"{shell} is not installed")
    done = subprocess.run(
        [found, "-c", code],
        env={"PATH": path, "HOME": str(folder), "LANG": "C.UTF-8"},
        cwd=folder,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stderr == ""
    return done.stdout.splitlines()


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("raytrain do", ["doctor"]),
        ("raytrain fit --emit = sl", ["slurm"]),
        ("raytrain fit --optim.m", ["--optim.momentum", "--optim.max-nonfinite"]),
    ],
)
def test_bash_completes(words: str, expected: list[str], path: str, tmp_path: Path):
    code = f"""
eval "$(raytrain --print-completion bash)"
complete -p raytrain > registered
COMP_WORDS=({words}); COMP_CWORD=$(( ${{#COMP_WORDS[@]}} - 1 ))
_raytrain
printf '%s\\n' "${{COMPREPLY[@]}}"
"""
    assert sorted(replies(path, "bash", code, tmp_path)) == sorted(expected)
    registered = (tmp_path / "registered").read_text()
    assert registered == "complete -o default -F _raytrain raytrain\n"


def test_fish_completes(path: str, tmp_path: Path):
    code = "raytrain --print-completion fish | source; complete -C 'raytrain fit --emit s'"
    assert replies(path, "fish", code, tmp_path) == ["slurm"]


def test_zsh_completes(path: str, tmp_path: Path):
    """Without zsh's own completion system, whose two functions are replaced."""
    code = """
compdef() { print registered $* }
_describe() { print -l -- ${(P)2} }
eval "$(raytrain --print-completion zsh)"
words=(raytrain fit --optim.no); CURRENT=3
_raytrain
"""
    reported = replies(path, "zsh", code, tmp_path)
    assert reported[0] == "registered _raytrain raytrain"
    nonfinite = "--optim.nonfinite:What to do when a loss or gradient is not finite"
    off = [f"--optim.no-{name}" for name in ("decay-bias", "decay-norms", "nesterov")]
    assert sorted(reported[1:]) == [*off, nonfinite]
