"""What other processes send arrives in order, and a failure of who takes it is kept and ends the sending."""

from __future__ import annotations

import pytest

from moe_ep.launch.gangs.mailbox import Mailbox, sender_to


def test_items_of_several_senders_arrive_before_it_closes() -> None:
    taken: list[object] = []
    mailbox = Mailbox(taken.append)
    for start in (0, 100):
        send = sender_to(mailbox.address)
        for item in range(start, start + 100):
            send(item)
        del send
    mailbox.close()
    assert taken == list(range(200))
    assert mailbox.error is None


def test_an_item_that_cannot_be_taken_ends_the_sending() -> None:
    def refuse(item: object) -> None:
        raise OSError("no room")

    mailbox = Mailbox(refuse)
    send = sender_to(mailbox.address)
    with pytest.raises(OSError, match="Broken pipe|reset"):
        while True:
            send("one")
    mailbox.close()
    assert str(mailbox.error) == "no room"
