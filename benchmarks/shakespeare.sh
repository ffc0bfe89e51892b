#!/usr/bin/env bash
# nanoGPT's CPU setting on tiny-shakespeare; the last line is the cross-entropy over the whole validation part.
# usage: benchmarks/shakespeare.sh PATH_TO_INPUT_TXT [SEED]
set -euo pipefail
seed="${2:-0}"
out="$(mktemp -d)/run"
surefoot train gpt --out "$out" --seed "$seed" --data.path "$1" --data.tokenizer characters \
  --model.layers 4 --model.heads 4 --model.width 128 --model.context 64 --model.dropout 0 \
  --batch-size 12 --length "2000 steps" --optimizer.lr 1e-3 --optimizer.betas 0.9 0.99 --optimizer.weight-decay 0.1 \
  --schedule.warmup "100 steps" --schedule.floor 0.1 --clip "norm 1.0" --precision fp32 \
  --evaluate-every "50%" --log-every "200 steps"
surefoot evaluate "$out"
