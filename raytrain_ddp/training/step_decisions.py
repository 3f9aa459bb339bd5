"""Decides what follows a step: the same on all ranks, agreed on while the step computes."""

from __future__ import annotations

from typing import NamedTuple

from raytrain_ddp.failpoints import failpoint
from raytrain_ddp.training.cadence import Cadence
from raytrain_ddp.training.session import Session
from raytrain_ddp.training.world import Ballot


class Decision(NamedTuple):
    """The actions after a step. `stop` is the number of a signal, or 0."""

    log: bool
    evaluate: bool
    save: bool
    stop: int


class Abandoned(Exception):
    """An evaluation was interrupted, on all ranks, because the run is stopping."""

    def __init__(self, stop: int) -> None:
        super().__init__(stop)
        self.stop = stop


class EvaluationWatch:
    """Checks before each chunk of an evaluation whether the run must stop; all ranks take part.

    The ranks agree while a chunk computes, and act before the next one. Each has `least` chunks
    or one more, so the last votes are cast before the last chunk that all of them have.
    """

    def __init__(self, session: Session, chunks: int) -> None:
        self._session, self._ballot = session, Ballot(session.world)
        self._least = chunks // session.world.size
        self._chunk = 0

    def __call__(self) -> None:
        """Raises Abandoned if the run must stop."""
        chunk, self._chunk = self._chunk, self._chunk + 1
        if 0 < chunk < self._least:
            stop, _, look = self._ballot.count()
            if look:
                self._session.look()
            if stop:
                raise Abandoned(stop)
        if chunk < self._least - 1:
            stop, _, look = self._session.meanwhile()
            self._ballot.cast(stop, False, look)


class StepDecisions:
    """Combines what is due by the number of steps, by time, and by requests of the ranks.

    Each rank asks before the compute of a step and decides after it.
    """

    def __init__(self, cadence: Cadence, session: Session) -> None:
        self._cadence, self._session = cadence, session
        self._ballot = Ballot(session.world)

    def ask(self, step: int) -> None:
        """Casts this rank's votes on what follows `step`; all ranks take part."""
        stop, save, look = self._session.wishes()
        by_the_clock = self._session.time_to_save()
        self._ballot.cast(stop, save or by_the_clock, look)
        failpoint("train.before_step", self._session.world.rank, step)

    def decide(self, step: int) -> Decision:
        """What follows `step`, which is computed; all ranks take part and get the same."""
        failpoint("train.after_step", self._session.world.rank, step)
        stop, save, look = self._ballot.count()
        if look:
            self._session.look()
        due = self._cadence
        return Decision(
            log=due.logs(step),
            # A run that is stopping does not wait for an evaluation: it is repeated on resume.
            evaluate=due.evaluates(step) and not stop,
            save=save or stop > 0 or due.saves(step),
            stop=stop,
        )
