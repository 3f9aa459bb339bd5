"""The picture of README.md: a worker is killed, the run continues, the weights are the same.

    python tools/killed_run.py docs/killed-run.svg

Trains the digits twice with three workers on an embedded Ray. In the first run, one worker is
killed (SIGKILL) after step 120. Then prints the hash of both runs' weights, and draws what the
terminal showed. Exits with 1 if the hashes differ. Needs psutil; takes two minutes on 2 cores.
"""

from __future__ import annotations

import hashlib
import os
import re
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import psutil
from rich.console import Console
from rich.text import Text

KILL_AFTER_STEP = 120
WIDTH = 92
WORKER = "ray::RayTrainWorker"  # the title that Ray gives to a worker's process
FIT = "python -m raytrain_ddp.fit"
FLAGS = "--epochs 8 --scaling.num-workers 3 --scaling.cpus-per-worker 0.5"
# Of all lines, those that tell the story; the others are left out.
KEPT = re.compile(r"slots x|epoch [4-8]/8 .*  eval  |rank \d failed|replaced; |: finished")
COLORS = {
    r"\$ kill|.* failed": "bold #ff7a6b",
    r"\$|    --": "bold #7cc7ff",
    r"[0-9a-f]{64}|.*replaced; ": "bold #8fd18f",
}
# As rich's own format, without its fonts from the network.
SVG = """<svg xmlns="http://www.w3.org/2000/svg" class="rich-terminal"
 viewBox="0 0 {width} {height}">
<style>{styles} .{unique_id}-matrix {{ font: {char_height}px/{line_height}px Menlo, Consolas,
 "DejaVu Sans Mono", monospace; }}</style>
<defs><clipPath id="{unique_id}-clip-terminal"><rect x="0" y="0" width="{terminal_width}"
 height="{terminal_height}"/></clipPath>{lines}</defs>
<rect width="100%" height="100%" rx="8" fill="#292929"/>
<g transform="translate(16, 20)" clip-path="url(#{unique_id}-clip-terminal)">
{backgrounds}<g class="{unique_id}-matrix">{matrix}</g></g></svg>
"""


def run(folder: Path, name: str, kill: bool) -> list[str]:
    """The lines that one `fit` prints; `kill` ends one of its workers on the way."""
    command = [sys.executable, *FIT.split()[1:], "--name", name, *FLAGS.split()]
    lines = [f"$ {FIT} --name {name} {FLAGS}"]
    print(lines[0], flush=True)
    with subprocess.Popen(
        command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as fit:
        if kill:
            metrics = folder / "runs" / name / "metrics.jsonl"
            threading.Thread(target=kill_a_worker, args=(fit, metrics, lines), daemon=True).start()
        for line in fit.stdout or ():
            lines.append(line.rstrip())
            print(lines[-1], flush=True)
    if fit.returncode:
        sys.exit(f"fit ended with status {fit.returncode}")
    return lines


def kill_a_worker(fit: subprocess.Popen[str], metrics: Path, lines: list[str]) -> None:
    """Kills one worker once `KILL_AFTER_STEP` is logged."""
    while fit.poll() is None:
        text = metrics.read_text(encoding="utf-8") if metrics.exists() else ""
        if f'"step": {KILL_AFTER_STEP},' in text:
            children = psutil.Process(fit.pid).children(recursive=True)
            workers = [child for child in children if child.name().startswith(WORKER[:15])]
            workers = [child for child in workers if WORKER in " ".join(child.cmdline())]
            workers[1].kill()
            lines.append(f"$ kill -9 {workers[1].pid}  # one of the three workers")
            print(lines[-1], flush=True)
            return
        time.sleep(0.02)


def weights(folder: Path, name: str) -> str:
    """sha256 of the newest checkpoint's weights."""
    newest = max((folder / "runs" / name / "checkpoints").glob("step-*/model.safetensors"))
    return hashlib.sha256(newest.read_bytes()).hexdigest()


def draw(lines: list[str], path: Path) -> None:
    """An SVG of a terminal that shows these lines."""
    with open(os.devnull, "w", encoding="utf-8") as nothing:
        console = Console(record=True, width=WIDTH, file=nothing, force_terminal=True)
        for line in lines:
            styles = (style for start, style in COLORS.items() if re.match(start, line))
            console.print(Text(line, style=next(styles, "")))
        svg = console.export_svg(code_format=SVG, unique_id="run")
    path.write_text("\n".join(line.rstrip() for line in svg.splitlines()) + "\n", encoding="utf-8")


def story(lines: list[str]) -> list[str]:
    """The lines that are shown, without details, and none too long."""
    kept = [line for line in lines if KEPT.search(line) or line.startswith("$")]
    host = f", on {socket.gethostname()}"
    kept = [line.partition(" (failure")[0].replace(host, "") for line in kept]
    return [part for line in kept for part in wrapped(line)]


def wrapped(line: str) -> list[str]:
    """A command over two lines, as one would type it."""
    head, cut, tail = line.partition(" --scaling")
    return [f"{head} \\", f"   {cut}{tail}"] if cut else [line]


def main() -> int:
    path = Path(sys.argv[1]).resolve()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        shown = story(run(folder, "killed", kill=True))
        run(folder, "undisturbed", kill=False)
        shown += ["", *wrapped(f"$ {FIT} --name undisturbed {FLAGS}"), "    ..."]
        shown.append("$ sha256sum runs/*/checkpoints/step-00000184-*/model.safetensors")
        hashes = {name: weights(folder, name) for name in ("killed", "undisturbed")}
        shown += [f"{digest}  runs/{name}/..." for name, digest in hashes.items()]
        print(*shown[-2:], sep="\n")
        draw(shown, path)
    return len(set(hashes.values())) - 1


if __name__ == "__main__":
    sys.exit(main())
