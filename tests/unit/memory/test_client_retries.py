"""How long a call waits for a broker that is away, by a clock that only the test moves."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from rollplex.core.errors import Unavailable
from rollplex.memory import broker_link
from rollplex.memory.client import BrokerSession


class Clock:
    def __init__(self):
        self.now_s = 0.0

    def monotonic(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds


@pytest.fixture
def clock(monkeypatch):
    made = Clock()
    monkeypatch.setattr(broker_link, "time", made)
    return made


@pytest.fixture
def session(clock, monkeypatch):
    made = BrokerSession("unix:/nowhere/broker.sock", Path("/nowhere/handles.sock"), "trainer-0", "trainer", 10.0)
    monkeypatch.setattr(made._link, "_connected", lambda failed: SimpleNamespace(session="secret"))
    yield made
    monkeypatch.undo()
    made.close()


def away() -> Unavailable:
    return Unavailable("the broker is gone", reason="UNAVAILABLE")


@pytest.mark.parametrize("worked_s", [0.0, 12.0], ids=["at once", "after longer than it is waited for"])
def test_a_broker_that_is_lost_is_waited_for_however_long_it_had_worked(session, clock, worked_s):
    """Pages of a deleted slab take longer to be free than a restart is waited for."""
    back_s = worked_s + 5.0

    def work(_):
        if not clock.now_s:
            clock.now_s = worked_s
        if clock.now_s < back_s:
            raise away()
        return "done"

    assert session._link.call(work) == "done"


def test_a_broker_that_stays_away_is_given_up(session, clock):
    def work(_):
        raise away()

    with pytest.raises(Unavailable, match="is gone"):
        session._link.call(work)
    assert 10.0 < clock.now_s < 10.1
