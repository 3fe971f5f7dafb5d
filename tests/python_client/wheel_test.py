"""The wheel by itself: in an environment that has nothing but what it depends on, it imports, typed and with its messages."""

import glob
import os
import subprocess
import sys
import sysconfig
import tempfile
import unittest
import zipfile

import moerl

WHEELS = glob.glob(os.path.join(sys.prefix, "wheel", "*.whl"))


class Wheel(unittest.TestCase):
    def test_there_is_one_and_it_is_typed(self):
        self.assertEqual(["moerl-0.1.0-py3-none-any.whl"], [os.path.basename(wheel) for wheel in WHEELS])
        names = set(zipfile.ZipFile(WHEELS[0]).namelist())
        for name in ("moerl/py.typed", "moerl/v1/rollout_pb2.py", "moerl/v1/rollout_pb2.pyi", "moerl/v1/rollout_pb2_grpc.py"):
            self.assertIn(name, names)
        self.assertFalse([name for name in names if not name.startswith(("moerl/", "moerl-0.1.0.dist-info/"))])

    def test_it_imports_in_an_empty_environment(self):
        with tempfile.TemporaryDirectory(prefix="moerl_wheel_test.") as directory:
            environment, packages = os.path.join(directory, "venv"), os.path.join(directory, "packages")
            subprocess.run(["/usr/bin/python3", "-m", "venv", "--without-pip", environment], check=True)
            python = os.path.join(environment, "bin", "python")
            importing = [python, "-c", "import moerl; print(moerl.__file__, *(getattr(moerl, n).__name__ for n in moerl.__all__))"]
            self.assertNotEqual(0, subprocess.run(importing, capture_output=True, cwd=directory).returncode)

            # grpcio, what it needs, and protobuf from where they are installed already; nothing else of that place.
            os.mkdir(packages)
            for name in ("grpc", "typing_extensions.py", "google"):
                os.symlink(os.path.join(sysconfig.get_path("purelib"), name), os.path.join(packages, name))
            place = subprocess.run([python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"],
                                   capture_output=True, text=True, check=True).stdout.strip()
            with open(os.path.join(place, "dependencies.pth"), "w") as file:
                file.write(packages + "\n")
            subprocess.run([sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-index",
                            "--no-deps", "--target", place, WHEELS[0]], check=True)
            done = subprocess.run(importing, capture_output=True, text=True, cwd=directory)
            self.assertEqual(0, done.returncode, done.stderr)
            where, *names = done.stdout.split()
            self.assertEqual(os.path.join(place, "moerl", "__init__.py"), where)
            self.assertEqual(len(moerl.__all__), len(names))


if __name__ == "__main__":
    unittest.main()
