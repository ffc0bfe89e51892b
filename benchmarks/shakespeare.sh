#!/usr/bin/env bash
# nanoGPT's CPU setting on tiny-shakespeare, its last tenth held out: 4 layers, 4 heads, width 128, context 64, batch 12, 2,000 steps,
# learning rate 1e-3 to 1e-4, warm-up 100 steps, beta2 0.99, no dropout. The last lines are scores over the whole held-out part.
# usage: benchmarks/shakespeare.sh PATH_TO_INPUT_TXT [modern|gpt2] [SEED]
set -euo pipefail
family="${2:-modern}"
seed="${3:-0}"
out="$(mktemp -d)/run"
surefoot train gpt --data.tokenizer characters --run-dir "$out" --seed "$seed" --data.path "$1" --model.family "$family" \
  --model.layers 4 --model.heads 4 --model.width 128 --model.context 64 --model.dropout 0 \
  --model.activation None --model.smear False --model.ngrams 1 \
  --batch-size 12 --length "2000 steps" --optimizer.name adamw --schedule.name cosine --optimizer.lr 1e-3 --optimizer.betas 0.9 0.99 --optimizer.weight-decay 0.1 \
  --schedule.warmup "100 steps" --schedule.min-lr-ratio 0.1 --clip "norm 1.0" --precision fp32 --data.val-fraction 0.1 \
  --cloze-questions 0 --evaluate-every "50%" --log-every "200 steps"
surefoot evaluate "$out"
