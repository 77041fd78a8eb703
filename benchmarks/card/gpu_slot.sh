#!/bin/sh
# Five minutes of a card: kernels that changed and the host's part of calls, steps of data parallelism, runs that must not
# hang, and what users combine. Usage, from the repository's root: sh benchmarks/card/gpu_slot.sh FOLDER
set -u
out=$1
export PYTHONPATH="$PWD" OMP_NUM_THREADS=1
timeout -s INT 75 python3 benchmarks/card/gpu_tune.py --out "$out" --budget 55 --only checksum inspect sign stochastic scatter "decode indices" > "$out.tune.log" 2>&1
timeout -s INT 125 python3 benchmarks/card/gpu_steps.py --out "$out" --ranks 4 --models gpt2 --budget 105 > "$out.steps.log" 2>&1
timeout -s INT 90 python3 benchmarks/card/gpu_twenty.py --out "$out" --budget 75 --parallel 4 > "$out.twenty.log" 2>&1
timeout -s INT 60 python3 benchmarks/card/gpu_trials.py --out "$out" --only "CUDA graph" "CPU offload" "a bf16 model" > "$out.trials.log" 2>&1
for what in tune steps twenty trials; do python3 benchmarks/card/gpu_$what.py --out "$out" --table; done
