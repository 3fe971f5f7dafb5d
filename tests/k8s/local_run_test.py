"""The local overlay trains its task to the end as local processes, while rollouts come and go as kubelet would make them and
Prometheus watches: every query of the dashboards, the autoscaler and the alerts finds its numbers.

With MOERL_PICTURES=DIRECTORY it leaves a picture of every dashboard there.
"""

import json
import os
import sqlite3
import tempfile
import time
import unittest

import grpc
import yaml

from kubelet import Cluster, pod_log
from moerl import TrainerClient
from monitoring import Prometheus, Variables, dashboards
from moerl.v1 import trainer_pb2
from rendering import render

TIMEOUT_S = 600
# The overlay whose components watch and scale; the pods are the local overlay's, which needs no operators.
WATCHING = "overlays/eks-p5en-efa"
# What the machine that tests may suffer from whatever runs on it.
ALERTS_OF_A_MACHINE = {"MoerlDiskNearlyFull", "MoerlMemoryPressure"}


class LocalOverlay(unittest.TestCase):
    def setUp(self):
        directory = tempfile.TemporaryDirectory(prefix="moerl-k8s-")
        self.addCleanup(directory.cleanup)
        documents = render("overlays/local")
        self.config = yaml.safe_load(next(d for d in documents if d["kind"] == "ConfigMap")["data"]["run.yaml"])
        self.cluster = Cluster(documents, directory.name)
        self.addCleanup(self.cluster.stop)
        self.watching = render(WATCHING)
        self.prometheus = Prometheus(self.cluster, self.watching)
        self.addCleanup(self.prometheus.stop)

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
        begun = time.time()
        self.cluster.start()
        self.leader = self.cluster.pods_of("moerl-trainer")[0]
        self.trainer = TrainerClient(f"{self.leader.address}:{self.leader.port('grpc')}")
        self.addCleanup(self.trainer.close)
        for pod in self.cluster.pods:
            self.cluster.wait_until_ready(pod, TIMEOUT_S)
            self.assertTrue(pod.probe("livenessProbe"))

        self.wait_for_step(num_steps // 4)
        started = time.time()
        added = self.cluster.add("moerl-rollout")
        self.prometheus.update_targets()
        self.cluster.wait_until_ready(added, 60)

        self.wait_for_step(num_steps // 2)
        leaving = self.cluster.pods_of("moerl-rollout")[0]
        self.cluster.remove(leaving)
        code, seconds = leaving.terminate()
        self.assertEqual(0, code, pod_log(leaving))
        self.assertLess(seconds, leaving.spec["terminationGracePeriodSeconds"])
        self.prometheus.update_targets()

        self.wait_for_step(num_steps)
        ended = time.time()
        deadline = time.monotonic() + 60
        while self.status().phase != trainer_pb2.TRAINER_PHASE_DONE:
            self.assertLess(time.monotonic(), deadline, "the run does not end")
            time.sleep(0.5)
        self.assert_nothing_was_lost(num_steps)
        self.assert_everything_watched_was_there(started, ended)
        if "MOERL_PICTURES" in os.environ:
            from pictures import draw  # needs matplotlib, which the tests do without
            for name, dashboard in dashboards(self.watching).items():
                draw(dashboard, self.prometheus, begun, ended, os.path.join(os.environ["MOERL_PICTURES"], f"dashboard-{name}.png"))

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


    def assert_everything_watched_was_there(self, started, ended):
        """Every query had a number at some second of the last three quarters of the training."""
        queries = []
        for name, dashboard in dashboards(self.watching).items():
            variables = Variables(dashboard, self.prometheus, ended)
            queries += [(f"{name}: {panel['title']}", variables.substitute(target["expr"]))
                        for panel in dashboard["panels"] for target in panel.get("targets", [])]
        self.assertGreater(len(queries), 100)
        queries += [(f"up of {job}", f'up{{job="{job}"}} == 1') for job, _, _ in self.prometheus.jobs()]
        scaled = next(d for d in self.watching if d["kind"] == "ScaledObject")
        queries += [("ScaledObject", trigger["metadata"]["query"]) for trigger in scaled["spec"]["triggers"]]
        moments = [ended - (ended - started) * i / 20 for i in range(20)]
        silent = [(what, expr) for what, expr in queries if not any(self.prometheus.query(expr, at) for at in moments)]
        self.assertEqual([], silent)
        self.assert_phases_are_those_of_the_rows()
        self.assertEqual(set(), self.prometheus.alerts_fired(started, ended) - ALERTS_OF_A_MACHINE)
        self.assertEqual([], self.prometheus.query("moerl_no_such_metric", ended))  # a query can be silent


    def assert_phases_are_those_of_the_rows(self):
        """Time counted by phase is the time that the steps' rows tell, up to what the last scrapes missed."""
        rows = [json.loads(line) for line in next(self.leader.root.rglob("metrics.jsonl")).read_text().splitlines()]
        for phase, column in (("training", "train_seconds"), ("waiting", "wait_seconds")):
            [(_, counted)] = self.prometheus.query(f'moerl_trainer_phase_seconds_total{{phase="{phase}"}}', time.time())
            told = sum(row[column] for row in rows)
            self.assertLess(abs(counted - told), 1 + 0.2 * told, f"{phase}: {counted} s counted, {told} s in the rows")


if __name__ == "__main__":
    unittest.main()
