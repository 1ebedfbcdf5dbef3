"""Configuration: typos name the nearest key, and the documentation cannot drift from the dataclasses."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from rollplex.core.errors import BadInput
from rollplex.core.strict import to_plain
from rollplex_client.cli import main
from rollplex_client.cli.config_reference import default_toml, reference_markdown, section_keys
from rollplex_client.cli.sections import SECTIONS, section_class
from rollplex_client.cli.settings import parse_settings

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize(("data", "nearest"), [
    ({"trainr": {}}, "trainer"), ({"runn": {"seed": 1}}, "run"), ({"rollout": {"thread": 2}}, "threads"),
    ({"run": {"optimizer": {"learnin_rate": 1.0}}}, "learning_rate"), ({"train": {"iteration": 3}}, "iterations"),
    ({"data": {"held_out": "x"}}, "heldout"), ({"coordinator": {"media": {"max_frame": 3}}}, "max_frames")])
def test_a_typo_names_the_nearest(data, nearest):
    with pytest.raises(BadInput) as raised:
        parse_settings(data)
    assert raised.value.metadata["nearest"] == nearest
    assert nearest in str(raised.value)


@pytest.mark.parametrize(("data", "words"), [
    ({"train": {"iterations": 0}}, "at least 1"), ({"train": {"iterations": "ten"}}, "type int"),
    ({"run": {"sampling": {"samples_per_group": 1}}}, "at least 2"), ({"seed": 3}, "is a section"),
    ({"zzzz": {}}, "known sections"), ({"model": {}}, "checkpoint"), ({"data": {"format": "csv"}}, "one of")])
def test_wrong_values_say_what_is_wrong(data, words):
    message = words if words != "is a section" else "section"
    with pytest.raises(BadInput, match=message):
        parse_settings(data)


def test_an_unknown_file_and_broken_toml_are_one_line(tmp_path, capsys):
    assert main(["config", "--check", "--config", str(tmp_path / "none.toml")]) == 2
    broken = tmp_path / "broken.toml"
    broken.write_text("[run\n")
    assert main(["config", "--check", "--config", str(broken)]) == 2
    assert capsys.readouterr().err.count("\n") == 2


def test_check_accepts_a_good_file(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rollplex.toml").write_text("[run]\nseed = 4\n")
    assert main(["config", "--check"]) == 0
    assert "run" in capsys.readouterr().out


def test_the_default_file_parses_to_the_defaults():
    settings = parse_settings({name: table for name, table in tomllib.loads(default_toml()).items()} | {
        "mesh": {"runtime_dir": "/run/x"}})
    for name in SECTIONS:
        if name not in ("mesh", "model"):
            assert to_plain(settings.sections[name]) == to_plain(section_class(name)()), name


def test_every_key_of_the_documentation_has_a_type_and_every_section_a_heading():
    text = (ROOT / "docs" / "config.md").read_text()
    assert text == reference_markdown(), "run: rollplex config --reference > docs/config.md"
    for name in SECTIONS:
        assert f"## [{name}]" in text
        assert section_keys(section_class(name))


@pytest.mark.parametrize("path", sorted((ROOT / "deploy" / "configs").glob("*.toml")), ids=lambda path: path.stem)
def test_deployed_configurations_parse_strictly(path):
    settings = parse_settings(tomllib.loads(path.read_text()))
    assert "model" in settings.sections
