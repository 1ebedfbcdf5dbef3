"""The ablations over real processes: other bytes in other places, the same update."""

from __future__ import annotations

import pytest
from runs import iterate, new_run, weights_of

pytestmark = pytest.mark.slow

ALL = {"no_state_offload": True, "rollout_resident": True, "unchunked_optimizer": True, "no_weight_sharing": True}


def held(client) -> set[tuple[str, str, str, str]]:
    return {(row.object_class, row.role, row.device, row.residency) for row in client.mesh().ledger
            if row.object_class in ("actor_snapshot", "optimizer_state")}


def test_all_four_together_give_the_same_snapshot(mesh, prompts, tmp_path):
    results, places = [], []
    with mesh.client as client:
        for ablation in ({}, ALL, {}):
            run = new_run(client, deterministic=True, loss={"kl_coef": 0.1}, optimizer={"chunk_elements": 1 << 14},
                          ablation=ablation)
            iterate(client, run, prompts[:4], 2)
            results.append(weights_of(client, run, tmp_path / str(len(results))))
            places.append(held(client))
    for other in results[1:]:
        assert [name for name, value in results[0].items() if value.tobytes() != other[name].tobytes()] == []
    assert places[0] == places[2] == {("actor_snapshot", "trainer", "host:0", "hbm"),
                                      ("optimizer_state", "trainer", "host", "pinned")}
    assert places[1] == places[0] | {("actor_snapshot", "rollout", "host:0", "hbm"),
                                     ("optimizer_state", "trainer", "host:0", "hbm")}, "the flip log stays on the host"
