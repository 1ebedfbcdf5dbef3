import pytest

from rollplex.core.errors import BadInput
from rollplex.reference.config import load_config


@pytest.fixture
def path(tmp_path):
    file = tmp_path / "mesh.toml"
    file.write_text('[model]\ncheckpoint = "/m"\n[mesh]\nruntime_dir = "/r"\n[rollout]\nmax_rows = 1\n')
    return file


def test_defaults_and_overrides(path):
    assert load_config(path, ["reference.suffix_tokens=9"]).reference.suffix_tokens == 9
    assert load_config(path).reference.threads == 1


@pytest.mark.parametrize("override", ["reference.threads=0", "reference.suffix_token=9", "reference.suffix_tokens=many"])
def test_mistakes_name_the_key(path, override):
    with pytest.raises(BadInput, match=r"threads|suffix_tokens"):
        load_config(path, [override])
