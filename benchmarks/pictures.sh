#!/usr/bin/env bash
# Every picture of README and docs, each from a run of its own: docs/images/NAME.png or .svg.
#
#   benchmarks/pictures.sh [NAME...]     without a name all of them, in about an hour of two quiet cores; resumed alone takes 5 min
#
# Seeds and settings are fixed, so the curves come out the same; times are those of this machine. `report` needs chromium, and
# `optimizers` needs $DATA/tinyshakespeare/input.txt (data/ by default): without it that picture stays as it is, which is said.
set -euo pipefail
here=$(cd "$(dirname "$0")/.." && pwd)
images=$here/docs/images
text=${DATA:-$here/data}/tinyshakespeare/input.txt
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
cd "$place"

smaller() { # a picture with few colors
  python - "$1" "$images/$2" <<'END'
import sys
from PIL import Image
with Image.open(sys.argv[1]) as picture:
    picture.convert("RGB").quantize(96, dither=Image.Dither.NONE).save(sys.argv[2], optimize=True)
END
}

resumed() { # a run that was killed and resumed, as a terminal of 80 columns shows it
  python "$here/benchmarks/resumed_picture.py"
}

report() { # the beginning of the page that a small run of gpt leaves
  if ! command -v chromium > /dev/null; then
    echo "report.png stays as it is: it needs chromium, which is not installed" >&2
    return
  fi
  surefoot train gpt --run-dir runs/first --length "600 steps" --model.layers 2 --model.width 64 --model.context 64 \
    --batch-size 8 --log-every "3 steps" --evaluate-every "40 steps" --layer-stats-every "10 steps" --precision fp32 \
    --cloze-questions 20 --data.val-fraction 0.005
  chromium --headless --no-sandbox --disable-gpu --hide-scrollbars --user-data-dir="$place/profile" \
    --window-size=1120,1560 --screenshot="$place/report.png" "file://$place/runs/first/report.html"
  smaller report.png report.png
}

find-lr() { # the losses of a range of rates, and the suggestion
  surefoot find-lr images --out find-lr
  cp find-lr/find-lr.svg "$images/find-lr.svg"
}

schedules() { # four schedules side by side
  surefoot plan --schedules cosine,linear:min_lr_ratio=0.1,wsd:cooldown=30%,inverse_sqrt
  cp schedules.svg "$images/schedules.svg"
}

comparison() { # three optimizers on the digits
  surefoot compare images --variant "optimizer.name=adamw optimizer.lr=0.003" \
    --variant "optimizer.name=adamw optimizer.lr=0.006" \
    --variant "optimizer.name=sgd optimizer.lr=0.05 optimizer.momentum=0.9" \
    --length "8 epochs" --precision fp32 --target 0.2 --seeds 3 --out comparison
  smaller comparison/comparison.png comparison.png
}

optimizers() { # seven optimizers on tiny-shakespeare
  if [ ! -f "$text" ]; then
    echo "optimizers.png stays as it is: it needs $text" >&2
    return
  fi
  bash "$here/benchmarks/compare_optimizers.sh" "$text" optimizers
  smaller optimizers/final/comparison.png optimizers.png
}

costs() { # what grows with a run, its data or its records
  python "$here/benchmarks/costs.py" --cpu --picture "$images/costs.svg"
}

changes() { # the three stories of the guide to changes
  python "$here/benchmarks/change_pictures.py" --out "$images"
}

documents() { # the mask of a window of three documents
  python "$here/benchmarks/documents_picture.py" --out "$images"
}

all=(resumed report find-lr schedules comparison costs changes documents optimizers)
for name in "${@:-${all[@]}}"; do
  case " ${all[*]} " in
    *" $name "*) echo "--- $name ---" && "$name" ;;
    *)
      echo "no picture is called $name: ${all[*]}" >&2
      exit 2
      ;;
  esac
done
