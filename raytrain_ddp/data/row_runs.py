"""Runs of rows laid end to end, of which nearly all have one length.

So it is with the blocks of a data set: row groups are alike but for the last of each file. Where a
run begins, and in which run a place is, follow from the few odd ones, whatever their number.
"""

from __future__ import annotations

import numpy as np

from raytrain_ddp.data.permutation import Feistel
from raytrain_ddp.data.sample_rng import Rows


class RowRuns:
    """`count` runs of `usual` places each, but for a few.

    Args:
        odd: which runs have another length, shape (n,), ascending.
        more: how many places more than usual (or less) they have, shape (n,).
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
        some = Feistel(len(lengths))(np.arange(min(len(lengths), 1001)))  # no regular sample
        usual = int(np.median(lengths[some]))
        odd = np.flatnonzero(lengths != usual)
        return RowRuns(len(lengths), usual, odd, lengths[odd] - usual)

    def permuted(self, permutation: Feistel) -> RowRuns:
        """The same runs in another order: run `permutation(i)` becomes the i-th."""
        odd = permutation.inverse(self._odd)
        order = np.argsort(odd)
        return RowRuns(self.count, self._usual, odd[order], self._more[order])

    def start(self, runs: Rows) -> Rows:
        """Where each of `runs`, shape (k,), begins; run `count`: where the last one ends."""
        starts: Rows = runs * self._usual + self._shifts[np.searchsorted(self._odd, runs)]
        return starts

    def at(self, places: Rows) -> Rows:
        """The run that each of `places`, shape (k,), is in."""
        passed = np.searchsorted(self._after_starts, places, side="right") - 1
        runs = self._after[passed] + (places - self._after_starts[passed]) // self._usual
        latest = np.append(self._odd, self.count - 1)[passed]  # an odd run may be a long one
        found: Rows = np.minimum(runs, latest)
        return found
