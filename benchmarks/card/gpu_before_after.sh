#!/bin/sh
# The kernels of this tree and of an older one on one card, in one run: both are compared with the reference, the
# tests of this one's kernels and trials of what users combine run beside that, then each is timed by itself.
# About 65 seconds, 10 of them of the card. Usage, from the repository's root:
#     sh benchmarks/card/gpu_before_after.sh FOLDER [OLDER.tar]
set -u
out=$1 older=${2:-}
limit=${LIMIT:-42}  # seconds to compile, compare and test in
mkdir -p "$out/new" "$out/old" "$out/tests"
export PYTHONPATH="$PWD" OMP_NUM_THREADS=1
tune() {  # FOLDER TREE ARGUMENTS
    folder=$1 tree=$2
    shift 2
    PYTHONPATH="$tree" timeout -s INT 60 python3 "$tree/benchmarks/card/gpu_tune.py" --out "$folder" --no-host --timing 0 \
        "$@" >> "$folder/log.txt" 2>&1
}
began=$(date +%s)
new="stochastic sign kth top scatter decode histogram nearest" old="stochastic sign kth top scatter decode"
tune "$out/new" "$PWD" --few --compare-only --parallel 7 --budget "$limit" --only $new & waits=$!
if [ -n "$older" ]; then
    there=$(mktemp -d)
    tar -xf "$older" -C "$there"
    tune "$out/old" "$there" --few --compare-only --parallel 3 --budget "$limit" --only $old & waits="$waits $!"
fi
timeout -s INT "$limit" python3 benchmarks/card/gpu_trials.py --out "$out" --parallel 2 --only "CUDA graph" stage \
    > "$out/trials.txt" 2>&1 &
waits="$waits $!"
for shard in 0 1 2 3 4 5; do
    names=$(for file in tests/test_kernels_gpu_select.py tests/test_kernels_gpu.py; do
        sed -n "s|^def \(test_[a-z0-9_]*\).*|$file::\1|p" $file
    done | grep -v "bits$\|ternary\|checksum\|frames\|two_means\|top_rows\|every_width" | awk "NR % 6 == $shard")
    timeout -s KILL "$limit" python3 -m pytest -q -p no:cacheprovider --durations=3 $names > "$out/tests/$shard.txt" 2>&1 &
    waits="$waits $!"
done
wait $waits
tail -qn 1 "$out"/tests/*.txt
cat "$out/trials.txt"
[ -n "$older" ] && tune "$out/old" "$there" --few --no-compare --budget 10 --only $old
tune "$out/new" "$PWD" --few --no-compare --budget 15 --only $new
[ -n "$older" ] && python3 benchmarks/card/gpu_tune.py --out "$out/old" --table
python3 benchmarks/card/gpu_tune.py --out "$out/new" --table
echo "$(($(date +%s) - began)) s"
