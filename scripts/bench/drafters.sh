#!/usr/bin/env bash
# DSpark, DFlash and EAGLE-3 at equal data, block and steps, judged at temperature 1, and prompt lookup beside them.
#
#   scripts/bench/drafters.sh            about an hour and a half on two cores; stopped, a second run continues
#
# Answers are sampled at temperature 1, which is also what the drafters are asked for. The last command prints the table.
set -euo pipefail
cd "$(dirname "$0")/../.."

export HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false WANDB_MODE=${WANDB_MODE:-offline}
PATH="$PWD/.venv/bin:$PATH"
target=smollm2-135m
run=${RUN:-runs/sampled}
answers=${ANSWERS:-1000}
steps=${STEPS:-1200}

[[ -d targets/$target ]] || python scripts/fetch_smollm2.py
data=(target=$target data=demo out="$run")
python -m deepspec.data prompts "${data[@]}"
python -m deepspec.data regenerate "${data[@]}" regenerate.temperature=1 regenerate.limit="$answers"
python -m deepspec.data cache "${data[@]}"

drafters=()
for recipe in dspark dflash eagle3; do
  size=demo
  [[ $recipe != eagle3 ]] || size=demo-eagle3
  torchrun --standalone --nproc-per-node 1 deepspec/train/main.py +recipe=$recipe target=$target +size=$size \
    drafter.block_size=7 train.steps="$steps" out="$run"
  drafters+=("$run/drafters/$recipe")
done

python -m deepspec.eval --suite demo --target $target --drafter "${drafters[@]}" --temperature 1 \
  --max-new-tokens 128 --batch-size 12 --output "$run/eval/drafters"
