#!/bin/sh
# What docs/gpu.md calls not measured, in nine minutes of a card that nothing else uses: kernels that changed since they
# were timed, a step of data parallelism on eight and two ranks and of what changed on four, what users combine, and runs
# that must not hang without CUDA's multi-process service, three at a time since processes then take turns.
# Rows are written at once; a second call goes on. Usage, from the repository's root: sh benchmarks/card/gpu_slot.sh FOLDER
set -u
out=$1
export PYTHONPATH="$PWD" OMP_NUM_THREADS=1
card() {  # SECONDS SCRIPT ARGUMENTS
    seconds=$1 script=$2
    shift 2
    timeout -s INT "$seconds" python3 "benchmarks/card/gpu_$script.py" --out "$out" "$@" >> "$out.$script.log" 2>&1
}
torch="torch DDP"
card 90 tune --budget 70 --timing 20 --only mse "decode indices" top stochastic
card 60 steps --ranks 4 --models gpt2 --budget 50 --ways "oktopk 1 % coded" "low rank 4, one unit" --rates unlimited 1gbit
card 100 steps --ranks 8 --models gpt2 --budget 85 --ways "$torch" "$torch bf16 hook" "$torch PowerSGD 4" max "low rank 4, one unit"
card 80 steps --ranks 2 --models gpt2 --budget 65 --ways "$torch" "$torch bf16 hook" "$torch PowerSGD 4" max "low rank 4, one unit"
card 60 trials --only "CUDA graph"
card 190 twenty --service off --short --unshared 3 --runs 20 --budget 175
for what in tune steps twenty trials; do python3 benchmarks/card/gpu_$what.py --out "$out" --table; done
