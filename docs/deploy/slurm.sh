#!/bin/bash
# A Slurm job: two nodes of eight GPUs, one task a GPU; ranks meet by srun's own variables.
#   sbatch docs/deploy/slurm.sh --model /models/checkpoint --tokens-per-rank 128
#SBATCH --job-name=moe-ep
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=8
set -euo pipefail
srun --kill-on-bad-exit=1 python -m moe_ep.launch run "$@"
