import numpy as np
import pytest
import torch

from rollplex.core.errors import BadInput, InternalError
from rollplex.core.work import Sampling
from rollplex.rollout.sampling import TokenSampler, uniforms

LOGITS = torch.tensor([0.3, -1.0, 2.0, 0.0, 1.0, -0.5, 0.7, 3.0])
FORBIDDEN = (4, 6)


def sampler(**changes) -> TokenSampler:
    return TokenSampler(Sampling(**{"temperature": 1.0, "max_response_tokens": 9} | changes), FORBIDDEN)


def expected_probabilities(temperature: float) -> np.ndarray:
    scaled = LOGITS.double() / temperature
    scaled[list(FORBIDDEN)] = -torch.inf
    return torch.softmax(scaled, -1).numpy()


def test_splitmix64_reference_sequence():
    # The published first outputs for seed 1234567.
    published = np.array([6457827717110365317, 3203168211198807973, 9817491932198370423], dtype=np.uint64)
    seed = np.array([1234567], dtype=np.uint64)
    drawn = [uniforms(seed, index)[0] for index in range(3)]
    assert drawn == [(int(value) >> 11) * 2.0**-53 for value in published]


def test_uniforms_are_uniform_over_seeds_and_over_indices():
    rng = np.random.default_rng(0)
    over_seeds = uniforms(rng.integers(0, 2**64, 20000, dtype=np.uint64), 5)
    one_seed = np.array([rng.integers(0, 2**64, dtype=np.uint64)])
    over_indices = np.array([uniforms(one_seed, index)[0] for index in range(20000)])
    for drawn in (over_seeds, over_indices):
        counts, _ = np.histogram(drawn, 20, (0, 1))
        assert counts.sum() == 20000
        assert ((counts - 1000) ** 2 / 1000).sum() < 43.8  # chi-square, 19 degrees of freedom, p = 0.001
    assert abs(np.corrcoef(over_indices[:-1], over_indices[1:])[0, 1]) < 0.03


@pytest.mark.parametrize("temperature", [1.0, 0.6, 2.0])
def test_distribution_is_the_processed_softmax(temperature):
    rows = 40000
    seeds = np.random.default_rng(1).integers(0, 2**64, rows, dtype=np.uint64)
    tokens, logp = sampler(temperature=temperature)(LOGITS.repeat(rows, 1), seeds, 3)
    expected = expected_probabilities(temperature)
    counts = np.bincount(tokens.numpy(), minlength=len(LOGITS))
    assert counts[list(FORBIDDEN)].sum() == 0
    allowed = expected > 0
    chi_square = ((counts - rows * expected)[allowed] ** 2 / (rows * expected[allowed])).sum()
    assert chi_square < 20.5  # 5 degrees of freedom, p = 0.001
    np.testing.assert_allclose(logp.numpy(), np.log(expected[tokens.numpy()]), atol=1e-5)


def test_a_draw_depends_on_its_own_row_only():
    seeds = np.array([7, 8, 9], dtype=np.uint64)
    logits = torch.randn(3, 50, generator=torch.Generator().manual_seed(0))
    together, _ = sampler()(logits.clone(), seeds, 12)
    order = [2, 0, 1]
    shuffled, _ = sampler()(logits[order].clone(), seeds[order], 12)
    assert together[order].tolist() == shuffled.tolist()
    assert [int(sampler()(logits[row : row + 1].clone(), seeds[row : row + 1], 12)[0]) for row in range(3)] == together.tolist()


def test_draws_at_the_edges_of_the_interval(monkeypatch):
    logits = torch.tensor([[-torch.inf, 0.0, -torch.inf, 0.0, -torch.inf]])
    for value, token in ((0.0, 1), (1 - 2.0**-53, 3)):
        monkeypatch.setattr("rollplex.rollout.sampling.uniforms", lambda seeds, index, value=value: np.array([value]))
        drawn, _ = TokenSampler(Sampling(1.0, 1), ())(logits.clone(), np.zeros(1, dtype=np.uint64), 0)
        assert drawn.tolist() == [token]


def test_greedy_takes_the_largest_allowed_token_at_temperature_one():
    logits = LOGITS.clone()
    logits[4] = 9.0  # forbidden
    tokens, logp = sampler(greedy=True, temperature=0.0)(logits[None].clone(), np.zeros(1, dtype=np.uint64), 0)
    assert tokens.tolist() == [7]
    assert float(logp) == pytest.approx(np.log(expected_probabilities(1.0)[7]), abs=1e-6)


def test_low_precision_and_double_logits():
    seeds = np.arange(4, dtype=np.uint64)
    assert sampler()(LOGITS.repeat(4, 1).bfloat16(), seeds, 0)[1].dtype == torch.float32
    assert sampler()(LOGITS.repeat(4, 1).double(), seeds, 0)[1].dtype == torch.float64


@pytest.mark.parametrize("greedy", [True, False])
def test_broken_weights_are_an_error_not_a_token(greedy):
    logits = torch.full((2, 8), torch.nan)
    with pytest.raises(InternalError) as caught:
        sampler(greedy=greedy)(logits, np.zeros(2, dtype=np.uint64), 4)
    assert caught.value.reason == "NON_FINITE_LOGITS"


@pytest.mark.parametrize("changes", [{"temperature": 0.0}, {"temperature": -1.0}, {"max_response_tokens": 0}])
def test_impossible_requests(changes):
    with pytest.raises(BadInput):
        sampler(**changes)
