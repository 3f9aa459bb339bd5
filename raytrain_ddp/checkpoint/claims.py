"""Fencing: each start of a run claims an attempt number and fences off earlier attempts.

    <storage>/claim-a0001-9f1c02ab.json                              the first start
    <storage>/claim-a0002-from-step-00000200-a0001-03d7e5b1.json     resumed from that checkpoint

All information is in the names, so one listing tells which checkpoints count: there is no clock,
no lock, and no file that a crash could leave half written.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from raytrain_ddp.checkpoint.committed import MOST_ATTEMPTS, CheckpointName
from raytrain_ddp.errors import RunLockedError

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
