"""Processes that run side by side, and that find each other on this machine."""

import os
import socket
import subprocess
import time

# Processes that fail end the others at once; all of them compile.
SECONDS = 900


def several_devices(count) -> str:
    """XLA's flags of this process, with as many CPU devices."""
    return f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={count}"


def free_address() -> str:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{found.getsockname()[1]}"


def run_all(commands, environment, folder) -> None:
    """Runs processes side by side until all end well; ends the others if one does not."""
    logs = [folder / f"{i}.log" for i in range(len(commands))]
    started = [
        subprocess.Popen(command, env=environment, stderr=log.open("w"))
        for command, log in zip(commands, logs, strict=True)
    ]
    try:
        limit = time.monotonic() + SECONDS
        while any(p.poll() is None for p in started) and not any(p.poll() for p in started):
            assert time.monotonic() < limit, "the processes must end in time"
            time.sleep(0.1)
        ends = [process.poll() for process in started]
    finally:
        for process in started:
            process.kill()
            process.wait()
    assert not any(ends), [log.read_text()[-4000:] for log in logs]
