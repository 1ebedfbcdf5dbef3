"""The `rollplex` command as a user types it: every data format, every command's JSON, failures, rewards, the wheel."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import pytest
from cli_rig import Cli, end
from data_files import DataFiles, write_json

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
TOKEN_SUM = ROOT / "tests" / "support" / "token_sum.py"
SERVICES = {"keeper", "broker", "trainer-0", "reference-0", "rollout-0", "reward", "coordinator"}
GROUPS, SAMPLES, PROMPT_LIMIT = 2, 2, 1024
SMALL_MESH = ("--set", "mesh.drain_timeout_s=2", "--set", "coordinator.media.video_min_pixels=3136",
              "--set", "coordinator.media.video_max_pixels=3136", "--set", "coordinator.media.max_frames=4")
SMALL_RUN = ("--iterations", 2, "--groups-per-iteration", GROUPS, "--set", "run.sampling.max_response_tokens=6",
             "--set", f"run.sampling.samples_per_group={SAMPLES}", "--set", "run.optimizer.learning_rate=1e-4")


@pytest.fixture(scope="module")
def files(videos, tmp_path_factory):
    return DataFiles(tmp_path_factory.mktemp("data"), videos.directory)


@pytest.fixture(scope="module")
def cli(tiny_checkpoint, videos, files):
    """One mesh for the module, started by `rollplex up`."""
    with Cli() as cli:
        roots = json.dumps([str(files.folder), str(videos.directory)])
        up = cli("up", "--model", tiny_checkpoint, *SMALL_MESH, "--set", f"coordinator.media_roots={roots}",
                 "--set", f"model.max_prompt_tokens={PROMPT_LIMIT}").result
        assert set(up["services"]) == SERVICES
        assert up["coordinator"] == f"unix:{cli.runtime_dir}/coordinator.sock"
        yield cli


def train(cli, data, run, *options):
    return cli("train", "--data", data, "--run", run, *SMALL_RUN, *options)


def metrics(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def assert_self_contained(report: Path):
    """A file that shows everything with no network: nothing is loaded from anywhere."""
    html = report.read_text()
    assert "<svg" in html
    assert not re.search(r"<(script\b[^>]*\bsrc|link|iframe|object|embed|base)\b", html, re.IGNORECASE)
    assert "@import" not in html
    loaded = re.findall(r"(?:\b(?:src|href|srcset|action|poster|data)\s*=\s*|url\(\s*)[\"']?([^\"'\s>)]*)", html, re.IGNORECASE)
    assert [place for place in loaded if not place.startswith(("#", "data:"))] == []
    assert not [place for place in re.findall(r"https?://[^\"'\s<)]*", html) if not place.startswith("http://www.w3.org/")]


# Every format.


@pytest.mark.parametrize("name", ["video_r1_absolute", "video_r1_relative", "verl_jsonl", "verl_parquet", "trl_jsonl",
                                  "trl_parquet", "mixed"])
def test_train_takes_every_format(cli, files, tiny_checkpoint, name):
    run = name.replace("_", "-")
    result = train(cli, getattr(files, name)(), run, "--model", tiny_checkpoint).result
    out = cli.folder / "runs" / run
    assert json.loads((out / "summary.json").read_text()) == result
    assert (result["iterations"], result["snapshot"], result["rows"], result["rows_refused"]) == (2, 2, 4, [])
    assert result["unscored_per_iteration"] == 0.0
    lines = metrics(out)
    assert [(line["run"], line["iteration"], line["state"]) for line in lines] == [(run, 0, "done"), (run, 1, "done")]
    assert all(line["metrics"]["timing_s/step"] > 0 for line in lines)
    assert_self_contained(out / "report.html")
    samples = [sample for iteration in range(2) for sample in cli("samples", run, iteration).result["samples"]]
    assert len(samples) == 2 * GROUPS * SAMPLES
    assert all(sample["reward"] is not None for sample in samples)


def test_train_starts_a_mesh_of_its_own_and_stops_it(tiny_checkpoint, videos):
    """The first thing a user does: no options for the mesh, nothing there yet, and validations and an export asked for."""
    with Cli(runtime_dir=None) as cli:
        heldout = cli.folder / "heldout.json"
        rows = json.loads(videos.heldout.read_text())[:2]
        write_json(heldout, [{**row, "path": str(videos.directory / row["path"])} for row in rows])
        result = train(cli, videos.train, "first", "--model", tiny_checkpoint, "--heldout", heldout,
                       "--media-root", videos.directory, *SMALL_MESH, "--export", "trained", "--out", "out").result
        assert cli.runtime_dir.stat().st_mode & 0o777 == 0o700
        assert (result["iterations"], result["report"]) == (2, "out/report.html")
        assert result["heldout_first"] is not None is not result["heldout_last"]
        assert [line["validation"] for line in metrics(cli.folder / "out")] == [True, False, False, True]
        assert (cli.folder / "trained" / "model.safetensors").stat().st_size > 1_000_000
        assert cli("status").error["reason"] == "MESH_DOWN"
        assert {path.name for path in cli.runtime_dir.glob("*.sock")} <= {"keeper.sock"}


# Rows that cannot be used.


@pytest.fixture(scope="module")
def bad_rows(files):
    row = files.video_r1_row
    return {"truth": row(1, solution=""), "type": row(2, problem_type="multiple chois"),
            "media": row(3, path=str(files.folder / "gone.mp4")), "long": row(4, problem="left or right? " * PROMPT_LIMIT)}


def test_bad_rows_are_left_out_counted_and_listed_when_asked(cli, files, bad_rows):
    data = write_json(files.folder / "bad.json", [files.video_r1_row(0), *bad_rows.values(), files.video_r1_row(5)])
    result = train(cli, data, "filtered", "--filter-bad-rows", "--groups-per-iteration", 4).result
    assert result["rows"] == 4
    (truth, truth_reason), (kind, kind_reason) = result["rows_refused"]
    assert (truth, kind) == (1, 2)
    assert "ground truth is missing" in truth_reason
    assert "'multiple chois'" in kind_reason
    assert "'multiple choice'" in kind_reason
    refused = dict(result["prompts_refused"])
    assert refused.keys() == {"row 3", "row 4"}
    assert "gone.mp4" in refused["row 3"]
    assert str(PROMPT_LIMIT) in refused["row 4"]
    for iteration in range(2):
        assert len(cli("samples", "filtered", iteration).result["samples"]) == 2 * SAMPLES


@pytest.mark.parametrize(("name", "reason", "words"), [
    ("truth", "NO_GROUND_TRUTH", "column solution"), ("type", "UNKNOWN_PROBLEM_TYPE", "nearest known: 'multiple choice'"),
    ("media", "MEDIA_MISSING", "gone.mp4"), ("long", "PROMPT_TOO_LONG", f"{PROMPT_LIMIT}")])
def test_a_bad_row_ends_the_command_and_is_named(cli, files, bad_rows, name, reason, words):
    rows = [files.video_r1_row(0), files.video_r1_row(5), bad_rows[name]]
    done = train(cli, write_json(files.folder / f"bad-{name}.json", rows), f"bad-{name}", "--groups-per-iteration", 3)
    assert done.status == 2
    assert done.error["reason"] == reason
    assert "row 2: " in done.error["message"]
    assert words in done.error["message"]


def test_a_file_without_a_usable_row_is_an_error_even_with_the_filter(cli, files, bad_rows):
    for name, row in (("truth", bad_rows["truth"]), ("media", bad_rows["media"])):
        data = write_json(files.folder / f"only-bad-{name}.json", [row])
        error = train(cli, data, f"only-{name}", "--filter-bad-rows", "--groups-per-iteration", 1).error
        assert error["reason"] == "EMPTY_DATASET"
        assert "row 0: " in error["message"]


@pytest.mark.parametrize(("name", "content", "words"), [
    ("gone.json", None, "does not exist"), ("rows.csv", "a,b", ".parquet"), ("empty.json", "[]", "no rows"),
    ("broken.jsonl", '{"prompt": "a", "solution": "A"}\n{"prompt": ', "line 2"),
    ("broken.parquet", "no parquet", "no parquet"), ("other.json", '[{"text": "a"}]', "row 0")])
def test_a_data_file_that_cannot_be_read_is_named(cli, tmp_path, name, content, words):
    path = tmp_path / name
    if content is not None:
        path.write_text(content)
    done = train(cli, path, "unread")
    assert done.status == 2
    assert name in done.error["message"]
    assert words in done.error["message"]


# Every command's JSON.


@pytest.fixture(scope="module")
def trained(cli, files):
    heldout = write_json(files.folder / "heldout.json", [files.video_r1_row(6)])
    return train(cli, files.video_r1_absolute(), "trained", "--heldout", heldout).result["run"]


def test_status_says_everything(cli, trained):
    status = cli("status").result
    assert {row["name"]: (row["state"], row["health"]) for row in status["services"]} == dict.fromkeys(
        SERVICES, ("RUNNING", "SERVING"))
    assert status["open_run"] is not None
    assert any(row["object_class"] == "actor_snapshot" and row["size_bytes"] > 0 for row in status["ledger"])


def test_logs(cli, trained):
    assert cli("logs", "-n", 3).result["logs"].keys() == SERVICES
    logs = cli("logs", "rollout-0", "--lines", 5).result["logs"]
    assert list(logs) == ["rollout-0"]
    assert 0 < len(logs["rollout-0"]) <= 5


def test_restart(cli, files):
    pids = {row["name"]: row["pid"] for row in cli("status").result["services"]}
    again = cli("restart", "reward").result
    assert again["service"] == "reward"
    assert again["pid"] != pids["reward"]
    assert {"coordinator", "broker", "trainer-0"} <= set(again["compared_with"])
    assert train(cli, files.video_r1_absolute(), "after-restart", "--iterations", 1).result["unscored_per_iteration"] == 0.0


def test_runs_and_samples(cli, trained):
    runs = {run["name"]: run for run in cli("runs").result["runs"]}
    assert (runs[trained]["next_iteration"], runs[trained]["snapshot"]) == (2, 2)
    samples = cli("samples", trained, 1).result["samples"]
    assert [(sample["group_index"], sample["sample_index"]) for sample in samples] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert all(0 < len(sample["token_ids"]) <= 6 for sample in samples)
    assert len(cli("samples", trained, 0, "--validation").result["samples"]) == 1


def test_report_and_export(cli, trained, files):
    made = cli("report", trained, "--out", "again.html").result
    assert made == {"run": trained, "report": "again.html"}
    assert_self_contained(cli.folder / "again.html")
    # Only the open run has a snapshot in memory.
    train(cli, files.video_r1_absolute(), "exported")
    written = cli("export", "exported", "exported").result
    assert written["path"] == str(cli.folder / "exported")
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= {path.name for path in (cli.folder / "exported").iterdir()}
    assert cli("export", "exported", "exported").error["reason"] == "OUTPUT_EXISTS"
    assert cli("up", "--model", "exported").error["reason"] == "RUNTIME_DIR_IN_USE"


def test_config(cli):
    assert cli("config").result["mesh"]["runtime_dir"] == str(cli.runtime_dir)
    assert cli("config", "--check").result["ok"] is True
    assert "[coordinator]" in cli("config", "--defaults").result["text"]
    assert "# Configuration" in cli("config", "--reference").result["text"]


@pytest.mark.parametrize(("arguments", "status", "reason", "words"), [
    (("samples", "nobody", "0"), 1, "RUN_NOT_FOUND", "nobody"),
    (("samples", "trained", "99"), 1, "ITERATION_NOT_FOUND", "99"),
    (("report", "nobody", "--out", "x.html"), 1, "RUN_NOT_FOUND", "nobody"),
    (("export", "nobody", "x"), 1, "RUN_NOT_FOUND", "nobody"),
    (("restart", "trainer-9"), 1, "NO_SUCH_SERVICE", "trainer-0"),
    (("logs", "trainer-9"), 1, "NO_LOG", "trainer-0"),
    (("reward", "remove", "nobody"), 1, "REWARD_NOT_FOUND", "nobody"),
    (("reward", "add", "x", "nowhere"), 2, "BAD_ADDRESS", "nowhere"),
    (("up",), 2, "MODEL_MISSING", "--model"),
    (("train",), 2, "DATA_MISSING", "--data"),
    (("config", "--set", "run.sampling.temprature=2"), 2, "UNKNOWN_CONFIG_KEY", "'temperature'"),
    (("up", "--set", "trianer.threads=2"), 2, "UNKNOWN_CONFIG_SECTION", "[trainer]"),
    (("status", "--set", "run.sampling.samples_per_group=1"), 2, "BAD_CONFIG", "samples_per_group"),
    (("config", "--config", "gone.toml"), 2, "CONFIG_NOT_FOUND", "gone.toml"),
])
def test_failures_on_a_mesh_that_is_up(cli, trained, arguments, status, reason, words):
    done = cli(*arguments)
    assert (done.error["reason"], done.status) == (reason, status), done
    assert words in done.error["message"]


def test_a_name_that_is_taken_and_another_model(cli, files, trained, tmp_path, tiny_checkpoint):
    taken = train(cli, files.video_r1_absolute(), trained, "--set", "run.seed=9").error
    assert taken["reason"] == "RUN_EXISTS"
    other = shutil.copytree(tiny_checkpoint, tmp_path / "other")
    assert train(cli, files.video_r1_absolute(), "x", "--model", other).error["reason"] == "OTHER_MODEL_LOADED"


def test_wrong_usage_is_one_line_after_the_usage():
    with Cli() as cli:
        for arguments in (("trian",), ("samples", "run"), ("train", "--schedule", "sideways"), ("reward",)):
            done = cli(*arguments)
            assert (done.status, done.stdout) == (2, "")
            assert re.match(r"rollplex.*: error: ", done.stderr.splitlines()[-1])


# Failures without a mesh. None of them starts a service.


@pytest.mark.parametrize(("arguments", "reason"), [
    (("down",), "MESH_DOWN"), (("status",), "MESH_DOWN"), (("restart", "reward"), "MESH_DOWN"), (("logs",), "NO_LOG"),
    (("runs",), "COORDINATOR_UNREACHABLE"), (("samples", "x", "0"), "COORDINATOR_UNREACHABLE"),
    (("report", "x", "--out", "x.html"), "COORDINATOR_UNREACHABLE"), (("export", "x", "y"), "COORDINATOR_UNREACHABLE"),
    (("reward", "list"), "COORDINATOR_UNREACHABLE"), (("reward", "remove", "x"), "COORDINATOR_UNREACHABLE"),
    (("reward", "add", "x", "unix:/x"), "COORDINATOR_UNREACHABLE")])
def test_commands_say_that_no_mesh_is_up(arguments, reason):
    with Cli() as cli:
        done = cli(*arguments)
        assert (done.error["reason"], done.status) == (reason, 1)
        if reason != "NO_LOG":
            assert "rollplex up" in done.error["message"]


@pytest.mark.parametrize("missing", ["config.json", "model.safetensors", "tokenizer.json", "preprocessor_config.json"])
def test_an_incomplete_checkpoint_is_refused_with_the_file_it_lacks(tiny_checkpoint, tmp_path, files, missing):
    model = shutil.copytree(tiny_checkpoint, tmp_path / "model")
    (model / missing).unlink()
    with Cli() as cli:
        for command in (("up",), ("train", "--data", files.video_r1_absolute(), *SMALL_RUN)):
            done = cli(*command, "--model", model)
            assert (done.error["reason"], done.status) == ("INCOMPLETE_CHECKPOINT", 2)
            assert missing in done.error["message"]
        assert not (cli.runtime_dir / "logs").exists()


def test_a_checkpoint_of_another_architecture_is_refused(tiny_checkpoint, tmp_path):
    model = shutil.copytree(tiny_checkpoint, tmp_path / "model")
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"model_type": "llava"}))
    with Cli() as cli:
        error = cli("up", "--model", model).error
        assert error["reason"] == "OTHER_ARCHITECTURE"
        assert "'llava'" in error["message"]
        assert "qwen2_5_vl" in error["message"]
        assert cli("up", "--model", tmp_path / "gone").status == 2


def test_a_second_up_names_who_listens(cli, tiny_checkpoint):
    error = cli("up", "--model", tiny_checkpoint).error
    assert error["reason"] == "RUNTIME_DIR_IN_USE"
    assert int(error["metadata"]["pid"]) in {row["pid"] for row in cli("status").result["services"]}


def test_a_port_in_use_is_named(tiny_checkpoint):
    with Cli() as cli, socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        given = ("--set", f'mesh.addresses=["coordinator={address}"]')
        assert cli("up", "--model", tiny_checkpoint, *given).error["reason"] == "TCP_INSECURE"
        done = cli("up", "--model", tiny_checkpoint, *given, "--set", "mesh.insecure_tcp=true")
        assert (done.error["reason"], done.status) == ("ADDRESS_IN_USE", 2)
        assert address in done.error["message"]


# Rewards while a run goes on.


@contextlib.contextmanager
def served(function: str, address: str):
    process = subprocess.Popen([sys.executable, "-m", "rollplex_client.reward", function, "--address", address])
    try:
        yield
    finally:
        end(process)


def until(what, seconds=60.0):
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if found := what():
            return found
        time.sleep(0.05)
    raise AssertionError("it has not come to that in time")


def test_a_reward_comes_and_goes_while_a_run_goes_on(cli, files):
    address, out = f"unix:{cli.runtime_dir}/tokens.sock", cli.folder / "runs" / "rewarded"
    run = cli.start("train", "--data", files.video_r1_absolute(), "--run", "rewarded", *SMALL_RUN, "--iterations", 1000)

    def seen() -> list[bool]:
        """By iteration, whether the new reward counted."""
        assert run.poll() is None, run.communicate()
        lines = metrics(out) if (out / "metrics.jsonl").exists() else []
        return ["rewards/tokens/mean" in line["metrics"] for line in lines]

    try:
        with served(f"{TOKEN_SUM}:token_sum", address):
            until(lambda: len(seen()) >= 2)
            until(lambda: Path(address.removeprefix("unix:")).exists())
            added = cli("reward", "add", "tokens", address, "--weight", 0.5, "--retries", 1).result
            assert (added["name"], added["address"], added["weight"], added["retries"]) == ("tokens", address, 0.5, 1)
            until(lambda: any(seen()))
            listed = {item["name"]: item for item in cli("reward", "list").result["rewards"]}
            assert listed.keys() == {"video_r1", "tokens"}
            assert all(item["reachable"] for item in listed.values())
            assert cli("reward", "remove", "tokens").result == {"removed": "tokens"}
            gone = len(seen()) + 1
            until(lambda: len(seen()) > gone)
        run.send_signal(signal.SIGINT)
        stdout, _ = run.communicate(timeout=60)
    finally:
        end(run)
    assert (run.returncode, json.loads(stdout)["error"]["reason"]) == (130, "INTERRUPTED")
    counted = ["rewards/tokens/mean" in line["metrics"] for line in metrics(out)]
    assert not counted[0]
    assert any(counted)
    assert not counted[-1]
    assert cli("reward", "list").result["rewards"][0]["name"] == "video_r1"


def test_a_reward_that_does_not_answer_is_listed_with_status_1(cli):
    cli("reward", "add", "absent", f"unix:{cli.runtime_dir}/absent.sock")
    try:
        done = cli("reward", "list")
        assert done.status == 1
        assert {item["name"]: item["reachable"] for item in done.data["rewards"]} == {"video_r1": True, "absent": False}
    finally:
        cli("reward", "remove", "absent")


# The wheel.


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """A folder with what a built wheel holds."""
    built, unpacked = tmp_path_factory.mktemp("built"), tmp_path_factory.mktemp("wheel")
    done = subprocess.run([sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", built], cwd=ROOT, text=True,
                          capture_output=True, check=False)
    assert done.returncode == 0, done.stderr
    (file,) = built.glob("rollplex-*.whl")
    with zipfile.ZipFile(file) as archive:
        archive.extractall(unpacked)
    return unpacked


def test_the_wheel_holds_the_product_and_no_tests(wheel):
    held = {str(path.relative_to(wheel)) for path in wheel.rglob("*") if path.is_file()}
    sources = {str(path.relative_to(base)) for base in (ROOT / "services", ROOT / "protos" / "gen") for path in
               (base / "rollplex").rglob("*.py")}
    sources |= {str(path.relative_to(ROOT)) for path in (ROOT / "rollplex_client").rglob("*.py")}
    assert sources - held == set()
    assert {"rollplex/v1/coordinator_service_pb2.py", "rollplex/v1/coordinator_service_pb2_grpc.py",
            "rollplex_client/report/style.css"} <= held
    assert {name.split("/")[0] for name in held if ".dist-info/" not in name} == {"rollplex", "rollplex_client"}
    assert [name for name in held if "test" in Path(name).stem.split("_") or name.startswith("tests/")] == []
    (entry_points,) = wheel.glob("*.dist-info/entry_points.txt")
    assert "rollplex = rollplex_client.cli:main" in entry_points.read_text()


def test_up_status_and_down_work_from_a_wheel_in_an_empty_folder(wheel, tiny_checkpoint):
    with Cli(runtime_dir=None, env={"PYTHONPATH": str(wheel)}) as cli:
        assert set(cli("up", "--model", tiny_checkpoint, *SMALL_MESH).result["services"]) == SERVICES
        status = cli("status").result
        assert all(row["health"] == "SERVING" for row in status["services"])
        for row in status["services"]:
            found = imported_by(row["pid"])
            assert all(Path(path).is_relative_to(wheel) for path in found), (row["name"], found)
        assert {path.name for path in cli.folder.iterdir()} == {".rollplex"}
        assert set(cli("down").result["stopped"]) == SERVICES
        assert cli("status").error["reason"] == "MESH_DOWN"
        assert not [row["name"] for row in status["services"] if Path(f"/proc/{row['pid']}").exists()]


def imported_by(pid: int) -> list[str]:
    """Where a running service's interpreter, environment and folder find our packages."""
    environment = dict(item.split("=", 1) for item in Path(f"/proc/{pid}/environ").read_text().split("\0") if "=" in item)
    code = ("import rollplex.core, rollplex.v1, rollplex_client; "
            "print(rollplex.core.__file__, rollplex.v1.__path__[0], rollplex_client.__file__)")
    interpreter = Path(f"/proc/{pid}/cmdline").read_text().split("\0")[0]
    return subprocess.run([interpreter, "-c", code], env=environment, cwd=Path(f"/proc/{pid}/cwd").readlink(), text=True,
                          capture_output=True, check=True).stdout.split()
