"""Completion of ``raytrain`` by shells: a script for each, and the words that it offers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from raytrain_ddp.command_line.commands import Command
from raytrain_ddp.command_line.flags import Flag
from raytrain_ddp.command_line.help_page import negated, summary
from raytrain_ddp.config.field_types import listed
from raytrain_ddp.config.recipe import shipped_recipes
from raytrain_ddp.config.train_config import TrainConfig
from raytrain_ddp.errors import ConfigError

SHELLS = {
    "bash": """add to ~/.bashrc: eval "$(raytrain --print-completion bash)\"""",
    "zsh": """add to ~/.zshrc, after compinit: eval "$(raytrain --print-completion zsh)\"""",
    "fish": "add to ~/.config/fish/config.fish: raytrain --print-completion fish | source",
}
# Each asks `raytrain --complete` with the words up to the cursor, and gets a line for each
# candidate: the word, a tab, what it means. Without candidates, shells offer files.
_SCRIPTS = {
    "bash": """\
_raytrain() {
    local word about
    COMPREPLY=()
    while IFS=$'\\t' read -r word about; do COMPREPLY+=("$word"); done < <(
        raytrain --complete "${COMP_WORDS[@]:1:COMP_CWORD}" 2>/dev/null)
}
complete -o default -F _raytrain raytrain
""",
    "zsh": """\
_raytrain() {
    local word about
    local -a found
    while IFS=$'\\t' read -r word about; do
        found+=("${word//:/\\\\:}${about:+:$about}")
    done < <(raytrain --complete "${(@)words[2,CURRENT]}" 2>/dev/null)
    if (( $#found )); then _describe raytrain found -o nosort; else _files; fi
}
compdef _raytrain raytrain
""",
    "fish": """\
function __raytrain
    set -l found (raytrain --complete (commandline -opc)[2..] (commandline -ct) 2>/dev/null)
    if test (count $found) -gt 0
        printf '%s\\n' $found
    else
        __fish_complete_path (commandline -ct)
    end
end
complete -c raytrain -f -a '(__raytrain)'
""",
}


def script(shell: str) -> str:
    """The script that makes a shell complete ``raytrain``. Raises ConfigError for another shell."""
    if shell not in _SCRIPTS:
        raise ConfigError(f"--print-completion takes {listed(_SCRIPTS)}, not {shell!r}.")
    return _SCRIPTS[shell]


def complete(
    words: Sequence[str], commands: Mapping[str, str], load: Callable[[str], Command[Any]]
) -> list[str]:
    """What may stand for the last of the words: candidates and their meaning, with a tab between.

    Args:
        words: of the command line, without the program; bash makes three of ``--flag=value``.
        commands: all commands, and what each is for.
    """
    *before, last = words or [""]
    start = ""
    if last == "=":
        before, last = [*before, last], ""
    if before[-1:] == ["="]:
        before = before[:-1]
    elif last.startswith("--") and "=" in last:
        flag, _, last = last.partition("=")
        before, start = [*before, flag], f"{flag}="
    if not before:
        others = {"--help": "", "--version": "", "--print-completion": "bash, zsh, or fish"}
        found = [*{**commands, **(others if last.startswith("-") else {})}.items()]
    elif before == ["--print-completion"]:
        found = [(shell, "") for shell in _SCRIPTS]
    elif before[0] in commands:
        found = [*_of_a_command(load(before[0]), before[1:], last)]
    else:
        found = []
    return [f"{start}{word}\t{about}" for word, about in found if word.startswith(last)]


def _of_a_command(
    command: Command[Any], before: Sequence[str], last: str
) -> Iterator[tuple[str, str]]:
    flags = command.flags(command.defaults(config=TrainConfig()))
    named = {f"--{flag.name}": flag for flag in flags if not flag.positional}
    previous = named.get(before[-1].replace("_", "-")) if before else None
    if before[-1:] == ["--help"]:
        yield from ((section, "") for section in dict.fromkeys(flag.section for flag in flags))
    elif last.startswith("-"):
        for name, flag in named.items():
            yield name, summary(flag)
            if flag.is_switch:
                yield f"--{negated(flag.name)}", ""
        yield from (("--help", "Main flags"), ("--help-all", "All flags"))
    else:
        words = previous.choices if previous else []
        if previous is None or previous.is_switch:
            words = [*words, *_placed(flags, before)]
        elif previous.name == "run":
            words = _runs()
        yield from ((word, "") for word in words)


def _placed(flags: Sequence[Flag], before: Sequence[str]) -> list[str]:
    """What may be given by place: a recipe as the first word, or runs."""
    metavars = {flag.positional for flag in flags if flag.positional}
    if "RECIPE" in metavars:
        return [] if before else [*shipped_recipes()]
    return _runs() if "RUN" in metavars else []


def _runs() -> list[str]:
    return sorted(path.parent.name for path in Path("runs").glob("*/config.toml"))
