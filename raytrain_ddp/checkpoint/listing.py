"""One listing of a folder of checkpoints, and which of them count.

Fencing: each start of a run claims an attempt number and fences off earlier attempts.

    <storage>/claim-a0001-9f1c02ab.json                              the first start
    <storage>/claim-a0002-from-step-00000200-a0001-03d7e5b1.json     resumed from that checkpoint

All information is in the names, so one listing tells which checkpoints count: there is no clock,
no lock, and no file that a crash could leave half written.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from raytrain_ddp.checkpoint.committed import MOST_ATTEMPTS, CheckpointName
from raytrain_ddp.errors import CheckpointError, RunLockedError

MANIFEST_FILE = "manifest.json"
DAMAGED_MARK = "damaged.txt"
RESERVED = (MANIFEST_FILE, DAMAGED_MARK)
DAMAGED_PREFIX = "damaged-"

_ANY_FOLDER = re.compile(rf"(?:{DAMAGED_PREFIX})?step-[0-9]+-a([0-9]+)(?:-[0-9]+)?")
_NAME = re.compile(
    r"claim-a([0-9]{4,15})(?:-from-(step-[0-9]{8,15}-a[0-9]{4,15}))?-([0-9a-f]{8})\.json"
)
_NOTHING = CheckpointName(-1, -1)


class ContendedError(RunLockedError, OSError):
    """Another process changed this run at the same moment: start again from `latest` a bit later.

    It is an OSError because it is transient, like a store that does not respond: of two processes
    of one run, Ray is often about to kill the older one. If it persists, two drivers run this run.
    """


@dataclass(frozen=True)
class Claim:
    """Start number `attempt` resumed from checkpoint `base`, or started from scratch.

    `token` (8 hex digits) distinguishes two starts that claim the same number at the same moment.
    """

    attempt: int
    base: CheckpointName | None
    token: str

    def __str__(self) -> str:
        base = f"-from-{self.base}" if self.base else ""
        return f"claim-a{self.attempt:04d}{base}-{self.token}.json"

    @property
    def rank(self) -> tuple[int, CheckpointName, str]:
        """The claim with the highest rank owns the run."""
        return self.attempt, self.base or _NOTHING, self.token

    def fences(self, name: CheckpointName) -> bool:
        """Whether that checkpoint was written too late: its writer had already been replaced."""
        return name.attempt < self.attempt and (self.base is None or self.base < name)

    @staticmethod
    def parse(text: str) -> Claim | None:
        """The claim whose name is ``text``, or None if it is not a claim's name."""
        match = _NAME.fullmatch(text)
        if match is None:
            return None
        base = CheckpointName.parse(match[2]) if match[2] else None
        claim = Claim(int(match[1]), base, match[3])
        return claim if str(claim) == text and claim.attempt <= MOST_ATTEMPTS else None


@dataclass(frozen=True)
class CheckpointListing:
    """A store's folders with the names in them, and its claims sorted by rank (the owner's
    last)."""

    folders: Mapping[str, set[str]]
    claims: list[Claim]

    @staticmethod
    def of(paths: Iterable[str]) -> CheckpointListing:
        """From relative paths; those of folders end with ``/``."""
        folders: dict[str, set[str]] = {}
        claims = []
        for path in paths:
            folder, slash, rest = path.partition("/")
            if slash:
                folders.setdefault(folder, set()).add(rest)
            elif claim := Claim.parse(path):
                claims.append(claim)
        return CheckpointListing(folders, sorted(claims, key=lambda claim: claim.rank))

    def names(self) -> list[CheckpointName]:
        """The committed checkpoints that count, newest first; never empty if any is committed."""
        fenced = set(self.fenced())
        return [name for name in self.committed() if name not in fenced]

    def fenced(self) -> list[CheckpointName]:
        """Committed checkpoints whose writer had already been replaced, newest first.

        A claim fences off nothing until its start, or a later one, has committed a checkpoint,
        unless its base still exists. Otherwise nothing would count if a replaced writer pruned the
        base of its successor, or if a backup is restored.
        """
        committed = self.committed()
        newest = max((name.attempt for name in committed), default=0)
        standing = [c for c in self.claims if c.base in committed or c.attempt <= newest]
        owners = {claim.attempt: claim for claim in standing}  # the highest of each number
        resumed = set()  # those the newest start resumed from: they counted when chosen
        claim = standing[-1] if standing else None
        while claim is not None and claim.base is not None:
            resumed.add(claim.base)
            claim = owners.get(claim.base.attempt) if claim.base.attempt < claim.attempt else None
        return [
            name
            for name in committed
            if name not in resumed and any(claim.fences(name) for claim in owners.values())
        ]

    def leftovers(self) -> list[str]:
        """Folders of unfinished commits or deletions."""
        marks = {MANIFEST_FILE, DAMAGED_MARK}
        return [
            f for f, files in self.folders.items() if CheckpointName.parse(f) and not files & marks
        ]

    def given_up(self, attempt: int) -> list[str]:
        """Returns the leftovers of failed commits of one start."""
        parsed = [(folder, CheckpointName.parse(folder)) for folder in self.leftovers()]
        return [folder for folder, name in parsed if name and name.attempt == attempt]

    def damaged(self) -> list[str]:
        """Folders of checkpoints set aside as damaged."""
        return sorted(
            folder
            for folder, files in self.folders.items()
            if folder.startswith(DAMAGED_PREFIX)
            or (CheckpointName.parse(folder) and DAMAGED_MARK in files)
        )

    def damaged_name(self, name: CheckpointName) -> str:
        """Of the folder under which a damaged checkpoint is kept; there may be others of it."""
        kept, copies = f"{DAMAGED_PREFIX}{name}", 1
        while kept in self.folders:
            copies += 1
            kept = f"{DAMAGED_PREFIX}{name}-{copies}"
        return kept

    def next_attempt(self) -> int:
        """The first number that no claim or folder has used."""
        number = 1 + max(self.written(), self.claims[-1].attempt if self.claims else 0)
        if number > MOST_ATTEMPTS:
            raise CheckpointError(
                f"A claim or a checkpoint has the attempt number {number - 1}, the highest "
                "possible one. No run wrote it: delete that file or folder."
            )
        return number

    def written(self) -> int:
        """The highest attempt number of all folders, in whatever state; 0 if there is none."""
        matches = map(_ANY_FOLDER.fullmatch, self.folders)
        numbers = [int(match[1]) for match in matches if match]
        return max((number for number in numbers if number <= MOST_ATTEMPTS), default=0)

    def committed(self) -> list[CheckpointName]:
        names = (
            CheckpointName.parse(folder)
            for folder, files in self.folders.items()
            if MANIFEST_FILE in files and DAMAGED_MARK not in files
        )
        return sorted(filter(None, names), reverse=True)
