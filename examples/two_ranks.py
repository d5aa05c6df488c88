"""One step on two processes: torchrun --standalone --nproc-per-node 2 examples/two_ranks.py"""

import torch
import torch.distributed as dist
from torch import nn

import fpipe

dist.init_process_group("gloo")
rank = dist.get_rank()

torch.manual_seed(0)  # every process makes the same net and batch
net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
batch = torch.randn(6, 4), torch.randn(6, 2)
model, params, _ = fpipe.from_sequential(net, stages=2, loss=nn.functional.mse_loss)
program = fpipe.chain(fpipe.split(3), fpipe.schedules.one_f_one_b(2), fpipe.merge())(fpipe.program(model))

step = fpipe.build(program, model, runtime="distributed", example=(params, batch), broadcast=True)
mine = fpipe.local_params(program, params, rank)  # None where a stage is another rank's
result = step(mine, batch)
print(f"rank {rank}: loss {result.loss:.4f}, gradients of {[list(stage or ()) for stage in result.grads]}")
dist.destroy_process_group()
