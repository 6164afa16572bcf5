#!/usr/bin/env bash
# All cases of pairs_two_gpus.py that answer a question of docs/TRAINING.md, on one machine with two GPUs, within a time:
#
#     benchmarks/pairs_two_gpus.sh OUT FOLDER COMMIT DEADLINE_S [--dry]
#
# Cases of one GPU run two at a time, a card each. What the time does not allow is written down as not run.
set -uo pipefail
out=$1 folder=$2 commit=$3 deadline_s=$4 dry=${5:-}
started=$SECONDS

run() { # run NAME.jsonl CASE...: until the deadline
    local file=$1; shift
    python3 -m benchmarks.pairs_two_gpus run "$out/$file" --folder "$folder" --commit "$commit" $dry \
        --deadline-s $((deadline_s - SECONDS + started)) "$@"
}

mkdir -p "$out"
python3 -m benchmarks.pairs_two_gpus prepare --folder "$folder" $dry || exit 1
CUDA_VISIBLE_DEVICES=0 run card0.jsonl fixed-one sft &
CUDA_VISIBLE_DEVICES=1 run card1.jsonl short-walk short-plain &
wait
run both.jsonl fixed-two
python3 -m benchmarks.pairs_two_gpus compare "$out/both.jsonl" --folder "$folder" fixed-two fixed-one
run both.jsonl uneven-auto uneven-in-order even-two mix-auto mix-in-order fifty-steps
CUDA_VISIBLE_DEVICES=0 run card0.jsonl shared-prefix &
CUDA_VISIBLE_DEVICES=1 run card1.jsonl one-branch whole-again even-one &
wait
run both.jsonl long
cat "$out"/card0.jsonl "$out"/card1.jsonl >> "$out/both.jsonl"
