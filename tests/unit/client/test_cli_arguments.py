"""The command line: what parses to what, and that every command reports failure by its exit status."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rollplex_client.cli import main
from rollplex_client.cli.arguments import build_parser

COMMANDS = {"up": [], "down": [], "status": [], "logs": [], "restart": ["trainer-0"], "runs": [],
            "samples": ["r", "0"], "report": ["r", "--out", "x.html"], "export": ["r", "out"],
            "reward list": [], "reward remove": ["x"], "reward add": ["x", "unix:/x"], "train": ["--data", "nothing.json"],
            "layout": ["--model", "nothing", "--train-tp", "2", "--rollout-tp", "1"],
            "plan": ["--model", "nothing", "--train-tp", "2", "--rollout-tp", "1"]}


def test_shared_options_stand_before_or_after_the_command():
    before = build_parser().parse_args(["--json", "--runtime-dir", "/a", "--set", "a.b=1", "status"])
    after = build_parser().parse_args(["status", "--json", "--runtime-dir", "/a"])
    assert (before.json, before.runtime_dir, before.overrides) == (True, Path("/a"), ["a.b=1"])
    assert (after.json, after.runtime_dir) == (True, Path("/a"))


def test_set_before_and_after_the_command_both_count(tmp_path, capsys):
    argv = ["--set", "train.iterations=7", "--json", "config", "--set", "run.seed=3", "--runtime-dir", str(tmp_path)]
    assert main(argv) == 0
    plain = json.loads(capsys.readouterr().out)
    assert (plain["train"]["iterations"], plain["run"]["seed"]) == (7, 3)


def test_options_stand_between_a_command_and_its_action_too(tmp_path, monkeypatch, capsys):
    arguments = build_parser().parse_args(["--set", "a.b=1", "reward", "--json", "--set", "a.b=2", "list", "--set", "a.b=3"])
    assert arguments.json
    assert (arguments.overrides, arguments.middle_overrides, arguments.later_overrides) == (["a.b=1"], ["a.b=2"], ["a.b=3"])
    monkeypatch.chdir(tmp_path)
    assert main(["reward", "--json", "--runtime-dir", str(tmp_path / "rt"), "list"]) in (1, 2)
    captured = capsys.readouterr()
    assert json.loads(captured.out)["error"]["reason"] in captured.err
    assert main(["reward", "--json", "--set", "run.sampling.samples_per_group=1", "list"]) == 2
    assert json.loads(capsys.readouterr().out)["error"]["reason"] == "BAD_CONFIG"


def test_training_options():
    arguments = build_parser().parse_args(["train", "--model", "m", "--data", "d.json", "--iterations", "3",
                                           "--filter-bad-rows", "--schedule", "serial"])
    assert (arguments.iterations, arguments.filter_bad_rows, arguments.schedule) == (3, True, "serial")
    assert build_parser().parse_args(["demo", "--control", "blank-videos"]).out == Path("runs/demo")


@pytest.mark.parametrize("argv", [["train", "--schedule", "stream"], ["demo", "--control", "none"], [], ["fly"]])
def test_wrong_usage_exits_with_2(argv, capsys):
    with pytest.raises(SystemExit) as raised:
        main(argv)
    assert raised.value.code == 2


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_fails_with_one_line_and_json(command, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    status = main([*command.split(), *COMMANDS[command], "--json"])
    captured = capsys.readouterr()
    assert status in (1, 2)
    assert captured.err.startswith("error: ")
    assert captured.err.count("\n") == 1
    error = json.loads(captured.out)["error"]
    assert error["reason"] in captured.err


def test_debug_shows_where(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    main(["down", "--debug"])
    assert "Traceback" in capsys.readouterr().err


def test_replay_options():
    arguments = build_parser().parse_args(["train", "--replay", "run-1", "--replay-journal", "j.sqlite", "--schedule",
                                           "disaggregated"])
    assert (arguments.replay, arguments.replay_journal.name, arguments.schedule) == ("run-1", "j.sqlite", "disaggregated")
