#!/bin/sh
# What docs/gpu.md calls not measured, in nine minutes of a card that nothing else uses: kernels that changed since they
# were timed, a step of data parallelism on eight and two ranks and of what changed on four; then, side by side, what no
# clock decides: runs that must not hang without CUDA's multi-process service, what users combine, every kernel beside
# its reference, and the kernels' tests.
# Rows are written at once; a second call goes on. Usage, from the repository's root: sh benchmarks/card/gpu_slot.sh FOLDER
set -u
out=$1
mkdir -p "$out"
export PYTHONPATH="$PWD" OMP_NUM_THREADS=1
card() {  # SECONDS SCRIPT ARGUMENTS
    seconds=$1 script=$2
    shift 2
    timeout -s INT -k 10 "$seconds" python3 "benchmarks/card/gpu_$script.py" --out "$out" "$@" >> "$out/$script.log" 2>&1
}
torch="torch DDP"
card 95 tune --budget 75 --timing 25 --only mse "decode indices" top stochastic
card 70 steps --ranks 4 --models gpt2 --budget 55 --ways "oktopk 1 % coded" "low rank 4, one unit" "auto, 10 Gbit/s" --rates unlimited 10gbit 1gbit
card 100 steps --ranks 8 --models gpt2 --budget 85 --ways "$torch" "$torch bf16 hook" "$torch PowerSGD 4" max "low rank 4, one unit"
card 70 steps --ranks 2 --models gpt2 --budget 55 --ways "$torch" "$torch bf16 hook" "$torch PowerSGD 4" max "low rank 4, one unit"
card 200 twenty --service off --short --unshared 3 --runs 20 --budget 180 &
card 60 trials --only "CUDA graph" &
timeout -s INT -k 10 190 python3 benchmarks/card/gpu.py --only check >> "$out/check.log" 2>&1 &
timeout -s INT -k 10 200 python3 -m pytest -q -x -p no:cacheprovider tests/test_kernels_gpu*.py >> "$out/tests.log" 2>&1 &
wait
for what in tune steps twenty trials; do python3 benchmarks/card/gpu_$what.py --out "$out" --table; done
tail -n 5 "$out/check.log" "$out/tests.log"
