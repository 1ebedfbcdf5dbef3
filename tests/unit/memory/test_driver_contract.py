"""What every driver promises, on the host and, where there is one, on a GPU."""

from __future__ import annotations

import fcntl
import mmap
import os
import signal
import subprocess
import sys
import textwrap

import pytest
import torch
from gpu_marks import NEEDS_GPU

from rollplex.core.errors import BadInput
from rollplex.core.placement import Placement
from rollplex.memory import views
from rollplex.memory.device_pages import DevicePages
from rollplex.memory.drivers import driver_of
from rollplex.memory.host_driver import HostDriver

SIZE = 3 * mmap.PAGESIZE + 100
GPU = pytest.param("cuda:0", marks=NEEDS_GPU)


@pytest.fixture(params=["host", GPU])
def driver(request):
    return driver_of(request.param)


@pytest.fixture
def host_handle():
    made = HostDriver().create(SIZE, "test")
    yield made
    HostDriver().release(made)


@pytest.fixture
def reservation(driver):
    reserved = driver.reserve(SIZE)
    yield reserved
    driver.free(reserved)


@pytest.fixture
def handle(driver):
    made = driver.create(SIZE, "test")
    yield made
    driver.release(made)


def test_reservations_are_whole_granules(driver, reservation):
    assert reservation.size_bytes >= SIZE
    assert reservation.size_bytes % driver.granularity_bytes == 0
    assert reservation.address % driver.granularity_bytes == 0


def test_new_memory_is_zero_and_keeps_its_bytes_over_unmap(driver, reservation, handle):
    base = views.reserved_tensor(driver, reservation, SIZE)
    driver.map(reservation, handle, writable=True)
    assert not base.any()
    base.fill_(7)
    driver.unmap(reservation)
    driver.map(reservation, handle, writable=False)
    assert bool((base == 7).all())


def test_zeros_can_be_read_and_give_way_to_memory(driver, reservation, handle):
    base = views.reserved_tensor(driver, reservation, SIZE)
    driver.map_zeros(reservation)
    assert not base.any()
    driver.map(reservation, handle, writable=True)
    base.fill_(7)
    driver.map_zeros(reservation)
    assert not base.any()
    driver.unmap(reservation)


def test_zeros_reach_over_any_size(driver):
    size = (130 << 20) + 100
    reservation = driver.reserve(size)
    base = views.reserved_tensor(driver, reservation, size)
    driver.map_zeros(reservation)
    assert not base.any()
    driver.free(reservation)


def test_tensors_made_before_the_first_map_keep_their_address(driver, reservation, handle):
    base = views.reserved_tensor(driver, reservation, SIZE)
    tensor = views.tensor(base, Placement.contiguous("s", 64, (5, 7), "float32"))
    address = tensor.data_ptr()
    other = driver.create(SIZE, "other")
    for memory, value in ((handle, 1.5), (other, 2.5), (handle, None)):
        driver.map(reservation, memory, writable=True)
        if value is not None:
            tensor.fill_(value)
        assert tensor.data_ptr() == address == reservation.address + 64
        assert tensor[0, 0] == (value or 1.5)
        driver.unmap(reservation)
    driver.release(other)


def test_two_mappings_share_bytes(driver, reservation, handle):
    second = driver.reserve(SIZE)
    driver.map(reservation, handle, writable=True)
    driver.map(second, handle, writable=False)
    views.base_tensor(reservation.address, SIZE, driver.device).fill_(9)
    assert bool((views.base_tensor(second.address, SIZE, driver.device) == 9).all())
    driver.free(second)


def test_bytes_are_copied_from_memory_that_is_mapped_for_reading(driver, reservation, handle):
    source = views.reserved_tensor(driver, reservation, SIZE)
    driver.map(reservation, handle, writable=True)
    source.copy_(torch.randint(0, 256, (SIZE,), dtype=torch.uint8))
    expected = source.clone()
    driver.map(reservation, handle, writable=False)
    own, made = driver.reserve(SIZE), driver.create(SIZE, "own")
    try:
        target = views.reserved_tensor(driver, own, SIZE)
        driver.map(own, made, writable=True)
        driver.copy(target[100:], source[100:])
        assert torch.equal(target[100:], expected[100:])
        assert not target[:100].any()
    finally:
        driver.free(own)
        driver.release(made)


def test_memory_outlives_its_creators_handle(driver, reservation):
    made = driver.create(SIZE, "short-lived")
    fd = driver.export(made)
    driver.map(reservation, made, writable=True)
    views.base_tensor(reservation.address, SIZE, driver.device).fill_(3)
    driver.unmap(reservation)
    driver.release(made)
    taken = driver.import_fd(fd, SIZE)
    os.close(fd)
    driver.map(reservation, taken, writable=False)
    assert bool((views.base_tensor(reservation.address, SIZE, driver.device) == 3).all())
    driver.release(taken)


def test_exported_descriptors_are_closed_on_exec(driver, handle):
    fd = driver.export(handle)
    assert fcntl.fcntl(fd, fcntl.F_GETFD) & fcntl.FD_CLOEXEC
    os.close(fd)


def test_another_process_sees_and_writes_the_bytes(driver, reservation, handle):
    driver.map(reservation, handle, writable=True)
    base = views.base_tensor(reservation.address, SIZE, driver.device)
    base[10] = 42
    code = """
        import sys
        from rollplex.memory import views
        from rollplex.memory.drivers import driver_of
        fd, size, device = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
        driver = driver_of(device)
        reservation = driver.reserve(size)
        driver.map(reservation, driver.import_fd(fd, size), writable=True)
        base = views.base_tensor(reservation.address, size, device)
        assert base[10] == 42
        base[11] = 43
        driver.unmap(reservation)
    """
    fd = driver.export(handle)
    subprocess.run([sys.executable, "-c", textwrap.dedent(code), str(fd), str(SIZE), driver.device], pass_fds=[fd], check=True)
    os.close(fd)
    assert base[11] == 43


FAULT = """
    import sys
    from rollplex.core.placement import Placement
    from rollplex.memory import views
    from rollplex.memory.host_driver import HostDriver
    driver = HostDriver()
    reservation = driver.reserve(4096)
    handle = driver.create(4096, "fault")
    base = views.base_tensor(reservation.address, 4096)
    driver.map(reservation, handle, writable={writable})
    base.sum()
    {before}
    print("reached", flush=True)
    {touch}
    print("survived", flush=True)
"""


@pytest.mark.parametrize(("writable", "before", "touch"), [
    (True, "driver.unmap(reservation)", "base.sum()"),
    (True, "driver.unmap(reservation)", "base.fill_(1)"),
    (False, "pass", "base.fill_(1)"),
], ids=["read after unmap", "write after unmap", "write to a read-only mapping"])
def test_forbidden_access_is_a_fault(writable, before, touch):
    code = textwrap.dedent(FAULT).format(writable=writable, before=before, touch=touch)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.split() == ["reached"], done.stderr
    assert done.returncode == -signal.SIGSEGV


def test_sizes_cannot_change(host_handle):
    for size in (0, SIZE - 1, SIZE + 1):
        with pytest.raises(PermissionError):
            os.ftruncate(host_handle.number, size)
    with pytest.raises(PermissionError):
        fcntl.fcntl(host_handle.number, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)


def test_a_read_only_descriptor_neither_writes_nor_truncates(host_handle):
    fd = os.open(f"/proc/self/fd/{host_handle.number}", os.O_RDONLY | os.O_CLOEXEC)
    with pytest.raises(PermissionError):
        mmap.mmap(fd, SIZE, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
    with pytest.raises(OSError, match="Invalid argument"):
        os.ftruncate(fd, 0)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.pwrite(fd, b"x", 0)
    mmap.mmap(fd, SIZE, mmap.MAP_SHARED, mmap.PROT_READ).close()
    os.close(fd)


def test_a_read_only_descriptor_cannot_be_mapped_writable(host_handle):
    driver = HostDriver()
    reservation = driver.reserve(SIZE)
    fd = os.open(f"/proc/self/fd/{host_handle.number}", os.O_RDONLY | os.O_CLOEXEC)
    taken = driver.import_fd(fd, SIZE)
    os.close(fd)
    with pytest.raises(PermissionError):
        driver.map(reservation, taken, writable=True)
    driver.map(reservation, taken, writable=False)
    driver.release(taken)
    driver.free(reservation)


@pytest.mark.parametrize("size", [0, -1])
def test_sizes_below_one_are_refused(driver, size):
    with pytest.raises(ValueError, match="at least 1"):
        driver.create(size, "none")
    with pytest.raises(ValueError, match="at least 1"):
        driver.reserve(size)


def test_nothing_outside_the_reservation_is_touched(driver, reservation, handle):
    with pytest.raises(ValueError, match="do not fit"):
        driver.map(reservation, handle, writable=True, offset_bytes=driver.granularity_bytes)
    with pytest.raises(ValueError, match="granularity"):
        driver.map(reservation, handle, writable=True, offset_bytes=100)
    with pytest.raises(ValueError, match="do not fit"):
        driver.unmap(reservation, size_bytes=reservation.size_bytes + 1)


def test_a_smaller_file_is_not_imported(host_handle):
    with pytest.raises(ValueError, match=f"{SIZE} bytes, {SIZE + 1} were expected"):
        HostDriver().import_fd(host_handle.number, SIZE + 1)


@pytest.mark.parametrize("dtype", list(views.DTYPES))
def test_views_have_dtype_shape_and_strides(driver, reservation, handle, dtype):
    driver.map(reservation, handle, writable=True)
    base = views.base_tensor(reservation.address, SIZE, driver.device)
    transposed = Placement("s", 128, (3, 4), (1, 3), dtype)
    tensor = views.tensor(base, transposed)
    assert (tensor.dtype, tuple(tensor.shape), tensor.stride()) == (views.DTYPES[dtype], (3, 4), (1, 3))
    tensor.copy_(torch.arange(12).view(3, 4))
    flat = views.tensor(base, Placement.contiguous("s", 128, (12,), dtype))
    assert flat.tolist() == torch.arange(12).view(3, 4).t().reshape(-1).tolist()


def test_views_stay_inside_the_slab(driver, reservation):
    base = views.reserved_tensor(driver, reservation, 100)
    views.tensor(base, Placement.contiguous("s", 96, (1,), "float32"))
    with pytest.raises(ValueError, match="ends at byte 104"):
        views.tensor(base, Placement.contiguous("s", 96, (2,), "float32"))


def test_pages_visit_a_device_behind_one_address(driver):
    pages = DevicePages(driver, SIZE)
    tensor = pages.tensor(Placement.contiguous("", 0, (8,), "float32"))
    address = tensor.data_ptr()
    for value in (1.0, 2.0):
        pages.back()
        pages.back()
        assert not tensor.any(), "new pages are zeros"
        tensor.fill_(value)
        assert tensor.sum() == 8 * value
        pages.drop()
        pages.drop()
    assert tensor.data_ptr() == address
    pages.close()


def test_devices_that_no_driver_serves_are_refused():
    for device in ("tpu:0", "host:x", "cuda", f"cuda:{torch.cuda.device_count()}"):
        with pytest.raises(BadInput, match=device):
            driver_of(device)
