"""What every program offers before it does anything of its own: health, reflection, metrics, drain, exit codes."""

import os
import subprocess
import sys
import threading
import time
import unittest
import urllib.request

import grpc

from program import Program, wait_until
from wire import NOT_SERVING, SERVING, check_health, code_of, list_services, watch_health

BIN = sys.argv.pop(1)
PROGRAMS = {
    "moerl-environment": ["moerl.v1.EnvironmentService"],
    "moerl-rollout": ["moerl.v1.RolloutService"],
    "moerl-trainer": ["moerl.v1.ExperienceService", "moerl.v1.TrainerService"],
    "moerl-weight-sync": ["moerl.v1.WeightSyncService"],
}


def binary(name):
    return os.path.join(BIN, name)


class EveryProgram(unittest.TestCase):
    def each(self):
        for name in PROGRAMS:
            with self.subTest(name), Program(binary(name)) as program, grpc.insecure_channel(program.address) as channel:
                yield name, program, channel

    def scrape(self, program):
        return urllib.request.urlopen(f"http://{program.metrics_address}/metrics").read()

    def test_lists_its_services_by_reflection(self):
        for name, _, channel in self.each():
            listed = list_services(channel)
            for service in PROGRAMS[name]:
                self.assertIn(service, listed)

    def test_is_alive(self):
        for _, _, channel in self.each():
            self.assertEqual(check_health(channel), SERVING)
            self.assertIn(check_health(channel, "ready"), (SERVING, NOT_SERVING))
            self.assertEqual(code_of(lambda: check_health(channel, "no such")), grpc.StatusCode.NOT_FOUND)

    def test_serves_metrics_that_promtool_accepts(self):
        for _, program, channel in self.each():
            self.assertNotEqual(program.address, program.metrics_address)
            check_health(channel)
            counted = b'grpc_server_handled_total{grpc_code="OK",grpc_method="Check",grpc_service="grpc.health.v1.Health"'
            self.assertTrue(wait_until(lambda: counted in self.scrape(program)))  # shortly after the answer
            checked = subprocess.run(["promtool", "check", "metrics"], input=self.scrape(program), capture_output=True)
            self.assertEqual(checked.returncode, 0, checked.stdout + checked.stderr)

    def test_exits_with_0_on_sigterm(self):
        for _, program, _ in self.each():
            program.terminate()
            self.assertEqual(program.wait(), 0)

    def test_idles_below_one_percent_of_a_core(self):
        for _, program, channel in self.each():
            check_health(channel)
            time.sleep(1)  # it has started
            before = program.cpu_seconds()
            time.sleep(3)
            self.assertLess(program.cpu_seconds() - before, 0.035)  # counted in ticks of 10 ms

    def test_refuses_bad_arguments_with_2(self):
        for name in PROGRAMS:
            for arguments, expected in [([], "no configuration"), (["--nonsense"], "unknown argument '--nonsense'"),
                                        (["--config", "/no/such/file"], "/no/such/file")]:
                ended = subprocess.run([binary(name), *arguments], capture_output=True, text=True, timeout=10)
                self.assertEqual(ended.returncode, 2)
                self.assertIn(expected, ended.stderr)
                self.assertEqual(ended.stderr.count("\n"), 1, ended.stderr)

    def test_arms_the_failpoints_of_its_configuration_and_refuses_bad_ones(self):
        with Program(binary("moerl-environment"), sets=["server.failpoints=nowhere=error@2"]) as program:
            self.assertEqual(program.find("failpoints are armed")[0]["failpoints"], "nowhere=error@2")
        with Program(binary("moerl-environment"), sets=["server.failpoints=nowhere=explode"], wait=False) as program:
            self.assertEqual(program.wait(), 2)
            program.reader.join(5)
            self.assertIn("moerl-environment: config: server.failpoints: 'nowhere=explode' is not NAME=crash|error|sleep",
                          program.events[0]["message"])


class AccessLog(unittest.TestCase):
    def test_has_each_call_with_its_trace(self):
        trace_id = "0af7651916cd43dd8448eb211c80319c"
        with Program(binary("moerl-environment")) as program, grpc.insecure_channel(program.address) as channel:
            reset = channel.unary_unary("/moerl.v1.EnvironmentService/Reset")
            code_of(lambda: reset(b"", timeout=5, metadata=(("traceparent", f"00-{trace_id}-b7ad6b7169203331-01"),)))
            event = program.wait_for("call", method="/moerl.v1.EnvironmentService/Reset")
            self.assertEqual(event["trace_id"], trace_id)
            self.assertIn("127.0.0.1", event["peer"])


class Drain(unittest.TestCase):
    def test_goes_not_serving_before_it_ends(self):
        with Program(binary("moerl-environment")) as program, grpc.insecure_channel(program.address) as channel:
            statuses = []
            seen = threading.Event()

            def watch():
                try:
                    for status in watch_health(channel, "ready"):
                        statuses.append(status)
                        seen.set()
                except grpc.RpcError:
                    pass

            watcher = threading.Thread(target=watch)
            watcher.start()
            self.assertTrue(seen.wait(5))
            program.terminate()
            self.assertEqual(program.wait(), 0)
            watcher.join()
            self.assertEqual(statuses, [SERVING, NOT_SERVING])


if __name__ == "__main__":
    sys.path.insert(0, os.path.dirname(__file__))
    unittest.main()
