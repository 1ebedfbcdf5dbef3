"""Products that are wrong are found, whatever was in the memory of a tile that nobody wrote; right ones are not suspected."""

from __future__ import annotations

import threading

import pytest
import torch

from rollplex.core.errors import BadInput
from rollplex.core.sharing import PERCENT_VARIABLE
from rollplex.engine import products
from rollplex.engine.products import check_products, wrong_products

CPU = torch.device("cpu")
SMALL = {"widths": ((96, 64), (300, 520), (64, 1500)), "tokens": (8, 65, 300)}


def test_right_products_are_right():
    before = torch.get_rng_state()
    assert wrong_products(CPU, **SMALL) == []
    assert torch.equal(torch.get_rng_state(), before), "samples of a capped process are those of one that is not"


def test_the_head_is_asked_for_what_a_chunk_of_logits_takes(monkeypatch):
    """Forward, input's and weight's gradient of as many tokens as the trainer's chunk has, and nothing of a whole prompt's."""
    monkeypatch.setattr(products, "_MOST_ELEMENTS", 1000 * 3000)
    monkeypatch.setattr(products, "_PIECE_ELEMENTS", 7 * 1000)
    asked = []

    def multiply(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        asked.append((*a.shape, b.shape[1]))
        return torch.matmul(a, b)

    assert wrong_products(CPU, widths=((3000, 64),), tokens=(1000, 1001), multiply=multiply) == []
    assert asked == [(1000, 64, 3000), (1000, 3000, 64), (3000, 1000, 64)]
    outputs = max(outputs for outputs, _ in products.WIDTHS)
    checked = [count for count in products.TOKENS if count * outputs <= 1 << 28]
    assert max(checked) == 1000, "a prompt's logits would take gigabytes"


@pytest.mark.parametrize("left", ["zeros", "another product's", "no numbers"])
def test_a_tile_that_nobody_wrote_is_found(left):
    before = {}

    def multiply(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        c = torch.matmul(a, b)
        if c.shape[0] < 64 or c.shape[1] < 64:
            return c
        tile = before.setdefault("tile", torch.randn(64, 64).to(c.dtype) * a.shape[1] ** 0.5)
        c[-64:, -64:] = {"zeros": torch.zeros_like(tile), "another product's": tile,
                         "no numbers": torch.full_like(tile, torch.nan)}[left]
        return c

    found = wrong_products(CPU, **SMALL, multiply=multiply)
    assert "forward of 65 x 64 -> 96" in found
    assert "weight gradient of 8 x 520 -> 300" in found
    assert "forward of 8 x 64 -> 96" not in found, "this one is too small to have the tile"
    # Products of at least 64 rows and columns: two of three forward and input's gradients, and every weight's.
    assert len(found) == 3 * (2 + 2 + 3)


def test_it_asks_outside_the_memory_pool_of_whoever_loads_a_model(monkeypatch):
    """torch's current pool is a thread's own; what the check leaves in the cache goes back from there, too."""
    asked, emptied = [], []
    monkeypatch.setattr(products, "wrong_products", lambda device: asked.append((device, threading.get_ident())) or [])
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: emptied.append((len(asked), threading.get_ident())))
    monkeypatch.setenv(PERCENT_VARIABLE, "50")
    check_products(torch.device("cuda", 1))
    (device, thread), = asked
    assert device.index == 1 and thread != threading.get_ident()
    assert emptied == [(1, thread)]


def test_only_a_capped_process_asks(monkeypatch):
    monkeypatch.setattr(products, "wrong_products", lambda device: ["a", "b"])
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: type("P", (), {"multi_processor_count": 92}))
    monkeypatch.delenv(PERCENT_VARIABLE, raising=False)
    check_products(torch.device("cuda"))
    monkeypatch.setenv(PERCENT_VARIABLE, "70")
    check_products(CPU)
    with pytest.raises(BadInput, match=r"70% .*\(92 SMs\).* a, and 1 other") as caught:
        check_products(torch.device("cuda"))
    assert (caught.value.reason, caught.value.metadata["sm_count"]) == ("CAP_COMPUTES_WRONGLY", "92")
    monkeypatch.setattr(products, "wrong_products", lambda device: [])
    check_products(torch.device("cuda"))
