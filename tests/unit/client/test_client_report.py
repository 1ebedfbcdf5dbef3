"""The report from canned events: complete, self-contained, well-formed."""

from __future__ import annotations

import re
from html.parser import HTMLParser

import pytest
from canned_run import canned_history

from rollplex_client.report import write_report
from rollplex_client.report.svg import ticks
from rollplex_client.summary import compare_overlap, summary


class Balance(HTMLParser):
    """Fails on a tag that is closed and was not the last one opened."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []

    def handle_starttag(self, tag, attrs):
        if tag != "meta":
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        """Opens nothing."""

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


@pytest.fixture
def page(tmp_path) -> str:
    history, serial = canned_history(), canned_history("serial", 3)
    facts = summary(history, 95.0)
    facts["overlap"] = compare_overlap(serial.iterations[1:3], history.iterations[1:3]).plain()
    return write_report(tmp_path / "deep" / "report.html", history, facts, serial).read_text()


def test_the_report_shows_every_part(page):
    for heading in ("Learning", "One iteration", "Overlap: predicted and measured", "Time by phase", "Memory", "Notes",
                    "Configuration"):
        assert f"<h2>{heading}</h2>" in page
    assert "serial: iteration 1" in page
    assert "overlap: iteration 1" in page
    assert "actor_snapshot" in page
    assert "9.0 MiB" in page


def test_the_report_needs_nothing_from_outside(page):
    assert not re.search(r"<(script|link|img|iframe)|https?://|url\(", page)


def test_text_from_the_run_is_escaped(page):
    assert "&lt;timed out&gt;" in page
    assert "<timed out>" not in page


def test_elements_are_closed(page):
    parser = Balance()
    parser.feed(page)
    assert parser.open == []


def test_a_run_without_iterations_has_a_report_too(tmp_path):
    history = canned_history(iterations=0)
    assert "<h1>canned</h1>" in write_report(tmp_path / "r.html", history, summary(history, 0.0)).read_text()


def test_ticks_are_round_and_inside():
    assert ticks(0.0, 2.0, 5) == [0.0, 0.5, 1.0, 1.5, 2.0]
    assert ticks(0, 29, 10) == [0, 5, 10, 15, 20, 25]
    assert ticks(3.0, 3.0, 5) == [3.0]
