"""A service that has no time for a moment is there all the same."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading

from grpc_health.v1 import health_pb2, health_pb2_grpc

from rollplex.rpc.channel import sync_channel

SERVER = """
import asyncio, sys
from rollplex.rpc.server import start_server
async def main():
    running = await start_server("late", sys.argv[1], lambda server: [])
    await running.ready()
    print("ready", flush=True)
    await asyncio.Event().wait()
asyncio.run(main())
"""


def test_a_connection_is_waited_for_while_the_service_has_no_time(tmp_path):
    address = f"unix:{tmp_path}/late.sock"
    server = subprocess.Popen([sys.executable, "-c", SERVER, address], stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout.readline() == "ready\n"
        os.kill(server.pid, signal.SIGSTOP)
        threading.Timer(0.3, os.kill, (server.pid, signal.SIGCONT)).start()
        with sync_channel(address) as channel:
            answer = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=60)
        assert answer.status == health_pb2.HealthCheckResponse.SERVING
    finally:
        server.kill()
        server.wait()
        server.stdout.close()
