"""The local overlay trains its task to the end as local processes, while rollouts come and go as kubelet would make them."""

import json
import sqlite3
import tempfile
import time
import unittest

import grpc
import yaml

from kubelet import Cluster, pod_log
from moerl import TrainerClient
from moerl.v1 import trainer_pb2
from rendering import render

TIMEOUT_S = 600


class LocalOverlay(unittest.TestCase):
    def setUp(self):
        directory = tempfile.TemporaryDirectory(prefix="moerl-k8s-")
        self.addCleanup(directory.cleanup)
        documents = render("overlays/local")
        self.config = yaml.safe_load(next(d for d in documents if d["kind"] == "ConfigMap")["data"]["run.yaml"])
        self.cluster = Cluster(documents, directory.name)
        self.addCleanup(self.cluster.stop)

    def status(self):
        try:
            return self.trainer.status()
        except grpc.RpcError:
            return trainer_pb2.GetStatusResponse()

    def wait_for_step(self, step):
        deadline = time.monotonic() + TIMEOUT_S
        while self.status().step < step:
            self.assertLess(time.monotonic(), deadline, f"step {step} not reached; trainer:\n{pod_log(self.leader)}")
            self.cluster.restart_what_ended()
            time.sleep(0.5)

    def test_trains_to_the_end_while_rollouts_come_and_go(self):
        num_steps = self.config["trainer"]["num_steps"]
        self.cluster.start()
        self.leader = self.cluster.pods_of("moerl-trainer")[0]
        self.trainer = TrainerClient(f"{self.leader.address}:{self.leader.port('grpc')}")
        self.addCleanup(self.trainer.close)
        for pod in self.cluster.pods:
            self.cluster.wait_until_ready(pod, TIMEOUT_S)
            self.assertTrue(pod.probe("livenessProbe"))

        self.wait_for_step(num_steps // 4)
        added = self.cluster.add("moerl-rollout")
        self.cluster.wait_until_ready(added, 60)

        self.wait_for_step(num_steps // 2)
        leaving = self.cluster.pods_of("moerl-rollout")[0]
        self.cluster.remove(leaving)
        code, seconds = leaving.terminate()
        self.assertEqual(0, code, pod_log(leaving))
        self.assertLess(seconds, leaving.spec["terminationGracePeriodSeconds"])

        self.wait_for_step(num_steps)
        deadline = time.monotonic() + 60
        while self.status().phase != trainer_pb2.TRAINER_PHASE_DONE:
            self.assertLess(time.monotonic(), deadline, "the run does not end")
            time.sleep(0.5)
        self.assert_nothing_was_lost(num_steps)

    def assert_nothing_was_lost(self, num_steps):
        status = self.trainer.status()
        groups = num_steps * self.config["trainer"]["prompts_per_step"]
        self.assertEqual((groups, groups, 0), (status.num_groups_admitted, status.num_groups_trained, status.num_groups_dropped))
        self.assertEqual([1] * len(self.cluster.pods), [pod.num_starts for pod in self.cluster.pods], "a pod was restarted")
        run = next(self.leader.root.rglob("metrics.jsonl"))
        rows = [json.loads(line) for line in run.read_text().splitlines()]
        self.assertEqual(list(range(1, num_steps + 1)), [row["step"] for row in rows])
        self.assertEqual(0.0, max(row["max_abs_mismatch"] for row in rows))
        self.assertGreater(sum(row["pass_rate"] for row in rows[-5:]) / 5, 0.9)
        self.assertEqual("ok", sqlite3.connect(next(self.leader.root.rglob("ledger.sqlite"))).execute("PRAGMA integrity_check").fetchone()[0])


if __name__ == "__main__":
    unittest.main()
