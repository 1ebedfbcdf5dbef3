from array import array

import numpy as np
import pytest
import torch

from rollplex.core.work import PreparedGroup, Sampling
from rollplex.model import PromptInputs
from rollplex.rollout.batch import Batch
from rollplex.rollout.engine import SeededGroup
from rollplex.rollout.sampling import TokenSampler

LIMIT = 60


def prompt(decoder, length: int, seed: int) -> PromptInputs:
    tokens = np.random.default_rng(seed).integers(0, 300, length)
    return PromptInputs.from_arrays(decoder.config, token_ids=tokens)


def member(decoder, index: int, length: int, rows: int):
    inputs = prompt(decoder, length, index)
    group = PreparedGroup(index, array("q", inputs.token_ids.tolist()), sample_count=rows)
    return SeededGroup(group, np.arange(100 * index, 100 * index + rows).astype(np.uint64)), inputs


def run(decoder, members) -> tuple[dict, list[int]]:
    sampler = TokenSampler(Sampling(1.0, LIMIT), decoder.config.forbidden_token_ids)
    seeded, inputs = zip(*members, strict=True)
    batch = Batch(decoder, sampler, decoder.config.eos_token_ids, 0, seeded, inputs)
    found, sizes = {}, [batch.size_bytes]
    while batch.row_count:
        for sample in batch.step():
            assert (sample.group_index, sample.sample_index) not in found
            found[sample.group_index, sample.sample_index] = sample
        sizes.append(batch.size_bytes)
    return found, sizes


@pytest.mark.parametrize("kept", [[True, False, True, False, True], [False, False, False, True, False], [True] * 5])
@pytest.mark.parametrize("steps", [1, 4])
def test_kept_rows_go_on_as_if_nothing_had_left(decoder, kept, steps):
    groups = [(prompt(decoder, length, length), 3 if length < 40 else 2) for length in (9, 14, 12, 41, 60)]
    whole, cut = decoder.start(groups, 12), decoder.start(groups, 12)
    rng = torch.Generator().manual_seed(0)
    feed = torch.randint(0, 300, (12, whole.row_count), generator=rng)
    for step in range(steps):
        for state in (whole, cut):
            decoder.step(state, feed[step] if step else None)
    rows = cut.keep_groups(kept)
    counts = [n for _, n in groups]
    assert rows.tolist() == np.flatnonzero(np.repeat(kept, counts)).tolist()
    if not all(kept):
        assert cut.size_bytes < whole.size_bytes
    for step in range(steps, steps + 3):
        expected = decoder.step(whole, feed[step])[rows]
        torch.testing.assert_close(decoder.step(cut, feed[step][rows]), expected, atol=1e-4, rtol=1e-4)


def test_groups_leave_one_after_the_other_with_the_samples_that_they_have_alone(decoder):
    members = [member(decoder, index, length, rows)
               for index, (length, rows) in enumerate([(8, 4), (30, 4), (11, 2), (12, 2), (8, 1)])]
    together, sizes = run(decoder, members)
    alone = {}
    for one in members:
        alone |= run(decoder, [one])[0]
    assert together.keys() == alone.keys()
    for key, sample in together.items():
        assert sample.token_ids == alone[key].token_ids
        assert sample.finish_reason == alone[key].finish_reason
        np.testing.assert_allclose(np.array(sample.logprobs), np.array(alone[key].logprobs), atol=1e-4)
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[-1] == 0
    assert len(set(sizes)) > 3  # freed group by group, not at the end


def test_unfinished_samples_have_their_tokens_so_far(decoder):
    sampler = TokenSampler(Sampling(1.0, LIMIT), decoder.config.forbidden_token_ids)
    seeded, inputs = member(decoder, 0, 9, 3)
    batch = Batch(decoder, sampler, (), 0, [seeded], [inputs])
    assert batch.unfinished() == []
    for _ in range(5):
        assert batch.step() == []
    assert [(sample.sample_index, len(sample.token_ids), sample.finish_reason) for sample in batch.unfinished()] == [
        (index, 5, "aborted") for index in range(3)]
    batch.release()
    assert batch.size_bytes == 0


def test_prescribed_lengths_are_kept_whatever_the_tokens_are(decoder):
    sampling = Sampling(1.0, 30, length_distribution="lognormal:10:30")
    sampler = TokenSampler(sampling, decoder.config.forbidden_token_ids)
    members = [member(decoder, index, length, rows) for index, (length, rows) in enumerate([(9, 4), (20, 3)])]
    seeded, inputs = zip(*members, strict=True)
    # Every token is an end token: without a prescribed length each response would have one token.
    batch = Batch(decoder, sampler, range(decoder.config.vocab_size), 0, seeded, inputs)
    found = {}
    while batch.row_count:
        found |= {(sample.group_index, sample.sample_index): sample for sample in batch.step()}
    expected = {(one.group.group_index, index): sampling.lengths.length(seed)
                for one in seeded for index, seed in enumerate(one.seeds.tolist())}
    assert {key: len(sample.token_ids) for key, sample in found.items()} == expected
    assert len(set(expected.values())) > 3
    assert {sample.finish_reason for sample in found.values()} == {"length"}
