"""Build the fake accelerator, and make a process know it.

device.cpp, happens_before.h        --> built -->        a library        --> known -->        torch.device("fake:0")
"""

from __future__ import annotations

import fcntl
import hashlib
import shutil
import subprocess
import types
from collections.abc import Callable
from pathlib import Path

import torch

HERE = Path(__file__).parent
COMPILER = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")


def built(folder: Path) -> Path:
    """The library in a folder, compiled if none there is of these sources and this torch."""
    sources = [HERE / "device.cpp", HERE / "happens_before.h"]
    told = b"".join(one.read_bytes() for one in sources) + torch.__version__.encode()
    folder.mkdir(parents=True, exist_ok=True)
    library = folder / f"fake_accelerator_{hashlib.sha256(told).hexdigest()[:16]}.so"
    with (folder / "lock").open("w") as lock:  # of workers that run tests at once, one compiles
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not library.exists():
            home = Path(torch.__file__).parent
            abi = f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"
            include = [f"-I{home / 'include'}", f"-I{home / 'include/torch/csrc/api/include'}"]
            made = library.with_suffix(".part")
            flags = ["-O1", "-std=c++20", "-shared", "-fPIC", "-w", "-DNDEBUG", abi, *include]
            linked = f"-L{home / 'lib'}", "-ltorch_cpu", "-lc10"
            subprocess.run([COMPILER or "c++", *flags, sources[0], "-o", made, *linked], check=True)
            made.rename(library)
    return library


def known(library: Path) -> None:
    """Make this process know the devices fake:0, fake:1, ..: for good, so it is one of its own."""
    if hasattr(torch, "fake"):
        return
    torch.ops.load_library(library)
    ops = torch.ops.fake_accelerator
    ops.setup()
    torch.utils.rename_privateuse1_backend("fake")
    module = types.ModuleType("torch.fake")
    module.is_available = module.is_initialized = lambda: True
    module.device_count, module.current_device = ops.count, ops.current
    module._is_in_bad_fork, module.manual_seed_all = lambda: False, lambda seed: None
    torch._register_device_module("fake", module)


def reports_of(run: Callable[[], object]) -> list[str]:
    """What the checker reports while something runs."""
    torch.ops.fake_accelerator.reset()
    run()
    return torch.ops.fake_accelerator.reports()
