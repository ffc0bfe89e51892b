#!/usr/bin/env bash
# Checks on one GPU what no CPU can show, in under ten minutes, and appends one result to benchmarks/results/gpu.txt:
#
#     benchmarks/gpu.sh                    # needs this repository and a Python with torch >= 2.11; PYTHON=... names another one
#     benchmarks/gpu.sh --device cpu       # a dry run of every line in a tiny size, about 4 minutes; writes no result
#     benchmarks/gpu.sh --only fp16,bf16 --out FILE
#
# Ends with 1 if any line fails. benchmarks/README.md describes the lines.
set -euo pipefail
cd "$(dirname "$0")/.."
python="${PYTHON:-}"
if [ -z "$python" ]; then
    python=python3
    if [ -x .venv/bin/python ]; then python=.venv/bin/python; fi
fi
exec "$python" benchmarks/gpu.py --device "${DEVICE:-cuda}" "$@"
