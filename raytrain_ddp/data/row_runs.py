"""Consecutive runs of rows, nearly all of the same length.

The blocks of a data set are like this: row groups have equal lengths, except the last of each
file. The start of a run, and the run of a place, follow from the few exceptions, whatever the
number of runs."""

from __future__ import annotations

import numpy as np

from raytrain_ddp.data.permutation import Feistel
from raytrain_ddp.data.sample_rng import Rows


class RowRuns:
    """`count` consecutive runs of `usual` places each, with a few exceptions.

    Args:
        odd: the runs with another length, shape (n,), ascending.
        more: how many places more (or less, if negative) they have, shape (n,).
    """

    def __init__(self, count: int, usual: int, odd: Rows, more: Rows) -> None:
        self.count, self._usual, self._odd, self._more = count, usual, odd, more
        self._shifts = np.concatenate([[0], np.cumsum(more)])  # (n + 1,) before each odd run
        # (n + 1,) the run after each odd one, and where it begins
        self._after = np.concatenate([[0], odd + 1])
        self._after_starts = self._after * usual + self._shifts

    @staticmethod
    def of(lengths: Rows) -> RowRuns:
        """Runs of these lengths, shape (count,), each 1 or more."""
        some = Feistel(len(lengths))(np.arange(min(len(lengths), 1001)))  # a random sample
        usual = int(np.median(lengths[some]))
        odd = np.flatnonzero(lengths != usual)
        return RowRuns(len(lengths), usual, odd, lengths[odd] - usual)

    def permuted(self, permutation: Feistel) -> RowRuns:
        """The same runs in another order: run `permutation(i)` becomes the i-th."""
        odd = permutation.inverse(self._odd)
        order = np.argsort(odd)
        return RowRuns(self.count, self._usual, odd[order], self._more[order])

    def start(self, runs: Rows) -> Rows:
        """The start of each of `runs`, shape (k,); for run `count`, the end of the last one."""
        starts: Rows = runs * self._usual + self._shifts[np.searchsorted(self._odd, runs)]
        return starts

    def at(self, places: Rows) -> Rows:
        """The run that contains each of `places`, shape (k,)."""
        passed = np.searchsorted(self._after_starts, places, side="right") - 1
        runs = self._after[passed] + (places - self._after_starts[passed]) // self._usual
        latest = np.append(self._odd, self.count - 1)[passed]  # an odd run may be longer
        found: Rows = np.minimum(runs, latest)
        return found
