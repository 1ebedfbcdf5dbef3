"""Single-use claims: issued by gRPC, redeemed on the handle socket by the same session, in time."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from rollplex.core.errors import Forbidden
from rollplex.core.ids import new_id


class Purpose(StrEnum):
    DEPOSIT = "deposit"
    REDEEM = "redeem"


@dataclass(frozen=True, slots=True)
class Claim:
    purpose: Purpose
    subject: str
    """DEPOSIT: name of the announced slab. REDEEM: id of the lease."""
    session: str
    expires_s: float
    """On the clock of the caller."""


@dataclass(slots=True)
class TicketBook:
    """All open claims; `issue` and `redeem` are the pair."""

    lifetime_s: float
    claims: dict[str, Claim] = field(default_factory=dict, repr=False)
    """By ticket, which nothing prints."""

    def issue(self, purpose: Purpose, subject: str, session: str, now_s: float) -> str:
        ticket = new_id("ticket")
        self.claims[ticket] = Claim(purpose, subject, session, now_s + self.lifetime_s)
        return ticket

    def redeem(self, ticket: str, purpose: Purpose, session: str, now_s: float) -> Claim:
        """Uses the ticket up. Raises Forbidden when it is unknown or used, another session's, or too old.

        Another session's attempt does not use it up: a stranger could otherwise void it.
        """
        claim = self.claims.get(ticket)
        if claim is None or claim.purpose is not purpose:
            raise Forbidden(f"no open {purpose.value} ticket of that name; it may have been used",
                            reason="TICKET_UNKNOWN")
        if claim.session != session:
            raise Forbidden(f"the ticket was issued to another session than {session}", reason="TICKET_FOREIGN")
        if now_s > claim.expires_s:
            # It stays for `expire`, whose caller takes back what it stood for.
            raise Forbidden(f"the ticket expired {now_s - claim.expires_s:.1f} s ago; it lives {self.lifetime_s:g} s",
                            reason="TICKET_EXPIRED")
        return self.claims.pop(ticket)

    def expire(self, now_s: float) -> list[Claim]:
        """Removes and returns the claims that nobody can redeem any more."""
        old = [ticket for ticket, claim in self.claims.items() if now_s > claim.expires_s]
        return [self.claims.pop(ticket) for ticket in old]

    def drop_session(self, session: str) -> list[Claim]:
        """Removes and returns the claims of a session that has ended."""
        its = [ticket for ticket, claim in self.claims.items() if claim.session == session]
        return [self.claims.pop(ticket) for ticket in its]
