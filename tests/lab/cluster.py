"""clusters/lan.yaml on the hosts of a lab, used from the laptop as a user would."""

from __future__ import annotations

import json
import re
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

from cluster_checks import opening
from lab import ROOT, Command, Lab, wait_until

HOSTS = ("laptop", "head", "w1", "w2")
PROJECT = Path(__file__).resolve().parent / "project"
SHELL = f"export PATH={sys.prefix}/bin:$PATH; cd ~/project; "


def filled_in(text: str, lab: Lab) -> str:
    """lan.yaml with the changes that a lab needs.

    There is no package index in a lab: the venv is this machine's, and the wheel is unpacked. Its
    hosts share this machine's cores and memory.
    """
    head, *workers = (lab.address(host) for host in lab.hosts[1:])
    install = re.search(r'(?m)^  - "W=.*"$', text)
    assert install is not None
    changes = {
        "192.168.1.10 ": head,
        "[192.168.1.11]": f"[{', '.join(workers)}]",
        "ssh_user: you ": "ssh_user: root ",
        "python3 -m venv ~/raytrain": f"ln -s {sys.prefix} ~/raytrain",
        install[0]: "  - rm -rf ~/code && python3 -m zipfile -e ~/.raytrain-dist/*.whl ~/code",
        "RAY_AUTH_MODE=token' >>": "RAY_AUTH_MODE=token PYTHONPATH=~/code' >>",
        " --disable-usage-stats": " --disable-usage-stats --num-cpus=1"
        " --object-store-memory=100000000",
    }
    for before, after in changes.items():
        assert before in text, before
        text = text.replace(before, after)
    return text


class Cluster:
    """Initially down."""

    def __init__(self, lab: Lab, shared: Path) -> None:
        self.lab, self.shared, self.is_up = lab, shared, False
        project = lab.home("laptop") / "project"
        shutil.copytree(PROJECT, project, ignore=shutil.ignore_patterns("__pycache__"))
        shutil.make_archive(str(project / "code"), "zip", ROOT, "raytrain_ddp")
        (project / "dist").mkdir()
        (project / "code.zip").rename(project / "dist" / "raytrain_ddp.whl")
        (project / "clusters").mkdir()
        text = (ROOT / "clusters" / "lan.yaml").read_text(encoding="utf-8")
        self.commands = opening(text)
        (project / "clusters" / "lan.yaml").write_text(filled_in(text, lab))
        key = lab.home("laptop") / ".ssh" / "id_ed25519"
        key.touch(0o600)
        key.write_text(lab.key(), encoding="utf-8")
        self.laptop("(umask 077; ray get-auth-token --generate > /dev/null)")

    def laptop(self, command: str, timeout_s: float = 180) -> str:
        """Runs a command on the laptop; returns its output."""
        return self.lab.run("laptop", SHELL + command, timeout_s)

    def up(self) -> None:
        if not self.is_up:
            self.laptop(self.commands["bring up"])
            self.is_up = True

    def take_down(self) -> str:
        self.is_up = False
        return self.laptop(self.commands["take down"])

    def train(self, flags: str) -> Command:
        """The second command of the file, with flags."""
        words = self.commands["train"].replace("/shared/runs", f"{self.shared}/runs {flags}")
        return self.lab.start("laptop", SHELL + words)

    @contextmanager
    def own(self, flags: str = "") -> Iterator[Run]:
        """`fit mine.toml` with the user's own folder, as in docs/clusters.md."""
        page = (ROOT / "docs" / "clusters.md").read_text(encoding="utf-8")
        tunnel = re.search(r"(?m)^    (ray dashboard .*?) +#", page)
        submit = re.search(r"(?m)^    (.*ray job submit .* mine\.toml)$", page)
        assert tunnel is not None
        assert submit is not None
        number = len(list(self.shared.glob("notes-*")))
        run = Run(self.shared, f"run-{number}", self.shared / f"notes-{number}")
        flags = f"--storage {self.shared}/runs --name {run.name} {flags}"
        words = f"{submit[1]} --task-options notes {run.notes} {flags}"
        through = self.lab.start("laptop", SHELL + tunnel[1])
        try:
            knock = "until exec 3<>/dev/tcp/127.0.0.1/8265; do sleep 0.2; done 2>/dev/null; "
            run.command = self.lab.start("laptop", SHELL + knock + words)
            yield run
        finally:
            if run.command is not None and not run.command.ended():
                run.command.end()
                for job in {*re.findall(r"raysubmit_\w+", run.command.output())}:
                    self.laptop(f"ray exec clusters/lan.yaml 'ray job stop {job}'")
            through.end()


class Run:
    """A run of project/mine.toml: its output, its files, and the times of its forward passes."""

    def __init__(self, shared: Path, name: str, notes: Path) -> None:
        self.name, self.notes = name, notes
        self.folder = shared / "runs" / name
        self.command: Command | None = None
        notes.mkdir()

    def finish(self, timeout_s: float = 180) -> None:
        """Runs without pauses from here on; must succeed."""
        (self.notes / "hurry").touch()
        assert self.command is not None
        assert self.command.wait(timeout_s) == 0, self.command

    def history(self, kind: str, file: str = "metrics.jsonl") -> list[dict[str, Any]]:
        path = self.folder / file
        lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
        records = [json.loads(line) for line in lines if line.endswith("}")]
        return [record for record in records if record["kind"] == kind]

    def events(self, kind: str) -> list[dict[str, Any]]:
        return self.history(kind, "events.jsonl")

    def sizes(self) -> list[int]:
        """The number of workers at each start."""
        return [event["world_size"] for event in self.events("plan")]

    def times(self, since: float = 0.0) -> list[float]:
        """Of the forward passes on all hosts, in order."""
        hosts = [path for path in self.notes.iterdir() if path.name in HOSTS]
        times = [float(line) for host in hosts for line in host.read_text("utf-8").split()]
        return sorted(t for t in times if t >= since)

    def wait_for(self, what: str, holds: Any, timeout_s: float = 150) -> float:
        def look() -> bool:
            assert self.command is None or not self.command.ended(), self.command
            return bool(holds())

        return wait_until(look, timeout_s, f"{what}; {self.command}")

    def wait_for_step(self, step: int) -> float:
        reported = lambda: self.history("train")[-1:]  # noqa: E731
        return self.wait_for(f"step {step}", lambda: reported() and reported()[0]["step"] >= step)

    def wait_for_start(self, number: int) -> float:
        """Waits until workers have been started this many times and have computed since."""
        at = self.wait_for(f"start {number}", lambda: len(self.sizes()) >= number)
        return self.wait_for(f"a step of start {number}", lambda: self.times(at))

    def standstill(self, since: float) -> tuple[float, float]:
        """The longest period without a forward pass on any host: begin and end, in seconds after
        `since`."""
        times = [t - since for t in self.times(since - 1)]
        return max(pairwise(times), key=lambda pair: pair[1] - pair[0])

    def weights(self) -> bytes:
        (file,) = self.folder.glob("checkpoints/step-00000360-*/model.safetensors")
        return file.read_bytes()
