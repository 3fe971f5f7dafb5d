"""Starts one of the four programs as a process of its own and reads its log."""

import json
import os
import signal
import socket
import subprocess
import tempfile
import threading
import time

# A run whose other programs are not there: nothing listens on port 9.
CONFIG = """
name: frame
task: {name: reverse}
model: {init: {hidden_size: 32}}
trainer: {address: "127.0.0.1:9", num_threads: 1}
rollout: {num_threads: 1, sampling: {max_new_tokens: 8}}
weight_sync: {address: "127.0.0.1:9"}
server: {drain_grace_ms: 3000}
"""


class Program:
    """with Program(binary) as program: program.address, program.metrics_address"""

    def __init__(self, binary, config=CONFIG, sets=(), listen="127.0.0.1:0", wait=True):
        self.directory = tempfile.TemporaryDirectory()
        path = os.path.join(self.directory.name, "config.yaml")
        with open(path, "w") as file:
            file.write(config)
        arguments = [binary, "--config", path]
        for item in [f"server.listen_address={listen}", "server.metrics_address=127.0.0.1:0", *sets]:
            arguments += ["--set", item]
        self.events = []
        self.changed = threading.Condition()
        self.process = subprocess.Popen(
            arguments, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, cwd=self.directory.name)
        self.reader = threading.Thread(target=self._read_log, daemon=True)
        self.reader.start()
        self.address = self.metrics_address = None
        if wait:
            self.metrics_address = self.wait_for("serving metrics")["address"]
            self.address = self.wait_for("serving")["address"]

    def _read_log(self):
        for line in self.process.stderr:
            try:
                event = json.loads(line)
            except ValueError:
                event = {"message": line.strip()}
            with self.changed:
                self.events.append(event)
                self.changed.notify_all()
        with self.changed:
            self.changed.notify_all()

    def find(self, message, **wanted):
        return [e for e in self.events if e["message"] == message and all(e.get(k) == v for k, v in wanted.items())]

    def wait_for(self, message, timeout=20, **wanted):
        """The first event with this message and these fields."""
        with self.changed:
            if not self.changed.wait_for(lambda: self.find(message, **wanted), timeout):
                raise AssertionError(f"no {message!r} {wanted} in the log:\n" + "\n".join(map(str, self.events[-40:])))
            return self.find(message, **wanted)[0]

    def terminate(self):
        self.process.send_signal(signal.SIGTERM)

    def wait(self, timeout=20):
        return self.process.wait(timeout)

    def rss_bytes(self):
        with open(f"/proc/{self.process.pid}/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    def cpu_seconds(self):
        with open(f"/proc/{self.process.pid}/stat") as file:
            times = file.read().rsplit(")", 1)[1].split()[11:13]
        return sum(map(int, times)) / os.sysconf("SC_CLK_TCK")

    def __enter__(self):
        return self

    def __exit__(self, *_):
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        self.reader.join(5)
        self.process.stderr.close()
        self.directory.cleanup()


def wait_until(condition, timeout=10):
    deadline = time.monotonic() + timeout
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
