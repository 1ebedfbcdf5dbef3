from __future__ import annotations

import pytest

from rollplex.broker.tickets import Purpose, TicketBook
from rollplex.core.errors import Forbidden


@pytest.fixture
def book():
    return TicketBook(lifetime_s=30.0)


def refused(book, ticket, purpose=Purpose.REDEEM, session="one#1", now_s=1.0):
    with pytest.raises(Forbidden) as caught:
        book.redeem(ticket, purpose, session, now_s)
    return caught.value.reason


def test_a_ticket_is_good_once(book):
    ticket = book.issue(Purpose.REDEEM, "lease-1", "one#1", 0.0)
    assert book.redeem(ticket, Purpose.REDEEM, "one#1", 30.0).subject == "lease-1"
    assert refused(book, ticket) == "TICKET_UNKNOWN"


def test_forged(book):
    ticket = book.issue(Purpose.REDEEM, "lease-1", "one#1", 0.0)
    for forged in ("", "ticket-", ticket[:-1], ticket + "0", ticket.upper()):
        assert refused(book, forged) == "TICKET_UNKNOWN"
    assert len({book.issue(Purpose.REDEEM, "x", "one#1", 0.0) for _ in range(100)}) == 100


def test_another_session_is_refused_and_does_not_void_it(book):
    ticket = book.issue(Purpose.REDEEM, "lease-1", "one#1", 0.0)
    assert refused(book, ticket, session="two#2") == "TICKET_FOREIGN"
    book.redeem(ticket, Purpose.REDEEM, "one#1", 1.0)


def test_another_purpose_is_refused(book):
    ticket = book.issue(Purpose.DEPOSIT, "slab", "one#1", 0.0)
    assert refused(book, ticket) == "TICKET_UNKNOWN"


def test_expired(book):
    ticket = book.issue(Purpose.REDEEM, "lease-1", "one#1", 0.0)
    assert refused(book, ticket, now_s=30.1) == "TICKET_EXPIRED"
    assert [claim.subject for claim in book.expire(30.1)] == ["lease-1"], "it is there to be taken back"
    assert refused(book, ticket, now_s=30.1) == "TICKET_UNKNOWN"


def test_expire_and_drop_return_the_claims(book):
    book.issue(Purpose.DEPOSIT, "old", "one#1", 0.0)
    book.issue(Purpose.DEPOSIT, "its", "one#1", 50.0)
    book.issue(Purpose.DEPOSIT, "other", "two#2", 50.0)
    assert [claim.subject for claim in book.expire(40.0)] == ["old"]
    assert [claim.subject for claim in book.drop_session("one#1")] == ["its"]
    assert [claim.subject for claim in book.claims.values()] == ["other"]
