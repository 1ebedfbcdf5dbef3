import statistics

import pytest

from rollplex.core.config import SamplingConfig
from rollplex.core.ids import sample_seed
from rollplex.core.response_lengths import LengthDistribution, parse_lengths
from rollplex.core.work import Sampling


def seeds(count: int) -> list[int]:
    return [sample_seed(0, iteration, ordinal, index)
            for iteration in range(2) for ordinal in range(count // 16) for index in range(8)]


def test_lengths_are_a_function_of_the_seed():
    lengths = LengthDistribution(225, 1024)
    assert [lengths.length(seed) for seed in seeds(256)] == [lengths.length(seed) for seed in seeds(256)]
    assert len({lengths.length(seed) for seed in seeds(256)}) > 100
    # Another draw would make two benchmarks different jobs.
    assert [lengths.length(seed) for seed in (0, 1, 2**64 - 1)] == [367, 67, 33]


def test_the_mean_is_as_asked_and_the_tail_is_clipped():
    drawn = [LengthDistribution(225, 1024).length(seed) for seed in seeds(8192)]
    assert 205 < statistics.fmean(drawn) < 230
    assert max(drawn) == 1024
    assert min(drawn) >= 1
    assert statistics.median(drawn) < 0.8 * statistics.fmean(drawn)


def test_a_short_distribution_never_gives_an_empty_response():
    assert {LengthDistribution(1, 2).length(seed) for seed in seeds(256)} == {1, 2}


@pytest.mark.parametrize("text", ["lognormal", "lognormal:225", "lognormal:225:1024:1", "normal:225:1024", "lognormal:0:9",
                                  "lognormal:nan:9", "lognormal:inf:9", "lognormal:225:x"])
def test_other_texts_are_refused(text):
    with pytest.raises(ValueError, match="lognormal:MEAN:MAX"):
        parse_lengths(text, 1024)


def test_a_length_over_the_response_limit_is_refused():
    with pytest.raises(ValueError, match="max_response_tokens, 512"):
        SamplingConfig(length_distribution="lognormal:225:1024")
    assert SamplingConfig(length_distribution="lognormal:225:512").length_distribution
    assert Sampling(1.0, 512, length_distribution="lognormal:225:512").lengths == LengthDistribution(225, 512)
    assert Sampling(1.0, 512).lengths is None
