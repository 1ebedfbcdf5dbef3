"""Sharing a GPU: the capped stream beside the others, and the mesh's MPS daemon with clients."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from gpu_marks import NEEDS_GPU
from tiny_qwen import bind_model, build_hf, make_groups, two_stage_loss, worst_gradient_error

from rollplex.core.config import MeshSection
from rollplex.core.sharing import GPU_ROLES, environment, without_mps_variables
from rollplex.core.strict import to_plain, to_toml
from rollplex.model import VisionLanguageModel, destroy_tensor_parallel, init_tensor_parallel
from rollplex_client.cli.mps_control import CONTROL
from rollplex_client.cli.supervision import listener_pid

pytestmark = NEEDS_GPU
needs_mps = pytest.mark.skipif(shutil.which(CONTROL) is None, reason=f"{CONTROL} is not on PATH")
WAIT_S = 120.0

CLIENT = """
import json, os, sys, time
from pathlib import Path
from rollplex.core.config import MeshSection
from rollplex.core.strict import parse, read_toml
from rollplex.rpc.mps_link import hold_daemon
mesh = parse(MeshSection, read_toml(Path(sys.argv[1]))["mesh"])
hold_daemon(mesh)
import torch
a = torch.randn(512, 512, device="cuda", dtype=torch.float64, generator=torch.Generator("cuda").manual_seed(0))
stream = None
if mesh.prefix_stream_percent is None:
    b = a @ a
else:
    from rollplex.engine.prefix_stream import open_prefix_stream
    stream = open_prefix_stream(mesh, 0)
    with stream():
        b = a @ a
error = float((b.cpu() - a.cpu() @ a.cpu()).abs().max())
sms = torch.cuda.get_device_properties(0).multi_processor_count
print(json.dumps({"error": error, "sms": sms, "prefix_sms": stream.sm_count if stream else None}), flush=True)
command = sys.stdin.readline().strip()
if command == "fault":
    # A write 4 TiB beyond an allocation, where nothing is mapped: a fatal fault of this client.
    source = 'extern "C" __global__ void stray(float* p) { p[1LL << 40] = 1.0f; }'
    torch.cuda._compile_kernel(source, "stray")(grid=(1, 1, 1), block=(1, 1, 1), args=(torch.zeros(8, device="cuda"),))
    torch.cuda.synchronize()
elif command == "work":
    while True:
        a @ a
        torch.cuda.synchronize()
        time.sleep(0.01)
"""


@pytest.fixture
def stream() -> Iterator:
    from rollplex.engine.prefix_stream import PrefixStream

    made = PrefixStream(0, 50)
    yield made
    made.rest()


def test_a_capped_stream_multiplies_rightly_and_in_order(stream):
    total = torch.cuda.get_device_properties(0).multi_processor_count
    assert 8 <= stream.sm_count < total
    a = torch.randn(1024, 1024, device="cuda", dtype=torch.float64)
    expected = a @ a
    for _ in range(20):
        # Written on the outer stream right before, read on it right after: only the events between keep the order.
        b = torch.zeros_like(a)
        torch.cuda._sleep(2_000_000)
        b += a
        with stream():
            torch.cuda._sleep(2_000_000)
            c = b @ a
        d = c - expected
        assert float(d.abs().max()) < 1e-9


def test_a_stream_that_is_made_anew_for_every_prefix_leaves_no_memory_behind(stream):
    """Workspaces of cuBLAS are kept a stream; results that outlive the green context stay whole."""
    a = torch.randn(1024, 1024, device="cuda", dtype=torch.bfloat16)
    expected = a @ a
    torch.cuda.synchronize()

    def prefix() -> int:
        with stream():
            b = a @ a
        stream.rest()
        # Made on a stream that is gone, read and freed on this one.
        torch.testing.assert_close(b.float(), expected.float(), rtol=2e-2, atol=1.0)
        del b
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        return torch.cuda.memory_allocated()

    first = prefix()
    assert [prefix() for _ in range(20)] == [first] * 20


def test_torch_records_events_on_the_capped_stream(stream):
    """What NCCL, record_stream and profilers do with a current stream."""
    with stream():
        a = torch.ones(1 << 20, device="cuda")
        event = torch.cuda.Event()
        event.record()
    torch.cuda.current_stream().wait_event(event)
    a.record_stream(torch.cuda.current_stream())
    assert float(a.sum()) == 1 << 20


def test_a_kernel_of_the_primary_context_runs_on_it(stream):
    """As Triton launches: a function of a module that was loaded in the primary context, through the driver's API."""
    source = 'extern "C" __global__ void count(float* p) { p[blockIdx.x * blockDim.x + threadIdx.x] += 1.0f; }'
    kernel = torch.cuda._compile_kernel(source, "count")
    a = torch.zeros(1 << 20, device="cuda")
    with stream():
        kernel(grid=(4096, 1, 1), block=(256, 1, 1), args=(a,))
    assert float(a.sum()) == 1 << 20


def test_memory_of_one_stream_is_not_reused_while_the_other_reads(stream):
    """Blocks freed on either side and asked for on the other at once: every sum is that of what was written."""
    sums, expected = [], []
    for step in range(200):
        with stream():
            a = torch.full((1 << 22,), float(step), device="cuda")
        torch.cuda._sleep(200_000)
        sums.append(a.sum(dtype=torch.float64))
        del a
        b = torch.full((1 << 22,), float(-step), device="cuda")
        with stream():
            torch.cuda._sleep(200_000)
            sums.append(b.sum(dtype=torch.float64))
        del b
        expected += [float(step << 22), float(-step << 22)]
    assert torch.stack(sums).tolist() == expected


def test_the_context_has_as_many_sms_as_it_says(stream):
    from cuda.bindings import driver

    with stream():
        status, resource = driver.cuGreenCtxGetDevResource(stream._green._context,
                                                           driver.CUdevResourceType.CU_DEV_RESOURCE_TYPE_SM)
    assert status == driver.CUresult.CUDA_SUCCESS
    assert resource.sm.smCount == stream.sm_count


@pytest.mark.parametrize("saved", ["keep", "recompute", "offload", "from_inputs"])
def test_gradients_under_the_cap(stream, tmp_path, monkeypatch, saved):
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", False)
    init_tensor_parallel(0, 1)
    try:
        build_hf(tied=False, dtype=torch.float64).save_pretrained(tmp_path)
        bound = bind_model(tmp_path, torch.float32)
        model = VisionLanguageModel(bound.config, torch.float32, "cuda")
        model.bind(bound.layout.training_views({name: view.cuda() for name, view in bound.rollout_views.items()}))
        found = []
        for limit in (None, stream):
            groups = make_groups(bound.config, ["video", "text", "one_token", "image_and_video"], torch.float32, [3, 1, 40])
            for group in groups:
                group.inputs = group.inputs.to("cuda")
                group.responses = [response.cuda() for response in group.responses]
                group.weights = [weights.cuda() for weights in group.weights]
            two_stage_loss(model, groups, 0.7, bound.config.forbidden_token_ids, saved=saved, limit=limit)
            found.append({name: p.grad.cpu() for name, p in model.parameters_by_name().items()})
            model.zero_grad()
        assert worst_gradient_error(found[1], found[0], vocab=bound.config.padded_vocab(1)) < 1e-4
    finally:
        destroy_tensor_parallel()


@contextmanager
def mps_service(sharing: str) -> Iterator[MeshSection]:
    with tempfile.TemporaryDirectory(prefix="rp-") as folder:
        mesh = MeshSection(runtime_dir=Path(folder), devices="cuda", sharing=sharing)
        config = mesh.runtime_dir / "effective.toml"
        config.write_text(to_toml({"mesh": to_plain(mesh)}))
        process = subprocess.Popen([sys.executable, "-m", "rollplex_client.cli.mps_service", "--config", str(config)])
        try:
            deadline = time.monotonic() + WAIT_S
            while listener_pid(mesh.mps_socket) is None:
                assert process.poll() is None and time.monotonic() < deadline, logs(mesh)
                time.sleep(0.1)
            yield mesh
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(WAIT_S)
        assert process.returncode == 0
        assert not mesh.mps_pipe_dir.exists() and not mesh.mps_socket.exists()


def logs(mesh: MeshSection) -> str:
    return "\n".join(f"{path}:\n{path.read_text()}" for path in mesh.mps_log_dir.glob("*.log"))


@contextmanager
def client(mesh: MeshSection, role: str) -> Iterator[tuple[subprocess.Popen, dict]]:
    """A process with the role's environment, and what it found."""
    variables = without_mps_variables(dict(os.environ)) | environment(
        mesh.policy, role, pipe_directory=mesh.mps_pipe_dir, prefix_sm_percent=mesh.prefix_percent)
    process = subprocess.Popen([sys.executable, "-c", CLIENT, str(mesh.runtime_dir / "effective.toml")], text=True,
                               stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=variables)
    try:
        line = process.stdout.readline()
        assert line, logs(mesh)
        yield process, json.loads(line)
    finally:
        process.kill()
        process.communicate()


@needs_mps
@pytest.mark.parametrize("sharing", ["mps-default", "mps-priority", "thread-cap", "sm-affinity", "green-context"])
def test_every_role_is_a_client_of_the_meshs_daemon(sharing):
    total = torch.cuda.get_device_properties(0).multi_processor_count
    with mps_service(sharing) as mesh:
        for role in GPU_ROLES:
            with client(mesh, role) as (process, found):
                assert found["error"] < 1e-6, role
                asked = subprocess.run([CONTROL], input=f"get_client_list {server_pid(mesh)}\n", capture_output=True, text=True,
                                       env={**os.environ, "CUDA_MPS_PIPE_DIRECTORY": str(mesh.mps_pipe_dir)}, check=True)
                assert str(process.pid) in asked.stdout.split(), asked.stdout
                print(sharing, role, found)
                capped = "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE" in environment(
                    mesh.policy, role, pipe_directory=mesh.mps_pipe_dir, prefix_sm_percent=70)
                assert (found["sms"] < total) == capped
                if sharing == "green-context":
                    assert 0 < found["prefix_sms"] < total


def server_pid(mesh: MeshSection) -> int:
    done = subprocess.run([CONTROL], input="get_server_list\n", capture_output=True, text=True, check=True,
                          env={**os.environ, "CUDA_MPS_PIPE_DIRECTORY": str(mesh.mps_pipe_dir)})
    return int(done.stdout.split()[0])


@needs_mps
def test_a_fault_of_one_client_ends_all_and_the_next_ones_work():
    with mps_service("mps-priority") as mesh:
        with client(mesh, "rollout") as (rollout, _), client(mesh, "trainer") as (trainer, _):
            rollout.stdin.write("work\n")
            rollout.stdin.flush()
            trainer.stdin.write("fault\n")
            trainer.stdin.flush()
            # Whether by CUDA's error or by the link, neither may live on.
            assert trainer.wait(WAIT_S) != 0
            assert rollout.wait(WAIT_S) != 0
        with client(mesh, "rollout") as (_, found):
            assert found["error"] < 1e-6


@needs_mps
def test_a_killed_server_ends_its_clients():
    with mps_service("mps-priority") as mesh:
        with client(mesh, "rollout") as (rollout, _):
            os.kill(server_pid(mesh), signal.SIGKILL)
            assert rollout.wait(WAIT_S) != 0
        with client(mesh, "rollout") as (_, found):
            assert found["error"] < 1e-6
