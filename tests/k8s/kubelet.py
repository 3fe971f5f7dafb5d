"""Runs rendered workloads as local processes, as kubelet would run their pods: commands, arguments, environment, volumes and
probes come from the YAML. Every pod has a loopback address of its own; names of services resolve to them."""

import os
import pathlib
import re
import signal
import subprocess
import time

import grpc

from rendering import SOURCE

BIN = pathlib.Path(os.environ["MOERL_BINARY_DIR"]) / "bin"


def entrypoint(image):
    """The program of an image: what the Dockerfile's target of that name starts."""
    target = image.split(":")[0].split("/")[-1]
    stage = re.search(rf"^FROM \S+ AS {re.escape(target)}$(.*?)(?=^FROM|\Z)", (SOURCE / "Dockerfile").read_text(), re.M | re.S)
    return BIN / pathlib.Path(re.search(r'ENTRYPOINT \["([^"]+)"\]', stage.group(1)).group(1)).name


class Pod:
    """One process with its volumes below `root`."""

    def __init__(self, cluster, workload, index):
        self.cluster = cluster
        self.workload = workload
        self.index = index
        self.name = f"{workload['metadata']['name']}-{index}"
        self.address = cluster.next_address()
        self.spec = workload["spec"]["template"]["spec"]
        self.container = self.spec["containers"][0]
        self.root = cluster.root / self.name
        self.num_starts = 0
        self.process = None
        self.log = None

    def environment(self):
        fields = {"status.podIP": self.address, "metadata.name": self.name,
                  "metadata.labels['apps.kubernetes.io/pod-index']": str(self.index)}
        return {e["name"]: e["value"] if "value" in e else fields[e["valueFrom"]["fieldRef"]["fieldPath"]]
                for e in self.container.get("env", [])}

    def mount_volumes(self):
        """Makes a directory for every volume; returns (mount path, directory), longest path first."""
        volumes = {v["name"]: v for v in self.spec["volumes"]}
        mounts = []
        for mount in sorted(self.container["volumeMounts"], key=lambda m: len(m["mountPath"])):
            volume = volumes.get(mount["name"], {})
            if "persistentVolumeClaim" in volume:
                directory = self.cluster.root / "claims" / volume["persistentVolumeClaim"]["claimName"]
            else:  # an emptyDir, a claim of the pod's own, a ConfigMap
                directory = self.root / mount["name"]
            directory.mkdir(parents=True, exist_ok=True)
            if "configMap" in volume:
                for name, text in self.cluster.config_maps[volume["configMap"]["name"]].items():
                    (directory / name).write_text(text)
            for outer, outer_directory in mounts:
                if mount["mountPath"].startswith(outer + "/"):
                    link = outer_directory / mount["mountPath"][len(outer) + 1:]
                    link.parent.mkdir(parents=True, exist_ok=True)
                    if not link.exists():
                        link.symlink_to(directory)
            mounts.append((mount["mountPath"], directory))
        return mounts[::-1]

    def arguments(self):
        environment, mounts = self.environment(), self.mount_volumes()
        result = []
        for argument in self.container["args"]:
            argument = re.sub(r"\$\((\w+)\)", lambda m: environment[m.group(1)], argument)
            argument = self.cluster.resolve(argument)
            paths = "|".join(re.escape(path) for path, _ in mounts)
            argument = re.sub(rf"(?<==)({paths})(?=/|$)", lambda m: str(dict(mounts)[m.group(1)]), argument)
            result.append(argument)
        return result

    def start(self):
        command = [str(entrypoint(self.container["image"])), *self.arguments()]
        self.log = open(self.root / "log", "ab")
        self.process = subprocess.Popen(command, stdout=self.log, stderr=self.log, cwd=self.root,
                                        env={"PATH": os.environ["PATH"], **self.environment()})
        self.num_starts += 1

    def probe(self, kind):
        """Asks the health service as the probe of that kind says."""
        probe = self.container[kind]
        service = probe["grpc"].get("service", "").encode()
        request = b"\x0a" + bytes([len(service)]) + service if service else b""
        with grpc.insecure_channel(f"{self.address}:{probe['grpc']['port']}") as channel:
            try:
                answer = channel.unary_unary("/grpc.health.v1.Health/Check")(request, timeout=probe.get("timeoutSeconds", 1))
                return answer == b"\x08\x01"
            except grpc.RpcError:
                return False

    def terminate(self):
        """SIGTERM, the grace period, then SIGKILL. Returns the exit code and the seconds it took."""
        start = time.monotonic()
        self.process.send_signal(signal.SIGTERM)
        try:
            code = self.process.wait(self.spec["terminationGracePeriodSeconds"])
        except subprocess.TimeoutExpired:
            self.process.kill()
            code = self.process.wait()
        return code, time.monotonic() - start

    def port(self, name):
        return next(p["containerPort"] for p in self.container["ports"] if p["name"] == name)


class Cluster:
    """The pods of a rendered overlay."""

    def __init__(self, documents, root):
        self.root = pathlib.Path(root)
        self.workloads = {d["metadata"]["name"]: d for d in documents if d["kind"] in ("Deployment", "StatefulSet")}
        self.config_maps = {d["metadata"]["name"]: d["data"] for d in documents if d["kind"] == "ConfigMap"}
        self.pods = []
        self._num_addresses = 0
        for name, workload in self.workloads.items():
            for index in range(workload["spec"]["replicas"]):
                self.pods.append(Pod(self, workload, index))

    def next_address(self):
        """Addresses of the loopback network, apart by process so that two runs do not meet."""
        self._num_addresses += 1
        return f"127.{10 + os.getpid() % 200}.{os.getpid() // 200 % 250}.{self._num_addresses}"

    def pods_of(self, workload):
        return [p for p in self.pods if p.workload["metadata"]["name"] == workload]

    def resolve(self, text):
        """Replaces host names of pods (pod.service) and of headless services by addresses."""
        for pod in self.pods:
            text = text.replace(f"{pod.name}.{pod.workload['metadata']['name']}:", f"{pod.address}:")
        for name in self.workloads:
            if self.pods_of(name):
                text = re.sub(rf"=(?:dns:///)?{re.escape(name)}:", f"={self.pods_of(name)[0].address}:", text)
        return text

    def start(self):
        for pod in self.pods:
            pod.start()

    def add(self, workload):
        """Scales a workload up by one."""
        pod = Pod(self, self.workloads[workload], len(self.pods_of(workload)))
        self.pods.append(pod)
        pod.start()
        return pod

    def remove(self, pod):
        self.pods.remove(pod)

    def restart_what_ended(self):
        """restartPolicy Always, with a back-off that doubles."""
        for pod in self.pods:
            if pod.process.poll() is None:
                continue
            if pod.num_starts > 5:
                raise AssertionError(f"{pod.name} keeps ending; its log ends:\n{pod_log(pod)}")
            time.sleep(0.25 * 2**pod.num_starts)
            pod.start()

    def wait_until_ready(self, pod, timeout_s):
        deadline = time.monotonic() + timeout_s
        while not pod.probe("readinessProbe"):
            if time.monotonic() > deadline:
                raise AssertionError(f"{pod.name} is not ready after {timeout_s} s; its log ends:\n{pod_log(pod)}")
            self.restart_what_ended()
            time.sleep(0.5)

    def stop(self):
        for pod in self.pods:
            if pod.process is not None and pod.process.poll() is None:
                pod.process.kill()
                pod.process.wait()


def pod_log(pod, num_lines=20):
    return "\n".join((pod.root / "log").read_text(errors="replace").splitlines()[-num_lines:])
