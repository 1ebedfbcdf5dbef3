"""A broker and its keeper as real processes."""

from __future__ import annotations

import pytest
from broker_node import Node


@pytest.fixture
def node():
    made = Node()
    yield made
    made.stop()


@pytest.fixture
def mesh(node):
    """Keeper and broker run."""
    node.start_keeper()
    node.start_broker()
    return node
