#!/usr/bin/env bash
# The whole chain on SmolLM2-135M-Instruct with the commands a user types. Stopped at any point, a second run continues.
set -euo pipefail
cd "$(dirname "$0")/.."

export HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false WANDB_MODE=${WANDB_MODE:-offline}
target=smollm2-135m
run=runs/$target
recipes=${DEMO_RECIPES:-"dspark dflash"}
started=$SECONDS

step() {
  printf '\n\033[1m[%4ds] $ %s\033[0m\n' $((SECONDS - started)) "$*"
  "$@"
}

step python scripts/fetch_smollm2.py
step python -m deepspec.data prompts target=$target data=demo
step python -m deepspec.data regenerate target=$target data=demo
step python -m deepspec.data cache target=$target data=demo
drafters=()
for recipe in $recipes; do
  size=demo
  [[ $recipe != eagle3 ]] || size=demo-eagle3
  step torchrun --standalone --nproc-per-node 1 deepspec/train/main.py +recipe="$recipe" target=$target +size=$size
  drafters+=("$run/drafters/$recipe")
done
step python -m deepspec.eval --suite demo --target $target --drafter "${drafters[@]}" --limit 12 --batch-size 12 \
  --max-new-tokens 128 --output report

cat <<TXT

Demo finished in $(((SECONDS - started) / 60)) min $(((SECONDS - started) % 60)) s. Open report/index.html.
The same chain for Qwen3-4B on a GPU node:
  . .venv/bin/activate
  make cache MODEL=qwen3-4b
  torchrun --nproc-per-node gpu deepspec/train/main.py +recipe=dspark target=qwen3-4b
  python -m deepspec.eval --suite math --target qwen3-4b
TXT
