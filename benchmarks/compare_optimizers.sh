#!/usr/bin/env bash
# Which optimizer, on tiny-shakespeare at nanoGPT's CPU setting (see shakespeare.sh)? First the learning rate of each is looked for
# over 500 steps; then each trains for 2,000 at the best of them. Both with `surefoot compare`, judged by the validation loss.
# The last table has the steps and seconds to a loss of 1.88. Stopped or killed, the same command goes on.
# usage: benchmarks/compare_optimizers.sh PATH_TO_INPUT_TXT OUT [JOBS]
set -euo pipefail
text="$1"
out="$2"
jobs="${3:-1}"
shape=(gpt --data.path "$text" --data.tokenizer characters --data.val-fraction 0.1 --model.layers 4 --model.heads 4
  --model.width 128 --model.context 64 --model.dropout 0 --batch-size 12 --schedule.min-lr-ratio 0.1 --precision fp32
  --cloze-questions 0 --sample-tokens 0 --schedule.warmup "5%" --threads 1 --jobs "$jobs"
  --model.activation None --model.smear False --model.ngrams 1 --schedule.name cosine
  --optimizer.adamw-lr None --optimizer.momentum None --optimizer.ns-steps None)  # no settings of the preset tiny

settings() { # of one entrant, but for its rate
  case "$1" in
    muon-modern) echo "model.family=modern optimizer.name=muon" ;;
    adamw) echo "model.family=gpt2 optimizer.name=adamw optimizer.betas='0.9 0.99'" ;;
    sgd) echo "model.family=gpt2 optimizer.name=sgd optimizer.momentum=0.9" ;;
    schedule-free) echo "model.family=gpt2 optimizer.name=schedule_free schedule.name=constant schedule.min_lr_ratio=None" ;;
    *) echo "model.family=gpt2 optimizer.name=$1" ;;
  esac
}

declare -A rates=(
  [adamw]="1e-3 3e-3 1e-2" [lion]="3e-4 1e-3 3e-3" [adafactor]="1e-2 3e-2 1e-1" [muon]="3e-3 1e-2 3e-2"
  [sgd]="0.1 0.3 1" [schedule-free]="1e-3 3e-3 1e-2 3e-2" [muon-modern]="3e-3 1e-2 3e-2"
)

entrants=()
for entrant in adamw lion adafactor muon sgd schedule-free muon-modern; do
  variants=()
  for rate in ${rates[$entrant]}; do
    variants+=(--variant "$(settings "$entrant") optimizer.lr=$rate")
  done
  surefoot compare "${shape[@]}" "${variants[@]}" --length "500 steps" --evaluate-every "100%" --out "$out/rates/$entrant"
  best="$(python -c "import json, sys; print(json.load(open(sys.argv[1]))['variants'][0]['settings']['optimizer.lr'])" \
    "$out/rates/$entrant/comparison.json")"
  entrants+=(--variant "$(settings "$entrant") optimizer.lr=$best")
done
surefoot compare "${shape[@]}" "${entrants[@]}" --length "2000 steps" --evaluate-every "100 steps" --target 1.88 --out "$out/final"
