"""Debian's Prometheus over the pods of a Cluster, told what to scrape by the rendered ServiceMonitors; and what the dashboards ask."""

import json
import math
import pathlib
import re
import subprocess
import urllib.parse
import urllib.request

import yaml

# Of the runs here, which last a minute or two; on a cluster the ServiceMonitors say 10 s and Grafana takes four of them.
SCRAPE_INTERVAL_S = 1
RATE_INTERVAL_S = 6


def endpoints(documents, monitor):
    """The Service that a ServiceMonitor selects, and (port, path) of its endpoints by the Service's ports."""
    labels = monitor["spec"]["selector"]["matchLabels"]
    service = next(d for d in documents if d["kind"] == "Service" and labels.items() <= d["metadata"]["labels"].items())
    ports = {p["name"]: p["port"] for p in service["spec"]["ports"]}
    return service, [(ports[e["port"]], e.get("path", "/metrics")) for e in monitor["spec"]["endpoints"]]


class Prometheus:
    """A server of its own, gone with stop(). `documents` are a rendered overlay's that has ServiceMonitors."""

    def __init__(self, cluster, documents):
        self.cluster = cluster
        self.documents = documents
        self.root = cluster.root / "prometheus"
        self.root.mkdir()
        self.address = f"{cluster.next_address()}:9090"
        self.update_targets()
        rules = [d["spec"] for d in documents if d["kind"] == "PrometheusRule"]
        (self.root / "rules.yaml").write_text(yaml.safe_dump({"groups": [group for spec in rules for group in spec["groups"]]}))
        config = {"global": {"scrape_interval": f"{SCRAPE_INTERVAL_S}s", "scrape_timeout": f"{SCRAPE_INTERVAL_S}s", "evaluation_interval": "5s"},
                  "rule_files": [str(self.root / "rules.yaml")],
                  "scrape_configs": [
                      {"job_name": job, "metrics_path": path, "file_sd_configs": [{"files": [str(self.root / f"{job}.json")], "refresh_interval": "1s"}]}
                      for job, _, path in self.jobs()]}
        (self.root / "prometheus.yaml").write_text(yaml.safe_dump(config))
        self.log = open(self.root / "log", "wb")
        self.process = subprocess.Popen(
            ["prometheus", f"--config.file={self.root}/prometheus.yaml", f"--storage.tsdb.path={self.root}/data",
             f"--web.listen-address={self.address}", "--log.level=warn"], stdout=self.log, stderr=self.log)

    def jobs(self):
        """(job, port, path) of every ServiceMonitor: the operator names a job after its Service."""
        for monitor in (d for d in self.documents if d["kind"] == "ServiceMonitor"):
            service, found = endpoints(self.documents, monitor)
            for port, path in found:
                yield service["metadata"]["name"], port, path

    def update_targets(self):
        """What the operator would find for the pods of now: their addresses, with the labels it gives."""
        for job, port, _ in self.jobs():
            groups = [{"targets": [f"{pod.address}:{port}"], "labels": {"namespace": "moerl", "pod": pod.name}}
                      for pod in self.cluster.pods_of(job)]
            partial = self.root / f"{job}.partial"
            partial.write_text(json.dumps(groups))
            partial.rename(self.root / f"{job}.json")

    def ask(self, path, **parameters):
        url = f"http://{self.address}/api/v1/{path}?{urllib.parse.urlencode(parameters)}"
        with urllib.request.urlopen(url, timeout=30) as answer:
            return json.load(answer)["data"]

    def query(self, expr, at):
        """(labels, value) of every series that has a number at that time."""
        series = [(s["metric"], float(s["value"][1])) for s in self.ask("query", query=expr, time=at)["result"]]
        return [(labels, value) for labels, value in series if math.isfinite(value)]

    def query_range(self, expr, start, end, step_s):
        """(labels, [(time, value)]) of every series."""
        result = self.ask("query_range", query=expr, start=start, end=end, step=step_s)["result"]
        return [(s["metric"], [(at, float(value)) for at, value in s["values"]]) for s in result]

    def alerts_fired(self, start, end):
        """Names of the alerts that were firing at some moment, and of the rules that could not be evaluated."""
        rules = [rule for group in self.ask("rules")["groups"] for rule in group["rules"]]
        assert rules, "no rules were loaded"
        broken = {rule["name"] for rule in rules if rule["health"] == "err"}
        return broken | {labels["alertname"] for labels, _ in self.query_range('ALERTS{alertstate="firing"}', start, end, 1)}

    def stop(self):
        self.process.kill()
        self.process.wait()
        self.log.close()


def dashboards(documents):
    """Every dashboard that a rendered overlay carries, by name."""
    maps = [d for d in documents if d["kind"] == "ConfigMap" and d["metadata"].get("labels", {}).get("grafana_dashboard") == "1"]
    return {pathlib.Path(name).stem: json.loads(text) for d in maps for name, text in d["data"].items()}


class Variables:
    """What Grafana makes of a dashboard's expressions with every variable at "All", at a time."""

    def __init__(self, dashboard, prometheus, at):
        self.values = {"__rate_interval": f"{RATE_INTERVAL_S}s"}
        for variable in dashboard["templating"]["list"]:
            if variable["type"] == "query":
                self.values[variable["name"]] = variable["allValue"] or self.all_of(variable, prometheus, at)

    def all_of(self, variable, prometheus, at):
        """Of a query label_values(metric, label): its values, as alternatives of a regular expression."""
        metric, label = re.fullmatch(r"label_values\((.*), (\w+)\)", variable["query"]["query"]).groups()
        found = prometheus.query(f"group by ({label}) ({self.substitute(metric)})", at)
        return "|".join(sorted(labels[label] for labels, _ in found))

    def substitute(self, text):
        return re.sub(r"\$(\w+)", lambda m: self.values[m[1]], text)
