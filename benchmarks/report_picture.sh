#!/bin/sh
# docs/images/report.png: the beginning of the page that a small run of gpt leaves, as Chromium shows it. Half a minute on two cores.
set -eu
here=$(cd "$(dirname "$0")/.." && pwd)
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
cd "$place"
surefoot train gpt --run-dir runs/first --length "600 steps" --model.layers 2 --model.width 64 --model.context 64 \
    --batch-size 8 --log-every "3 steps" --evaluate-every "40 steps" --layer-stats-every "10 steps" --precision fp32 \
    --cloze-questions 20 --data.val-fraction 0.005
chromium --headless --no-sandbox --disable-gpu --hide-scrollbars --user-data-dir="$place/profile" \
    --window-size=1120,1560 --screenshot="$place/report.png" "file://$place/runs/first/report.html"
python - "$place/report.png" "$here/docs/images/report.png" <<'END'
import sys
from PIL import Image
with Image.open(sys.argv[1]) as picture:
    picture.convert("RGB").quantize(96, dither=Image.Dither.NONE).save(sys.argv[2], optimize=True)
END
