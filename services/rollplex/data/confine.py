"""A seccomp filter for the decoding child: what is not needed to read open files and write a memfd is refused by the kernel.

Unprivileged, and for good: neither the process nor what it might start can take it off. Refused calls fail with EPERM (ENOSYS
where libc has an older way of its own), so that a library that tries one says so instead of dying.
Numbers and layout: Linux's include/uapi/linux/seccomp.h and filter.h, and the system call tables of each machine.
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct

PR_SET_NO_NEW_PRIVS, PR_SET_SECCOMP, SECCOMP_MODE_FILTER = 38, 22, 2
ALLOW, ERRNO, KILL_PROCESS = 0x7FFF0000, 0x00050000, 0x80000000
# Offsets in struct seccomp_data, little-endian: the call's number, the machine, the low half of argument n.
NUMBER, MACHINE = 0, 4
LD, JEQ, JGE, JSET, RET = 0x20, 0x15, 0x35, 0x45, 0x06
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_TMPFILE & ~os.O_DIRECTORY
CLONE_THREAD = 0x10000
X32_BIT = 0x40000000

# By machine: AUDIT_ARCH and the numbers. aarch64 and what is newer than Linux 5.0 share one table.
_NEWER = {"clone3": 435, "openat2": 437, "pidfd_open": 434, "pidfd_send_signal": 424, "pidfd_getfd": 438, "io_uring_setup": 425,
          "io_uring_enter": 426, "io_uring_register": 427, "open_tree": 428, "move_mount": 429, "fsopen": 430, "fsmount": 432,
          "process_madvise": 440, "mount_setattr": 442}
_X86_64 = {
    "socket": 41, "connect": 42, "accept": 43, "bind": 49, "listen": 50, "socketpair": 53, "clone": 56, "fork": 57,
    "vfork": 58, "execve": 59, "kill": 62, "truncate": 76, "rename": 82, "mkdir": 83, "rmdir": 84, "creat": 85, "link": 86,
    "unlink": 87, "symlink": 88, "chmod": 90, "fchmod": 91, "chown": 92, "fchown": 93, "lchown": 94, "ptrace": 101,
    "mknod": 133, "chroot": 161, "mount": 165, "umount2": 166, "setxattr": 188, "lsetxattr": 189, "fsetxattr": 190,
    "removexattr": 197, "lremovexattr": 198, "fremovexattr": 199, "tkill": 200, "open": 2, "openat": 257,
    "mkdirat": 258, "mknodat": 259, "fchownat": 260, "unlinkat": 263, "renameat": 264, "linkat": 265, "symlinkat": 266,
    "fchmodat": 268, "unshare": 272, "accept4": 288, "open_by_handle_at": 304, "setns": 308, "process_vm_readv": 310,
    "process_vm_writev": 311, "renameat2": 316, "bpf": 321, "execveat": 322, "userfaultfd": 323, "perf_event_open": 298,
    "add_key": 248, "request_key": 249, "keyctl": 250, "shmget": 29, "shmat": 30, "msgget": 68, "mq_open": 240,
    "inotify_init1": 294, "fanotify_init": 300,
}
_AARCH64 = {
    "socket": 198, "socketpair": 199, "bind": 200, "listen": 201, "accept": 202, "connect": 203, "accept4": 242,
    "clone": 220, "execve": 221, "execveat": 281, "kill": 129, "tkill": 130, "ptrace": 117, "truncate": 45, "openat": 56,
    "mknodat": 33, "mkdirat": 34, "unlinkat": 35, "symlinkat": 36, "linkat": 37, "renameat": 38, "renameat2": 276,
    "umount2": 39, "mount": 40, "chroot": 51, "fchmod": 52, "fchmodat": 53, "fchownat": 54, "fchown": 55, "setxattr": 5,
    "lsetxattr": 6, "fsetxattr": 7, "removexattr": 14, "lremovexattr": 15, "fremovexattr": 16, "unshare": 97, "setns": 268,
    "open_by_handle_at": 265, "process_vm_readv": 270, "process_vm_writev": 271, "bpf": 280, "userfaultfd": 282,
    "perf_event_open": 241, "add_key": 217, "request_key": 218, "keyctl": 219, "shmget": 194, "shmat": 196, "msgget": 186,
    "mq_open": 180, "inotify_init1": 26, "fanotify_init": 262,
}
MACHINES = {"x86_64": (0xC000003E, _X86_64 | _NEWER), "aarch64": (0xC00000B7, _AARCH64 | _NEWER)}

_OLD_WAY = ("clone3", "openat2")
"""libc falls back to `clone` and `openat`, whose arguments a filter can see."""
_OPENING = {"open": 1, "openat": 2}
"""The argument that holds the flags: opening for reading stays allowed, for libraries that load parts of themselves."""


def confine() -> bool:
    """Confines this process for the rest of its life. False where the machine or its kernel does not know how."""
    machine = MACHINES.get(os.uname().machine)
    if machine is None:
        return False
    program = _program(*machine)
    buffer = ctypes.create_string_buffer(program, len(program))
    header = _Program(len(program) // 8, ctypes.addressof(buffer))
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    return (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0
            and prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, ctypes.byref(header), 0, 0) == 0)


class _Program(ctypes.Structure):
    """struct sock_fprog."""

    _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.c_void_p))


def _program(arch: int, numbers: dict[str, int]) -> bytes:
    """struct sock_filter, 8 bytes an instruction: code, jump if true, jump if false, operand."""
    out = [_op(LD, MACHINE), _op(JEQ, arch, 1, 0), _op(RET, KILL_PROCESS), _op(LD, NUMBER)]
    # x86-64's other numbers for the same calls.
    out += [_op(JGE, X32_BIT, 0, 1), _op(RET, ERRNO | errno.ENOSYS)]
    for name, number in numbers.items():
        if name in _OPENING:
            out += [_op(JEQ, number, 0, 4), _op(LD, _argument(_OPENING[name])), _op(JSET, WRITING, 0, 1),
                    _op(RET, ERRNO | errno.EPERM), _op(RET, ALLOW)]
        elif name == "clone":
            out += [_op(JEQ, number, 0, 4), _op(LD, _argument(0)), _op(JSET, CLONE_THREAD, 1, 0),
                    _op(RET, ERRNO | errno.EPERM), _op(RET, ALLOW)]
        else:
            out += [_op(JEQ, number, 0, 1), _op(RET, ERRNO | (errno.ENOSYS if name in _OLD_WAY else errno.EPERM))]
    return b"".join([*out, _op(RET, ALLOW)])


def _argument(index: int) -> int:
    return 16 + 8 * index


def _op(code: int, operand: int, then: int = 0, otherwise: int = 0) -> bytes:
    return struct.pack("<HBBI", code, then, otherwise, operand)
