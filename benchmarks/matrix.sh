#!/usr/bin/env bash
# The part of the fast suite that depends on torch, with several versions of torch and Python: an environment for each.
#
#   benchmarks/matrix.sh 2.11.0 2.12.1                 # versions of torch, by default those of TORCHES
#   PYTHON=python3.12 benchmarks/matrix.sh 2.13.0      # another Python
#
# Appends a row for each to benchmarks/results/matrix.txt, and the names of tests that fail. pip chooses the build of torch; every
# test here runs on the CPU. An environment of ENVIRONMENTS (a new directory by default, which is removed) is used if it exists.
set -euo pipefail
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-python3}
TORCHES=(2.11.0 2.12.1 2.13.0 2.15.0)
FSDP=(tests/identities/test_law_{03_strategy,04_other_ranks}.py)  # needs torch 2.13
TESTS=(
    tests/identities/test_law_{01_accumulation,04_restore,08_numbers,12_no_waiting}.py
    tests/run/test_run.py tests/train/test_compile.py tests/checkpoint/test_store.py tests/optim/test_every_optimizer.py
)
RESULT=benchmarks/results/matrix.txt
unset PYTHONPATH
if [ -z "${ENVIRONMENTS:-}" ]; then
    ENVIRONMENTS=$(mktemp -d)
    trap 'rm -rf "$ENVIRONMENTS"' EXIT
fi
[ $# -gt 0 ] || set -- "${TORCHES[@]}"

short=$("$PYTHON" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
for version in "$@"; do
    environment=$ENVIRONMENTS/python$short-torch$version
    [ -d "$environment" ] || "$PYTHON" -m venv "$environment"
    bin=$environment/bin
    "$bin/python" -m pip install --quiet --disable-pip-version-check "torch==$version"
    "$bin/python" -m pip install --quiet --disable-pip-version-check "torch==$version" \
        -e ".[text,images,plots,tensorboard]" pytest hypothesis torchmetrics
    log=$environment/log.txt fsdp=("${FSDP[@]}")
    if printf '%s\n2.13\n' "$version" | sort -VC; then fsdp=(); fi
    { time "$bin/python" -m pytest -q -p no:cacheprovider -m "not slow and not campaign and not gpu and not timing" "${TESTS[@]}" "${fsdp[@]}"; } \
        > "$log" 2>&1 || true
    facts=$("$bin/python" -c 'import platform, torch; print(f"torch {torch.__version__}, Python {platform.python_version()}")')
    cpu_s=$(awk '$1 == "user" || $1 == "sys" { split($2, part, /[ms]/); total += 60 * part[1] + part[2] } END { printf "%d", total }' "$log")
    summary=$({ grep -E "^[0-9]+ (passed|failed)|(passed|failed|error).* in [0-9.]+" "$log" || true; } | tail -1 | sed 's/ in [0-9.]*s.*//')
    {
        printf '%s  %s, commit %s: %s; %s CPU s%s\n' "$(date +%F)" "$facts" "$(git rev-parse --short HEAD)" \
            "${summary:-no test ran}" "$cpu_s" "$([ ${#fsdp[@]} -gt 0 ] || echo '; without FSDP2')"
        grep -E "^(FAILED|ERROR) " "$log" | cut -c1-160 | sed 's/^/    /' || true
    } | tee -a "$RESULT"
done
