#!/usr/bin/env python3
"""Time diffusers' VAE decoders as `xtask bench` times ours: the same protocol, the same JSON.

    python3 benches/side_by_side/gpu.py --family flux2 --sizes 512,1024,2048 --json torch.json
    cargo xtask bench --family flux2 --sizes 512,1024,2048 --compare torch.json

Needs torch and diffusers, and nvidia-smi for the clocks. The weights are random, the latents resident. Each row has a
process of its own: the first decode is timed apart, then come warm-ups, then runs back to back, each by the wall clock
from the call to the end of a synchronise. Device events around the same runs must agree with it.

Implementations (the rows' "quality"):
  eager           as a pipeline runs it, in --dtype
  eager-autocast  eager under torch.autocast, which runs GroupNorm in f32
  channels-last   eager with channels-last weights and latents
  compile         channels-last with the decoder under torch.compile

On the CPU, to try it: --device cpu --dtype f32 --sizes 64 --warmups 1 --runs 2
"""

import argparse
import contextlib
import datetime
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from common import FLUX1, FLUX2, FLUX2_SMALL, child, commit, cpu_name, task_of, to_vae_space

FAMILIES = {"flux1": FLUX1, "flux2": FLUX2, "flux2-small": FLUX2_SMALL}
AUTOCAST = "eager-autocast"
IMPLEMENTATIONS = ("eager", AUTOCAST, "channels-last", "compile")
DTYPES = {"f32": "float32", "f16": "float16", "bf16": "bfloat16"}
MIB = 2**20


# In a process of its own: a row.


class Query:
    """What nvidia-smi says of a card, asked beside other work."""

    def __init__(self, uuid: str | None) -> None:
        self.process = None
        if uuid:
            command = ["nvidia-smi", "-i", uuid, "--query-gpu=clocks.sm,driver_version"]
            command.append("--format=csv,noheader,nounits")
            with contextlib.suppress(OSError):
                self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)

    def is_running(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def answer(self) -> tuple[int | None, str | None]:
        """The clock in MHz and the driver's version."""
        line = self.process.communicate()[0].strip() if self.process else ""
        clock, _, driver = line.partition(", ")
        return (int(clock), driver) if clock.isdecimal() else (None, None)


def time_row(family: str, implementation: str, width: int, height: int, batch: int, dtype: str, device: str,
             warmups: int, runs: int, seed: int) -> None:
    """Time one row and print it as a line of JSON."""
    import diffusers
    import torch

    diffusers.utils.logging.set_verbosity_error()
    on_gpu = device != "cpu"
    if on_gpu and not torch.cuda.is_available():
        sys.exit("PyTorch sees no CUDA device; pass --device cpu to try this on the CPU")
    torch.backends.cudnn.benchmark = True
    torch_dtype = getattr(torch, DTYPES[dtype])
    model = FAMILIES[family]
    vae = model.vae(seed)
    vae.encoder = vae.quant_conv = None
    vae = vae.to(device, torch_dtype)
    latents = model.latents(width, height, batch).to(device, torch_dtype)
    if implementation in ("channels-last", "compile"):
        vae = vae.to(memory_format=torch.channels_last)
        latents = latents.to(memory_format=torch.channels_last)
    if implementation == "compile":
        vae.decoder.compile()

    def autocast() -> Any:
        if implementation == AUTOCAST:
            return torch.autocast(torch.device(device).type, torch_dtype)
        return contextlib.nullcontext()

    def synchronise() -> None:
        if on_gpu:
            torch.cuda.synchronize(device)

    image, events = None, []

    def decode() -> float:
        """Seconds of one decode, with device events around it."""
        nonlocal image
        image = None  # the last run's, so that it does not count towards this one's peak
        if on_gpu:
            events.append([torch.cuda.Event(enable_timing=True) for _ in range(2)])
        start = time.perf_counter()
        if on_gpu:
            events[-1][0].record()
        image = vae.decode(to_vae_space(vae, latents), return_dict=False)[0]
        if on_gpu:
            events[-1][1].record()
        synchronise()
        return time.perf_counter() - start

    properties = torch.cuda.get_device_properties(device) if on_gpu else None
    uuid = f"GPU-{properties.uuid}" if properties else None
    with torch.inference_mode(), autocast():
        synchronise()
        first = decode()
        query = Query(uuid)
        for _ in range(warmups):
            decode()
        while query.is_running():  # a card that waits lowers its clock
            decode()
        clock_start, driver = query.answer()
        events.clear()
        seconds = [decode() for _ in range(runs)]
        clock_end, _ = Query(uuid).answer()

    assert image is not None
    if list(image.shape) != [batch, 3, height, width] or not image.isfinite().all():
        sys.exit(f"{implementation} decoded to {list(image.shape)} or to values that are not finite")
    if on_gpu:
        by_events = statistics.median(start.elapsed_time(end) for start, end in events)
        peak, allocated = torch.cuda.max_memory_reserved(device) / MIB, torch.cuda.max_memory_allocated(device) / MIB
        if by_events > 1.05 * statistics.median(seconds) * 1e3:
            sys.exit(f"the device worked {by_events:.2f} ms a decode, longer than was timed")
    else:
        import resource

        by_events = allocated = None
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    row = {"family": family, "width": width, "height": height, "batch": batch, "quality": implementation,
           "dtype": dtype, "ms_median": statistics.median(seconds) * 1e3, "ms_min": min(seconds) * 1e3,
           "ms_max": max(seconds) * 1e3, "runs": runs, "warmups": warmups, "first_ms": first * 1e3,
           "peak_mib": round(peak, 1), "clock_mhz_start": clock_start, "clock_mhz_end": clock_end}
    print(json.dumps({"device": properties.name if properties else cpu_name(), "driver": driver,
                      "versions": f"PyTorch {torch.__version__}, diffusers {diffusers.__version__}",
                      "events_ms": by_events, "allocated_mib": allocated, "row": row}))


# In the parent: no torch.


def measure(options: argparse.Namespace) -> tuple[dict[str, Any], int]:
    """The report, and how many rows failed."""
    answers, failed = [], 0
    print("| family | image | implementation | dtype | median ms | by events | min | max | first ms "
          "| reserved MiB | allocated | clock MHz |")
    print("|---|---|---|---|---:|---:|---:|---:|---:|---:|---:|---:|", flush=True)
    for family in options.family:
        for width, height in options.sizes:
            for implementation in options.implementations:
                process = child(__file__, "row", {}, family=family, implementation=implementation, width=width,
                                height=height, batch=options.batch, dtype=options.dtype, device=options.device,
                                warmups=options.warmups, runs=options.runs, seed=options.seed)
                lines = process.communicate()[0].splitlines()
                if process.returncode:
                    print(f"{family} {width}x{height} {implementation}: its process ended with {process.returncode}",
                          file=sys.stderr)
                    failed += 1
                    continue
                answer = json.loads(lines[-1])
                answers.append(answer)
                row = answer["row"]

                def number(value: float | None, digits: int) -> str:
                    return "" if value is None else f"{value:.{digits}f}"

                print(f"| {family} | {width}x{height} | {implementation} | {row['dtype']} | {row['ms_median']:.2f} "
                      f"| {number(answer['events_ms'], 2)} | {row['ms_min']:.2f} | {row['ms_max']:.2f} "
                      f"| {row['first_ms']:.0f} | {row['peak_mib']:.0f} | {number(answer['allocated_mib'], 0)} "
                      f"| {number(row['clock_mhz_start'], 0)}-{number(row['clock_mhz_end'], 0)} |", flush=True)
    if not answers:
        sys.exit("no row could be measured")
    first = answers[0]
    method = (f"benches/side_by_side/gpu.py, {first['versions']}, cuDNN's benchmark mode: wall clock from the call to "
              "the end of a synchronise, random weights and latents on the device; a process a row; first decode "
              "apart; peak_mib is what PyTorch's allocator reserved, on the CPU the process's resident set")
    date = datetime.datetime.now(datetime.UTC).date().isoformat()
    report = {"device": first["device"], "driver": first["driver"], "date": date, "commit": commit(),
              "method": method, "rows": [answer["row"] for answer in answers]}
    driver = f", driver {report['driver']}" if report["driver"] else ""
    print(f"\n{report['device']}{driver}; commit {report['commit']}; {report['date']}. {method}.")
    return report, failed


def main() -> None:
    if called := task_of(sys.argv[1:]):
        time_row(**called[1])
        return

    def names(known: Any) -> Any:
        def parse(text: str) -> list[str]:
            unknown = [name for name in text.split(",") if name not in known]
            if unknown:
                raise argparse.ArgumentTypeError(f"{unknown[0]!r} is none of {', '.join(known)}")
            return text.split(",")
        return parse

    def sizes(text: str) -> list[tuple[int, int]]:
        parsed = []
        for size in text.split(","):
            width, _, height = size.partition("x")
            if not width.isdecimal() or not (height or width).isdecimal():
                raise argparse.ArgumentTypeError(f"{size!r} is not a size; use 1024 or 1024x768")
            parsed.append((int(width), int(height or width)))
        return parsed

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--family", type=names(FAMILIES), default=["flux2"], metavar="LIST",
                        help=f"of {', '.join(FAMILIES)} (default: flux2)")
    parser.add_argument("--sizes", type=sizes, default=[(512, 512), (1024, 1024), (2048, 2048)], metavar="LIST",
                        help="of the image in pixels, as 1024 or 1024x768 (default: 512,1024,2048)")
    parser.add_argument("--implementations", type=names(IMPLEMENTATIONS), metavar="LIST",
                        help="see above (default: all, eager-autocast in half precision only)")
    parser.add_argument("--batch", type=int, default=1, metavar="N", help="images decoded at once (default: 1)")
    parser.add_argument("--dtype", choices=DTYPES, default="bf16", help="of weights and activations (default: bf16)")
    parser.add_argument("--device", default="cuda", help="cuda, cuda:N or cpu (default: cuda)")
    parser.add_argument("--warmups", type=int, default=5, metavar="N", help="at least, after the first (default: 5)")
    parser.add_argument("--runs", type=int, default=20, metavar="N", help="timed decodes (default: 20)")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of weights and latents (default: 0)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the results there")
    options = parser.parse_args()
    if options.batch < 1 or options.runs < 1 or options.warmups < 0:
        parser.error("--batch and --runs must be at least 1, --warmups at least 0")
    if options.implementations is None:
        options.implementations = [name for name in IMPLEMENTATIONS if name != AUTOCAST or options.dtype != "f32"]
    elif AUTOCAST in options.implementations and options.dtype == "f32":
        parser.error(f"{AUTOCAST} is for --dtype bf16 or f16")
    for family in options.family:
        pixels = FAMILIES[family].pixels
        for width, height in options.sizes:
            if not width or not height or width % pixels or height % pixels:
                parser.error(f"{family} makes images of multiples of {pixels} pixels, not {width}x{height}")
    if options.json and not options.json.resolve().parent.is_dir():
        parser.error(f"there is no folder {options.json.parent}")

    report, failed = measure(options)
    if options.json:
        options.json.write_text(json.dumps(report, indent=2) + "\n")
    if failed:
        sys.exit(f"{failed} rows could not be measured")


if __name__ == "__main__":
    main()
