import pytest

from rollplex.rollout.admission import admitted_count


@pytest.mark.parametrize(
    ("waiting", "busy", "count"),
    [
        ([], 0, 0),
        ([8, 8, 8, 8, 8], 0, 4),
        ([64], 0, 1),  # larger than max_rows: alone
        ([64, 8], 0, 1),
        ([16, 20, 4], 0, 1),  # request order: the third does not overtake the second
        ([8, 8, 8], 24, 0),  # a few free rows are not worth a batch
        ([8, 8, 8], 16, 2),
        ([8], 24, 1),  # unless everything that waits fits
        ([8], 32, 0),
        ([8], 40, 0),
    ],
)
def test_by_rows(waiting, busy, count):
    assert admitted_count(waiting, busy, 32, deterministic=False) == count


@pytest.mark.parametrize(("waiting", "busy", "count"), [([], 0, 0), ([8, 8], 0, 1), ([8], 8, 0), ([99], 0, 1)])
def test_deterministic_takes_one_group_at_a_time(waiting, busy, count):
    assert admitted_count(waiting, busy, 32, deterministic=True) == count
