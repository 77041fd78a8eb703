#!/bin/bash
# Two machines under Slurm, one torchrun on each: sbatch examples/slurm.sh train.py --epochs 3
# Tried with stand-ins for Slurm's commands on one machine, not on a cluster.
#SBATCH --job-name=thinwire
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=4
#SBATCH --cpus-per-task=16
#SBATCH --time=12:00:00
set -euo pipefail

RANKS=${RANKS:-${SLURM_GPUS_PER_NODE:-1}}                         # per machine
WIRE=${WIRE:-max}
read -r HEAD < <(scontrol show hostnames "$SLURM_JOB_NODELIST")     # serves the rendezvous
PORT=$((20000 + SLURM_JOB_ID % 10000))                             # another one per job

# The network that reaches the other machines; `thinwire doctor --peers` prints its name.
if [ -n "${IFACE:-}" ]; then
    export GLOO_SOCKET_IFNAME=$IFACE NCCL_SOCKET_IFNAME=$IFACE
fi
export OMP_NUM_THREADS=$((${SLURM_CPUS_PER_TASK:-1} / RANKS > 0 ? ${SLURM_CPUS_PER_TASK:-1} / RANKS : 1))

srun --kill-on-bad-exit=1 torchrun \
    --nnodes "$SLURM_NNODES" --nproc-per-node "$RANKS" \
    --rdzv-backend c10d --rdzv-id "$SLURM_JOB_ID" --rdzv-endpoint "$HEAD:$PORT" \
    -m thinwire run --wire "$WIRE" "$@"
