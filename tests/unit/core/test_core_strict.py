"""Strict config: unknown keys name the nearest, wrong types say so, overrides and TOML round-trip."""

from __future__ import annotations

import tomllib

import pytest

from rollplex.core.config import MeshSection, OptimizerConfig, RunConfig
from rollplex.core.entry import load_sections
from rollplex.core.errors import BadInput
from rollplex.core.strict import apply_overrides, parse, to_plain, to_toml


def test_unknown_key_names_the_nearest():
    with pytest.raises(BadInput, match=r"'loss.agregation'; did you mean 'aggregation'"):
        parse(RunConfig, {"loss": {"agregation": "token-mean"}})


@pytest.mark.parametrize(("data", "text"), [
    ({"seed": "one"}, "seed must be of type int"),
    ({"deterministic": 1}, "deterministic must be of type bool"),
    ({"seed": True}, "seed must be of type int"),
    ({"sampling": []}, "sampling must be a table"),
    ({"sampling": {"samples_per_group": 1}}, "samples_per_group is 1; it must be finite and at least 2"),
    ({"sampling": {"top_p": 0.9}}, "truncate the distribution"),
    ({"sampling": {"temperature": 0.0}}, "temperature is 0.0"),
    ({"loss": {"aggregation": "mean"}}, "aggregation is 'mean'"),
    ({"loss": {"dual_clip": 0.5}}, "dual_clip is 0.5"),
    ({"optimizer": {"schedule": "cosine"}}, "needs total_steps"),
    ({"optimizer": {"beta1": 1.0}}, "beta1 is 1.0"),
    ({"loss": {"importance_cap": -1.0}}, "importance_cap is -1.0"),
    ({"optimizer": {"vision_learning_rate": -1.0}}, "vision_learning_rate is -1.0"),
    ({"optimizer": {"learning_rate": float("inf")}}, "learning_rate must be a finite number"),
    ({"optimizer": {"epsilon": 0.0}}, "epsilon is 0.0"),
    ({"schedule": "parallel"}, "schedule is 'parallel'"),
])
def test_wrong_values_say_what_is_wrong(data, text):
    with pytest.raises(BadInput, match=text):
        parse(RunConfig, data)


def test_integers_are_taken_for_floats_only():
    assert parse(RunConfig, {"optimizer": {"learning_rate": 1}}).optimizer.learning_rate == 1.0


def test_missing_required_key_is_named():
    with pytest.raises(BadInput, match="runtime_dir"):
        parse(MeshSection, {}, "mesh")


def test_plain_form_and_toml_round_trip():
    config = RunConfig(seed=3, optimizer=OptimizerConfig(vision_learning_rate=0.0))
    assert parse(RunConfig, to_plain(config)) == config
    assert parse(RunConfig, tomllib.loads(to_toml(to_plain(config)))) == config


def test_overrides_reach_into_tables_and_leave_the_original():
    data = {"run": {"seed": 1}}
    changed = apply_overrides(data, ["run.seed=7", "run.loss.aggregation=token-mean", "coordinator.media_roots=['/a']"])
    assert changed == {"run": {"seed": 7, "loss": {"aggregation": "token-mean"}}, "coordinator": {"media_roots": ["/a"]}}
    assert data == {"run": {"seed": 1}}


@pytest.mark.parametrize("override", ["seed", ".seed=1", "run.seed.x=1"])
def test_bad_override(override):
    with pytest.raises(BadInput):
        apply_overrides({"run": {"seed": 1}}, [override])


def test_unknown_section_names_the_nearest(tmp_path):
    file = tmp_path / "mesh.toml"
    file.write_text("[coordnator]\n")
    with pytest.raises(BadInput, match="did you mean 'coordinator'"):
        load_sections(file, [], {})


def test_bad_toml_names_the_file(tmp_path):
    file = tmp_path / "mesh.toml"
    file.write_text("[run\n")
    with pytest.raises(BadInput, match=r"mesh.toml.*line 1"):
        load_sections(file, [], {})


def test_addresses_replace_the_default_sockets(tmp_path):
    mesh = MeshSection(runtime_dir=tmp_path, addresses=("coordinator=127.0.0.1:7070",))
    assert mesh.address("coordinator") == "127.0.0.1:7070"
    assert mesh.address("broker") == f"unix:{tmp_path}/broker.sock"


def test_frozen_modules_have_rate_zero():
    rates = OptimizerConfig(learning_rate=1e-3, vision_learning_rate=0.0).module_learning_rates()
    assert rates == {"vision": 0.0, "projector": 1e-3, "decoder": 1e-3}


@pytest.mark.parametrize(("addresses", "words"), [
    (["trainer=127.0.0.1:1"], "'trainer'; they are broker, trainer-0, trainer-1, reference-0, rollout-0, reward, coordinator"),
    (["trainer-2=127.0.0.1:1"], "no service of this mesh is called 'trainer-2'"),
    (["keeper=unix:/k"], "no service of this mesh is called 'keeper'"), (["127.0.0.1:7070"], "called '127.0.0.1:7070'"),
    (["reward"], "'reward' has no address"), (["reward=unix:/a", "reward=unix:/b"], "'reward' has two addresses")])
def test_addresses_are_of_services_that_exist(tmp_path, addresses, words):
    given = {"runtime_dir": str(tmp_path), "train_tensor_parallel": 2, "rollout_tensor_parallel": 2}
    with pytest.raises(BadInput) as caught:
        parse(MeshSection, given | {"addresses": addresses}, "mesh")
    assert words in str(caught.value)
    mesh = parse(MeshSection, given | {"addresses": ["trainer-1=127.0.0.1:1"]}, "mesh")
    assert (mesh.address("trainer-1"), mesh.address("trainer-0")) == ("127.0.0.1:1", f"unix:{tmp_path}/trainer-0.sock")
