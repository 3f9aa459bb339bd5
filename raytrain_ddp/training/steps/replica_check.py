"""Checks that all workers still have the same weights, to the last bit.

They start equal and apply equal updates. A faulty device or memory shows in no other way: the
loss keeps falling, and the checkpoint has only rank 0's weights.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor

from raytrain_ddp.config.sections import ScalingConfig
from raytrain_ddp.errors import DivergedError, first_names
from raytrain_ddp.failpoints import failpoint
from raytrain_ddp.torch_compat import all_gather
from raytrain_ddp.training.gradients.buffer_sync import buffers_of, is_merged
from raytrain_ddp.training.membership import Membership
from raytrain_ddp.training.runtime.fingerprints import fingerprints
from raytrain_ddp.training.state.train_state import TrainState


class ReplicaCheck:
    """Compares parameters and buffers of all workers; ends the run if they differ."""

    def __init__(self, scaling: ScalingConfig, state: TrainState, membership: Membership) -> None:
        self._every = scaling.check_every_steps if membership.world.size > 1 else 0
        self._state, self._membership, self._world = state, membership, membership.world
        self._buffers = buffers_of(state.model)

    def _named(self) -> dict[str, Tensor]:
        """The tensors to compare."""
        named = {name: p.detach() for name, p in self._state.model.named_parameters()}
        weights = {name: p for name, p in named.items() if not p.is_complex()}
        buffers = {place.name: place.tensor() for place in self._buffers}
        # The buffers that SlotBuffers keeps equal.
        return weights | {name: b for name, b in buffers.items() if is_merged(b.dtype)}

    def follow(self) -> None:
        """Called at the end of a step; all ranks take part."""
        turned = failpoint("train.weights", self._world.rank, self._state.step)  # 1 except in tests
        if turned != 1:
            next(iter(self._named().values())).view(-1)[0] *= turned
        if self._every and self._state.step % self._every == 0:
            self.require()

    def require(self) -> None:
        """Compares now, unless the check is off; all ranks take part.

        Raises:
            DivergedError: they differ.
        """
        failpoint("train.compare", self._world.rank, self._state.step)
        differing = self._differing() if self._every else None
        if differing is not None:
            raise DivergedError(
                f"{self._problem(*differing)}. A device, memory or kernel of that host computes "
                "wrong results, or the task changes weights on its own. The last checkpoint, made "
                "earlier, is kept. Exclude that host, and start again."
            )

    def _differing(self) -> tuple[list[int], list[str]] | None:
        """(the ranks that differ from most, the tensors that differ), if any differ."""
        named = self._named()
        mine = fingerprints([*named.values()]).cpu()
        every = torch.empty(self._world.size * len(mine), dtype=torch.int64)
        all_gather(every, mine)
        table = every.view(self._world.size, -1)
        if bool((table == table[0]).all()):
            return None
        rows = [tuple(row) for row in table.tolist()]
        usual = Counter(rows).most_common(1)[0][0]  # in a tie, rank 0's
        ranks = [rank for rank, row in enumerate(rows) if row != usual]
        columns = zip(named, zip(*rows, strict=True), strict=True)
        names = [name for name, column in columns if len(set(column)) > 1]
        return ranks, names

    def _problem(self, ranks: Sequence[int], names: Sequence[str]) -> str:
        hosts, of_run = self._membership.hosts, self._world.of_run
        names_of = (f"{of_run(r)} ({hosts[r]})" if hosts else f"{of_run(r)}" for r in ranks)
        who = ", ".join(names_of)
        subject = f"ranks {who} have" if len(ranks) > 1 else f"rank {who} has"
        others = f"rank {of_run(0)}" if self._world.size == 2 else "the others"
        return (
            f"{subject} different weights from {others} after step {self._state.step}: "
            f"in {first_names(names, 1)}"
        )
