#!/usr/bin/env python3
"""What the row rule costs: moerl's GEMM beside oneDNN's, which may sum in any order, on the model's shapes, in one run.

    python3 bench/model/against_onednn.py [--moerl build/release/bin/moerl] [--rounds 5] [--library libdnnl.so.3]

Needs numpy and oneDNN 3 (onednn-cpu-gomp from PyPI, which puts libdnnl.so.3 under the environment's lib). One thread; x row-major,
the weight packed in advance as each side likes it (oneDNN: format any), fp32 output. Both sides are timed by the thread's
CPU time and take turns; medians. Prints a line a shape, then all products of a training step (without weight gradients, whose
operands oneDNN has no packed form for) and of a decode step of 32 sequences, by how often each shape occurs.
"""

import argparse
import ctypes
import json
import os
import pathlib
import statistics
import subprocess
import sys
import time

import numpy

GOAL = 1.03
# (rows, columns, depth) -> times in a training step of 8 x 256 tokens, in a decode step of 32 sequences.
SHAPES = {
    (2048, 1024, 512): (8, 0),    # q, k, v
    (2048, 512, 1024): (8, 0),    # their input gradient
    (2048, 512, 512): (16, 0),    # attention's output and its input gradient
    (256, 512, 512): (512, 0),    # an expert's gate and up, and their input gradient
    (256, 512, 256): (256, 0),    # its down
    (256, 256, 512): (256, 0),    # its input gradient
    (2048, 8192, 512): (1, 0),    # the vocabulary
    (2048, 512, 8192): (1, 0),    # its input gradient
    (32, 1024, 512): (0, 8),
    (32, 512, 512): (0, 8),
    (32, 8192, 512): (0, 1),
    (4, 512, 512): (0, 256),
    (4, 512, 256): (0, 256),
}

# oneDNN's C API (dnnl_types.h).
CPU, IN_ORDER, TAG_ANY, TAG_AB = 1, 1, 1, 3
TYPES = {"bf16": 2, "fp32": 3}
QUERY_WEIGHTS = 131
ARG_SRC, ARG_DST, ARG_WEIGHTS = 1, 17, 33


class Argument(ctypes.Structure):
    _fields_ = [("arg", ctypes.c_int), ("memory", ctypes.c_void_p)]


class OneDnn:
    def __init__(self, library):
        self.library = ctypes.CDLL(library)
        for name in ("dnnl_memory_desc_get_size",):
            getattr(self.library, name).restype = ctypes.c_size_t
        self.library.dnnl_primitive_desc_query_md.restype = ctypes.c_void_p
        self.engine = self.made("dnnl_engine_create", ctypes.c_int(CPU), ctypes.c_size_t(0))
        self.stream = self.made("dnnl_stream_create", self.engine, ctypes.c_uint(IN_ORDER))

    def call(self, name, *arguments):
        status = getattr(self.library, name)(*arguments)
        if status != 0:
            raise RuntimeError(f"{name}: oneDNN status {status}")

    def made(self, name, *arguments):
        handle = ctypes.c_void_p()
        self.call(name, ctypes.byref(handle), *arguments)
        return handle

    def describe(self, rows, columns, dtype, tag):
        return self.made("dnnl_memory_desc_create_with_tag", ctypes.c_int(2), (ctypes.c_int64 * 2)(rows, columns),
                         ctypes.c_int(dtype), ctypes.c_int(tag))

    def memory(self, description, array):
        return self.made("dnnl_memory_create", description, self.engine, ctypes.c_void_p(array.ctypes.data))

    def run(self, primitive, arguments):
        self.call("dnnl_primitive_execute", primitive, self.stream, ctypes.c_int(len(arguments)), arguments)

    def reorder(self, source, source_description, target, target_description):
        description = self.made("dnnl_reorder_primitive_desc_create", source_description, self.engine, target_description,
                                self.engine, None)
        self.run(self.made("dnnl_primitive_create", description),
                 (Argument * 2)(Argument(ARG_SRC, source), Argument(ARG_DST, target)))
        self.call("dnnl_stream_wait", self.stream)

    def gemm(self, rows, columns, depth, compute):
        """A function that multiplies once."""
        dtype = TYPES[compute]
        x, y, plain = (self.describe(rows, depth, dtype, TAG_AB), self.describe(rows, columns, TYPES["fp32"], TAG_AB),
                       self.describe(depth, columns, dtype, TAG_AB))
        description = self.made("dnnl_matmul_primitive_desc_create", self.engine, x,
                                self.describe(depth, columns, dtype, TAG_ANY), None, y, None)
        packed = ctypes.c_void_p(self.library.dnnl_primitive_desc_query_md(description, ctypes.c_int(QUERY_WEIGHTS), 0))
        values = numpy.random.default_rng(1).standard_normal((rows + columns) * depth).astype(numpy.float32)
        if compute == "bf16":
            values = (values.view(numpy.uint32) >> 16).astype(numpy.uint16)
        inputs, weights = values[:rows * depth].copy(), values[rows * depth:].copy()
        outputs = numpy.zeros(rows * columns, numpy.float32)
        room = numpy.zeros(self.library.dnnl_memory_desc_get_size(packed), numpy.uint8)
        packed_memory = self.memory(packed, room)
        self.reorder(self.memory(plain, weights), plain, packed_memory, packed)
        primitive = self.made("dnnl_primitive_create", description)
        arguments = (Argument * 3)(Argument(ARG_SRC, self.memory(x, inputs)), Argument(ARG_WEIGHTS, packed_memory),
                                   Argument(ARG_DST, self.memory(y, outputs)))
        execute = self.library.dnnl_primitive_execute

        def multiply(keep=(inputs, outputs, room)):
            execute(primitive, self.stream, 3, arguments)

        return multiply


def seconds_of(multiply, budget):
    """Median CPU seconds of one call over windows of a few milliseconds."""
    multiply()
    windows, spent = [], 0.0
    while spent < budget:
        begin, calls, elapsed = time.thread_time(), 0, 0.0
        while elapsed < 0.002:
            for _ in range(8):  # the clock costs as much as a small product
                multiply()
            calls += 8
            elapsed = time.thread_time() - begin
        windows.append(elapsed / calls)
        spent += elapsed
    return statistics.median(windows)


def our_seconds(moerl, shape, compute, budget):
    rows, columns, depth = shape
    printed = subprocess.run([moerl, "bench", "gemm", "--json", "--compute", compute, "--rows", str(rows), "--columns",
                              str(columns), "--depth", str(depth), "--kernel-seconds", str(budget)],
                             check=True, capture_output=True, text=True).stdout
    return 2e-9 * rows * columns * depth / json.loads(printed)["value"]


def find_library():
    for prefix in (sys.prefix, sys.base_prefix):
        found = sorted(pathlib.Path(prefix, "lib").glob("libdnnl.so.3*"))
        if found:
            return str(found[0])
    raise SystemExit("against_onednn: no libdnnl.so.3 in this environment; pip install onednn-cpu-gomp, or give --library")


def main():
    arguments = argparse.ArgumentParser()
    arguments.add_argument("--moerl", default="build/release/bin/moerl")
    arguments.add_argument("--rounds", type=int, default=5)
    arguments.add_argument("--seconds", type=float, default=0.05, help="of a shape, side and round")
    arguments.add_argument("--library")
    options = arguments.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    onednn = OneDnn(options.library or find_library())
    for compute in TYPES:
        training, decoding = [0.0, 0.0], [0.0, 0.0]
        for shape, times in SHAPES.items():
            multiply = onednn.gemm(*shape, compute)
            ours, theirs = [], []
            for _ in range(options.rounds):
                ours.append(our_seconds(options.moerl, shape, compute, options.seconds))
                theirs.append(seconds_of(multiply, options.seconds))
            seconds = statistics.median(ours), statistics.median(theirs)
            for side in (0, 1):
                training[side] += times[0] * seconds[side]
                decoding[side] += times[1] * seconds[side]
            flops = 2e-9 * shape[0] * shape[1] * shape[2]
            print(json.dumps({"name": f"gemm_{compute}_" + "x".join(map(str, shape)), "value": flops / seconds[0],
                              "unit": "GFLOP/s", "reference": f"oneDNN, {flops / seconds[1]:.1f} GFLOP/s",
                              "ratio": seconds[0] / seconds[1], "goal": None, "better": "lower"}), flush=True)
        for name, (ours, theirs) in (("training_step", training), ("decode_step_n32", decoding)):
            print(json.dumps({"name": f"row_rule_cost_{compute}_{name}", "value": ours * 1e3, "unit": "ms",
                              "reference": f"oneDNN, {theirs * 1e3:.2f} ms", "ratio": ours / theirs, "goal": GOAL,
                              "better": "lower"}), flush=True)


if __name__ == "__main__":
    main()
