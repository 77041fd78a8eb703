#!/bin/sh
# The kernels of this tree and of an older one on one card, in one run: both are compared with the reference, the
# tests of this one's kernels run, then each is timed by itself. About 65 seconds, 10 of them of the card.
# Usage, from the repository's root: sh benchmarks/card/gpu_before_after.sh FOLDER [OLDER.tar]
set -u
out=$1 older=${2:-}
limit=${LIMIT:-42}  # seconds to compile, compare and test in
mkdir -p "$out/new" "$out/old" "$out/tests"
export PYTHONPATH="$PWD" OMP_NUM_THREADS=1
kernels="stochastic mse sign kth top scatter decode histogram checksum nearest"
tune() {  # FOLDER TREE ARGUMENTS
    folder=$1 tree=$2
    shift 2
    PYTHONPATH="$tree" timeout -s INT 60 python3 "$tree/benchmarks/card/gpu_tune.py" --out "$folder" --no-host --timing 0 \
        --only $kernels "$@" >> "$folder/log.txt" 2>&1
}
began=$(date +%s)
tune "$out/new" "$PWD" --few --compare-only --parallel 7 --budget "$limit" & new=$!
old=
if [ -n "$older" ]; then
    there=$(mktemp -d)
    tar -xf "$older" -C "$there" && cp benchmarks/card/gpu_tune*.py "$there/benchmarks/card/"
    tune "$out/old" "$there" --own --compare-only --parallel 4 --budget "$limit" & old=$!
fi
for shard in 0 1 2 3 4 5 6 7; do
    names=$(for file in tests/test_kernels_gpu.py tests/test_kernels_gpu_select.py; do
        sed -n "s|^def \(test_[a-z0-9_]*\).*|$file::\1|p" $file
    done | awk "NR % 8 == $shard")
    timeout -s KILL "$limit" python3 -m pytest -q -p no:cacheprovider $names > "$out/tests/$shard.txt" 2>&1 &
done
wait $new $old
while [ $(($(date +%s) - began)) -lt "$limit" ] && ! tail -qn 1 "$out"/tests/*.txt | awk '/ in [0-9.]+s/ {n++} END {exit n < 8}'; do
    sleep 1
done
tail -qn 1 "$out"/tests/*.txt
[ -n "$older" ] && tune "$out/old" "$there" --own --no-compare --budget 15
tune "$out/new" "$PWD" --few --no-compare --budget 20
[ -n "$older" ] && python3 benchmarks/card/gpu_tune.py --out "$out/old" --table
python3 benchmarks/card/gpu_tune.py --out "$out/new" --table
