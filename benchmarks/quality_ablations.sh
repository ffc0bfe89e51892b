#!/usr/bin/env bash
# What each part of setting a of quality.py brings: `surefoot compare` with one thing changed at a time, judged by the last tenth of
# the first nine tenths of tiny-shakespeare, on which the settings were chosen. The held-out part of quality.py is not read.
# usage: benchmarks/quality_ablations.sh PATH_TO_INPUT_TXT OUT [JOBS]
set -euo pipefail
out="$2"
mkdir -p "$out"
adamw="optimizer.name=adamw optimizer.lr=0.004 optimizer.betas='0.9 0.95' optimizer.momentum=None optimizer.adamw_lr=None"
gpt2="model.family=gpt2 model.smear=False model.activation=gelu"
head -c $(($(wc -c <"$1") * 9 / 10)) "$1" >"$out/first-nine-tenths.txt"
surefoot compare gpt --preset shakespeare --data.path "$out/first-nine-tenths.txt" --precision bf16 --threads 1 --jobs "${3:-1}" \
  --model.context 64 --model.heads 1 --model.smear 3 --batch-size 28 --length "61 steps" --schedule.warmup "0 steps" \
  --optimizer.lr 0.05 --optimizer.adamw-lr 0.04 --optimizer.momentum 0.7 \
  --evaluate-every "100%" --cloze-questions 0 --sample-tokens 0 --seeds 3 --baseline "ns_steps=4" --out "$out/a" \
  --variant "optimizer.ns_steps=4" \
  --variant "optimizer.ns_steps=5" \
  --variant "model.smear=False" \
  --variant "model.smear=1" \
  --variant "model.smear=False model.ngrams=2" \
  --variant "model.ngrams=3" \
  --variant "model.ngrams=4" \
  --variant "model.activation=relu2" \
  --variant "model.heads=2" \
  --variant "optimizer.momentum=0.95" \
  --variant "schedule.name=cosine" \
  --variant "$adamw" \
  --variant "$gpt2" \
  --variant "$gpt2 $adamw"
