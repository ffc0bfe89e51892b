"""torch.export and ONNX take a GPT, with batches of any size and length. 15 seconds."""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from surefoot.cli.main import main
from surefoot.models.gpt import GPT
from surefoot.models.gpt_layers import GPTConfig

SIZES = ({0: torch.export.Dim.AUTO, 1: torch.export.Dim.AUTO},)
FAMILIES: dict[str, dict[str, Any]] = {
    "modern": {"family": "modern", "activation": "swiglu"},
    "modern that looks back": {"family": "modern", "smear": True, "ngrams": 2},
    "gpt2": {"family": "gpt2", "tie_embeddings": True},
    "llama": {"family": "llama", "kv_heads": 2},
}
every_family = pytest.mark.parametrize("settings", FAMILIES.values(), ids=FAMILIES.keys())


def model_of(settings: dict[str, Any]) -> GPT:
    torch.manual_seed(0)
    shape = GPTConfig(layers=2, heads=4, width=32, context=48, vocab_size=60, **settings)
    model = GPT(shape).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    return model


def batches() -> list[torch.Tensor]:
    return [torch.randint(60, size) for size in ((2, 16), (1, 48), (5, 3))]


@every_family
def test_a_program_of_torch_export_gives_the_logits_of_the_model(settings: dict[str, Any]) -> None:
    model = model_of(settings)
    tokens = torch.zeros(2, 16, dtype=torch.long)

    program = torch.export.export(model, (tokens,), dynamic_shapes=SIZES).module()

    for tokens_BT in batches():
        with torch.no_grad():
            expected_BTV = model(tokens_BT)
            torch.testing.assert_close(program(tokens_BT), expected_BTV, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*LeafSpec.*:FutureWarning")  # in torch's own exporter
@every_family
def test_an_onnx_file_gives_the_logits_of_the_model(
    settings: dict[str, Any], tmp_path: Path
) -> None:
    pytest.importorskip("onnxscript")
    reference = pytest.importorskip("onnx.reference")
    model = model_of(settings)
    tokens = torch.zeros(2, 16, dtype=torch.long)
    file = tmp_path / "model.onnx"

    torch.onnx.export(model, (tokens,), file, dynamo=True, dynamic_shapes=SIZES)

    program = reference.ReferenceEvaluator(str(file))
    for tokens_BT in batches():
        inputs = {program.input_names[0]: tokens_BT.numpy()}
        logits_BTV = torch.from_numpy(program.run(None, inputs)[0])
        with torch.no_grad():
            torch.testing.assert_close(logits_BTV, model(tokens_BT), rtol=1e-5, atol=1e-5)


@pytest.mark.filterwarnings("ignore:.*LeafSpec.*:FutureWarning")  # in torch's own exporter
def test_the_page_about_checkpoints_exports_the_model_of_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = Path(__file__).parents[2] / "docs" / "explained" / "checkpoints.md"
    (code,) = re.findall(r"```python\n(.*?)```", page.read_text(), flags=re.DOTALL)
    if find_spec("onnxscript") is None:
        code = code.partition("torch.onnx.export")[0]
    monkeypatch.chdir(tmp_path)
    Path("text.txt").write_text("the cat sat on the mat\n" * 99)
    options = "--data.path text.txt --data.tokenizer bytes --run-dir runs/a"
    options += " --model.family llama --model.width 8 --model.context 16 --sample-tokens 0"
    main(["train", "gpt", "--length", "2 steps", *options.split()])
    names: dict[str, Any] = {}

    exec(code, names)

    tokens_BT = batches()[0]
    with torch.no_grad():
        expected_BTV = names["model"](tokens_BT)
        torch.testing.assert_close(names["program"].module()(tokens_BT), expected_BTV)
