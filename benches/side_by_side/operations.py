#!/usr/bin/env python3
"""Time PyTorch's operations as `xtask bench-operations` times ours: the same shapes, the same protocol, the same JSON.

    python3 benches/side_by_side/operations.py --json torch.json
    cargo xtask bench-operations --compare torch.json

Needs torch, and nvidia-smi for the driver's version; clocks come with nvidia-ml-py. Activations and weights are
channels-last, convolutions cuDNN's in its benchmark mode. A run is as many calls as take 20 ms, between two synchronises.

  conv3x3, conv1x1   F.conv2d with bias; +residual adds a tensor in place
  upsample_conv3x3   F.conv_transpose2d of 4x4 taps with stride 2, the folded form of upsampling and a 3x3
  group_norm_silu    F.group_norm, then F.silu in place; also of contiguous activations
  attention          norm, four F.linear, scaled_dot_product_attention of one head by the fastest backend that takes it,
                     and the residual; attention_core is scaled_dot_product_attention alone

On the CPU, to try it: --device cpu --dtype f32 --shrink 32 --warmups 1 --runs 2
"""

import argparse
import contextlib
import datetime
import functools
import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from common import commit, cpu_name
from gpu import DTYPES, MIB, Query
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

# Channels, and the side of a square image of the input in pixels: those of xtask/src/bench/operations.rs.
CONV3X3 = [(512, 512, 128), (512, 512, 256), (512, 512, 512), (512, 256, 512), (256, 256, 512), (256, 256, 1024),
           (256, 128, 1024), (128, 128, 1024), (128, 3, 1024)]
CONV1X1 = [(512, 256, 512)]
UPSAMPLE = [(512, 512, 128), (512, 512, 256), (256, 256, 512)]
NORM = [(32, 8), (512, 128), (512, 256), (512, 512), (256, 1024), (128, 1024)]
ATTENTION = [(512, 64), (512, 128), (512, 256)]
OPERATIONS = ("conv3x3", "conv1x1", "upsample_conv3x3", "group_norm_silu", "attention")

RUN_SECONDS = 0.02
ROTATED_BYTES = 256 * MIB
MOST_BUFFERS = 64
MOST_CALLS = 10_000
GROUPS, EPSILON = 32, 1e-6
NAME = "pytorch"

Row = dict[str, Any]


class Bench:
    """Makes tensors on the device, and rows."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.device = torch.device(options.device)
        self.dtype = getattr(torch, DTYPES[options.dtype])

    def synchronise(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def clock_mhz(self) -> int | None:
        with contextlib.suppress(Exception):  # without nvidia-ml-py or a card
            return torch.cuda.clock_rate(self.device)
        return None

    def weight(self, *shape: int, inputs: int) -> Tensor:
        """That sums `inputs` values of variance one to one of variance one."""
        bound = math.sqrt(3 / inputs)
        weight = torch.empty(shape, device=self.device).uniform_(-bound, bound).to(self.dtype)
        return weight.to(memory_format=torch.channels_last) if len(shape) == 4 else weight

    def bias(self, channels: int) -> Tensor:
        return torch.empty(channels, device=self.device).uniform_(-0.1, 0.1).to(self.dtype)

    def buffers(self, number: int, channels: int, side: int) -> list[Tensor]:
        shape = (1, channels, side, side)
        return [torch.randn(shape, device=self.device, dtype=self.dtype).to(memory_format=torch.channels_last)
                for _ in range(number)]

    def activations(self, channels: int, side: int) -> list[Tensor]:
        """As many as it takes for no cache to hold them."""
        number = math.ceil(ROTATED_BYTES / self.bytes(channels, side))
        return self.buffers(min(number, MOST_BUFFERS), channels, side)

    def bytes(self, channels: int, side: int) -> int:
        return channels * side * side * self.dtype.itemsize

    def row(self, operation: str, shape: str, implementation: str, buffers: int, call: Callable[[int], Tensor], *,
            arithmetic: int | None = None, memory: int | None = None) -> Row:
        """Times calls back to back on each of the buffers in turn."""
        results: list[Tensor | None] = [None] * buffers
        position = 0

        def run(calls: int) -> float:
            """Seconds of a run."""
            nonlocal position
            start = time.perf_counter()
            for _ in range(calls):
                index = position % buffers
                results[index] = None  # kept until here, so that new ones do not take its place
                results[index] = call(index)
                position += 1
            self.synchronise()
            return time.perf_counter() - start

        self.synchronise()
        run(1)
        calls = 1
        for _ in range(2):
            fastest = min(run(calls) for _ in range(3))
            calls = min(max(math.ceil(calls * RUN_SECONDS / fastest), 1), MOST_CALLS)
        for _ in range(self.options.warmups):
            run(calls)
        clock_start = self.clock_mhz()
        us = [run(calls) * 1e6 / calls for _ in range(self.options.runs)]
        clock_end = self.clock_mhz()
        result = results[(position - 1) % buffers]
        assert result is not None
        if not result[..., -1:, :].isfinite().all():
            sys.exit(f"{operation} {shape}: its result has values that are not finite")
        median = statistics.median(us)
        row = {"operation": operation, "shape": shape, "implementation": implementation,
               "dtype": self.options.dtype, "us_median": median, "us_min": min(us), "us_max": max(us),
               "tflops": arithmetic and arithmetic / median / 1e6, "gb_per_s": memory and memory / median / 1e3,
               "calls": calls, "runs": self.options.runs, "warmups": self.options.warmups,
               "clock_mhz_start": clock_start, "clock_mhz_end": clock_end}

        def number(value: float | None, digits: int) -> str:
            return "" if value is None else f"{value:.{digits}f}"

        print(f"| {operation} | {shape} | {implementation} | {row['dtype']} | {median:.1f} | {row['us_min']:.1f} "
              f"| {row['us_max']:.1f} | {number(row['tflops'], 2)} | {number(row['gb_per_s'], 0)} | {calls} "
              f"| {number(clock_start, 0)}-{number(clock_end, 0)} |", flush=True)
        return row

    def conv(self, taps: int, channels_in: int, channels_out: int, side: int) -> Iterator[Row]:
        name, shape = f"conv{taps}x{taps}", f"{channels_in}->{channels_out} {side}x{side}"
        weight = self.weight(channels_out, channels_in, taps, taps, inputs=channels_in * taps * taps)
        bias = self.bias(channels_out)
        inputs = self.activations(channels_in, side)
        arithmetic = 2 * side * side * channels_in * channels_out * taps * taps

        def plain(i: int) -> Tensor:
            return F.conv2d(inputs[i], weight, bias, padding=taps // 2)

        yield self.row(name, shape, NAME, len(inputs), plain, arithmetic=arithmetic)
        if taps == 3 and channels_out >= GROUPS:
            residuals = self.buffers(len(inputs), channels_out, side)
            yield self.row(f"{name}+residual", shape, NAME, len(inputs), lambda i: plain(i).add_(residuals[i]),
                           arithmetic=arithmetic)

    def upsample(self, channels_in: int, channels_out: int, side: int) -> Iterator[Row]:
        shape = f"{channels_in}->{channels_out} {side}x{side}"
        weight = self.weight(channels_in, channels_out, 4, 4, inputs=channels_in * 4)
        bias = self.bias(channels_out)
        inputs = self.activations(channels_in, side)
        yield self.row("upsample_conv3x3", shape, NAME, len(inputs),
                       lambda i: F.conv_transpose2d(inputs[i], weight, bias, stride=2, padding=1),
                       arithmetic=2 * side * side * channels_in * channels_out * 16)

    def norm(self, channels: int, side: int) -> Iterator[Row]:
        weight, bias = 1 + self.bias(channels), self.bias(channels)
        inputs = self.activations(channels, side)
        for implementation, layout in ((NAME, torch.channels_last), (f"{NAME}, contiguous", torch.contiguous_format)):
            # Frees what it replaces.
            for i in range(len(inputs)):
                inputs[i] = inputs[i].contiguous(memory_format=layout)
            yield self.row(
                "group_norm_silu", f"{channels} {side}x{side}", implementation, len(inputs),
                lambda i: F.silu(F.group_norm(inputs[i], GROUPS, weight, bias, EPSILON), inplace=True),
                memory=3 * self.bytes(channels, side))

    def attention(self, channels: int, side: int) -> Iterator[Row]:
        tokens = side * side
        shape = f"{channels} {tokens} tokens"
        norm_weight, norm_bias = 1 + self.bias(channels), self.bias(channels)
        query, key, value, out = [(self.weight(channels, channels, inputs=channels), self.bias(channels))
                                  for _ in range(4)]
        inputs = self.activations(channels, side)

        def rows(x: Tensor) -> Tensor:
            return x.permute(0, 2, 3, 1).reshape(1, 1, tokens, channels)

        def block(i: int) -> Tensor:
            x = rows(F.group_norm(inputs[i], GROUPS, norm_weight, norm_bias, EPSILON))
            attended = F.scaled_dot_product_attention(F.linear(x, *query), F.linear(x, *key), F.linear(x, *value))
            return F.linear(attended, *out).add_(rows(inputs[i]))

        triples = [[rows(x) for x in self.buffers(3, channels, side)] for _ in range(math.ceil(len(inputs) / 3))]

        def core(i: int) -> Tensor:
            return F.scaled_dot_product_attention(*triples[i])

        backend = self.fastest_backend(functools.partial(core, 0))
        implementation = f"{NAME}, {backend.name.lower()}"
        arithmetic = 4 * tokens * tokens * channels
        with sdpa_kernel(backend):
            # That of our form, which needs three projections.
            whole = arithmetic + 2 * tokens * channels * 3 * channels
            yield self.row("attention", shape, implementation, len(inputs), block, arithmetic=whole)
            yield self.row("attention_core", shape, implementation, len(triples), core, arithmetic=arithmetic)

    def fastest_backend(self, attend: Callable[[], Tensor]) -> SDPBackend:
        best, best_seconds = SDPBackend.MATH, math.inf
        backends = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.CUDNN_ATTENTION,
                    SDPBackend.MATH]
        for backend in backends:
            # RuntimeError covers what a backend does not take and what does not fit in memory.
            with contextlib.suppress(RuntimeError), sdpa_kernel(backend):
                attend()
                self.synchronise()
                start = time.perf_counter()
                attend()
                self.synchronise()
                seconds = time.perf_counter() - start
                if seconds < best_seconds:
                    best, best_seconds = backend, seconds
        return best

    def rows(self) -> Iterator[Row]:
        def of(operation: str, cases: list[tuple[int, ...]]) -> Iterator[list[int]]:
            if operation in self.options.only:
                for *channels, side in cases:
                    yield [*channels, max(side // self.options.shrink, 2)]

        for case in of("conv3x3", CONV3X3):
            yield from self.conv(3, *case)
        for case in of("conv1x1", CONV1X1):
            yield from self.conv(1, *case)
        for case in of("upsample_conv3x3", UPSAMPLE):
            yield from self.upsample(*case)
        for case in of("group_norm_silu", NORM):
            yield from self.norm(*case)
        for case in of("attention", ATTENTION):
            yield from self.attention(*case)


def names(text: str) -> list[str]:
    for name in text.split(","):
        if name not in OPERATIONS:
            raise argparse.ArgumentTypeError(f"{name!r} is none of {', '.join(OPERATIONS)}")
    return text.split(",")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", type=names, default=OPERATIONS, metavar="LIST", help="only these operations")
    parser.add_argument("--dtype", choices=DTYPES, default="bf16", help="of weights and activations (default: bf16)")
    parser.add_argument("--device", default="cuda", help="cuda, cuda:N or cpu (default: cuda)")
    parser.add_argument("--warmups", type=int, default=2, metavar="N", help="runs before the timed ones (default: 2)")
    parser.add_argument("--runs", type=int, default=10, metavar="N", help="timed runs (default: 10)")
    parser.add_argument("--shrink", type=int, default=1, metavar="N",
                        help="divide the sides of all images by N, to 2 at least, to try this on a slow device")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the results there")
    options = parser.parse_args()
    if options.runs < 1 or options.shrink < 1 or options.warmups < 0:
        parser.error("--runs and --shrink must be at least 1, --warmups at least 0")
    if options.json and not options.json.resolve().parent.is_dir():
        parser.error(f"there is no folder {options.json.parent}")
    on_gpu = options.device != "cpu"
    if on_gpu and not torch.cuda.is_available():
        sys.exit("PyTorch sees no CUDA device; pass --device cpu to try this on the CPU")

    torch.manual_seed(0)
    torch.backends.cudnn.benchmark = True
    print("| operation | shape | implementation | dtype | median us | min | max | TFLOP/s | GB/s | calls | clock MHz |")
    print("|---|---|---|---|---:|---:|---:|---:|---:|---:|---:|", flush=True)
    with torch.inference_mode():
        rows = list(Bench(options).rows())
    properties = torch.cuda.get_device_properties(options.device) if on_gpu else None
    _, driver = Query(f"GPU-{properties.uuid}" if properties else None).answer()
    method = (f"benches/side_by_side/operations.py, PyTorch {torch.__version__}, channels-last, cuDNN's benchmark mode: "
              "wall clock of calls back to back between two synchronises, of which a run has as many as take 20 ms, "
              f"divided by their number; inputs, residuals and results rotate among buffers whose inputs have "
              f"{ROTATED_BYTES // MIB} MiB together, at most {MOST_BUFFERS} of them; all operations in one process; "
              "random normal activations; upsample_conv3x3 is a transposed convolution, 4x4 with stride 2; TFLOP/s of "
              "attention count three projections of the four; attention_core is scaled_dot_product_attention alone")
    report = {"device": properties.name if properties else cpu_name(), "driver": driver,
              "date": datetime.datetime.now(datetime.UTC).date().isoformat(), "commit": commit(), "method": method,
              "rows": rows}
    print(f"\n{report['device']}; commit {report['commit']}; {report['date']}. {method}.")
    if options.json:
        options.json.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
