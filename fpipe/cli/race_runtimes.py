"""Race runtimes against each other: ms, tokens and kernels of a step, in processes that may fail.

A row alternates its step with the eager loop, so that a slow moment of the machine hits both. Rows run in a process of
their own, since an illegal access to memory or a kill takes all that follows in its process.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import tempfile
import time
import warnings
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import takewhile
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.profiler import ProfilerActivity, profile

from fpipe.cli.race_nets import MICROBATCHES, NETS, STAGES, Net, small
from fpipe.cli.racers import LEARNING_RATE, RACERS, Case, Racer, Step, eager_step

ROW_SECONDS = 180.0
"""The longest that a row may take, with what it compiles."""
_COMPARED_STEPS = 4
# Dense bfloat16 FLOP/s that the vendor gives, by a part of the device's name; the first that fits.
PEAKS = {
    "H100 PCIe": 756e12,
    "H100": 989e12,
    "H200": 989e12,
    "GH200": 989e12,
    "B200": 2250e12,
    "A100": 312e12,
    "L40S": 362e12,
}


@dataclass(frozen=True)
class Row:
    """The measurements of one racer on one net, None for a number that the device does not give.

    Attributes:
        net, racer, has_update: who raced on what.
        ms, eager_ms: the shortest step, and that of the eager loop between its rounds.
        host_us: microseconds until the call returns, for each F and B of the schedule.
        kernel_ms, kernels: the time of kernels, copies and fills alone, and how many they are.
        peak_mib: what the step reserves of the device's memory beside the net and the batch.
        bits: how far its gradients or parameters are from those of the eager loop.
        tokens, flops: those of a step.
        device: the name of the device.
        reason: why nothing was measured.
    """

    net: str
    racer: str
    has_update: bool
    ms: float | None = None
    eager_ms: float | None = None
    host_us: float | None = None
    kernel_ms: float | None = None
    kernels: int | None = None
    peak_mib: float | None = None
    bits: str = "-"
    tokens: int = 0
    flops: float = 0.0
    device: str = ""
    reason: str = ""

    @property
    def tokens_per_second(self) -> float | None:
        """Tokens that a step trains on in a second."""
        return None if self.ms is None else self.tokens / self.ms * 1e3

    @property
    def tflops(self) -> float | None:
        """TFLOP/s of the model's products."""
        return None if self.ms is None else self.flops / self.ms / 1e9

    @property
    def mfu(self) -> float | None:
        """The share of the device's peak."""
        peak = peak_of(self.device)
        return None if self.tflops is None or peak is None else self.tflops * 1e12 / peak


def peak_of(device: str) -> float | None:
    """Return the dense bfloat16 FLOP/s of a device by its name, None for an unknown one.

    >>> peak_of("NVIDIA H100 80GB HBM3")
    989000000000000.0
    """
    return next((peak for part, peak in PEAKS.items() if part in device), None)


@dataclass(frozen=True)
class Job:
    """A row to measure."""

    net: str
    racer: int
    has_update: bool

    @property
    def ranks(self) -> int:
        """The processes that it runs in."""
        return RACERS[self.racer].ranks


@dataclass(frozen=True)
class Setting:
    """The kind of device of a race, whether nets are small, and the rounds of a row."""

    device: str
    is_quick: bool
    rounds: int

    def net(self, name: str) -> Net:
        """Return the net of that name."""
        return small(NETS[name]) if self.is_quick else NETS[name]

    def empty_row(self, job: Job, reason: str = "") -> Row:
        """Return the row of a job without numbers."""
        net, racer = self.net(job.net), RACERS[job.racer]
        return Row(net.title, racer.name, job.has_update, tokens=net.tokens, flops=net.flops(), reason=reason)


def jobs_of(nets: Sequence[str], against: Sequence[str]) -> list[Job]:
    """Return the rows of these nets, without updates first."""
    racers = [(index, racer) for index, racer in enumerate(RACERS) if racer.against in ("fpipe", *against)]
    updates = [
        (index, has_update) for has_update in (False, True) for index, racer in racers if racer.updates >= has_update
    ]
    return [Job(net, index, has_update) for net in nets for index, has_update in updates]


def race(jobs: Sequence[Job], setting: Setting, budget: float, row_seconds: float = ROW_SECONDS) -> Generator[Row]:
    """Yield the row of each job, with the reason where it could not run.

    Args:
        jobs: what to measure, the most important first.
        setting: how.
        budget: seconds after which no row starts, and the one that runs is ended.
        row_seconds: the longest that a row may take.
    """
    deadline, pending = time.monotonic() + budget, [*jobs]
    while pending:
        if time.monotonic() >= deadline:
            yield setting.empty_row(pending.pop(0), f"left out: the {budget:.0f} s of the budget were over.")
            continue
        ranks = pending[0].ranks
        group = [*takewhile(lambda job, ranks=ranks: job.ranks == ranks, pending)]
        with start_workers(_work, ranks, group, setting) as receive:
            for job in group:
                seconds = min(row_seconds, deadline - time.monotonic())
                answer: tuple[Row, bool] | str = receive(seconds)
                pending.pop(0)
                row, is_over = (setting.empty_row(job, answer), True) if isinstance(answer, str) else answer
                yield row
                if is_over:
                    break


@contextmanager
def start_workers(work: Callable[..., None], ranks: int, *arguments: object) -> Generator[Callable[..., Any]]:
    """Start processes that each call `work(rank, ranks, address, *arguments, sender)`, with the address of a group.

    Yields a function that waits some seconds, or for ever, for what the next one sends. It returns a sentence if they
    send nothing.
    """
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    with tempfile.TemporaryDirectory() as folder:
        address = f"file://{folder}/group"
        processes = [
            context.Process(target=work, args=(rank, ranks, address, *arguments, sender), daemon=True)
            for rank in range(ranks)
        ]
        for process in processes:
            process.start()
        # With the parent's own end closed, the end of the processes that write is the end of the pipe.
        sender.close()

        def receive(seconds: float | None = None) -> Any:
            ready = wait([receiver, *(process.sentinel for process in processes)], seconds)
            if receiver in ready:
                try:
                    return receiver.recv()
                except EOFError:
                    pass
            elif not ready:
                return f"ended after {seconds:.0f} s."
            # Python takes seconds to end a process that has loaded torch, after its end of the pipe is closed.
            for process in processes:
                process.join(10)
            codes = [process.exitcode for process in processes if process.exitcode]
            return f"its process ended with exit code {codes[0] if codes else 0}."

        try:
            yield receive
        finally:
            for process in processes:
                process.kill()
                process.join()
            receiver.close()


def _work(rank: int, ranks: int, address: str, jobs: Sequence[Job], setting: Setting, sender: Connection) -> None:
    """Measure rows in this process, and send them from rank 0, or from the rank that fails, which ends its process."""
    warnings.simplefilter("ignore")
    if setting.device == "cuda":
        # cuBLAS gives the same bits in each run with a workspace of a fixed size, which is read when it starts.
        os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
        torch.cuda.set_device(rank % torch.cuda.device_count())
        if ranks > torch.cuda.device_count():
            # NCCL refuses two ranks on one device of one host; on two, as it believes, it goes over sockets.
            os.environ |= {"NCCL_HOSTID": f"host {rank}", "NCCL_SOCKET_IFNAME": "lo"}
    else:
        # As many threads as on the smallest machine: what differs between runtimes is not how they share cores.
        torch.set_num_threads(1)
    if ranks > 1:
        backend = "nccl" if setting.device == "cuda" else "gloo"
        dist.init_process_group(backend, init_method=address, rank=rank, world_size=ranks)
    bench: Bench | None = None
    for job in jobs:
        try:
            if ranks > 1:
                row = measure_on_ranks(job, setting)
            else:
                bench = bench if bench is not None and bench.name == job.net else Bench(job.net, setting)
                row = bench.measure(job)
        # What the user, torch or CUDA refuses is the row's reason; nothing else is lost.
        except Exception as error:
            row = setting.empty_row(job, first_line(error))
            # Memory of a failed step may stay, and a CUDA error is every later call's.
            is_over = ranks > 1 or not isinstance(error, ValueError | TypeError)
        else:
            is_over = False
        if rank == 0 or is_over:
            sender.send((row, is_over))
        if is_over:
            return


def first_line(error: BaseException) -> str:
    """Return the first line of an error, with its type if that is no plain refusal."""
    text = (str(error).strip() or type(error).__name__).splitlines()[0][:160]
    return text if isinstance(error, ValueError | TypeError) else f"{type(error).__name__}: {text}"


class Bench:
    """A net on one device, with the eager loop that its rows alternate with."""

    def __init__(self, name: str, setting: Setting) -> None:
        self.name, self.setting, device = name, setting, torch.device(setting.device)
        net, batch = setting.net(name).make(device)
        self.case = Case(net, batch, torch.bfloat16 if setting.device == "cuda" else None)
        self.first_values = [parameter.detach().clone() for parameter in net.parameters()]
        self.eager = eager_step(self.case, has_update=False)
        self.references: dict[tuple[bool, bool], dict[str, Tensor]] = {}

    def measure(self, job: Job) -> Row:
        """Measure one row."""
        racer = RACERS[job.racer]
        # 1) Compare bits, with algorithms that are deterministic: those of a GPU are slower, so another step is timed.
        step = racer.step(self.case, job.has_update) if self.setting.device == "cpu" else None
        try:
            bits = self._compare_bits(racer, job.has_update, step)
        except RuntimeError as error:
            if "deterministic" not in str(error):
                raise
            bits = "no deterministic kernels"
        self._restore()
        start_bytes = _reserved(self.setting.device)
        step = step or racer.step(self.case, job.has_update)
        results = step()
        for _ in range(2):
            self.eager()
            results = step()
        # Compiled code is compared as it is timed: under other settings of torch it would compile again.
        if not racer.bits and not job.has_update:
            bits = _difference(results, self._reference(has_update=False, capturable=False))
        del results
        # 2) Alternate with the eager loop.
        times, eager_times = list[tuple[float, float]](), list[float]()
        for _ in range(self.setting.rounds):
            times.append(_time(step, self.setting.device))
            eager_times.append(_time(self.eager, self.setting.device)[1])
        row = replace(
            self.setting.empty_row(job),
            ms=1e3 * min(total for _, total in times),
            eager_ms=1e3 * min(eager_times),
            host_us=1e6 * min(host for host, _ in times) / (2 * STAGES * MICROBATCHES),
            bits=bits,
            device=device_name(self.setting.device),
        )
        # 3) Kernels and memory, of a device that counts them.
        if self.setting.device == "cuda":
            kernel_ms, kernels = measure_kernels(step)
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
            step()
            torch.cuda.synchronize()
            peak_mib = (torch.cuda.max_memory_reserved() - start_bytes) / 2**20
            row = replace(row, kernel_ms=kernel_ms, kernels=kernels, peak_mib=peak_mib)
        self._restore()
        return row

    def _compare_bits(self, racer: Racer, has_update: bool, step: Step | None) -> str:
        """Say how far a racer's gradients are from the eager loop's, or fpipe's parameters from torch.optim's."""
        # Warm-ups of a capture by hand move the parameters, and the fused rule of torch.optim rounds otherwise.
        if not racer.bits or (has_update and racer.against != "fpipe"):
            return "-"
        capturable = has_update and self.setting.device != "cpu" and bool(racer.options.get("graph"))
        expected = self._reference(has_update, capturable)
        with _deterministic(self.setting.device):
            return _difference(self._run(step or racer.step(self.case, has_update)), expected)

    def _reference(self, has_update: bool, capturable: bool) -> dict[str, Tensor]:
        """Return the gradients of the eager loop, or the parameters that torch.optim updates without its fused rule."""
        key = has_update, capturable
        if key not in self.references:
            with _deterministic(self.setting.device):
                rule: dict[str, Any] = {"foreach": False, "capturable": capturable}
                if capturable:  # a graph reads the rate from the device, in single precision
                    rule["lr"] = torch.tensor(LEARNING_RATE, device=self.case.device)
                self.references[key] = self._run(eager_step(self.case, has_update, rule=rule))
        return self.references[key]

    def _run(self, step: Step) -> dict[str, Tensor]:
        """Return the results of several steps from the first values; a graph is replayed by the last ones."""
        self._restore()
        for _ in range(_COMPARED_STEPS - 1):
            step()
        return {name: leaf.detach().clone() for name, leaf in step().items()}

    def _restore(self) -> None:
        """Give parameters their first values, and drop gradients."""
        with torch.no_grad():
            for parameter, value in zip(self.case.net.parameters(), self.first_values, strict=True):
                parameter.copy_(value)
                parameter.grad = None


def _difference(results: dict[str, Tensor], expected: dict[str, Tensor]) -> str:
    """Say whether tensors are the same, or their largest difference as a share of the largest number of a tensor."""
    if all(torch.equal(results[name], leaf) for name, leaf in expected.items()):
        return "the same"
    errors = [(results[name] - leaf).abs().max() / leaf.abs().max() for name, leaf in expected.items()]
    return f"{float(max(errors)):.0e}"


@contextmanager
def _deterministic(device: str) -> Generator[None]:
    # Attention's backward on a GPU adds in the order of its blocks, unless told otherwise, and so differs by run.
    torch.use_deterministic_algorithms(device != "cpu")
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def _reserved(device: str) -> int:
    """Return the bytes that are reserved on the device after all caches are dropped."""
    gc.collect()
    if device != "cuda":
        return 0
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return torch.cuda.memory_reserved()


def _time(step: Callable[[], Any], device: str) -> tuple[float, float]:
    """Return seconds until a step returns, and until its kernels are done."""
    if device == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    step()
    host_seconds = time.perf_counter() - start
    if device == "cuda":
        torch.cuda.synchronize()
    return host_seconds, time.perf_counter() - start


def measure_kernels(step: Step) -> tuple[float, int]:
    """Return the milliseconds of kernels, copies and fills of a step on a CUDA device, and how many they are."""
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        step()
        torch.cuda.synchronize()
    # Ranges, fpipe's too, are events of the device as well, and last from their first kernel to their last.
    events: Any = profiled.events()
    on_device = [event for event in events if event.device_type.name == "CUDA"]
    kernels = [event for event in on_device if not getattr(event, "is_user_annotation", event.name[:6] == "fpipe ")]
    return sum(event.time_range.elapsed_us() for event in kernels) / 1e3, len(kernels)


def measure_on_ranks(job: Job, setting: Setting) -> Row:
    """Measure a row on all ranks of the default group, two replicas; the slowest rank counts."""
    mesh = init_device_mesh(setting.device, (2, dist.get_world_size() // 2), mesh_dim_names=("dp", "pp"))
    net, batch = setting.net(job.net).make(torch.device(setting.device))
    start_bytes = _reserved(setting.device)
    if setting.device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    case = Case(net, batch, torch.bfloat16 if setting.device == "cuda" else None, mesh)
    step = RACERS[job.racer].step(case, job.has_update)
    times = list[float]()
    for number in range(3 + setting.rounds):
        dist.barrier()
        seconds = torch.tensor(_time(step, setting.device)[1], device=setting.device)
        dist.all_reduce(seconds, dist.ReduceOp.MAX)
        times += [float(seconds)] if number >= 3 else []
    row = replace(setting.empty_row(job), ms=1e3 * min(times), device=device_name(setting.device))
    if setting.device != "cuda":
        return row
    peak = torch.tensor(torch.cuda.max_memory_reserved() - start_bytes, device="cuda")
    dist.all_reduce(peak, dist.ReduceOp.MAX)
    return replace(row, peak_mib=float(peak) / 2**20)


def device_name(device: str) -> str:
    """Return the name of the GPU, or of the processor with the number of its cores."""
    if device == "cuda":
        return torch.cuda.get_device_name()
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            model = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "CPU")
    except OSError:
        model = "CPU"
    return f"{model}, {os.cpu_count()} cores"
