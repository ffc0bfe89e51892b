"""examples/evaluation: lm-evaluation-harness scores the export of a run as surefoot scores the run.
40 seconds, where it is installed.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

import surefoot as sf
from surefoot.cli.main import main

EXAMPLE = Path(__file__).parents[2] / "examples" / "evaluation"


def rows(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (EXAMPLE / name).read_text().splitlines()]


def bits_per_byte(model: torch.nn.Module, texts: list[str]) -> float:
    """The bits of texts, each after the token between documents, for each of their bytes."""
    tokenizer = sf.tokenizers.ByteTokenizer()
    nats = 0.0
    for text in texts:
        tokens_T = torch.tensor([tokenizer.eos_id, *tokenizer.encode(text).tolist()])
        with torch.no_grad():
            (logits_TV,) = model(tokens_T[None, :-1])
        losses_T = torch.nn.functional.cross_entropy(logits_TV, tokens_T[1:], reduction="none")
        nats += losses_T.sum().item()
    return nats / math.log(2) / len("".join(texts).encode())


@pytest.mark.slow
@pytest.mark.skipif(find_spec("lm_eval") is None, reason="lm_eval is not installed")
def test_the_harness_gives_the_accuracy_and_the_bits_per_byte_of_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    # the answers to five of eight questions can be learned
    known = ""
    for question in rows("questions.jsonl")[:5]:
        known += f"{question['ctx']} {question['endings'][question['label']]}\n"
    Path("text.txt").write_text(known * 40)
    options = "--data.path text.txt --data.tokenizer bytes --model.family llama --run-dir runs/a"
    options += " --model.heads 4 --model.kv-heads 2 --model.context 256 --batch-size 4"
    main(["train", "gpt", "--length", "120 steps", "--sample-tokens", "0", *options.split()])
    capsys.readouterr()
    main(["evaluate", "runs/a", "--questions", f"q={EXAMPLE / 'questions.jsonl'}"])
    ours = capsys.readouterr().out

    process = subprocess.run(
        [sys.executable, str(EXAMPLE / "lm_harness.py"), "runs/a"],
        env=os.environ | {"HF_HOME": str(tmp_path / "hf")},
        capture_output=True,
        text=True,
        check=True,
    )

    results = [json.loads(line) for line in process.stdout.splitlines() if line[:1] == "{"]
    of_task = {result["task"]: result for result in results}
    accuracy = of_task["questions"]["acc,none"]
    assert 5 / 8 <= accuracy < 1
    assert f"q/acc={accuracy:g}\n" in ours
    texts = [row["text"] for row in rows("texts.jsonl")]
    model = sf.load("runs/a").load_model(device="cpu")
    expected = pytest.approx(bits_per_byte(model, texts), rel=1e-5)
    assert of_task["texts"]["bits_per_byte,none"] == expected
