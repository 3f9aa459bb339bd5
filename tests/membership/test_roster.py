"""Which processes form which generation: examples, and random sequences of deaths, messages, and
restarts of the roster."""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from raytrain_ddp.membership.roster import OVER, CallClock, Member, Roster, Seat

W = 3
ALL = 5  # of which the last two join later


class ClockedRoster:
    """A roster with a clock that tests set."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.roster = Roster(lambda: self.now_s)

    def asks(
        self, rank: int, token: str, last: int = 0, least: int = W, most: int = 0
    ) -> tuple[int, str] | None:
        address = f"host:{ord(token[0])}"
        member = Member(rank, W, least, token, last, "a", "node", address, most)
        seat = self.roster.meet(member)[0]
        return seat and (seat.number, seat.address)

    def is_over(self, rank: int, token: str, last: int) -> bool:
        return self.roster.is_over(Member(rank, W, 1, token, last, "a"))


def training_roster(least: int = 1) -> ClockedRoster:
    """All three train in generation 1."""
    clocked = ClockedRoster()
    for rank, token in enumerate("abc"):
        clocked.asks(rank, token, least=least)
    return clocked


def test_fault_51_a_generation_needs_all_ranks_and_refuses_a_process_that_was_replaced() -> None:
    clocked = ClockedRoster()
    clocked.asks(1, "x")
    clocked.now_s += 10
    assert clocked.asks(0, "a") is None
    assert clocked.asks(2, "c") is None, "rank 1 has died while it waited"
    assert clocked.asks(1, "b") == (1, "host:97")
    assert clocked.asks(0, "a") == clocked.asks(2, "c") == (1, "host:97")

    assert not clocked.is_over(0, "a", last=1)
    clocked.now_s += 1
    assert clocked.asks(1, "d") is None
    assert clocked.is_over(0, "a", last=1)
    assert clocked.asks(1, "b", last=1) == (OVER, "")
    assert clocked.asks(0, "a", last=1) is None
    assert clocked.asks(2, "c", last=1) == (2, "host:97")
    assert clocked.asks(1, "d") == (2, "host:97")


def test_a_start_with_fewer_ranks_does_not_wait_for_those_of_the_one_before() -> None:
    roster = Roster(lambda: 0.0)
    assert roster.meet(Member(2, 3, 3, "c", 0, "a"))[0] is None
    assert roster.meet(Member(0, 2, 2, "d", 0, "a"))[0] is None
    seat = roster.meet(Member(1, 2, 2, "e", 0, "a"))[0]
    assert seat is not None
    assert (seat.size, seat.ranks) == (2, ())


def test_a_pause_of_the_roster_does_not_count_as_silence_of_members(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    roster = Roster(CallClock())
    members = [Member(rank, 4, 1, token, 0, "a") for rank, token in enumerate("abcd")]
    assert [roster.meet(each)[0] for each in members][:3] == [None] * 3
    members = [replace(each, last=1) for each in members]
    roster.died(3)
    assert roster.meet(members[0])[0] is None  # rank 0 has left; the others follow
    now[0] += 7.0
    assert roster.meet(members[0])[0] is None
    assert roster.meet(members[1])[0] is None
    seat = roster.meet(members[2])[0]
    assert seat is not None
    assert seat.size == 3
    members = [replace(each, last=2) for each in members]
    for _ in range(21):  # now they are silent: the roster was asked all the time
        now[0] += 0.5
        seat = roster.meet(members[0])[0]
    assert seat is not None
    assert seat.size == 1


def test_survivors_continue_with_the_lowest_rank_as_host_as_soon_as_a_death_is_reported() -> None:
    clocked = training_roster()
    assert clocked.asks(2, "c", last=1, least=1) is None, "rank 0 may only be slow"
    assert not clocked.is_over(1, "b", last=1)
    clocked.roster.died(0)
    assert clocked.roster.alive() == 2
    assert clocked.is_over(1, "b", last=1), "rank 1 may not notice it otherwise"
    for _ in range(60):  # rank 1 is in a long step
        clocked.now_s += 1
        assert clocked.asks(2, "c", last=1, least=1) is None
        assert clocked.is_over(1, "b", last=1)
    assert clocked.asks(1, "b", last=1, least=1) == (2, "host:98")
    assert clocked.asks(2, "c", last=1, least=1) == (2, "host:98")


def test_too_few_survivors_wait_for_a_replacement_and_a_replacement_for_them() -> None:
    clocked = training_roster(least=2)
    clocked.roster.died(0)
    clocked.roster.died(1)
    assert clocked.asks(2, "c", last=1, least=2) is None
    assert clocked.asks(0, "d", least=2) == (2, "host:100"), "two are there"

    clocked = training_roster()
    clocked.roster.died(0)
    assert clocked.asks(0, "d", least=1) is None
    clocked.roster.died(1)
    clocked.roster.died(2)
    assert clocked.asks(0, "d", least=1) is None, "nobody is left: all begin together"
    clocked.asks(1, "e", least=1)
    assert clocked.asks(2, "f", least=1) == (2, "host:100")


def test_training_ranks_learn_of_newcomers_that_have_waited_for_each_other() -> None:
    clocked = training_roster()
    for rank in (1, 2):
        clocked.roster.died(rank)
    assert clocked.asks(0, "a", last=1, least=1) == (2, "host:97")
    assert clocked.asks(1, "d", least=1) is None
    assert not clocked.roster.has_newcomer(), "rank 2 may come soon"
    clocked.asks(2, "e", least=1)
    assert clocked.roster.has_newcomer()
    for _ in range(11):
        clocked.now_s += 1
        clocked.asks(1, "d", least=1)
    assert clocked.roster.has_newcomer(), "one has waited long enough"
    assert not clocked.is_over(0, "a", last=2), "it leaves at the end of a step"
    clocked.asks(0, "a", last=2, least=1)
    assert clocked.asks(1, "d", least=1) == (3, "host:97")


def test_a_silent_process_counts_as_dead_without_a_report_of_ray() -> None:
    clocked = training_roster()
    for _ in range(130):
        clocked.now_s += 1
        assert not clocked.is_over(0, "a", last=1) or clocked.now_s > 120
        clocked.is_over(2, "c", last=1)
    assert clocked.roster.alive() == 2
    assert clocked.is_over(0, "a", last=1)
    clocked.asks(0, "a", last=1, least=1)
    assert clocked.asks(2, "c", last=1, least=1) == (2, "host:97")
    clocked.now_s += 1
    assert clocked.is_over(1, "b", last=1), "it was only stopped"
    clocked.asks(1, "b", last=1, least=1)
    assert clocked.roster.has_newcomer()


def test_a_restarted_roster_waits_for_all_ranks_before_it_forms_a_smaller_generation() -> None:
    clocked = training_roster()
    clocked.roster = Roster(lambda: clocked.now_s)
    assert clocked.asks(0, "a", last=1, least=1) is None
    clocked.now_s += 1
    assert not clocked.is_over(2, "c", last=1)
    clocked.now_s += 1
    assert clocked.asks(2, "c", last=1, least=1) is None
    assert clocked.asks(1, "b", last=1, least=1) is None
    clocked.now_s += 5
    for rank, token in enumerate("ab"):
        clocked.asks(rank, token, last=1, least=1)
    assert clocked.asks(2, "c", last=1, least=1) == (2, "host:97")


def test_additional_ranks_join_and_continue_after_the_first_ranks_died() -> None:
    """The run starts with as many ranks as there is room for."""
    clocked, of = ClockedRoster(), {"least": 3, "most": 6}
    for rank, token in enumerate("abc"):
        clocked.asks(rank, token, **of)
    assert clocked.asks(3, "d", **of) is None
    assert not clocked.roster.has_newcomer(), "ranks 4 and 5 may come at the same time"
    clocked.now_s += 1
    assert clocked.asks(5, "f", **of) is None
    assert not clocked.roster.has_newcomer()
    clocked.now_s += 2.5
    assert clocked.asks(3, "d", **of) is None
    assert clocked.roster.has_newcomer()
    for rank, token in enumerate("abc"):
        clocked.asks(rank, token, last=1, **of)
    assert clocked.asks(5, "f", **of) == (2, "host:97")

    clocked.roster.died(0)
    clocked.roster.died(2)
    assert clocked.asks(1, "b", last=2, **of) is None
    assert clocked.asks(3, "d", last=2, **of) is None
    assert clocked.asks(5, "f", last=2, **of) == (3, "host:98")
    left = clocked.roster.meet(Member(3, W, 3, "d", 2, "a", most=6))[0]
    assert left is not None
    assert (left.rank, left.size, left.ranks) == (1, 3, (1, 3, 5)), "for texts: those of the run"
    assert clocked.asks(0, "g", **of) is None
    assert not clocked.roster.has_newcomer(), "rank 2 is replaced, too"
    assert clocked.asks(2, "h", **of) is None
    assert clocked.roster.has_newcomer(), "rank 4 has had no room yet"


def test_starting_processes_wait_a_minute_for_the_first_ranks() -> None:
    clocked, of = training_roster(least=2), {"least": 2, "most": 4}
    for rank in range(W):
        clocked.roster.died(rank)
    for _ in range(59):
        assert clocked.asks(3, "d", **of) is None
        assert clocked.asks(1, "e", **of) is None
        clocked.now_s += 1
    clocked.now_s += 1
    clocked.asks(3, "d", **of)
    assert clocked.asks(1, "e", **of) == (2, "host:101")


def test_a_newcomer_never_starts_alone_while_others_train() -> None:
    clocked, of = training_roster(), {"least": 1, "most": 4}
    for _ in range(100):
        clocked.now_s += 1
        assert clocked.asks(3, "d", **of) is None
        for rank, token in enumerate("abc"):
            clocked.is_over(rank, token, last=1)


def test_seats_have_local_and_node_ranks_on_several_nodes() -> None:
    roster = Roster()
    nodes = ["x", "y", "x", "y", "y"]
    for _ in range(2):
        seats = [
            roster.meet(Member(rank, 5, 5, f"{rank}", 0, node, node))[0]
            for rank, node in enumerate(nodes)
        ]
    assert [seat and seat[3:8] for seat in seats] == [
        (0, 5, 0, 2, 0),
        (1, 5, 0, 3, 1),
        (2, 5, 1, 2, 0),
        (3, 5, 1, 3, 1),
        (4, 5, 2, 3, 1),
    ]


# ------------------------------------------------------------------ random sequences of events


@dataclass
class Process:
    """A process of a rank that behaves like `Place`: it asks until it has a seat, then trains."""

    member: Member
    seat: Seat = field(default_factory=lambda: Seat(0))
    since_s: float = 0.0  # when it got its seat
    trains: bool = False
    alive: bool = True


class Run:
    """Some ranks, each with a sequence of processes. Each action takes time."""

    def __init__(self, least: int, ranks: int) -> None:
        self.now_s, self.least, self.made, self.most = 0.0, least, 0, ranks
        self.roster = Roster(lambda: self.now_s)
        self.ranks = [self.process(rank) for rank in range(ranks)]
        self.formed: dict[str, set[str]] = {}  # key of a generation -> tokens with a seat in it

    def process(self, rank: int) -> Process:
        self.made += 1
        token = f"{self.made}"
        address = f"a:{token}"
        return Process(Member(rank, W, self.least, token, 0, "host", "node", address, self.most))

    def act(self, what: str, rank: int) -> None:
        self.now_s += 0.1
        process = self.ranks[rank]
        if what == "kill":
            process.alive = process.trains = False
        elif what == "report" and not process.alive:
            self.roster.died(rank)
        elif what == "replace" and not process.alive:
            self.ranks[rank] = self.process(rank)
        elif what == "lose roster":
            self.roster = Roster(lambda: self.now_s)
        elif what == "wait":
            self.now_s += 2.0
        elif what == "turn" and process.alive:
            self.turn(process)

    def turn(self, process: Process) -> None:
        """A process asks the roster; it has lost its peers if one of them is dead or has left."""
        if process.trains:
            peers, key = self.formed[process.seat.key], process.seat.key
            there = {p.member.token for p in self.ranks if p.trains and p.seat.key == key}
            lost = len(peers) == process.seat.size and not peers <= there
            lost |= len(peers) < process.seat.size and self.now_s - process.since_s > 20
            member = replace(process.member, last=process.seat.number)
            over = self.roster.is_over(member)
            joins = self.roster.has_newcomer()
            process.trains = not (lost or over or joins)
            return
        member = replace(process.member, last=max(0, process.seat.number))
        seat, _ = self.roster.meet(member)
        if seat is None:
            return
        assert seat.number != OVER, "no process is replaced while it lives"
        assert seat.number > process.seat.number
        tokens = self.formed.setdefault(seat.key, set())
        tokens.add(member.token)
        assert self.least <= seat.size <= self.most
        assert len(tokens) <= seat.size
        process.seat, process.trains, process.since_s = seat, True, self.now_s


ACTIONS = ["turn"] * 6 + ["kill", "report", "replace", "wait", "lose roster"]


@settings(max_examples=80, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    st.integers(1, W),
    st.sampled_from((W, ALL)),
    st.lists(st.tuples(st.sampled_from(ACTIONS), st.integers(0, ALL - 1)), max_size=80),
)
def test_after_any_sequence_of_events_all_live_processes_finally_train_together(
    least: int, ranks: int, actions: list[tuple[str, int]]
) -> None:
    run = Run(least, ranks)
    for what, rank in actions:
        run.act(what, rank % ranks)
    for rank in range(ranks):
        run.act("report", rank)
        run.act("replace", rank)
    for _ in range(400):
        for rank in range(ranks):
            run.act("turn", rank)
    seats = [process.seat for process in run.ranks]
    assert all(process.trains for process in run.ranks)
    assert len({seat[:3] for seat in seats}) == 1
    assert sorted(seat.rank for seat in seats) == [*range(ranks)]


def test_a_process_reported_dead_that_is_heard_again_is_not() -> None:
    clocked = training_roster()
    clocked.roster.died(0)
    clocked.now_s += 1
    assert clocked.is_over(1, "b", last=1)
    clocked.now_s += 1
    clocked.is_over(0, "a", last=1)  # its heartbeat
    clocked.now_s += 1
    assert not clocked.is_over(1, "b", last=1)
    assert clocked.roster.alive() == 3
