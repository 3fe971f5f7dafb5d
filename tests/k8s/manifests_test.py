"""What kubectl renders from k8s/ is valid for the oldest and newest supported Kubernetes, and keeps the deployment's rules."""

import importlib.util
import pathlib
import subprocess
import tempfile
import unittest

import kubernetes_validate
import yaml

from monitoring import dashboards, endpoints
from rendering import SOURCE, render

KUBERNETES_VERSIONS = ("1.31", "1.36")
KUSTOMIZATIONS = ("base", "overlays/local", "overlays/eks-p5en-efa")
# Kinds of operators that are not part of Kubernetes; only components may use them.
CUSTOM_GROUPS = ("keda.sh", "monitoring.coreos.com")


def is_custom(document):
    return document["apiVersion"].split("/")[0] in CUSTOM_GROUPS


class Manifests(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.rendered = {name: render(name) for name in KUSTOMIZATIONS}

    def workloads(self, name):
        return [d for d in self.rendered[name] if d["kind"] in ("Deployment", "StatefulSet")]

    def find(self, name, kind, object_name):
        return next(d for d in self.rendered[name] if d["kind"] == kind and d["metadata"]["name"] == object_name)

    def test_every_object_fits_the_schemas_of_the_supported_versions(self):
        for name in KUSTOMIZATIONS:
            for document in self.rendered[name]:
                if is_custom(document):
                    continue
                for version in KUBERNETES_VERSIONS:
                    with self.subTest(kustomization=name, kind=document["kind"], name=document["metadata"]["name"], version=version):
                        kubernetes_validate.validate(document, version, strict=True)

    def test_a_broken_object_does_not_fit(self):
        broken = dict(self.workloads("base")[0])
        broken["spec"] = dict(broken["spec"], replicas="two")
        with self.assertRaises(kubernetes_validate.ValidationError):
            kubernetes_validate.validate(broken, KUBERNETES_VERSIONS[0], strict=True)

    def test_base_and_local_need_no_custom_resources(self):
        for name in ("base", "overlays/local"):
            self.assertEqual([], [d["kind"] for d in self.rendered[name] if is_custom(d)])

    def test_autoscaling_follows_the_trainers_own_measure(self):
        scaled = self.find("overlays/eks-p5en-efa", "ScaledObject", "moerl-rollout")
        self.assertEqual("moerl-rollout", scaled["spec"]["scaleTargetRef"]["name"])
        self.assertIn("moerl_trainer_rollouts_wanted", scaled["spec"]["triggers"][0]["metadata"]["query"])

    def test_monitoring_scrapes_the_metrics_port_of_every_service(self):
        documents = self.rendered["overlays/eks-p5en-efa"]
        scraped = [endpoints(documents, d) for d in documents if d["kind"] == "ServiceMonitor"]
        services = {d["metadata"]["name"]: d for d in documents if d["kind"] == "Service"}
        self.assertEqual(sorted(services), sorted(service["metadata"]["name"] for service, _ in scraped))
        for service, found in scraped:
            metrics = next(p["port"] for p in service["spec"]["ports"] if p["name"] == "metrics")
            self.assertEqual([(metrics, "/metrics")], found)

    def test_every_alert_fires_in_its_trouble_and_is_explained(self):
        rule = self.find("overlays/eks-p5en-efa", "PrometheusRule", "moerl")
        tests = yaml.safe_load((pathlib.Path(__file__).parent / "alerts.yaml").read_text())
        with tempfile.TemporaryDirectory() as directory:
            rules = pathlib.Path(directory, "rules.yaml")
            rules.write_text(yaml.safe_dump(rule["spec"]))
            pathlib.Path(directory, "tests.yaml").write_text(yaml.safe_dump({"rule_files": [str(rules)], **tests}))
            for command in (["check", "rules", "--lint-fatal", rules], ["test", "rules", f"{directory}/tests.yaml"]):
                result = subprocess.run(["promtool", *command], capture_output=True, text=True)
                self.assertEqual(0, result.returncode, result.stdout + result.stderr)
        alerts = {r["alert"] for group in rule["spec"]["groups"] for r in group["rules"]}
        fired = {t["alertname"] for test in tests["tests"] for t in test["alert_rule_test"] if t["exp_alerts"]}
        self.assertEqual(alerts, fired)
        text = (SOURCE / "docs" / "kubernetes.md").read_text()
        self.assertEqual([], [alert for alert in alerts if f"| `{alert}` |" not in text])

    def test_dashboards_are_what_the_descriptions_give(self):
        directory = SOURCE / "k8s" / "components" / "monitoring"
        spec = importlib.util.spec_from_file_location("dashboards", directory / "dashboards.py")
        described = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(described)
        for name in described.DASHBOARDS:
            self.assertEqual(described.render(name), (directory / "dashboards" / f"{name}.json").read_text(), "run k8s/components/monitoring/dashboards.py")
        self.assertEqual(set(described.DASHBOARDS), set(dashboards(self.rendered["overlays/eks-p5en-efa"])))

    def test_dashboards_have_what_grafana_needs(self):
        found = dashboards(self.rendered["overlays/eks-p5en-efa"])
        self.assertEqual({"trainer", "rollouts", "weights", "ep"}, set(found))
        self.assertEqual(len(found), len({d["uid"] for d in found.values()}))
        for name, dashboard in found.items():
            self.assertLessEqual(len(dashboard["uid"]), 40)  # Grafana's bound
            self.assertGreaterEqual(dashboard["schemaVersion"], 36)  # from here on a data source is {type, uid}
            self.assertNotIn("id", dashboard)  # of the database that it came from; a provisioned one has none
            self.assertEqual({"datasource", "namespace", "job", "pod"}, {v["name"] for v in dashboard["templating"]["list"]})
            cells = set()
            for panel in dashboard["panels"]:
                with self.subTest(dashboard=name, panel=panel["title"]):
                    at = panel["gridPos"]
                    covered = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
                    self.assertFalse(covered & cells, "panels overlap")
                    self.assertLessEqual(at["x"] + at["w"], 24)
                    cells |= covered
                    if panel["type"] == "row":
                        continue
                    self.assertTrue(panel["description"])
                    self.assertTrue(panel["fieldConfig"]["defaults"]["unit"])
                    for target in panel["targets"]:
                        self.assertEqual({"type": "prometheus", "uid": "${datasource}"}, target["datasource"])
            self.assertEqual(len(dashboard["panels"]), len({p["id"] for p in dashboard["panels"]}))

    def test_probes_ask_alive_for_restarts_and_ready_for_traffic(self):
        for name in KUSTOMIZATIONS:
            for workload in self.workloads(name):
                container = workload["spec"]["template"]["spec"]["containers"][0]
                ports = {p["name"]: p["containerPort"] for p in container["ports"]}
                for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
                    self.assertEqual(ports["grpc"], container[probe]["grpc"]["port"])
                self.assertEqual("", container["startupProbe"]["grpc"].get("service", ""))
                self.assertEqual("", container["livenessProbe"]["grpc"].get("service", ""))
                self.assertEqual("ready", container["readinessProbe"]["grpc"]["service"])
                self.assertNotEqual(ports["grpc"], ports["metrics"])

    def test_trainer_ranks_find_each_other_before_they_are_ready(self):
        for name in KUSTOMIZATIONS:
            trainer = self.find(name, "StatefulSet", "moerl-trainer")
            service = self.find(name, "Service", "moerl-trainer")
            self.assertEqual("Parallel", trainer["spec"]["podManagementPolicy"])
            self.assertEqual("moerl-trainer", trainer["spec"]["serviceName"])
            self.assertTrue(service["spec"]["publishNotReadyAddresses"])
            self.assertEqual("None", service["spec"]["clusterIP"])

    def test_ledger_has_a_volume_of_its_own_and_checkpoints_a_shared_one(self):
        for name in ("base", "overlays/eks-p5en-efa"):
            trainer = self.find(name, "StatefulSet", "moerl-trainer")
            template = trainer["spec"]["volumeClaimTemplates"][0]
            self.assertEqual(["ReadWriteOnce"], template["spec"]["accessModes"])
            mounts = {m["mountPath"]: m["name"] for m in trainer["spec"]["template"]["spec"]["containers"][0]["volumeMounts"]}
            self.assertEqual(template["metadata"]["name"], mounts["/var/lib/moerl"])
            claim = self.find(name, "PersistentVolumeClaim", "moerl-checkpoints")
            self.assertEqual(["ReadWriteMany"], claim["spec"]["accessModes"])
            self.assertEqual("checkpoints", mounts["/var/lib/moerl/run/checkpoints"])

    def test_weight_store_survives_its_pod(self):
        for name in KUSTOMIZATIONS:
            weight_sync = self.find(name, "StatefulSet", "moerl-weight-sync")
            self.assertEqual("store", weight_sync["spec"]["volumeClaimTemplates"][0]["metadata"]["name"])

    def test_grace_period_is_longer_than_the_drain(self):
        drain_s = 20  # default of server.drain_grace_ms
        for name in KUSTOMIZATIONS:
            for workload in self.workloads(name):
                self.assertGreater(workload["spec"]["template"]["spec"]["terminationGracePeriodSeconds"], drain_s)

    def test_pods_run_without_privileges(self):
        for name in KUSTOMIZATIONS:
            for workload in self.workloads(name):
                pod = workload["spec"]["template"]["spec"]
                container = pod["containers"][0]
                self.assertTrue(pod["securityContext"]["runAsNonRoot"])
                self.assertEqual("RuntimeDefault", pod["securityContext"]["seccompProfile"]["type"])
                self.assertFalse(pod["automountServiceAccountToken"])
                self.assertFalse(container["securityContext"]["allowPrivilegeEscalation"])
                self.assertTrue(container["securityContext"]["readOnlyRootFilesystem"])
                self.assertEqual(["ALL"], container["securityContext"]["capabilities"]["drop"])
                self.assertTrue(container["resources"]["requests"] and container["resources"]["limits"])

    def test_every_workload_has_a_service_account_and_a_disruption_budget(self):
        for name in KUSTOMIZATIONS:
            budgets = {d["metadata"]["name"] for d in self.rendered[name] if d["kind"] == "PodDisruptionBudget"}
            accounts = {d["metadata"]["name"] for d in self.rendered[name] if d["kind"] == "ServiceAccount"}
            for workload in self.workloads(name):
                self.assertIn(workload["metadata"]["name"], budgets)
                self.assertIn(workload["spec"]["template"]["spec"]["serviceAccountName"], accounts)

    def test_configuration_is_the_example_itself(self):
        for name in KUSTOMIZATIONS:
            config = next(d for d in self.rendered[name] if d["kind"] == "ConfigMap" and d["metadata"]["name"].startswith("moerl-config"))
            self.assertEqual((SOURCE / "examples" / "reverse.yaml").read_text(), config["data"]["run.yaml"])
            for workload in self.workloads(name):
                volumes = workload["spec"]["template"]["spec"]["volumes"]
                self.assertIn(config["metadata"]["name"], [v["configMap"]["name"] for v in volumes if "configMap" in v])

    def test_efa_overlay_asks_for_the_device_and_never_falls_back(self):
        for kind, object_name in (("StatefulSet", "moerl-trainer"), ("Deployment", "moerl-rollout")):
            container = self.find("overlays/eks-p5en-efa", kind, object_name)["spec"]["template"]["spec"]["containers"][0]
            self.assertIn("--set=fabric.provider=efa", container["args"])
            for resource in ("vpc.amazonaws.com/efa", "nvidia.com/gpu", "hugepages-2Mi"):
                self.assertIn(resource, container["resources"]["limits"])

    def test_every_image_is_a_target_of_the_dockerfile(self):
        targets = [line.split()[3] for line in (SOURCE / "Dockerfile").read_text().splitlines()
                   if line.startswith("FROM") and " AS " in line]
        for name in KUSTOMIZATIONS:
            for workload in self.workloads(name):
                image = workload["spec"]["template"]["spec"]["containers"][0]["image"].split(":")[0]
                self.assertIn(image.split("/")[-1], targets)

    def test_a_trainer_follower_is_not_called_by_rollouts(self):
        rollout = self.find("base", "Deployment", "moerl-rollout")["spec"]["template"]["spec"]["containers"][0]
        self.assertIn("--set=trainer.address=moerl-trainer-0.moerl-trainer:7100", rollout["args"])


if __name__ == "__main__":
    unittest.main()
