"""Trains the denoiser of the pipeline example, in PyTorch, and writes weights/denoiser.safetensors.

In PyTorch, because the workspace leaves out Burn's autodiff and optimisers: nothing that is shipped needs them, and with them
everything that depends on Burn would be built a second time. The layers and parameter names are those of src/denoiser.rs,
which a test there holds against outputs that this script writes (weights/expected.safetensors).

    pip install torch safetensors numpy
    python examples/train.py            # about ten minutes on two cores

The data are the latents of three pictures, so the model learns those pictures by heart. It is there to be sampled, not to be
admired.
"""

import argparse
import math
import pathlib
import time

import torch
from safetensors.torch import load_file, save_file
from torch import nn

HERE = pathlib.Path(__file__).parent
LATENTS = HERE.parent / "tests/fixtures/flux2-tiny/latents"
# In the order of the enum `Picture` of src/denoiser.rs.
PICTURES = ["astronaut", "chelsea", "coffee"]

CHANNELS = 128
WIDTH = 64
BLOCKS = 4
TIME_FREQUENCIES = 16
POSITION_FREQUENCIES = 5


def position_features(height, width):
    """sin and cos of pi 2^k y and pi 2^k x, with y and x from -1 to 1 at the centres of the tokens: [4 K, height, width]."""
    y = ((torch.arange(height) + 0.5) / height * 2 - 1)[:, None].expand(height, width)
    x = ((torch.arange(width) + 0.5) / width * 2 - 1)[None, :].expand(height, width)
    features = []
    for k in range(POSITION_FREQUENCIES):
        for coordinate in (y, x):
            angle = math.pi * 2**k * coordinate
            features += [angle.sin(), angle.cos()]
    return torch.stack(features)


def time_features(t):
    """sin and cos of t times frequencies from 1 to 1000 in equal ratios: [batch, 2 F]."""
    exponents = torch.arange(TIME_FREQUENCIES) / (TIME_FREQUENCIES - 1)
    angles = t[:, None] * 1000**exponents
    return torch.cat([angles.sin(), angles.cos()], 1)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(WIDTH, WIDTH, 3, padding=1)
        self.modulation = nn.Linear(WIDTH, 2 * WIDTH)
        self.conv2 = nn.Conv2d(WIDTH, WIDTH, 3, padding=1)
        nn.init.zeros_(self.conv2.weight)

    def forward(self, h, condition):
        scale, shift = self.modulation(condition)[:, :, None, None].chunk(2, 1)
        x = self.conv1(nn.functional.silu(h))
        return h + self.conv2(nn.functional.silu(x * (1 + scale) + shift))


class Denoiser(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv_in = nn.Conv2d(CHANNELS + 4 * POSITION_FREQUENCIES, WIDTH, 1)
        self.time = nn.Linear(2 * TIME_FREQUENCIES, WIDTH)
        self.picture = nn.Embedding(len(PICTURES), WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.conv_out = nn.Conv2d(WIDTH, CHANNELS, 1)

    def forward(self, x, t, picture):
        """The data, as far as it can be told from x = (1 - t) data + t noise. The velocity noise - data follows from it,
        (x - data) / t; predicted itself, it would have to carry all of the noise through a network that is narrower."""
        condition = nn.functional.silu(self.time(time_features(t)) + self.picture(picture))
        position = position_features(*x.shape[2:]).expand(x.shape[0], -1, -1, -1)
        h = self.conv_in(torch.cat([x, position], 1))
        for block in self.blocks:
            h = block(h, condition)
        return self.conv_out(nn.functional.silu(h))


def train(minutes, batch, seed):
    torch.manual_seed(seed)
    model = Denoiser()
    print(sum(p.numel() for p in model.parameters()), "parameters")
    average = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.99))
    data = [load_file(LATENTS / f"{name}.safetensors")["latents"].float() for name in PICTURES]
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, betas=(0.9, 0.98), weight_decay=0)
    started, step, running = time.monotonic(), 0, None
    while (done := (time.monotonic() - started) / 60 / minutes) < 1:
        picture = step % len(PICTURES)
        x0 = data[picture].expand(batch, -1, -1, -1)
        t = (torch.arange(batch) + torch.rand(batch)) / batch
        noise = torch.randn_like(x0)
        tt = t[:, None, None, None]
        estimate = model((1 - tt) * x0 + tt * noise, t, torch.full((batch,), picture))
        loss = (estimate - x0).square().mean()
        for group in optimizer.param_groups:
            group["lr"] = 2e-3 * min(1, (step + 1) / 50) * (0.02 + 0.98 * math.cos(math.pi / 2 * done))
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        average.update_parameters(model)
        running = loss.item() if running is None else 0.99 * running + 0.01 * loss.item()
        step += 1
        if step % 100 == 0:
            print(f"step {step}: loss {running:.4f}, {time.monotonic() - started:.0f} s", flush=True)
    return average.module


def write(model):
    """Half precision, and linear weights transposed to [in, out], as Burn keeps them."""
    model = model.half().float().eval()
    linear = {f"{name}.weight" for name, layer in model.named_modules() if isinstance(layer, nn.Linear)}
    tensors = {k: (v.T if k in linear else v).contiguous() for k, v in model.state_dict().items()}
    folder = HERE / "weights"
    folder.mkdir(exist_ok=True)
    save_file({k: v.half() for k, v in tensors.items()}, folder / "denoiser.safetensors")
    # Wide, and three times and pictures: what a swapped axis or a wrong frequency would change.
    torch.manual_seed(0)
    x = torch.randn(3, CHANNELS, 2, 3)
    t = torch.tensor([1.0, 0.35, 0.02])
    with torch.no_grad():
        data = model(x, t, torch.arange(3))
    save_file({"x": x, "t": t, "data": data}, folder / "expected.safetensors")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--batch", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    write(train(args.minutes, args.batch, args.seed))
