"""Generates messages and stubs from the repository's protos while the wheel is built."""

import pathlib

from setuptools import setup
from setuptools.command.build_py import build_py

PROTO = pathlib.Path(__file__).resolve().parents[2] / "proto"


class GenerateProtos(build_py):
    def run(self):
        super().run()
        import grpc_tools
        from grpc_tools import protoc

        well_known = pathlib.Path(grpc_tools.__file__).parent / "_proto"
        files = sorted((PROTO / "moerl").rglob("*.proto"))
        out = self.build_lib
        arguments = ["protoc", f"-I{PROTO}", f"-I{well_known}", f"--python_out={out}", f"--pyi_out={out}",
                     f"--grpc_python_out={out}", *map(str, files)]
        if protoc.main(arguments) != 0:
            raise RuntimeError(f"protoc could not generate from {PROTO}")


setup(cmdclass={"build_py": GenerateProtos})
