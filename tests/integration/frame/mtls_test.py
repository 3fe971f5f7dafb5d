"""Mutual TLS: who comes in, who does not, and a rotation that nobody notices."""

import os
import ssl
import sys
import tempfile
import threading
import time
import unittest

import grpc

from certificates import Authority, read
from program import Program, wait_until
from wire import SERVING, check_health, code_of

BIN = sys.argv.pop(1)
SERVER_SAN = "DNS:localhost,IP:127.0.0.1,URI:spiffe://moerl/moerl/weight-sync"
CONFIG = """
name: mtls
task: {{name: reverse}}
server:
  tls: {{certificate_file: {0}/tls.crt, key_file: {0}/tls.key, ca_file: {0}/ca.crt}}
"""


def role(name):
    return f"URI:spiffe://moerl/moerl/{name}"


def channel_to(program, directory):
    credentials = grpc.ssl_channel_credentials(read(directory, "ca.crt"), read(directory, "tls.key"), read(directory, "tls.crt"))
    return grpc.secure_channel(program.address, credentials, [("grpc.use_local_subchannel_pool", 1)])


def refusal(call):
    """(code, message) of a call that must not return."""
    try:
        call()
    except grpc.RpcError as error:
        return error.code(), error.details()
    raise AssertionError("the call returns")


def generate(channel):
    for _ in channel.unary_stream("/moerl.v1.RolloutService/Generate")(b"", timeout=5):
        pass


def unary(channel, method):
    return code_of(lambda: channel.unary_unary(method)(b"", timeout=5))


class MutualTls(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.files = tempfile.TemporaryDirectory()
        cls.root = cls.files.name
        cls.authority = Authority(os.path.join(cls.root, "ca"))
        server = cls.authority.issue(os.path.join(cls.root, "server-1"), SERVER_SAN)
        cls.server = os.path.join(cls.root, "server")
        os.symlink(server, cls.server)
        cls.program = Program(os.path.join(BIN, "moerl-weight-sync"), CONFIG.format(cls.server),
                              ["weight_sync.store_directory=" + os.path.join(cls.root, "store")])

    @classmethod
    def tearDownClass(cls):
        cls.program.__exit__()
        cls.files.cleanup()

    def issue(self, san, authority=None, expired=False):
        directory = tempfile.mkdtemp(dir=self.root)
        os.rmdir(directory)
        return (authority or self.authority).issue(directory, san, expired)

    def test_lets_the_right_certificate_in(self):
        with channel_to(self.program, self.issue(role("rollout"))) as channel:
            self.assertEqual(check_health(channel), SERVING)
            self.assertEqual(unary(channel, "/moerl.v1.WeightSyncService/ListVersions") in
                             (grpc.StatusCode.OK, grpc.StatusCode.UNIMPLEMENTED), True)

    def test_keeps_roles_apart(self):
        publish = "/moerl.v1.WeightSyncService/AcquirePublisher"
        with channel_to(self.program, self.issue(role("rollout"))) as channel:
            self.assertEqual(unary(channel, publish), grpc.StatusCode.PERMISSION_DENIED)
        with channel_to(self.program, self.issue(role("trainer"))) as channel:
            self.assertNotEqual(unary(channel, publish), grpc.StatusCode.PERMISSION_DENIED)

    def test_denies_an_unknown_san_and_logs_it(self):
        for san in ("URI:spiffe://elsewhere/moerl/trainer", "URI:spiffe://moerl/moerl/root", "DNS:trainer"):
            with channel_to(self.program, self.issue(san)) as channel:
                self.assertEqual(code_of(lambda: check_health(channel)), grpc.StatusCode.PERMISSION_DENIED)
                logged = san.removeprefix("URI:") if san.startswith("URI:") else ""
                self.program.wait_for("call refused", san=logged, method="/grpc.health.v1.Health/Check")

    def refused(self, channel):
        before = len(self.program.find("grpc"))
        self.assertEqual(code_of(lambda: check_health(channel, timeout=3)), grpc.StatusCode.UNAVAILABLE)
        self.assertTrue(wait_until(lambda: len(self.program.find("grpc")) > before), "gRPC's reason is in the log")
        return " ".join(event["reason"] for event in self.program.find("grpc")[before:])

    def test_refuses_another_authority(self):
        stranger = Authority(os.path.join(self.root, "stranger"))
        directory = self.issue(role("trainer"), stranger)
        with open(os.path.join(directory, "ca.crt"), "wb") as file:
            file.write(read(self.server, "ca.crt"))
        with channel_to(self.program, directory) as channel:
            self.assertIn("verify failed", self.refused(channel))

    def test_refuses_an_expired_certificate(self):
        with channel_to(self.program, self.issue(role("trainer"), expired=True)) as channel:
            self.assertIn("verify failed", self.refused(channel))

    def test_refuses_plaintext(self):
        with grpc.insecure_channel(self.program.address) as channel:
            self.assertIn("Handshake failed", self.refused(channel))

    def test_refuses_a_client_without_certificate(self):
        credentials = grpc.ssl_channel_credentials(read(self.server, "ca.crt"))
        with grpc.secure_channel(self.program.address, credentials) as channel:
            self.assertIn("peer did not return a certificate", self.refused(channel))

    def serial(self):
        host, port = self.program.address.split(":")
        client = self.issue(role("client"))
        context = ssl.create_default_context(cafile=os.path.join(client, "ca.crt"))
        context.load_cert_chain(os.path.join(client, "tls.crt"), os.path.join(client, "tls.key"))
        context.set_alpn_protocols(["h2"])
        import socket
        with socket.create_connection((host, int(port))) as plain, context.wrap_socket(plain, server_hostname=host) as tls:
            return tls.getpeercert()["serialNumber"]

    def test_rotates_under_load_without_a_failed_call(self):
        client = self.issue(role("client"))
        codes, stop = [], threading.Event()

        def call_for_ever(calls_per_channel):
            while not stop.is_set():
                with channel_to(self.program, client) as channel:
                    for _ in range(calls_per_channel):
                        codes.append(code_of(lambda: check_health(channel)))
                        if stop.wait(0.018):
                            return

        # One connection that outlives the rotation, and one that is made anew every few calls.
        threads = [threading.Thread(target=call_for_ever, args=(n,)) for n in (10**9, 5)]
        for thread in threads:
            thread.start()
        before = self.serial()
        for round in (2, 3):
            fresh = self.authority.issue(os.path.join(self.root, f"server-{round}"), SERVER_SAN)
            os.symlink(fresh, self.server + ".new")
            os.rename(self.server + ".new", self.server)
            self.assertTrue(wait_until(lambda: self.serial() != before, timeout=15))
            before = self.serial()
        time.sleep(0.5)
        stop.set()
        for thread in threads:
            thread.join()
        print(f"rotation: {len(codes)} calls, two rotations", file=sys.stderr)
        self.assertGreater(len(codes), 60)
        self.assertEqual(set(codes), {grpc.StatusCode.OK})


class MutualTlsOfARolloutServer(unittest.TestCase):
    """The server that samples, with a certificate of its own; its trainer and weight_sync are not there."""

    @classmethod
    def setUpClass(cls):
        cls.files = tempfile.TemporaryDirectory()
        cls.root = cls.files.name
        cls.authority = Authority(os.path.join(cls.root, "ca"))
        server = cls.authority.issue(os.path.join(cls.root, "server"), f"DNS:localhost,IP:127.0.0.1,{role('rollout')}")
        sets = [f"server.tls.{field}={os.path.join(server, name)}" for field, name in
                (("certificate_file", "tls.crt"), ("key_file", "tls.key"), ("ca_file", "ca.crt"))]
        cls.program = Program(os.path.join(BIN, "moerl-rollout"), sets=sets)

    @classmethod
    def tearDownClass(cls):
        cls.program.__exit__()
        cls.files.cleanup()

    def channel_with(self, san):
        directory = tempfile.mkdtemp(dir=self.root)
        os.rmdir(directory)
        return channel_to(self.program, self.authority.issue(directory, san))

    def test_denies_generate_to_an_environment(self):
        with self.channel_with(role("environment")) as channel:
            code, message = refusal(lambda: generate(channel))
        self.assertEqual(code, grpc.StatusCode.PERMISSION_DENIED)
        self.assertEqual(message, "role environment may not call /moerl.v1.RolloutService/Generate")

    def test_lets_a_client_call_generate(self):
        with self.channel_with(role("client")) as channel:
            code, message = refusal(lambda: generate(channel))
        self.assertEqual((code, message), (grpc.StatusCode.UNAVAILABLE, "no weights yet"))  # the service's own answer

    def test_names_an_unknown_san(self):
        san = "spiffe://elsewhere/moerl/client"
        with self.channel_with(f"URI:{san}") as channel:
            code, message = refusal(lambda: generate(channel))
        self.assertEqual(code, grpc.StatusCode.PERMISSION_DENIED)
        self.assertIn(san, message)
        self.program.wait_for("call refused", san=san, method="/moerl.v1.RolloutService/Generate")

    def test_refuses_a_client_without_certificate(self):
        credentials = grpc.ssl_channel_credentials(read(self.root, "server/ca.crt"))
        before = len(self.program.find("grpc"))
        with grpc.secure_channel(self.program.address, credentials) as channel:
            code, _ = refusal(lambda: generate(channel))
        self.assertEqual(code, grpc.StatusCode.UNAVAILABLE)
        self.assertTrue(wait_until(lambda: len(self.program.find("grpc")) > before), "gRPC's reason is in the log")
        reasons = " ".join(event["reason"] for event in self.program.find("grpc")[before:])
        self.assertIn("peer did not return a certificate", reasons)


if __name__ == "__main__":
    unittest.main()
