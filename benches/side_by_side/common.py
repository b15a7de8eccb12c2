"""What cpu.py and gpu.py share: models with random weights, processes of their own, what ran where.

torch and diffusers are imported where they are needed, never here at the top: the scripts' parents do without them.
"""

import json
import os
import platform
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

CHANNELS = (128, 256, 512, 512)
REDUCTION = 2 ** (len(CHANNELS) - 1)  # pixels per value of the VAE's latents, each way


@dataclass(frozen=True)
class Model:
    """A full-size VAE: diffusers' class and config, pixels and channels of the latents that its pipeline ends with."""

    class_name: str
    config: dict[str, Any]
    pixels: int
    channels: int

    def latents(self, width: int, height: int, batch: int = 1) -> Any:
        """Random latents as the pipeline's loop ends with them."""
        import torch

        return torch.randn(batch, self.channels, height // self.pixels, width // self.pixels)

    def vae(self, seed: int) -> Any:
        """A VAE with seeded random weights on the CPU, in f32."""
        import diffusers
        import torch

        torch.manual_seed(seed)
        vae = getattr(diffusers, self.class_name)(**self.config)
        for module in vae.modules():  # the defaults, 1 and 0, would hide a mistake
            if isinstance(module, torch.nn.GroupNorm):
                torch.nn.init.normal_(module.weight, 1.0, 0.1)
                torch.nn.init.normal_(module.bias, 0.0, 0.1)
            if isinstance(module, torch.nn.BatchNorm2d):
                torch.nn.init.uniform_(module.running_var, 0.5, 1.5)
                torch.nn.init.normal_(module.running_mean, 0.0, 0.1)
        return vae.eval()


def to_vae_space(vae: Any, latents: Any) -> Any:
    """What the pipeline does between its loop and `vae.decode`."""
    import torch

    if hasattr(vae, "bn"):
        statistics = vae.bn.running_mean, torch.sqrt(vae.bn.running_var + vae.config.batch_norm_eps)
        mean, std = (values.view(1, -1, 1, 1).to(latents.dtype) for values in statistics)
        latents = latents * std + mean
        batch, channels, height, width = latents.shape
        latents = latents.reshape(batch, channels // 4, 2, 2, height, width).permute(0, 1, 4, 2, 5, 3)
        return latents.reshape(batch, channels // 4, 2 * height, 2 * width)
    return latents / vae.config.scaling_factor + (vae.config.shift_factor or 0.0)


BLOCKS = {
    "in_channels": 3,
    "out_channels": 3,
    "down_block_types": ("DownEncoderBlock2D",) * len(CHANNELS),
    "up_block_types": ("UpDecoderBlock2D",) * len(CHANNELS),
    "block_out_channels": CHANNELS,
    "layers_per_block": 2,
    "norm_num_groups": 32,
    "sample_size": 1024,
}
FLUX1 = Model("AutoencoderKL", BLOCKS | {
    "latent_channels": 16,
    "scaling_factor": 0.3611,
    "shift_factor": 0.1159,
    "use_quant_conv": False,
    "use_post_quant_conv": False,
}, REDUCTION, 16)
FLUX2 = Model("AutoencoderKLFlux2", BLOCKS | {"latent_channels": 32}, 2 * REDUCTION, 128)
FLUX2_SMALL = Model("AutoencoderKLFlux2", FLUX2.config | {"decoder_block_out_channels": (96, 192, 384, 384)},
                    2 * REDUCTION, 128)


def child(script: str, task: str, environment: dict[str, str], /, **task_args: Any) -> subprocess.Popen[str]:
    """Start a script again in a new process to do `task`, which its main finds after --task."""
    command = [sys.executable, os.path.abspath(script), "--task", task, json.dumps(task_args, default=str)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
                            env=os.environ | environment)


def task_of(arguments: list[str]) -> tuple[str, dict[str, Any]] | None:
    """The task of a process that `child` started, and its arguments."""
    return (arguments[1], json.loads(arguments[2])) if arguments[:1] == ["--task"] else None


def cpu_name() -> str:
    cpu = platform.processor() or platform.machine()
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        cpu = next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        pass
    return f"{cpu}, {os.cpu_count()} CPUs"


def commit() -> str:
    """What the bundle that this file came in says, else what git says."""
    root = Path(__file__).resolve().parents[2]
    if (root / "COMMIT").is_file():
        return (root / "COMMIT").read_text().strip()

    def git(*words: str) -> str:
        try:
            return subprocess.run(["git", *words], cwd=root, capture_output=True, text=True).stdout.strip()
        except OSError:
            return ""

    head = git("rev-parse", "--short", "--verify", "--quiet", "HEAD")
    return f"{head or 'unknown'}{'-dirty' if git('status', '--porcelain') else ''}"
