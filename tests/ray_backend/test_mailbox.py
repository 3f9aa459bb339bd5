"""The mailbox between workers and driver, including when it is killed and restarted; no Ray."""

from __future__ import annotations

import random
from typing import Any

import pytest

from raytrain_ddp.ray_backend.mailbox import Inbox, Mailbox, Outbox


def numbers(events: list[Any]) -> list[int]:
    return [event["n"] for event in events]


@pytest.mark.parametrize("seed", range(6))
def test_fault_52_a_killed_mailbox_neither_loses_nor_duplicates_events(seed: int) -> None:
    """Pushes, answers, and takes in any order, while the mailbox dies repeatedly."""
    dice = random.Random(seed)
    outbox, inbox, mailbox = Outbox(), Inbox(), Mailbox()
    under_way: list[Any] = []  # at most one push; Ray repeats it if the mailbox dies
    answer: list[Any] = []
    heard: list[Any] = []
    reported = 0

    def act() -> None:
        nonlocal mailbox, reported
        match dice.randrange(6):
            case 0 | 1:
                outbox.add({"n": reported})
                reported += 1
            case 2 if not under_way and not answer:
                under_way.append(outbox.letter())
            case 3 if under_way:
                answer.append(mailbox.push(*under_way.pop()))
            case 4 if answer:
                outbox.answered(answer.pop())
            case 5:
                if dice.random() < 0.3:
                    mailbox = Mailbox()
                elif dice.random() < 0.2:
                    mailbox.take(inbox.taken)  # the answer is lost with the mailbox
                    mailbox = Mailbox()
                else:
                    heard.extend(inbox.sort(mailbox.take(dict(inbox.taken))))

    for _ in range(2000):
        act()
    for _ in range(10):  # as a worker does at its end
        if under_way:
            answer.append(mailbox.push(*under_way.pop()))
        if answer:
            outbox.answered(answer.pop())
        heard += inbox.sort(mailbox.take(dict(inbox.taken)))
        outbox.answered(mailbox.push(*outbox.letter()))
    heard += inbox.sort(mailbox.take(dict(inbox.taken)))
    assert (numbers(heard), outbox.is_empty()) == (list(range(reported)), True)
