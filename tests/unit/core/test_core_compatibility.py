"""What must agree between services, and what is said when it does not."""

from __future__ import annotations

import dataclasses

import pytest

from rollplex.core.compatibility import (
    LAYOUT,
    MESH,
    MODEL,
    NOT_SHARED,
    PROTOS,
    Description,
    config_facts,
    differences,
    digest,
    mismatch,
    unlike,
)
from rollplex.core.config import MeshSection, ModelSection


def described(name, **subjects):
    facts = {subject: dict(found) for subject, found in subjects.items()}
    return Description(name, 7, {subject: digest(found) for subject, found in facts.items()}, facts)


def of_config(name, mesh, model=None):
    return described(name, **config_facts(mesh, model))


def test_the_same_sections_agree_and_every_shared_key_is_named_with_both_values(tmp_path):
    mesh = MeshSection(runtime_dir=tmp_path)
    model = ModelSection(checkpoint=tmp_path)
    assert unlike(of_config("coordinator", mesh, model), of_config("trainer-0", mesh, model)) == ""
    other = dataclasses.replace(mesh, train_tensor_parallel=2, hbm_budget_gib=8.0, drain_timeout_s=99.0)
    ours, theirs = of_config("coordinator", mesh, model), of_config("trainer-0", other, model)
    assert unlike(ours, theirs) == MESH
    error = mismatch(MESH, ours, theirs)
    assert error.reason == "CONFIG_MISMATCH"
    assert "mesh.train_tensor_parallel: 1 in coordinator, 2 in trainer-0" in str(error)
    assert "mesh.hbm_budget_gib: 0.0 in coordinator, 8.0 in trainer-0" in str(error)
    assert "drain_timeout_s" not in str(error)
    assert error.metadata["names"] == "mesh.hbm_budget_gib,mesh.train_tensor_parallel"


def test_a_service_without_a_model_section_is_compared_in_mesh_alone(tmp_path):
    mesh = MeshSection(runtime_dir=tmp_path)
    coordinator = of_config("coordinator", mesh, ModelSection(checkpoint=tmp_path))
    assert unlike(coordinator, of_config("broker", mesh)) == ""
    assert unlike(coordinator, of_config("broker", dataclasses.replace(mesh, sharing="time-slice"))) == MESH


def test_a_checkpoint_is_what_its_path_leads_to(tmp_path):
    (tmp_path / "one").mkdir()
    (tmp_path / "two").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "one")
    mesh = MeshSection(runtime_dir=tmp_path)
    ours = of_config("coordinator", mesh, ModelSection(checkpoint=tmp_path / "one"))
    assert unlike(ours, of_config("a", mesh, ModelSection(checkpoint=tmp_path / "link"))) == ""
    theirs = of_config("a", mesh, ModelSection(checkpoint=tmp_path / "two", dtype="bfloat16"))
    assert unlike(ours, theirs) == MODEL
    assert f"model.checkpoint: {tmp_path}/one in coordinator, {tmp_path}/two in a" in str(mismatch(MODEL, ours, theirs))


def test_what_is_not_shared_is_a_key_of_the_section():
    """A renamed key would be compared, or not, without a word."""
    assert {item.name for item in dataclasses.fields(MeshSection)} >= NOT_SHARED


def test_an_absent_fact_is_a_difference():
    assert differences({"a": "1"}, {"b": "2"}) == [("a", "1", "absent"), ("b", "absent", "2")]


def test_configuration_explains_a_layout():
    one = described("coordinator", **{MODEL: {"model.dtype": "float32"}, LAYOUT: {"w": "float32"}, PROTOS: {"A.b": "int64 = 1"}})
    other = described("a", **{MODEL: {"model.dtype": "bfloat16"}, LAYOUT: {"w": "bfloat16"}, PROTOS: {"A.b": "int64 = 2"}})
    assert unlike(one, other) == MODEL


@pytest.mark.parametrize("count", [1, 8, 9, 200])
def test_a_long_list_is_cut_and_counted(count):
    one, other = (described(name, layout={f"t{index:03}": value for index in range(count)})
                  for name, value in (("a", "x"), ("b", "y")))
    text = str(mismatch(LAYOUT, one, other))
    assert text.count(" in a, ") == min(count, 8)
    assert ("and " in text and f"; and {count - 8} more" in text) == (count > 8)
