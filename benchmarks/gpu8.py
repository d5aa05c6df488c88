"""Time a step on all ranks of torchrun, fpipe's shards under 1F1B against FSDP2 under torch's.

    torchrun --standalone --nproc-per-node 8 benchmarks/gpu8.py [--nets gpt-wide]
    torchrun --standalone --nproc-per-node 2 benchmarks/gpu8.py --device cpu --quick

THIS HAS NEVER RUN ON EIGHT GPUs. It ran on two and four processes of one machine, on gloo and the CPU. Rows of shards
have two replicas; FSDP2 and fpipe's shards both gather once a step.
"""

import argparse
import os
from dataclasses import replace

import torch
import torch.distributed as dist

from fpipe.cli.race_nets import NETS
from fpipe.cli.race_report import as_text
from fpipe.cli.race_runtimes import Job, Setting, first_line, measure_on_ranks
from fpipe.cli.racers import RACERS


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nets", nargs="*", default=["gpt-wide", "llama"], choices=[*NETS])
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--quick", action="store_true", help="small nets")
    options = parser.parse_args()
    if options.device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    else:
        torch.set_num_threads(1)
    dist.init_process_group("nccl" if options.device == "cuda" else "gloo")
    setting = Setting(options.device, options.quick, options.rounds)
    # The racers of two ranks run on any even number.
    racers = [index for index, racer in enumerate(RACERS) if racer.ranks == 2]
    rows = []
    for job in [Job(net, racer, has_update=False) for net in options.nets for racer in racers]:
        try:
            row = measure_on_ranks(job, setting)
        # Every rank refuses the same, such as more ranks than blocks; an error of one rank alone ends torchrun.
        except ValueError as error:
            row = setting.empty_row(job, first_line(error))
        rows.append(replace(row, racer=row.racer.partition(",")[0]))
    if dist.get_rank() == 0:
        print(f"{dist.get_world_size()} ranks, two replicas (this script has never run on 8 GPUs)")
        print(as_text(rows))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
