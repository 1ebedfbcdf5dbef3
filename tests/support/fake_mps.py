"""A stand-in for `nvidia-cuda-mps-control`: `-f` serves commands on a socket in the pipe directory, without it one command is
read from stdin, as the real one does both. What servers there are, and how they are, lies in the file `servers` in the log
directory ("PID STATUS" lines), which a test may rewrite; their clients in the file `clients`, a PID a line."""

from __future__ import annotations

import stat
import sys
import textwrap
from pathlib import Path

SCRIPT = '''
import os, signal, socket, subprocess, sys
from pathlib import Path

pipe, logs = Path(os.environ["CUDA_MPS_PIPE_DIRECTORY"]), Path(os.environ.get("CUDA_MPS_LOG_DIRECTORY", "/nowhere"))
servers, clients, path = logs / "servers", logs / "clients", str(pipe / "control")


def known():
    lines = servers.read_text().split("\\n") if servers.exists() else []
    return dict(line.split() for line in lines if line)


def answer(command):
    words = command.split()
    if words[0] == "get_server_list":
        return "".join(pid + "\\n" for pid in known())
    if words[0] == "get_server_status":
        return known().get(words[1], "?") + "\\n"
    if words[0] == "get_client_list":
        return clients.read_text() if clients.exists() else ""
    if words[0] == "start_server":
        server = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        servers.write_text(f"{server.pid} ACTIVE\\n")
        return ""
    return ""


def serve():
    with (logs / "environment").open("w") as file:
        file.writelines(f"{name}={value}\\n" for name, value in os.environ.items())
    if os.environ.get("FAKE_MPS") == "fails":
        sys.exit(3)
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    listener.listen()
    while True:
        with listener.accept()[0] as client:
            client.settimeout(1.0)
            try:
                command = client.recv(1000).decode().strip()
            except TimeoutError:
                continue
            if not command:  # whoever asked has ended meanwhile
                continue
            with (logs / "commands").open("a") as file:
                file.write(command + "\\n")
            if command == "quit" and os.environ.get("FAKE_MPS") != "never quits":
                for pid in known():
                    os.kill(int(pid), signal.SIGKILL)
                client.sendall(b"ok")
                return
            client.sendall(answer(command).encode() or b"\\n")


def ask():
    with socket.socket(socket.AF_UNIX) as client:
        try:
            client.connect(path)
        except OSError:
            sys.exit("Cannot find MPS control daemon process")
        client.sendall(sys.stdin.read().encode())
        sys.stdout.write(client.recv(1000).decode())


serve() if "-f" in sys.argv else ask()
'''


def install(folder: Path) -> Path:
    """Writes the command into `folder`, which a test puts on PATH."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "nvidia-cuda-mps-control"
    path.write_text(f"#!{sys.executable}\n" + textwrap.dedent(SCRIPT))
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


def daemon_of(service: int) -> int:
    """Pid of the daemon under the MPS service of this pid, whose other children are commands, and servers that it adopted."""
    children = Path(f"/proc/{service}/task/{service}/children").read_text().split()
    return next(int(pid) for pid in children if b"-f" in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0"))
