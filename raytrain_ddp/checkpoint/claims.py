"""Who may write: each start of a run claims an attempt number, and fences off those before it.

    <storage>/claim-a0001-9f1c02ab.json                              the first start
    <storage>/claim-a0002-from-step-00000200-a0001-03d7e5b1.json     went on from that checkpoint

All that counts is in the names, so that one listing tells which checkpoints stand: no clock, no
lock, and no file that a crash could leave half written.
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
    """Another process was at work here at the same instant: begin again with `latest`, a bit later.

    An OSError since, like that of a store that does not answer, it passes: of two processes of one
    run, Ray is often about to kill the older. Where it lasts, the run is driven from two places.
    """


@dataclass(frozen=True)
class Claim:
    """Start number `attempt` went on from checkpoint `base`, or from nothing.

    `token` (8 hex digits) tells two starts apart that claim one number at the same instant.
    """

    attempt: int
    base: CheckpointName | None
    token: str

    def __str__(self) -> str:
        base = f"-from-{self.base}" if self.base else ""
        return f"claim-a{self.attempt:04d}{base}-{self.token}.json"

    @property
    def rank(self) -> tuple[int, CheckpointName, str]:
        """Whoever has the highest rank owns the run."""
        return self.attempt, self.base or _NOTHING, self.token

    def fences(self, name: CheckpointName) -> bool:
        """Whether that checkpoint came too late: its writer had been replaced already."""
        return name.attempt < self.attempt and (self.base is None or self.base < name)

    @staticmethod
    def parse(text: str) -> Claim | None:
        """The claim that is written ``text``, or None where it is something else."""
        match = _NAME.fullmatch(text)
        if match is None:
            return None
        base = CheckpointName.parse(match[2]) if match[2] else None
        claim = Claim(int(match[1]), base, match[3])
        return claim if str(claim) == text and claim.attempt <= MOST_ATTEMPTS else None
