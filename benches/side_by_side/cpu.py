#!/usr/bin/env python3
"""Time the VAE decoder on the CPU: PyTorch (diffusers' AutoencoderKL) beside our binary.

The model is full-size FLUX.1 with seeded random weights, so nothing is downloaded:

    python3 -m venv venv && venv/bin/pip install -r benches/side_by_side/requirements.txt
    venv/bin/python benches/side_by_side/cpu.py                        # PyTorch alone
    venv/bin/python benches/side_by_side/cpu.py --size 512 --runs 5 \\
        --decode-bin target/release/decode --json cpu.json             # side by side

Our decoder runs in both qualities. Other options of it go in the same quotes: --decode-bin "target/release/decode -q".

Every variant has processes of its own: PyTorch one for each variant, which loads the model
once; our binary a new one for each run, which reports the time of the decode without the
load. All get one warm-up, then they take turns, the order turned round in each repetition.
This parent never imports torch: Linux hands a parent's ru_maxrss down to its children.
"""

import argparse
import datetime
import json
import os
import resource
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from common import FLUX1, REDUCTION, child, commit, cpu_name, task_of, to_vae_space

WEIGHTS, LATENTS = "diffusion_pytorch_model.safetensors", "latents.safetensors"
REFERENCE = "torch.safetensors"
QUALITIES = ("lossless", "high")


# In processes of their own: what needs torch.


def save_model(folder: Path, size: int, seed: int, decoder_only: bool) -> None:
    """Write the random model and the latents as a pipeline would return them."""
    from safetensors.torch import load_file, save_file

    vae = FLUX1.vae(seed)
    vae.save_pretrained(folder)
    if decoder_only:
        kept = {k: v for k, v in load_file(folder / WEIGHTS).items() if k.startswith("decoder.")}
        save_file(kept, folder / WEIGHTS, metadata={"format": "pt"})
    save_file({"latents": FLUX1.latents(size, size)}, folder / LATENTS)


def serve_torch(folder: Path, threads: int, channels_last: bool) -> None:
    """Decode once for each line on stdin and answer with a line of JSON; save the image at the end."""
    import torch
    from diffusers import AutoencoderKL
    from safetensors.torch import load_file, save_file

    torch.set_num_threads(threads)
    imports_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with torch.device("meta"):  # no memory for weights that are about to be replaced
        vae = AutoencoderKL.from_config(AutoencoderKL.load_config(folder)).eval()
    vae.encoder = torch.nn.Identity()
    weights = {k: v for k, v in load_file(folder / WEIGHTS).items() if k.startswith("decoder.")}
    vae.load_state_dict(weights, strict=True, assign=True)
    del weights
    latents = load_file(folder / LATENTS)["latents"]
    if channels_last:
        vae = vae.to(memory_format=torch.channels_last)
        latents = latents.to(memory_format=torch.channels_last)
    image = None
    for _ in sys.stdin:
        image = None  # the last run's, so that it does not count towards the next one's peak
        with torch.inference_mode():
            start = time.perf_counter()
            image = vae.decode(to_vae_space(vae, latents), return_dict=False)[0]
            seconds = time.perf_counter() - start
        peak_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        answer = {"seconds": seconds, "peak_kib": peak_kib, "imports_kib": imports_kib, "torch": torch.__version__}
        print(json.dumps(answer), flush=True)
    if image is not None and not channels_last:
        save_file({"image": image.contiguous()}, folder / REFERENCE)


# In the parent: no torch.


def start(task: str, threads: int, /, **task_args: Any) -> subprocess.Popen[str]:
    return child(__file__, task, {"OMP_NUM_THREADS": str(threads)}, **task_args)


class Torch:
    """PyTorch in one long-lived process."""

    def __init__(self, folder: Path, threads: int, channels_last: bool) -> None:
        self.name = "PyTorch, channels_last" if channels_last else "PyTorch"
        self.process = start("torch", threads, folder=folder, threads=threads, channels_last=channels_last)

    def run(self) -> dict[str, Any]:
        assert self.process.stdin and self.process.stdout
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        if not line:
            sys.exit(f"{self.name} ended with status {self.process.wait()}")
        return json.loads(line)

    def close(self) -> None:
        self.process.communicate()
        if self.process.returncode:
            sys.exit(f"{self.name} ended with status {self.process.returncode}")


class Ours:
    """Our binary in one quality, a new process for each run."""

    def __init__(self, binary: str, quality: str, folder: Path, threads: int) -> None:
        self.name = f"burn-vae, {quality}"
        self.image = folder / f"{quality}.safetensors"
        self.command = shlex.split(binary) + [str(folder / LATENTS), "--vae", str(folder), "--quality", quality]
        self.command += "--device cpu --dtype f32 --json --force -o".split() + [str(self.image)]
        self.environment = os.environ | {"RAYON_NUM_THREADS": str(threads)}

    def run(self) -> dict[str, Any]:
        process = subprocess.Popen(self.command, stdout=subprocess.PIPE, text=True, env=self.environment)
        assert process.stdout
        lines = process.stdout.read().splitlines()
        _, status, usage = os.wait4(process.pid, 0)  # the same counter as PyTorch's own
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            sys.exit(f"{shlex.join(self.command)} ended with status {process.returncode}")
        report = json.loads(next(line for line in reversed(lines) if line.startswith("{")))
        return {"seconds": report["decode_s"], "peak_kib": usage.ru_maxrss, "own_peak": report.get("peak_bytes")}

    def close(self) -> None:
        pass


def difference(folder: Path, image: Path) -> dict[str, float | None]:
    """An image against PyTorch's: the pixels are in -1..1, so the range is 2. PSNR is null if they are equal."""
    import numpy
    from safetensors.numpy import load_file

    expected, actual = (load_file(path)["image"].astype(numpy.float64) for path in (folder / REFERENCE, image))
    if expected.shape != actual.shape:
        sys.exit(f"the image has the shape {actual.shape}, PyTorch's {expected.shape}")
    squared = float(numpy.mean((expected - actual) ** 2))
    psnr = float(10 * numpy.log10(4 / squared)) if squared > 0 else None
    return {"max_abs_error": float(numpy.abs(expected - actual).max()), "psnr_db": psnr}


def measure(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    maker = start("save", options.threads, folder=folder, size=options.size, seed=options.seed,
                  decoder_only=options.decoder_only)
    maker.communicate()
    if maker.returncode:
        sys.exit("could not make the model")

    variants: list[Torch | Ours] = [Torch(folder, options.threads, last) for last in (False, True)]
    if options.decode_bin:
        variants += [Ours(options.decode_bin, quality, folder, options.threads) for quality in QUALITIES]
    first = {variant.name: variant.run() for variant in variants}
    results: dict[str, list[dict[str, Any]]] = {variant.name: [] for variant in variants}
    for repetition in range(options.runs):
        for variant in variants if repetition % 2 == 0 else reversed(variants):
            results[variant.name].append(variant.run())
            print(f"{repetition + 1}/{options.runs} {variant.name}: {results[variant.name][-1]['seconds']:.3f} s",
                  file=sys.stderr)
    for variant in variants:
        variant.close()

    rows = []
    for name, runs in results.items():
        seconds = [run["seconds"] for run in runs]
        peak = max(run["peak_kib"] for run in [first[name], *runs])
        rows.append({"name": name, "width": options.size, "height": options.size,
                     "seconds_median": statistics.median(seconds), "seconds_min": min(seconds),
                     "seconds_max": max(seconds), "runs": len(runs), "peak_mib": round(peak / 1024, 1)})
    report: dict[str, Any] = {"device": cpu_name(), "date": datetime.date.today().isoformat(), "commit": commit(),
                              "torch": first["PyTorch"]["torch"], "threads": options.threads, "rows": rows}

    print("| Decoder | Image | Median s | Min s | Max s | Runs | Warm-up s | Peak MiB |")
    print("| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: |")
    for row in rows:
        print(f"| {row['name']} | {row['width']}x{row['height']} | {row['seconds_median']:.3f} "
              f"| {row['seconds_min']:.3f} | {row['seconds_max']:.3f} | {row['runs']} "
              f"| {first[row['name']]['seconds']:.3f} | {row['peak_mib']:.0f} |")
    print(f"\n{report['device']}; {report['threads']} threads; f32; PyTorch {report['torch']}; "
          f"commit {report['commit']}; {report['date']}.")
    print(f"Peak is the process's ru_maxrss; PyTorch's imports alone take "
          f"{first['PyTorch']['imports_kib'] / 1024:.0f} MiB of it.")
    ours = [variant for variant in variants if isinstance(variant, Ours)]
    report["accuracy"] = {variant.name: difference(folder, variant.image) for variant in ours}
    for variant in ours:
        accuracy = report["accuracy"][variant.name]
        own_peak = max(run["own_peak"] or 0 for run in results[variant.name])
        psnr = accuracy["psnr_db"]
        print(f"{variant.name} against PyTorch: max abs error {accuracy['max_abs_error']:.3g}, PSNR "
              f"{'infinite' if psnr is None else f'{psnr:.1f} dB'} (range 2); peak by its own count "
              f"{f'{own_peak / 2**20:.0f} MiB' if own_peak else 'unknown'}.")
    return report


def main() -> None:
    if called := task_of(sys.argv[1:]):
        task, task_args = called
        task_args["folder"] = Path(task_args["folder"])
        {"save": save_model, "torch": serve_torch}[task](**task_args)
        return

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=int, default=512, help="width and height of the image in pixels (default: 512)")
    parser.add_argument("--runs", type=int, default=3, help="timed runs of each variant after one warm-up (default: 3)")
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="threads for each (default: all CPUs)")
    parser.add_argument("--decode-bin", metavar="PATH", help="our decoder, to run in turn with PyTorch and compare")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the results there")
    parser.add_argument("--save", type=Path, metavar="DIR",
                        help="keep the model, the latents and the images there (default: a temporary folder)")
    parser.add_argument("--decoder-only", action="store_true", help="save the model without the encoder's weights")
    parser.add_argument("--seed", type=int, default=0, help="seed of the weights and the latents (default: 0)")
    options = parser.parse_args()
    if options.size <= 0 or options.size % REDUCTION:
        parser.error(f"--size must be a positive multiple of {REDUCTION}")
    if options.runs < 1 or options.threads < 1:
        parser.error("--runs and --threads must be at least 1")

    with tempfile.TemporaryDirectory() as temporary:
        folder = options.save or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        report = measure(options, folder)
    if options.json:
        options.json.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
