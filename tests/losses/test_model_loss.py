"""`sf.losses.of_model` on models of transformers: a plain loop's losses, for any micro-batch size,
and the same bits after a kill.
"""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import surefoot as sf
from forked import Forked
from refused import refused

transformers = pytest.importorskip("transformers", reason="transformers is not installed")
pytestmark = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning"
)
VOCABULARY, STEPS = 32, 4
SMALL: dict[str, Any] = {
    "hidden_size": 16,
    "num_attention_heads": 2,
    "num_hidden_layers": 1,
    "vocab_size": VOCABULARY,
}
OF_BERT = SMALL | {
    "intermediate_size": 16,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}
OF_GPT2: dict[str, Any] = {"n_embd": 16, "n_head": 2, "n_layer": 1, "vocab_size": VOCABULARY}
OF_GPT2 |= {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": None}
OF_GPT2 |= {"attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0}
OF_T5: dict[str, Any] = {
    "d_model": 16,
    "d_kv": 8,
    "d_ff": 16,
    "num_heads": 2,
    "num_layers": 1,
    "dropout_rate": 0.0,
}
OF_T5 |= {"vocab_size": VOCABULARY, "decoder_start_token_id": 0, "pad_token_id": 0}
FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "gpt2": ("GPT2Config", "GPT2LMHeadModel", OF_GPT2),
    "llama": ("LlamaConfig", "LlamaForCausalLM", SMALL | {"intermediate_size": 16}),
    "bert masked": ("BertConfig", "BertForMaskedLM", OF_BERT),
    "bert tokens": (
        "BertConfig",
        "BertForTokenClassification",
        OF_BERT | {"num_labels": VOCABULARY},
    ),
    "bert sentences": ("BertConfig", "BertForSequenceClassification", OF_BERT | {"num_labels": 3}),
    "bert numbers": ("BertConfig", "BertForSequenceClassification", OF_BERT | {"num_labels": 1}),
    "t5": ("T5Config", "T5ForConditionalGeneration", OF_T5),
}


def network(family: str) -> Any:
    config, model, settings = FAMILIES[family]
    with torch.random.fork_rng():
        torch.manual_seed(7)
        return getattr(transformers, model)(getattr(transformers, config)(**settings))


def rows(family: str) -> list[dict[str, Tensor]]:
    """32 rows of 12 tokens with 1 to 9 targets in different parts of the row; the first label
    counts in no causal model.
    """
    generator = torch.Generator().manual_seed(3)
    made = []
    for number in range(32):
        ids = torch.randint(3, VOCABULARY, (12,), generator=generator)
        labels = torch.full((12,), -100)
        labels[0] = ids[0]
        targets = slice(2 + number % 2, 3 + number % 9)
        labels[targets] = ids[targets]
        labels[11] = ids[11]
        of_row: dict[str, Tensor] = {
            "bert sentences": ids[0] % 3,
            "bert numbers": ids[0] / VOCABULARY,
        }
        made.append({"input_ids": ids, "labels": of_row.get(family, labels)})
    return made


def build(family: str, run_dir: Path | None = None, **changes: Any) -> sf.Run:
    settings: dict[str, Any] = {
        "model": lambda: network(family),
        "loss": sf.losses.of_model,
        "run_dir": run_dir,
    }
    settings |= {
        "train_data": rows(family),
        "batch_size": 8,
        "optimizer": sf.optim.adamw(lr=1e-2, weight_decay=0.0),
    }
    settings |= {
        "console": False,
        "report": False,
        "tensorboard": False,
        "device": "cpu",
        "save_every": "1 step",
    }
    return sf.Run(**(settings | {"length": f"{STEPS} steps"} | changes))


def losses(run: sf.Run) -> list[float]:
    with run:
        return [step.loss.item() for step in run if step.loss is not None]


def plain_losses(family: str) -> list[float]:
    model = network(family).train()
    run = build(family)
    values = list[float]()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)
    with run:
        for step in run:
            loss = model(**step.micro_batches[0].batch).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            values.append(loss.item())
    return values


@pytest.mark.fast("gpt2", "bert sentences")
@pytest.mark.parametrize("family", FAMILIES)
def test_losses_are_those_of_a_plain_loop_for_any_micro_batch_size(family: str) -> None:
    expected = plain_losses(family)
    for size in (8, 2, 1):
        assert losses(build(family, micro_batch_size=size)) == pytest.approx(
            expected, rel=1e-5, abs=1e-6
        ), size


def test_an_instance_that_is_killed_and_resumed_has_the_same_bits(tmp_path: Path) -> None:
    def train(run_dir: Path, *, dies_at: int | None = None) -> None:
        settings: dict[str, Any] = {"model": network("gpt2"), "micro_batch_size": 2}
        with build("gpt2", run_dir, **settings) as run:
            for step in run:
                if step.index + 1 == dies_at:
                    os.kill(os.getpid(), signal.SIGKILL)

    train(tmp_path / "alone")
    with Forked(lambda: train(tmp_path / "killed", dies_at=3), stdout=subprocess.PIPE) as process:
        assert process.wait() == -signal.SIGKILL
    train(tmp_path / "killed")
    last = [
        load_file(tmp_path / name / f"checkpoints/step-{STEPS:08d}/model.safetensors")
        for name in ("alone", "killed")
    ]
    assert last[0].keys() == last[1].keys()
    assert "lm_head.weight" not in last[0]  # tied to the embedding
    assert all(torch.equal(last[0][name], last[1][name]) for name in last[0])


def test_metrics_compare_each_label_with_the_logits_that_predict_it() -> None:
    """Accuracy of a model that predicts the next token of a known sequence is 1."""
    model = network("gpt2").eval()
    ids = torch.randint(3, VOCABULARY, (1, 12), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        guesses = model(ids).logits.argmax(-1)
        labels = torch.cat([ids[:, :1], guesses[:, :-1]], dim=1)
        mean, pair = sf.losses.of_model(model, {"input_ids": ids, "labels": labels})
    accuracy = sf.metrics.accuracy(*pair)
    assert (int(mean.count), int(accuracy.count), float(accuracy.value)) == (11, 11, 1.0)


REFUSED: dict[str, tuple[Callable[[], Any], Any, str, dict[str, Any]]] = {
    "tuple": (
        lambda: network("gpt2"),
        (torch.ones(1, 2), torch.ones(1, 2)),
        "model-loss-of-batch",
        {"batch": "tuple"},
    ),
    "no labels": (
        lambda: network("gpt2"),
        {"input_ids": torch.ones(1, 2, dtype=torch.long)},
        "model-without-loss",
        {"batch": ["input_ids"]},
    ),
    "no loss": (
        lambda: nn.Linear(2, 2),
        {"input": torch.ones(1, 2)},
        "model-without-loss",
        {"output": "Tensor"},
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_has_no_loss_is_refused(case: str) -> None:
    model, batch, code, fields = REFUSED[case]
    with refused(code, **fields):
        sf.losses.of_model(model(), batch)


def test_other_libraries_with_the_same_form_work_too() -> None:
    class Net(nn.Linear):
        def forward(self, x: Tensor, labels: Tensor) -> SimpleNamespace:  # type: ignore[override]
            logits = super().forward(x)
            return SimpleNamespace(loss=nn.functional.cross_entropy(logits, labels), logits=logits)

    batch = {"x": torch.randn(4, 3), "labels": torch.tensor([1, -100, 0, 1])}
    mean, _ = sf.losses.of_model(net := Net(3, 2), batch)
    assert torch.allclose(mean.value, net(**batch).loss)
    assert int(mean.count) == 3


class Classifier(torch.nn.Linear):
    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> Any:
        logits = super().forward(x)
        return {"loss": torch.nn.functional.cross_entropy(logits, labels), "logits": logits}


def trained(model: Any, loss: Any, micro_batch_size: int) -> Any:
    inputs = torch.randn(8, 4, generator=torch.Generator().manual_seed(0))
    rows = [
        {"x": x, "labels": label}
        for x, label in zip(inputs, (0, 1, 2, 0, -100, -100, 1, 2), strict=True)
    ]
    run = sf.Run(
        model=model,
        loss=loss,
        train_data=rows,
        batch_size=8,
        micro_batch_size=micro_batch_size,
        optimizer=sf.optim.sgd(lr=0.1),
        length="3 steps",
        seed=3,
        console=False,
    )
    losses = []
    with run:
        for step in run:
            losses.append(float(step.loss))
    return losses


def test_a_micro_batch_without_targets_adds_nothing() -> None:
    whole = trained(partial(Classifier, 4, 3), sf.losses.of_model, 8)
    assert trained(partial(Classifier, 4, 3), sf.losses.of_model, 1) == pytest.approx(
        whole, rel=1e-5
    )


def test_several_models_need_a_loss_that_names_one() -> None:
    models = {"first": partial(Classifier, 4, 3), "second": partial(Classifier, 4, 3)}
    with refused("model-loss-of-several-models"):
        trained(models, sf.losses.of_model, 8)
    with refused("model-loss-of-several-models"):
        sf.losses.of_model({"first": Classifier(4, 3)}, {})
