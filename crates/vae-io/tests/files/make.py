"""Writes the small files beside it with PyTorch and NumPy themselves: python make.py (made with torch 2.15.0, numpy 2.4.6).

Latents are 0, 1, 2, ... in [1, 4, 2, 3] unless the name says otherwise.
"""

from collections import OrderedDict
from pathlib import Path

import numpy as np
import torch

here = Path(__file__).parent
z = torch.arange(24, dtype=torch.float32).reshape(1, 4, 2, 3)


def pt(name, value, **options):
    torch.save(value, here / f"{name}.pt", **options)


for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int64):
    pt(str(dtype).removeprefix("torch."), z.to(dtype))
for protocol in (3, 4, 5):
    pt(f"protocol{protocol}", z, pickle_protocol=protocol)
pt("dict", {"latents": z, "noise": z + 100, "prompt": "a cat", "steps": 4, "seed": 2**70, "cfg": 3.5, "sizes": [(16, 24)], "none": None})
pt("state_dict", OrderedDict(latents=z, sigmas=torch.zeros(3)))
pt("parameter", torch.nn.Parameter(z))
pt("module", torch.nn.Conv2d(1, 1, 1))
pt("list", [z, z])
pt("text", "no tensor")
# Views: the values are z, the storage holds them in another order, among others, or repeats them.
pt("permuted", z.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2))
pt("sliced", torch.nn.functional.pad(z, (1, 1, 1, 0), value=-1.0)[..., 1:, 1:-1])
pt("expanded", z.expand(2, 4, 2, 3))
pt("repeated", torch.zeros(1).expand(1, 4, 64, 64))
pt("negated", torch.complex(z, -z).conj().imag)
pt("empty", torch.zeros(1, 4, 0, 3))
torch.serialization.set_crc32_options(False)
pt("unchecked", z)
torch.serialization.set_crc32_options(True)
pt("legacy", z, _use_new_zipfile_serialization=False)

z = z.numpy()
np.savez(here / "stored.npz", z)
np.savez_compressed(here / "deflated.npz", latents=z.astype(np.float16), noise=z + 100)
np.savez(here / "several.npz", first=z, second=z + 100, steps=np.arange(3))
np.savez(here / "fortran.npz", np.asfortranarray(z.astype(">f8")))
np.savez(here / "objects.npz", latents=np.array([None]))
np.savez_compressed(here / "bomb.npz", np.zeros((1, 4, 1024, 1024), np.float32))
