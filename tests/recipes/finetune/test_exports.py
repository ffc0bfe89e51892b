"""Exports of a finetune run speak as the run does: `generate` of transformers stops where `predict`
stops, with the base model's tokens and the template.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import surefoot as sf
from surefoot.recipes.finetune.conversations import render
from surefoot.recipes.finetune.models import end_tokens, model_config, tuned_model, write_tuned
from surefoot.recipes.finetune.predict import prompt_tokens, stop_tokens, with_logits
from tuned_runs import (
    CHAT_TEMPLATE,
    FAMILIES,
    build_as_command,
    config,
    write_chat,
    write_model,
)

pytest.importorskip("transformers", reason="transformers is not installed")
pytest.importorskip("peft", reason="peft is not installed")
pytestmark = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning"
)
QUESTION: list[dict[str, Any]] = [{"role": "user", "content": "What is 2 plus 2?"}]


def train_one_step(run_dir: Path, model: Path, tmp_path: Path, **changes: Any) -> sf.SavedRun:
    """What the model says does not matter here, but where it ends."""
    chat = write_chat(tmp_path / "chat.jsonl")
    run = build_as_command(config(run_dir, model, chat, length="1 steps", **changes))
    run.train()
    return sf.load(run_dir)


def write_base(directory: Path, family: str, **generation: Any) -> Path:
    """A base model that begins texts with token 0 and pads with 7; `generation` is in its
    generation_config.json.
    """
    write_model(directory, family, eos_token_id=3, bos_token_id=0, pad_token_id=7)
    file = directory / "generation_config.json"
    file.write_text(json.dumps({"eos_token_id": 3, "pad_token_id": 7} | generation))
    return directory


def answer_of_surefoot(net: Any, tokenizer: Any, **settings: Any) -> list[int]:
    """By greedy decoding."""
    prompt = prompt_tokens(tokenizer, QUESTION)
    tokens = sf.generate.sample(
        with_logits(net), prompt, max_new_tokens=24, context=128, temperature=0.0, **settings
    )
    return tokens[len(prompt) :]


def answer_of_transformers(net: Any, tokenizer: Any) -> list[int]:
    """By `generate`."""
    prompt = prompt_tokens(tokenizer, QUESTION)
    batch = tokenizer.apply_chat_template(
        QUESTION, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    assert batch["input_ids"][0].tolist() == prompt
    tokens = net.generate(
        input_ids=batch["input_ids"],
        attention_mask=batch["attention_mask"],
        max_new_tokens=24,
        do_sample=False,
    )
    return tokens[0].tolist()[len(prompt) :]


@pytest.mark.fast("qwen2")
@pytest.mark.parametrize("family", FAMILIES)
def test_generate_stops_where_predict_stops(family: str, tmp_path: Path) -> None:
    """At the base model's ends and at the template's, in the merged layout and in that of peft."""
    from peft import AutoPeftModelForCausalLM
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

    saved = train_one_step(tmp_path / "run", write_base(tmp_path / "base", family), tmp_path)
    merged = saved.export(tmp_path / "merged").directory
    net: Any = AutoModelForCausalLM.from_pretrained(merged).eval()
    tokenizer = AutoTokenizer.from_pretrained(merged)
    stops = {"eos_id": stop_tokens(tokenizer, [3]), "use_cache": True}
    ours = answer_of_surefoot(net, tokenizer, **stops)
    theirs = answer_of_transformers(net, tokenizer)
    assert tokenizer.eos_token_id == 0
    assert json.loads((merged / "generation_config.json").read_text())["eos_token_id"] == [3, 0]
    assert theirs[: len(ours)] == ours

    # its fifth token is an end of the base model from now on
    without_end = answer_of_surefoot(net, tokenizer)
    end = without_end[4]
    file = tmp_path / "run" / "generation_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"eos_token_id": [3, end]}))
    merged = saved.export(tmp_path / "merged").directory
    net = AutoModelForCausalLM.from_pretrained(merged).eval()
    stops["eos_id"] = stop_tokens(tokenizer, end_tokens(net.config, file.read_text()))
    ours = answer_of_surefoot(net, tokenizer, **stops)
    assert len(ours) == without_end.index(end)
    assert answer_of_transformers(net, tokenizer) == [*ours, end]

    adapter = saved.export(tmp_path / "adapter", layout="peft").directory
    net = AutoPeftModelForCausalLM.from_pretrained(adapter).eval()
    net.generation_config = GenerationConfig.from_pretrained(adapter)
    tokenizer = AutoTokenizer.from_pretrained(adapter)
    ours = answer_of_surefoot(net, tokenizer, **stops)
    assert answer_of_transformers(net, tokenizer) == [*ours, end]


@pytest.mark.parametrize("layout", ["transformers", "peft"])
def test_the_files_of_the_base_model_are_kept(layout: Any, tmp_path: Path) -> None:
    """Settings of generation, the token of padding, and the template that the run used."""
    kept = {"temperature": 0.6, "top_k": 20, "do_sample": True, "bos_token_id": 5}
    template = "{# of the run #}" + CHAT_TEMPLATE
    file = tmp_path / "template.jinja"
    file.write_text(template)
    base = write_base(tmp_path / "base", "llama", eos_token_id=[3, 4], **kept)
    saved = train_one_step(tmp_path / "run", base, tmp_path, **{"data.template": str(file)})
    file.unlink()

    out = saved.export(tmp_path / "out", layout=layout).directory

    generation = json.loads((out / "generation_config.json").read_text())
    assert generation == {"eos_token_id": [3, 4, 0], "pad_token_id": 7} | kept
    assert (out / "chat_template.jinja").read_text() == template
    if layout == "transformers":
        from transformers import AutoConfig

        settings: Any = AutoConfig.from_pretrained(out)
        assert settings.pad_token_id == 7
        assert settings.bos_token_id == 0
        assert settings.eos_token_id == 3


def test_a_base_model_without_settings_of_generation_ends_by_its_configuration(
    tmp_path: Path,
) -> None:
    """As in a run that began before they were kept."""
    base = write_base(tmp_path / "base", "gpt2")
    (base / "generation_config.json").unlink()
    saved = train_one_step(tmp_path / "run", base, tmp_path, method="full")
    assert not (tmp_path / "run" / "generation_config.json").exists()

    out = saved.export(tmp_path / "out").directory

    generation = json.loads((out / "generation_config.json").read_text())
    assert generation == {"bos_token_id": 0, "eos_token_id": [3, 0], "pad_token_id": 7}


def test_the_configuration_of_the_base_model_is_not_changed(tmp_path: Path) -> None:
    class NoTokenizer:
        def save_pretrained(self, _: Any) -> None: ...

    of_base = model_config(write_base(tmp_path / "base", "llama") / "config.json")
    net = tuned_model(of_base, None, lora=None)
    assert net.config.pad_token_id is None
    assert of_base.pad_token_id == 7

    write_tuned(net, NoTokenizer(), tmp_path, config=of_base, adapter=False, max_bytes=10**9)
    assert json.loads((tmp_path / "config.json").read_text())["pad_token_id"] == 7


def test_several_tokens_may_end_a_text() -> None:
    class Counting(torch.nn.Module):
        def forward(self, tokens_BT: torch.Tensor) -> torch.Tensor:
            return torch.nn.functional.one_hot((tokens_BT + 1) % 10, 10).float()

    settings: dict[str, Any] = {"max_new_tokens": 9, "context": 8, "temperature": 0.0}

    def sample_from_7(eos_id: Any) -> list[int]:
        return sf.generate.sample(Counting(), [7], **settings, eos_id=eos_id)

    assert sample_from_7([4, 1]) == [7, 8, 9, 0]
    assert sample_from_7(np.int64(1)) == [7, 8, 9, 0]
    assert len(sample_from_7([])) == 10
    batch = sf.generate.sample_batch(Counting(), [[7], [2]], **settings, eos_id={4, 1})
    assert batch == [[7, 8, 9, 0], [2, 3]]


def test_special_tokens_inside_a_message_are_tokens_as_in_transformers(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    directory = write_model(tmp_path / "base")
    tokenizer = AutoTokenizer.from_pretrained(directory)
    tokenizer.add_tokens(["<think>", "</think>", "<tool_call>"])
    messages = [
        {"role": "user", "content": "a <tool_call> b <|endoftext|> c"},
        {"role": "assistant", "content": "<think>d</think>e"},
    ]
    text = render(tokenizer, messages, "a row")
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]

    assert ids == tokenizer.apply_chat_template(messages, return_dict=False)
    tokens = tokenizer.convert_ids_to_tokens(ids)
    for token in ("<tool_call>", "<think>", "</think>"):
        assert tokens.count(token) == 1
