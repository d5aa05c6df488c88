#!/usr/bin/env bash
# Train on two hosts under SLURM: sbatch examples/slurm.sh examples/train_gpt.py --schedule zb_h1
# Each task is one torchrun, which starts a process for each GPU of its host (or, on CPUs, PROCESSES of them).
#SBATCH --job-name=fpipe
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=16
#SBATCH --gpus-per-node=2
#SBATCH --time=01:00:00
#SBATCH --output=%x-%j.out
set -euo pipefail

first_host=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
processes=${PROCESSES:-${SLURM_GPUS_ON_NODE:-1}}

# --kill-on-bad-exit: if a host is lost, the job ends at once instead of at its time limit.
srun --kill-on-bad-exit=1 python -m torch.distributed.run \
    --nnodes "$SLURM_NNODES" --nproc-per-node "$processes" \
    --rdzv-id "$SLURM_JOB_ID" --rdzv-backend c10d --rdzv-endpoint "$first_host:29500" \
    "$@"
