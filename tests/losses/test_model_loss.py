"""`sf.losses.of_model` on models of transformers: a plain loop's losses, for any micro-batch size,
and the same bits after a kill.
"""

from __future__ import annotations

import os
import signal
import subprocess
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import surefoot as sf
from forked import Forked
from refused import refused
from same_bits import assert_same_bits, newest_checkpoint

transformers = pytest.importorskip("transformers", reason="transformers is not installed")
pytestmark = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning"
)
VOCABULARY = 32
STEPS = 4
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
OF_GPT2: dict[str, Any] = {
    "n_embd": 16,
    "n_head": 2,
    "n_layer": 1,
    "vocab_size": VOCABULARY,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": None,
    "attn_pdrop": 0.0,
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
}
OF_T5: dict[str, Any] = {
    "d_model": 16,
    "d_kv": 8,
    "d_ff": 16,
    "num_heads": 2,
    "num_layers": 1,
    "dropout_rate": 0.0,
    "vocab_size": VOCABULARY,
    "decoder_start_token_id": 0,
    "pad_token_id": 0,
}
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
    rows = []
    for number in range(32):
        ids = torch.randint(3, VOCABULARY, (12,), generator=generator)
        match family:
            case "bert sentences":
                labels = ids[0] % 3
            case "bert numbers":
                labels = ids[0] / VOCABULARY
            case _:
                targets = [0, *range(2 + number % 2, 3 + number % 9), 11]
                labels = torch.full((12,), -100)
                labels[targets] = ids[targets]
        rows.append({"input_ids": ids, "labels": labels})
    return rows


def build(family: str, run_dir: Path | None = None, **changes: Any) -> sf.Run:
    settings: dict[str, Any] = {
        "model": lambda: network(family),
        "loss": sf.losses.of_model,
        "train_data": rows(family),
        "batch_size": 8,
        "length": f"{STEPS} steps",
        "optimizer": sf.optim.adamw(lr=1e-2, weight_decay=0.0),
        "save_every": "1 step",
        "run_dir": run_dir,
        "device": "cpu",
        "console": False,
        "report": False,
        "tensorboard": False,
    }
    return sf.Run(**(settings | changes))


def losses(run: sf.Run) -> list[float]:
    with run:
        return [step.loss.item() for step in run if step.loss is not None]


def plain_losses(family: str) -> list[float]:
    model = network(family).train()
    run = build(family)
    values = []
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
    expected = pytest.approx(plain_losses(family), rel=1e-5, abs=1e-6)

    for size in (8, 2, 1):
        assert losses(build(family, micro_batch_size=size)) == expected, size


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

    whole = newest_checkpoint(tmp_path / "alone").tensors("model")
    resumed = newest_checkpoint(tmp_path / "killed").tensors("model")
    assert "lm_head.weight" not in whole  # tied to the embedding
    assert_same_bits(resumed, whole)


def test_metrics_compare_each_label_with_the_logits_that_predict_it() -> None:
    """Accuracy of a model that predicts the next token of a known sequence is 1."""
    model = network("gpt2").eval()
    ids = torch.randint(3, VOCABULARY, (1, 12), generator=torch.Generator().manual_seed(0))

    with torch.no_grad():
        guesses = model(ids).logits.argmax(-1)
        labels = torch.cat([ids[:, :1], guesses[:, :-1]], dim=1)
        mean, pair = sf.losses.of_model(model, {"input_ids": ids, "labels": labels})
    accuracy = sf.metrics.accuracy(*pair)

    assert int(mean.count) == 11
    assert int(accuracy.count) == 11
    assert float(accuracy.value) == 1.0


def test_a_batch_that_is_no_dict_is_refused() -> None:
    batch = (torch.ones(1, 2), torch.ones(1, 2))

    with refused("model-loss-of-batch", batch="tuple"):
        sf.losses.of_model(network("gpt2"), batch)


def test_a_batch_without_labels_is_refused() -> None:
    batch = {"input_ids": torch.ones(1, 2, dtype=torch.long)}

    with refused("model-without-loss", batch=["input_ids"]):
        sf.losses.of_model(network("gpt2"), batch)


def test_a_model_without_a_loss_is_refused() -> None:
    with refused("model-without-loss", output="Tensor"):
        sf.losses.of_model(nn.Linear(2, 2), {"input": torch.ones(1, 2)})


def test_other_libraries_with_the_same_form_work_too() -> None:
    class Net(nn.Linear):
        def forward(self, x: Tensor, labels: Tensor) -> SimpleNamespace:  # type: ignore[override]
            logits = super().forward(x)
            return SimpleNamespace(loss=nn.functional.cross_entropy(logits, labels), logits=logits)

    net = Net(3, 2)
    batch = {"x": torch.randn(4, 3), "labels": torch.tensor([1, -100, 0, 1])}

    mean, _ = sf.losses.of_model(net, batch)

    assert torch.allclose(mean.value, net(**batch).loss)
    assert int(mean.count) == 3


class Classifier(torch.nn.Linear):
    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> Any:
        logits = super().forward(x)
        return {"loss": torch.nn.functional.cross_entropy(logits, labels), "logits": logits}


def build_classifier(model: Any, micro_batch_size: int) -> sf.Run:
    inputs = torch.randn(8, 4, generator=torch.Generator().manual_seed(0))
    labels = [0, 1, 2, 0, -100, -100, 1, 2]
    rows = [{"x": x, "labels": label} for x, label in zip(inputs, labels, strict=True)]
    return sf.Run(
        model=model,
        loss=sf.losses.of_model,
        train_data=rows,
        batch_size=8,
        micro_batch_size=micro_batch_size,
        optimizer=sf.optim.sgd(lr=0.1),
        length="3 steps",
        seed=3,
        console=False,
    )


def test_a_micro_batch_without_targets_adds_nothing() -> None:
    model = partial(Classifier, 4, 3)

    whole = losses(build_classifier(model, 8))
    by_sample = losses(build_classifier(model, 1))

    assert by_sample == pytest.approx(whole, rel=1e-5)


def test_several_models_need_a_loss_that_names_one() -> None:
    models = {"first": partial(Classifier, 4, 3), "second": partial(Classifier, 4, 3)}
    with refused("model-loss-of-several-models"):
        build_classifier(models, 8).train()
    with refused("model-loss-of-several-models"):
        sf.losses.of_model({"first": Classifier(4, 3)}, {})
