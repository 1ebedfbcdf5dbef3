"""The capped stream without a GPU: which CUDA calls are made, in which order, and what is said when one is refused."""

from __future__ import annotations

import sys
from contextlib import contextmanager
from enum import IntEnum
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch

from rollplex.core.config import MeshSection
from rollplex.core.errors import InternalError
from rollplex.engine.prefix_stream import PrefixStream, open_prefix_stream


class CUresult(IntEnum):
    CUDA_SUCCESS = 0
    CUDA_ERROR_INVALID_RESOURCE_CONFIGURATION = 914


class FakeDriver(ModuleType):
    """cuda.bindings.driver's shape: a tuple of status and results. It notes its calls, and refuses the call named `refuse`."""

    CUresult = CUresult
    CUdevResourceType = SimpleNamespace(CU_DEV_RESOURCE_TYPE_SM="sm")
    CUgreenCtxCreate_flags = SimpleNamespace(CU_GREEN_CTX_DEFAULT_STREAM=1)
    CUstream_flags = SimpleNamespace(CU_STREAM_NON_BLOCKING=1)
    CUevent_flags = SimpleNamespace(CU_EVENT_DISABLE_TIMING=2)

    def __init__(self, refuse: str = "") -> None:
        super().__init__("cuda.bindings.driver")
        self.refuse, self.calls = refuse, []

    @staticmethod
    def CUstream(handle: int) -> str:
        return f"stream {handle}"

    def __getattr__(self, name: str):
        if not name.startswith("cu"):
            raise AttributeError(name)

        def call(*arguments):
            self.calls.append((name, *arguments))
            if name == self.refuse:
                return (CUresult.CUDA_ERROR_INVALID_RESOURCE_CONFIGURATION,)
            return (CUresult.CUDA_SUCCESS, *self._results(name, arguments))

        return call

    def _results(self, name: str, arguments: tuple) -> tuple:
        def sms(count: int) -> SimpleNamespace:
            return SimpleNamespace(sm=SimpleNamespace(smCount=count))

        if name == "cuDevSmResourceSplitByCount":
            return [sms(arguments[3])], 1, sms(0)
        return {"cuDeviceGet": ("device",), "cuDeviceGetDevResource": (sms(132),), "cuDevResourceGenerateDesc": ("desc",),
                "cuGreenCtxCreate": ("green",), "cuGreenCtxStreamCreate": (77,), "cuCtxFromGreenCtx": ("context",),
                "cuCtxPopCurrent": ("context",), "cuEventCreate": ("event",)}.get(name, ())

    def names(self) -> list[str]:
        return [call[0] for call in self.calls]


@pytest.fixture
def fake(monkeypatch):
    """Installs a FakeDriver, and streams of torch.cuda that note what they do among the driver's calls."""

    def install(refuse: str = "") -> FakeDriver:
        driver = FakeDriver(refuse)
        bindings = ModuleType("cuda.bindings")
        bindings.driver = driver
        monkeypatch.setitem(sys.modules, "cuda", ModuleType("cuda"))
        monkeypatch.setitem(sys.modules, "cuda.bindings", bindings)
        monkeypatch.setitem(sys.modules, "cuda.bindings.driver", driver)
        monkeypatch.delitem(sys.modules, "rollplex.memory.green_context", raising=False)

        def noting(name: str):
            return lambda *arguments, **_: driver.calls.append((name, *arguments))

        @contextmanager
        def stream(which):
            driver.calls.append(("current", which.handle))
            yield
            driver.calls.append(("no longer current", which.handle))

        def external(handle: int, device: torch.device) -> SimpleNamespace:
            return SimpleNamespace(handle=handle, wait_stream=noting("wait_stream"), synchronize=noting("synchronize"))

        for name in ("init", "set_device"):
            monkeypatch.setattr(torch.cuda, name, noting(name))
        monkeypatch.setattr(torch.cuda, "synchronize", noting("device synchronize"))
        # A torch without CUDA has no such call.
        monkeypatch.setattr(torch._C, "_cuda_clearCublasWorkspaces", noting("clear workspaces"), raising=False)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=5))
        monkeypatch.setattr(torch.cuda, "stream", stream)
        monkeypatch.setattr(torch.cuda, "ExternalStream", external)
        return driver

    yield install
    # It is bound to the stand-in.
    sys.modules.pop("rollplex.memory.green_context", None)


def test_made_and_given_back(fake):
    driver = fake()
    stream = PrefixStream(3, 70)
    assert stream.sm_count == 96
    assert ("cuDeviceGet", 3) in driver.calls
    assert driver.names().index("set_device") < driver.names().index("cuGreenCtxCreate")
    # The event is made in the green context, which is not left current.
    event = driver.names().index("cuEventCreate")
    assert driver.names()[event - 1:event + 2] == ["cuCtxPushCurrent", "cuEventCreate", "cuCtxPopCurrent"]
    given_back = ["synchronize", "clear workspaces", "cuEventDestroy", "cuStreamDestroy", "cuGreenCtxDestroy"]
    # What CUDA refuses is known at the start; the SMs are taken by the first block.
    assert driver.names()[-5:] == given_back
    for _ in range(2):
        driver.calls.clear()
        for _ in range(3):
            with stream():
                pass
        assert driver.names().count("cuGreenCtxCreate") == 1
        stream.rest()
        stream.rest()
        assert driver.names()[-5:] == given_back and driver.names().count("cuGreenCtxDestroy") == 1


@pytest.mark.parametrize("fails", [False, True])
def test_both_streams_wait_for_each_other_also_after_a_failure(fake, fails):
    driver = fake()
    stream = PrefixStream(0, 50)
    with stream():
        pass
    driver.calls.clear()
    try:
        with stream():
            driver.calls.append(("work",))
            if fails:
                raise KeyError("a block")
    except KeyError:
        assert fails
    names = [name for name in driver.names() if name != "no longer current"]
    assert names == ["wait_stream", "current", "work", "cuEventRecord", "cuStreamWaitEvent"]
    assert driver.calls[-2:] == [("cuEventRecord", "event", 77), ("cuStreamWaitEvent", "stream 5", "event", 0)]


@pytest.mark.parametrize("call", ["cuDeviceGetDevResource", "cuDevSmResourceSplitByCount", "cuGreenCtxCreate",
                                  "cuGreenCtxStreamCreate", "cuEventCreate"])
def test_a_refusal_names_the_call_and_a_policy_without(fake, call):
    driver = fake(refuse=call)
    with pytest.raises(InternalError, match=f"{call}: CUDA_ERROR_INVALID_RESOURCE_CONFIGURATION.*mps-priority"):
        PrefixStream(0, 50)
    assert driver.names().count("cuCtxPushCurrent") == driver.names().count("cuCtxPopCurrent")


def test_other_policies_and_the_host_have_none():
    for values in ({"sharing": "green-context"}, {"sharing": "thread-cap", "devices": "cuda"}):
        assert open_prefix_stream(MeshSection(runtime_dir=Path("/r"), **values), 0) is None


def test_a_mesh_with_the_policy_has_its_share(fake):
    fake()
    mesh = MeshSection(runtime_dir=Path("/r"), devices="cuda", sharing="green-context", prefix_sm_percent=25)
    assert open_prefix_stream(mesh, 0).sm_count == 32
