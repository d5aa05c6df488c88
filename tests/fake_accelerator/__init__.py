"""Build the fake accelerator, and make a process know it.

device.cpp, its headers        --> built -->        a library        --> known -->        torch.device("fake:0")
"""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import itertools
import shutil
import subprocess
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

FOLDER = Path(__file__).parent
COMPILER = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")


def build_library(folder: Path) -> Path:
    """Return the library in a folder; compile it unless one of these sources and this torch is there."""
    sources = [FOLDER / "device.cpp", *sorted(FOLDER.glob("*.h"))]
    fingerprint = b"".join(source.read_bytes() for source in sources) + torch.__version__.encode()
    folder.mkdir(parents=True, exist_ok=True)
    library = folder / f"fake_accelerator_{hashlib.sha256(fingerprint).hexdigest()[:16]}.so"
    # Several pytest workers may get here at once: one compiles, and the others wait for its library.
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not library.exists():
            home = Path(torch.__file__).parent
            abi = f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"
            include_flags = [f"-I{home / 'include'}", f"-I{home / 'include/torch/csrc/api/include'}"]
            unfinished = library.with_suffix(".part")
            flags = ["-O1", "-std=c++20", "-shared", "-fPIC", "-w", "-DNDEBUG", abi, *include_flags]
            link_flags = f"-L{home / 'lib'}", "-ltorch_cpu", "-lc10"
            subprocess.run([COMPILER or "c++", *flags, sources[0], "-o", unfinished, *link_flags], check=True)
            unfinished.rename(library)
    return library


def register_device(library: Path) -> None:
    """Register the devices fake:0, fake:1, .. in this process, which cannot be undone: use a process for it alone."""
    if hasattr(torch, "fake"):
        return
    torch.ops.load_library(library)
    ops = torch.ops.fake_accelerator
    ops.setup()
    torch.utils.rename_privateuse1_backend("fake")
    module = types.ModuleType("torch.fake")
    module.is_available = module.is_initialized = lambda: True
    module.device_count, module.current_device = ops.count, ops.current
    module.default_generators = tuple(ops.default_generator(index) for index in range(ops.count()))
    module._is_in_bad_fork = lambda: False
    module.manual_seed_all = lambda seed: [generator.manual_seed(seed) for generator in module.default_generators]
    module.Graph, module.is_current_stream_capturing = Graph, ops.is_capturing
    module.graph_pool_handle = lambda: (ops.new_pool(), 0)
    module.get_amp_supported_dtype = lambda: [torch.bfloat16, torch.float16]
    torch._register_device_module("fake", module)


class Graph:
    """A graph of ops on the fake device, with the methods of `torch.cuda.CUDAGraph`."""

    def __init__(self) -> None:
        self.ops = torch.ops.fake_accelerator
        self.number = self.ops.new_graph()

    # As of CUDA, the device has the graph's memory until the last reference to it is gone.
    def __del__(self) -> None:
        self.ops.delete_graph(self.number)

    def capture_begin(self, pool: tuple[int, int] | None = None, capture_error_mode: str = "global") -> None:
        self.ops.capture_begin(self.number, 0 if pool is None else pool[0], capture_error_mode)
        self.capture, self.calls, self.queues = next(CAPTURE_NUMBERS), list[Any](), dict[Any, Any]()
        CAPTURING.append(self)

    def capture_end(self) -> None:
        if self in CAPTURING:
            CAPTURING.remove(self)
        self.ops.capture_end(self.number)

    def replay(self) -> None:
        try:
            self.ops.replay(self.number)
        except RuntimeError:
            if CALL_ERRORS:
                raise CALL_ERRORS.pop() from None
            raise

    def reset(self) -> None:
        self.ops.reset_graph(self.number)

    def pool(self) -> tuple[int, int]:
        return self.ops.pool_of(self.number), 0

    def register_generator_state(self, generator: torch.Generator) -> None:
        self.ops.register_generator(self.number, generator)


CAPTURING, CALL_ERRORS = list[Graph](), list[BaseException]()
CAPTURE_NUMBERS = itertools.count(1)


def capture_call(function: Callable[[], object]) -> None:
    """Add a call to the graph that the current stream captures; each replay calls it at its place."""

    @ctypes.CFUNCTYPE(ctypes.c_int)
    def call() -> int:
        try:
            function()
        except BaseException as error:
            CALL_ERRORS.append(error)
        return len(CALL_ERRORS)

    # The library has its address only.
    CAPTURING[-1].calls.append(call)
    torch.ops.fake_accelerator.capture_call(ctypes.cast(call, ctypes.c_void_p).value)


def reports_of(run: Callable[[], object]) -> list[str]:
    """Run a function and return the reports of the checker."""
    torch.ops.fake_accelerator.reset()
    run()
    return torch.ops.fake_accelerator.reports()
