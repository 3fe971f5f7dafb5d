"""What strangers can send: the server's memory stays bounded, and while they send it answers others within a second."""

import os
import random
import resource
import socket
import sys
import threading
import time
import unittest

import grpc

from health_probe import HealthProbe
from program import Program
from wire import SERVING, check_health, code_of, text

BIN = sys.argv.pop(1)
NUM_IDLE = 10_000
IDLE_S = 2
IS_SANITIZED = os.environ.get("MOERL_TEST_TIME_SCALE", "1") != "1"
GROWTH_BYTES_MAX = (1200 if IS_SANITIZED else 400) << 20  # sanitizers pad what is allocated and keep what is freed
HEALTH_S_MAX = 1  # longer than another server needs, which nobody attacks: what the machine's other work costs
ATTACKER = ("127.0.0.2", 0)  # strangers and the probe are two hosts to the server
SEED = int(os.environ.get("SEED", time.time()))


class HostileWire(unittest.TestCase):
    def setUp(self):
        self.program = Program(os.path.join(BIN, "moerl-environment"))
        self.host, port = self.program.address.split(":")
        self.port = int(port)
        self.channel = grpc.insecure_channel(self.program.address)
        self.assertEqual(check_health(self.channel), SERVING)
        self.calm = Program(os.path.join(BIN, "moerl-environment"))
        self.probe = HealthProbe(self.program.address)
        self.calm_probe = HealthProbe(self.calm.address)
        self.rss_before = self.program.rss_bytes()

    def tearDown(self):
        self.probe.__exit__()
        self.calm_probe.__exit__()
        self.channel.close()
        self.program.__exit__()
        self.calm.__exit__()

    def assert_well(self, label):
        checks, seconds = self.probe.slowest()
        _, calm_seconds = self.calm_probe.slowest()
        grown = self.program.rss_bytes() - self.rss_before
        print(f"{label}: {checks} health checks in at most {seconds * 1000:.0f} ms "
              f"({calm_seconds * 1000:.0f} ms unattacked), memory grown by {grown / 2**20:.1f} MiB",
              file=sys.stderr)
        self.assertLess(seconds - calm_seconds, HEALTH_S_MAX)
        self.assertLess(grown, GROWTH_BYTES_MAX)
        self.assertIsNone(self.program.process.poll())

    def connect(self):
        return socket.create_connection((self.host, self.port), timeout=5, source_address=ATTACKER)

    def test_random_bytes(self):
        print(f"seed {SEED}", file=sys.stderr)
        dice = random.Random(SEED)
        preface = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
        for round in range(300):
            with self.connect() as connection:
                try:
                    if round % 2:
                        connection.sendall(preface)
                    connection.sendall(dice.randbytes(dice.randrange(1, 20_000)))
                except OSError:
                    pass  # refused in the middle of it, as it should be
        self.assert_well("random bytes")

    def test_oversized_message(self):
        send = self.channel.unary_unary("/moerl.v1.EnvironmentService/Reset")
        code = code_of(lambda: send(text(2, b"x" * (64 << 20)), timeout=20))
        self.assertIn(code, (grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.UNIMPLEMENTED))
        self.assert_well("oversized message")

    def test_ten_thousand_idle_connections(self):
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, NUM_IDLE + 1000), hard))
        preface_and_settings = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\4\0\0\0\0\0"
        connections = []
        try:
            for _ in range(NUM_IDLE):
                connection = self.connect()
                connection.sendall(preface_and_settings)  # past the handshake: not closed by its timeout
                connections.append(connection)
            self.assert_well(f"{len(connections)} connections opened")
            time.sleep(IDLE_S)
            self.assert_well("the same, idle")
        finally:
            for connection in connections:
                connection.close()

    def test_more_connections_than_allowed(self):
        with Program(os.path.join(BIN, "moerl-environment"), sets=["server.connections_max=100"]) as program:
            host, port = program.address.split(":")
            with grpc.insecure_channel(program.address) as early:
                check_health(early)
                connections = [socket.create_connection((host, int(port)), timeout=5) for _ in range(3000)]
                self.assertEqual(check_health(early, timeout=1), SERVING)
                self.assertLess(len(os.listdir(f"/proc/{program.process.pid}/fd")), 1000)
                for connection in connections:
                    connection.close()
            with grpc.insecure_channel(program.address, [("grpc.use_local_subchannel_pool", 1)]) as late:
                self.assertEqual(check_health(late), SERVING)

    def test_client_that_never_reads(self):
        watches = []
        for _ in range(200):
            stream = self.channel.stream_stream("/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo")
            watches.append(stream(iter([text(4, "moerl.v1.EnvironmentService")] * 200)))  # answers of some KiB, never read
        time.sleep(1)
        self.assert_well("never reading")
        for watch in watches:
            watch.cancel()


if __name__ == "__main__":
    unittest.main()
