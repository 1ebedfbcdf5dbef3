"""Reference ranks as processes over one broker: the scores of one rank, from rank 0 alone; a dead rank is named."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import pytest
from engine_rig import EngineClient
from reference_rig import expected, materialize, respond, score, start_score

from rollplex.core.errors import Aborted
from rollplex.core.strict import to_plain, to_toml

pytestmark = pytest.mark.ranks
numbers = itertools.count()


class Ranks:
    """Processes and their clients; `each` calls all at once."""

    def __init__(self, mesh, folder, size, **fields):
        self.size = size
        self.section = replace(mesh.section, reference_tensor_parallel=size, **fields,
                               addresses=tuple(f"reference-{rank}=unix:{folder}/r{rank}.sock" for rank in range(size)))
        self._file = folder / "mesh.toml"
        self._file.write_text(to_toml(to_plain(replace(mesh.config, mesh=self.section))))
        self.processes, self.clients = {}, {}

    def spawn(self, rank):
        command = [sys.executable, "-W", "ignore", "-m", "rollplex.reference", "--config", str(self._file), "--rank", str(rank)]
        self.processes[rank] = subprocess.Popen(command, env=os.environ | {"OMP_NUM_THREADS": "1"})

    def connect(self):
        for rank in self.processes:
            self.clients.setdefault(rank, None)
            if self.clients[rank] is None:
                self.clients[rank] = EngineClient(self.section.address(f"reference-{rank}"))

    def kill(self, rank):
        self.processes[rank].kill()
        self.processes[rank].wait(20)
        self.clients.pop(rank).channel.close()

    def each(self, call):
        with ThreadPoolExecutor(self.size) as pool:
            return list(pool.map(call, [self.clients[rank] for rank in range(self.size)]))

    def join(self):
        epoch = EngineClient.new_epoch()
        self.each(lambda client: client.join(epoch))

    def stop(self):
        for client in self.clients.values():
            client.channel.close()
        for process in self.processes.values():
            process.terminate()
        for process in self.processes.values():
            process.wait(30)


@contextmanager
def started(mesh, folder, size, **fields):
    ranks = Ranks(mesh, folder, size, **fields)
    folder.chmod(0o700)
    try:
        for rank in range(size):
            ranks.spawn(rank)
        ranks.connect()
        ranks.join()
        ranks.each(lambda client: client.open_run())
        yield ranks
    finally:
        ranks.stop()
        for slab in mesh.session.list_slabs("reference/weights/"):
            mesh.session.delete(slab.name)


@pytest.fixture
def groups(mesh):
    return [mesh.prompts.group(kind, next(numbers)) for kind in ("text", "video", "mixed")]


@pytest.mark.parametrize("size", [2, 4])
def test_scores_are_those_of_one_rank_and_come_from_rank_0(mesh, tmp_path, groups, size):
    with started(mesh, tmp_path, size) as ranks:
        names = [slab.name for slab in mesh.session.list_slabs("reference/weights/")]
        assert names == [f"reference/weights/host/{rank}" for rank in range(size)]
        assert len({joined.layout_hash for joined in ranks.each(lambda client: client.joined)}) == 1
        hashes = ranks.each(lambda client: materialize(client, groups).prompt_hashes)
        assert set(hashes) == {tuple(group.prompt_hash for group in groups)}
        responses = [respond(group) for group in groups]
        first, *others = ranks.each(lambda client: score(client, responses).samples)
        assert others == [()] * (size - 1)
        wanted = [values for group, response in zip(groups, responses) for values in expected(mesh, group, response)]
        assert len(first) == len(wanted)
        for sample, values in zip(first, wanted):
            np.testing.assert_allclose(np.array(sample.logprobs), values, atol=1e-4)


@pytest.mark.parametrize(("size", "tensor_size"), [(2, 1), (4, 2)])
def test_replicas_share_groups_out(mesh, tmp_path, groups, size, tensor_size):
    """Each computes and scores its own, and the first of its ranks answers with the scores."""
    fields = {"data_parallel": True, "train_tensor_parallel": size, "rollout_tensor_parallel": tensor_size}
    with started(mesh, tmp_path, size, **fields) as ranks:
        for rank, prefixes in enumerate(ranks.each(lambda client: materialize(client, groups))):
            assert prefixes.prompt_hashes == tuple(group.prompt_hash for group in groups if group.group_index % 2 == rank % 2)
        responses = [respond(group) for group in groups]
        answers = ranks.each(lambda client: score(client, responses).samples)
        scored = {(sample.group_index, sample.sample_index): (rank, sample.logprobs)
                  for rank, samples in enumerate(answers) for sample in samples}
        assert sum(map(len, answers)) == len(scored), "no sample twice"
        for group, response in zip(groups, responses, strict=True):
            for sample, values in zip(response.samples, expected(mesh, group, response), strict=True):
                rank, found = scored.pop((group.group_index, sample.sample_index))
                assert rank == group.group_index % 2
                np.testing.assert_allclose(np.array(found), values, atol=1e-4)
        assert not scored


def test_a_killed_rank_is_named_and_the_group_rejoins(mesh, tmp_path, groups):
    responses = [respond(group) for group in groups]
    with started(mesh, tmp_path, 2) as ranks:
        ranks.each(lambda client: materialize(client, groups))
        command = start_score(ranks.clients[0], responses)
        ranks.kill(1)
        with pytest.raises(Aborted, match=r"reference rank 1 died in SUFFIX \(score_suffix\)"):
            raise ranks.clients[0].watch(command).error
        ranks.spawn(1)
        ranks.connect()
        ranks.join()
        ranks.each(lambda client: client.open_run())
        ranks.each(lambda client: materialize(client, groups))
        assert len(ranks.each(lambda client: score(client, responses).samples)[0]) == 12
