"""Time how programs are built and simulated (split, 1F1B and check, then simulate) at growing sizes.

Each time has a floor, one plain Python pass: one that only makes as many tuples, and one that only adds as many times.
Then it times sharding against replicas. All is CPU time: other work on the machine changes it less than wall time.

    python benchmarks/language.py [--quick]
"""

import argparse
import gc
import resource
import statistics
import time

import fpipe


def build(ranks: int, microbatches: int) -> fpipe.Program:
    pipeline = fpipe.chain(fpipe.split(microbatches), fpipe.schedules.one_f_one_b(ranks))
    return pipeline(fpipe.program(ranks))


def floor(ops: int) -> float:
    """Time how long Python takes to make each op's six tuples and a dict of its values, twice: before and after."""
    gc.disable()
    start = time.process_time()
    records = []
    for _ in range(2):
        store = {}
        for position in range(ops):
            output, residuals = ("y", position, 0, None, 0, ""), ("res", position, 0, None, 0, "")
            store[output] = store[residuals] = position
            records.append(("F", position, 0, None, 0, (output, store), (output, residuals), (position, ops)))
    seconds = time.process_time() - start
    gc.enable()
    return seconds


def time_simulation(program: fpipe.Program, makespan: float) -> float:
    """Time a simulation of starts, ends and peaks."""
    start = time.process_time()
    timeline = fpipe.simulate(program)
    seconds = time.process_time() - start
    assert timeline.makespan == makespan
    return seconds


def simulation_floor(program: fpipe.Program) -> float:
    """Time one pass that reads each op's sources, adds its cost, and stores its start and end."""
    gc.disable()
    sources = program.sources
    start = time.process_time()
    starts, ends = [], [0.0] * (len(sources) + 1)
    for position, op_sources in enumerate(sources):
        ready = max([ends[source] for source in op_sources])
        starts.append(ready)
        ends[position] = ready + 1.0
    seconds = time.process_time() - start
    gc.enable()
    return seconds


def measure_size(ranks: int, microbatches: int) -> None:
    start = time.process_time()
    program = build(ranks, microbatches)
    built = time.process_time()
    fpipe.check(program)
    checked = time.process_time()
    simulated = min(time_simulation(program, 3 * (microbatches + ranks - 1)) for _ in range(3))
    ops = len(program.ops)
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    time_floor = min(simulation_floor(program) for _ in range(3))
    del program
    total = checked - start
    print(
        f"{ops:>9,} ops ({ranks} ranks, {microbatches} microbatches): split + schedule {built - start:7.3f} s, check "
        f"{checked - built:6.3f} s; {ops / total:>7,.0f} ops/s, {total / floor(ops):4.1f}x the floor, {memory:.2f} "
        f"GiB; simulate {simulated:6.3f} s, best of 3, {simulated / time_floor:4.1f}x the floor"
    )


def measure_small(rounds: int = 60) -> None:
    """Print the best and the median time of 1F1B at 8 ranks and 64 microbatches."""
    times: list[float] = []
    for _ in range(rounds):
        start = time.process_time()
        program = build(8, 64)
        fpipe.check(program)
        times.append(time.process_time() - start)
        del program
    print(
        f"1F1B, 8 ranks, 64 microbatches, built and checked: {min(times) * 1e3:.2f} ms at best, median "
        f"{statistics.median(times) * 1e3:.2f} ms"
    )


def measure_sharding(rounds: int = 60) -> None:
    """Time adding replicas to 1F1B at 8 ranks and 64 microbatches: data_parallel, then shard with each policy."""
    merged = fpipe.merge(outputs=False)(build(8, 64))
    transforms = {
        "data_parallel": fpipe.data_parallel(),
        **{name: fpipe.shard(gather=name) for name in ("step", "run", "use")},
    }
    times = dict.fromkeys(transforms, float("inf"))
    for _ in range(rounds):
        for name, transform in transforms.items():
            start = time.process_time()
            program = transform(merged)
            times[name] = min(times[name], time.process_time() - start)
            del program
    base = times.pop("data_parallel")
    summary = ", ".join(f"{name} {seconds * 1e3:.2f} ms, {seconds / base:.2f}x" for name, seconds in times.items())
    print(f"Added to 8 ranks, 64 microbatches, at best: data_parallel {base * 1e3:.2f} ms; shard: {summary}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="leave out the million ops")
    quick = parser.parse_args().quick
    measure_small()
    measure_sharding()
    for sizes in [(50, 100), (128, 400)] + ([] if quick else [(512, 1024)]):
        measure_size(*sizes)
