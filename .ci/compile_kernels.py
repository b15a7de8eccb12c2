#!/usr/bin/env python3
"""Compile the CUDA C++ of every kernel for sm_90a, without a GPU, and hold each to its budget of registers.

    compile_kernels.py FOLDER

FOLDER has the .cu files of BURN_VAE_EMIT; docs/kernels.md has the commands. NVRTC gets the options that CubeCL gives it,
and ptxas's report is read. A kernel over its budget, one without a budget and any warning fail, among them that ptxas
serialises wgmma. --print shows what each kernel takes.
"""

import argparse
import ctypes
import fnmatch
import importlib.util
import multiprocessing
import re
import sys
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Budget:
    """What kernels of some names may take; the first budget that fits a name is its."""

    names: str
    registers: int  # a unit's, in the eights that they are handed out in
    spill_bytes: int = 0  # stores and loads of a unit, as ptxas counts them


BUDGETS = (
    Budget("conv_*_2groups_*", 168),
    Budget("conv_*_3groups_*", 128, spill_bytes=16),
    Budget("narrow_conv_*", 40),
    Budget("attention_scores_*_512", 168, spill_bytes=48),
    Budget("attention_scores_*", 168, spill_bytes=24),
    Budget("attention_mix_*", 160),
    Budget("attention_merge_*", 40),
    Budget("gemm_MultiplyAdd_*", 48),
    Budget("gemm_TensorCore_F16_upsample_128", 128, spill_bytes=16),
    Budget("gemm_TensorCore_*", 128),
    Budget("channel_moments_*", 64, spill_bytes=24),
    Budget("group_coefficients", 48),
    Budget("normalize_*", 64),
    Budget("pack_*", 40),
    Budget("softmax", 40),
)


@dataclass(frozen=True)
class Report:
    """What ptxas says of a kernel; `failure` is what NVRTC says where it refuses one."""

    name: str
    registers: int = 0
    spill_bytes: int = 0
    warnings: tuple[str, ...] = ()
    failure: str = ""


class Nvrtc:
    """NVRTC and the headers of the wheels beside this Python."""

    def __init__(self) -> None:
        nvidia = importlib.util.find_spec("nvidia")
        folders = [Path(folder) / "cu13" for folder in (nvidia.submodule_search_locations or ())] if nvidia else []
        folder = next((folder for folder in folders if (folder / "lib/libnvrtc.so.13").is_file()), None)
        if folder is None:
            raise SystemExit("NVRTC 13 is not among this Python's packages; pip install -r .ci/compile_kernels.txt")
        # It opens the first by name, which finds it only where it is loaded.
        for builtins in (folder / "lib").glob("libnvrtc-builtins.so.13.*"):
            ctypes.CDLL(str(builtins), mode=ctypes.RTLD_GLOBAL)
        self.library = ctypes.CDLL(str(folder / "lib/libnvrtc.so.13"))
        self.library.nvrtcGetErrorString.restype = ctypes.c_char_p
        options = ["--gpu-architecture=sm_90a", "-lineinfo", "--ptxas-options=-v",
                   f"--include-path={folder / 'include'}", f"--include-path={folder / 'include/cccl'}"]
        self.options = (ctypes.c_char_p * len(options))(*map(str.encode, options))

    def check(self, result: int) -> None:
        if result:
            raise SystemExit(f"NVRTC failed: {self.library.nvrtcGetErrorString(result).decode()}")

    def compile(self, path: Path) -> Report:
        program = ctypes.c_void_p()
        name = path.name.encode()
        self.check(self.library.nvrtcCreateProgram(ctypes.byref(program), path.read_bytes(), name, 0, None, None))
        result = self.library.nvrtcCompileProgram(program, len(self.options), self.options)
        size = ctypes.c_size_t()
        self.check(self.library.nvrtcGetProgramLogSize(program, ctypes.byref(size)))
        buffer = ctypes.create_string_buffer(size.value)
        self.check(self.library.nvrtcGetProgramLog(program, buffer))
        self.check(self.library.nvrtcDestroyProgram(ctypes.byref(program)))
        log = buffer.value.decode(errors="replace")
        return Report(path.stem, failure=log or "no log") if result else report(path.stem, log)


def report(name: str, log: str) -> Report:
    """ptxas's report of the one kernel of a file."""
    registers = re.findall(r"Used (\d+) registers", log)
    spills = re.findall(r"(\d+) bytes spill stores, (\d+) bytes spill loads", log)
    if len(registers) != 1 or len(spills) != 1:
        return Report(name, failure=f"ptxas reports on {len(registers)} kernels, not on one:\n{log}")
    # Those of performance, (C75xx), are mere information to ptxas.
    warnings = [line.strip() for line in log.splitlines() if re.search(r"warning|\(C75\d\d\)", line, re.IGNORECASE)]
    return Report(name, int(registers[0]), sum(map(int, spills[0])), tuple(warnings))


def complaints(found: Report) -> list[str]:
    """What is wrong with a kernel, each in a sentence."""
    if found.failure:
        return [f"{found.name} does not compile for sm_90a: {found.failure}"]
    said = [f"{found.name}: the compiler warns: {warning}" for warning in found.warnings]
    budget = budget_of(found.name)
    if budget is None:
        return [*said, f"{found.name} takes {found.registers} registers and has no budget; add one to BUDGETS"]
    for taken, allowed, of in (
        (found.registers, budget.registers, "registers"),
        (found.spill_bytes, budget.spill_bytes, "bytes of spills"),
    ):
        if taken > allowed:
            said.append(f"{found.name} takes {taken} {of}, its budget ({budget.names}) is {allowed}: make it smaller, or "
                        "raise the budget in BUDGETS and say why")
    return said


def budget_of(name: str) -> Budget | None:
    return next((budget for budget in BUDGETS if fnmatch.fnmatchcase(name, budget.names)), None)


nvrtc: Nvrtc  # of a worker


def start_worker() -> None:
    global nvrtc
    nvrtc = Nvrtc()


def compile_in_worker(path: Path) -> Report:
    return nvrtc.compile(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="of the .cu files that BURN_VAE_EMIT made")
    parser.add_argument("--print", action="store_true", dest="prints", help="print what each kernel takes")
    options = parser.parse_args()
    paths = sorted(options.folder.glob("*.cu"))
    if not paths:
        parser.error(f"there are no .cu files in {options.folder}; see --help for how they are made")
    Nvrtc()  # says what is missing before there are workers to say so

    with multiprocessing.Pool(initializer=start_worker) as pool:
        reports = pool.map(compile_in_worker, paths, chunksize=1)
    if options.prints:
        for found in reports:
            print(f"{found.name}: {found.registers} registers, {found.spill_bytes} bytes of spills")
    said = [complaint for found in reports for complaint in complaints(found)]
    if not said:
        used = {budget_of(found.name) for found in reports}
        unused = [budget for budget in BUDGETS if budget not in used]
        said = [f"no kernel is called {budget.names}; take that budget out of BUDGETS" for budget in unused]
    for complaint in said:
        print(f"error: {complaint}", file=sys.stderr)
    if said:
        raise SystemExit(1)
    print(f"{len(reports)} kernels compile for sm_90a within their budgets")


if __name__ == "__main__":
    main()
