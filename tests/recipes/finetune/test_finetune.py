"""The finetune recipe: its tokens, masks and losses against a plain loop, kills, and what it
refuses.
"""

from __future__ import annotations

import json
import shutil
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import surefoot as sf
from rank_processes import Ranks
from refused import refused
from stated import numbers_in
from surefoot.cli.main import main
from surefoot.config.behavior import BUFFERS_IN_ORDER
from surefoot.program import choose_checkpoint, find_program
from surefoot.recipes import finetune, gpt
from surefoot.recipes.finetune import corpus as texts
from surefoot.recipes.finetune import documentation
from surefoot.recipes.finetune import predict as predict_module
from surefoot.recipes.finetune.conversations import read_conversations
from surefoot.recipes.finetune.template import rendered
from surefoot.recipes.gpt import corpus as gpt_corpus
from surefoot.tracking.jsonl import records
from tuned_runs import (
    CHAT_TEMPLATE,
    FAMILIES,
    build_as_command,
    config,
    outcome,
    session,
    write_chat,
    write_model,
)

pytest.importorskip("transformers", reason="transformers is not installed")
pytest.importorskip("peft", reason="peft is not installed")
pytestmark = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning"
)


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("finetune")


@pytest.fixture(scope="module")
def chat(scratch: Path) -> Path:
    return write_chat(scratch / "chat.jsonl")


@pytest.fixture(scope="module")
def model(scratch: Path) -> Path:
    return write_model(scratch / "gpt2")


def padded_batch(data: Any, ids: np.ndarray) -> dict[str, torch.Tensor]:
    """Rows as the input of a model of transformers: padded, with labels and a mask."""
    rows = [slice(data.starts[row], data.starts[row + 1]) for row in ids]
    longest = max(row.stop - row.start for row in rows)
    inputs = torch.zeros(len(rows), longest, dtype=torch.long)
    labels = torch.full((len(rows), longest), -100)
    mask = torch.zeros(len(rows), longest, dtype=torch.long)
    for place, row in enumerate(rows):
        size = row.stop - row.start
        tokens = torch.from_numpy(data.tokens[row])
        is_answer = torch.from_numpy(data.is_answer[row])
        inputs[place, :size] = tokens
        labels[place, :size][is_answer] = tokens[is_answer].long()
        mask[place, :size] = 1
    return {"input_ids": inputs, "attention_mask": mask, "labels": labels}


def plain_losses(run: sf.Run, directory: Path, asked: finetune.Config) -> list[float]:
    """A plain loop of transformers over the batches of a run: masks and labels as its users write
    them.
    """
    from transformers import AutoModelForCausalLM

    plain: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    if asked.method == "lora":
        import peft

        lora = peft.LoraConfig(
            r=4, lora_alpha=8, target_modules="all-linear", task_type="CAUSAL_LM"
        )
        plain = peft.get_peft_model(plain, lora)
        initial = run.state.model.state_dict()
        same_adapters = {name: initial[name] for name in plain.state_dict()}
        plain.load_state_dict(same_adapters)
    plain.train()
    trainable = [parameter for parameter in plain.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trainable, lr=5e-3, weight_decay=0.0)
    losses = []
    for step in range(8):
        optimizer.param_groups[0]["lr"] = 5e-3 * run.parts.task.factors(step)
        micro_batches = run.parts.pipeline.plan.micro_batches(step)
        ids = np.concatenate([ids for ids, _ in micro_batches])
        loss = plain(**padded_batch(run.parts.pipeline.dataset, ids)).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trainable, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


@pytest.mark.fast("gpt2-lora")
@pytest.mark.parametrize("method", ["lora", "full"])
@pytest.mark.parametrize("family", FAMILIES)
def test_losses_are_those_of_a_plain_loop(
    family: str, method: str, scratch: Path, chat: Path, tmp_path: Path
) -> None:
    """Micro-batches of similar length, padded apart, without a mask: as one padded batch with
    labels and mask.
    """
    without_dropout = {
        "gpt2": {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0},
        "opt": {"dropout": 0.0},
    }
    directory = write_model(tmp_path / family, family, **without_dropout.get(family, {}))
    settings: dict[str, Any] = {"method": method}
    if method == "lora":
        settings["lora.dropout"] = 0.0
    asked = config(tmp_path / "run", directory, chat, **settings)
    run = finetune.build(asked)
    expected = plain_losses(run, directory, asked)

    run.train()

    all_records = records(tmp_path / "run" / "metrics.jsonl")
    losses = [record["loss"] for record in all_records if record["kind"] == "train"]
    np.testing.assert_allclose(losses, expected, rtol=0, atol=1e-5)
    assert losses[-1] < losses[0] - 0.1


def read_corpus(asked: finetune.Config, tokenizer: Any) -> Any:
    return texts.read_corpus(asked, tokenizer, context=128, default=None)


def gather_row(data: Any, row: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and targets of one row, without padding."""
    inputs_BT, targets_BT = data.gather(np.array([row]), np.zeros(1, np.int64))
    return inputs_BT[0], targets_BT[0]


def test_only_answers_are_targets_and_rows_are_not_joined(model: Path, chat: Path) -> None:
    tokenizer = texts.load_tokenizer(model, template=None)
    asked = config(None, model, chat, **{"data.val_fraction": 0.0})

    rows = read_corpus(asked, tokenizer).train

    first_inputs, first_targets = gather_row(rows, 0)
    _, last_targets = gather_row(rows, len(rows) - 1)
    assert tokenizer.decode(first_inputs) == (
        "<|user|>\nWhat is 0 plus 4?<|endoftext|>\n<|assistant|>\n0 plus 4 is 4.<|endoftext|>"
    )
    of_first = tokenizer.decode(first_targets[first_targets >= 0])
    of_last = tokenizer.decode(last_targets[last_targets >= 0])
    assert of_first == "0 plus 4 is 4.<|endoftext|>\n"
    assert of_last == "9.<|endoftext|>\n10 does.<|endoftext|>\n"


def test_only_the_last_answer_is_a_target_where_that_is_asked_for(model: Path, chat: Path) -> None:
    tokenizer = texts.load_tokenizer(model, template=None)
    asked = config(None, model, chat, **{"data.val_fraction": 0.0, "data.train_on": "last"})

    rows = read_corpus(asked, tokenizer).train

    _, targets = gather_row(rows, len(rows) - 1)
    assert tokenizer.decode(targets[targets >= 0]) == "10 does.<|endoftext|>\n"


TEMPLATE_WITH_TOOLS = (
    "{% if tools %}{{ tools | map(attribute='name') | join }}\n{% endif %}"
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content or '' }}"
    "{% for call in m.tool_calls or [] %}call {{ call.name }}{% endfor %}{{ eos_token }}\n"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
ASK: dict[str, Any] = {"role": "user", "content": "a?"}
ANSWER: dict[str, Any] = {"role": "assistant", "content": "b"}
WITH_TOOLS = {
    "tools": [{"name": "add"}],
    "messages": [
        ASK,
        {"role": "assistant", "content": None, "tool_calls": [{"name": "add"}], "id": 1},
        {"role": "tool", "content": "2"},
        ANSWER,
    ],
}
WITH_A_WEIGHT_OF_0 = {
    "messages": [ASK, ANSWER | {"weight": 0}, ASK, {"role": "assistant", "content": "c"}]
}
WITHOUT_TRAINED_ANSWER = {
    "messages": [{"role": "user", "content": "<|assistant|> hi"}, ANSWER | {"weight": 0}]
}
WITH_A_MARK_AND_A_SOURCE = {
    "messages": [{"role": "user", "content": "<|assistant|> hi"}, ANSWER],
    "source": "x",
}


def read_rows_with_tools(model: Path, place: Path, rows: list[Any]) -> tuple[Any, Any]:
    """The corpus of some rows under a template that writes tools, and the tokenizer."""
    template = place / "template.jinja"
    template.write_text(TEMPLATE_WITH_TOOLS)
    chat = write_chat(place / "chat.jsonl", rows)
    settings = {"data.val_fraction": 0.0, "data.template": str(template)}
    tokenizer = texts.load_tokenizer(model, template=str(template))
    return read_corpus(config(None, model, chat, **settings), tokenizer), tokenizer


def test_what_a_row_says_is_in_the_text_and_the_mask(model: Path, tmp_path: Path) -> None:
    """Calls of tools, definitions of tools, and weights."""
    rows = [WITH_TOOLS, WITH_A_WEIGHT_OF_0, WITHOUT_TRAINED_ANSWER, WITH_A_MARK_AND_A_SOURCE]

    corpus, tokenizer = read_rows_with_tools(model, tmp_path, rows)

    data = corpus.train
    spans = [slice(data.starts[row], data.starts[row + 1]) for row in range(len(data))]
    assert tokenizer.decode(data.tokens[spans[0]]) == (
        "add\n<|user|>a?<|endoftext|>\n<|assistant|>call add<|endoftext|>\n"
        "<|tool|>2<|endoftext|>\n<|assistant|>b<|endoftext|>\n"
    )
    answers = [tokenizer.decode(data.tokens[span][data.is_answer[span]]) for span in spans]
    assert answers == [
        "call add<|endoftext|>\nb<|endoftext|>\n",
        "c<|endoftext|>\n",
        "b<|endoftext|>\n",
    ]


def test_what_nothing_uses_of_a_row_is_in_the_header(model: Path, tmp_path: Path) -> None:
    rows = [WITH_TOOLS, WITH_A_WEIGHT_OF_0, WITHOUT_TRAINED_ANSWER, WITH_A_MARK_AND_A_SOURCE]

    corpus, _ = read_rows_with_tools(model, tmp_path, rows)

    _, unused, left_out, unwritten, marks = corpus.about.split("; ")
    assert unused.endswith(": source (1 row)")
    assert left_out.startswith("left out: 1 row ")
    assert left_out.endswith(" (weight, train)")
    assert unwritten.endswith(": id (1 row)")
    assert marks.endswith(": <|assistant|>")
    assert numbers_in(marks) == [1]


def test_rows_without_a_trained_answer_are_refused(model: Path, tmp_path: Path) -> None:
    with refused("chats-without-trained-answers", sf.DataError):
        read_rows_with_tools(model, tmp_path, [WITHOUT_TRAINED_ANSWER])


def test_a_run_that_began_earlier_has_the_tokens_that_it_had(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain: list[Any] = [{"messages": [ASK, ANSWER]}, {"instruction": "c", "response": "d"}]
    full: list[Any] = [
        {"messages": [ASK, ANSWER | {"weight": 0, "name": "n"}], "system": "s"},
        {"instruction": "c", "response": "d", "context": "e", "history": [["f", "g"]]},
    ]
    tokenizer = texts.load_tokenizer(model, template=None)

    def fingerprint_of(rows: list[Any]) -> dict[str, Any]:
        chat = write_chat(tmp_path / "chat.jsonl", rows)
        asked = config(tmp_path / "run", model, chat, **{"data.val_fraction": 0.0})
        return read_corpus(asked, tokenizer).train.fingerprint()

    of_plain = fingerprint_of(plain)
    assert fingerprint_of(full) != of_plain

    monkeypatch.setattr(texts, "behavior_in", lambda run: BUFFERS_IN_ORDER)
    assert fingerprint_of(full) == of_plain


def test_a_sample_asks_for_an_answer_that_is_trained(model: Path, tmp_path: Path) -> None:
    other_question = {"role": "user", "content": "c?"}
    rows = [{"messages": [ASK, ANSWER | {"weight": 0}, other_question, ANSWER]}]
    chat = write_chat(tmp_path / "chat.jsonl", rows)
    run = finetune.build(config(None, model, chat, **{"data.val_fraction": 0.0}))
    assert run.parts.settings.predict_example == "c?"


def test_files_of_a_validation_part_are_held_out(model: Path, tmp_path: Path) -> None:
    place = tmp_path / "chats"
    place.mkdir()
    rows = [{"prompt": f"{number}", "completion": "b"} for number in range(6)]
    write_chat(place / "train.jsonl", rows[:4])
    write_chat(place / "validation.jsonl", rows[4:])
    tokenizer = texts.load_tokenizer(model, template=None)

    with_val = read_corpus(config(None, model, place), tokenizer)
    assert (len(with_val.rows), len(with_val.held_out)) == (4, 2)

    asked = config(None, model, place, **{"data.val_fraction": 0.0})
    without_val = read_corpus(asked, tokenizer)
    assert (len(without_val.rows), len(without_val.held_out)) == (4, 0)
    assert "read 1 of 2 files" in without_val.about


def test_padding_changes_no_loss(model: Path, chat: Path) -> None:
    run = finetune.build(config(None, model, chat, **{"lora.dropout": 0.0}))
    data = run.parts.pipeline.dataset
    shortest = int(data.lengths.argmin())
    longest = int(data.lengths.argmax())
    assert data.lengths[shortest] < data.lengths[longest]
    net = run.state.model.eval()
    compute_loss: Any = run.parts.task.loss

    together = data.gather(np.array([shortest, longest]), np.zeros(2, np.int64))
    loss, _ = compute_loss(net, together)

    total = 0.0
    for row in (shortest, longest):
        inputs_T, targets_T = gather_row(data, row)
        logits_TV = net(input_ids=inputs_T[None]).logits[0]
        total += F.cross_entropy(logits_TV, targets_T, reduction="sum")
    torch.testing.assert_close(loss.total, total, rtol=1e-5, atol=1e-5)


# --- what a run leaves ----------------------------------------------------------------------------


def train(run_dir: Path, model: Path, chat: Path, **changes: Any) -> sf.Run:
    run = build_as_command(config(run_dir, model, chat, **changes))
    run.train()
    return run


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(input_ids=torch.arange(24).reshape(2, 12)).logits


@pytest.mark.fast("gpt2-lora")
@pytest.mark.parametrize("method", ["lora", "full"])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_exported_model_is_the_trained_one(
    family: str, method: str, chat: Path, tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    run = train(tmp_path / "run", write_model(tmp_path / "base", family), chat, method=method)
    expected = logits(run.state.model)

    directory = sf.load(tmp_path / "run").export().directory

    exported = AutoModelForCausalLM.from_pretrained(directory)
    torch.testing.assert_close(logits(exported), expected, rtol=1e-5, atol=1e-5)
    assert exported.config.pad_token_id is None
    assert exported.config.use_cache
    embedding = exported.get_input_embeddings().weight
    head = exported.get_output_embeddings().weight
    assert (embedding is head) == exported.config.tie_word_embeddings
    assert AutoTokenizer.from_pretrained(directory).chat_template == CHAT_TEMPLATE
    if method == "full":
        with refused("layout-without-adapter"):
            sf.load(tmp_path / "run").export(layout="peft")
        return
    from peft import AutoPeftModelForCausalLM

    directory = sf.load(tmp_path / "run").export(tmp_path / "adapter", layout="peft").directory
    assert not (directory / "model.safetensors").exists()
    with_adapter = AutoPeftModelForCausalLM.from_pretrained(directory)
    torch.testing.assert_close(logits(with_adapter), expected)


class Terminal(StringIO):
    def isatty(self) -> bool:
        return True


class InterruptedTerminal(Terminal):
    """A terminal at whose end somebody presses Ctrl-C."""

    def readline(self, _: int | None = -1) -> str:  # type: ignore[override]
        line = super().readline()
        if not line:
            raise KeyboardInterrupt
        return line


@dataclass(frozen=True)
class Answering:
    """A run that has learnt three answers by heart."""

    run: sf.Run
    asked: finetune.Config
    run_dir: Path

    def answers(self, *inputs: str, **options: Any) -> str:
        """What `surefoot predict` prints."""
        program = find_program("finetune")
        request = program.names["Predict"](temperature=0.0, **options)
        checkpoint = choose_checkpoint(self.run_dir, None)
        pieces = program.names["predict"](
            self.asked, request, inputs, run=self.run_dir, checkpoint=checkpoint
        )
        return "".join(pieces)


@pytest.fixture(scope="module")
def learnt(tmp_path_factory: pytest.TempPathFactory) -> Answering:
    place = tmp_path_factory.mktemp("learnt")
    words = ("one", "two", "six")
    rows = [{"instruction": f"Say {word}", "response": f"{word} {word}"} for word in words]
    chat = write_chat(place / "few.jsonl", rows)
    directory = write_model(place / "base", attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0)
    run_dir = place / "run"
    settings = {
        "length": "60 steps",
        "method": "full",
        "optimizer.lr": 1e-2,
        "data.val_fraction": 0.0,
    }
    run = train(
        run_dir, directory, chat, **settings, evaluate_every="60 steps", save_every="60 steps"
    )
    return Answering(run, config(run_dir, directory, chat, **settings), run_dir)


def test_a_sample_shows_the_reference_and_what_was_learnt(learnt: Answering) -> None:
    assert learnt.run.sample() == "Say one\n  reference: one one\n  output:    one one"


def test_it_answers_a_prompt_and_a_file_of_prompts(learnt: Answering, tmp_path: Path) -> None:
    """In a batch and alone."""
    file = tmp_path / "prompts.txt"
    file.write_text("Say six\nSay two\n")

    assert learnt.answers("Say two") == "two two\n"
    lines = learnt.answers("Say one", file=str(file)).splitlines()
    assert [json.loads(line)["answer"] for line in lines] == ["one one", "six six", "two two"]


def test_no_prompt_and_a_prompt_that_is_too_long_are_refused(learnt: Answering) -> None:
    with refused("predict-without-input"):
        learnt.answers()
    with refused("prompt-too-long", context=128):
        learnt.answers("Say two. " * 90)


@pytest.fixture
def prompts(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The texts of the turns of each prompt."""
    texts_of_turns: list[list[str]] = []
    tokens_of = predict_module.prompt_tokens

    def noting(owner: Any, turns: Any) -> Any:
        texts_of_turns.append([turn["content"] for turn in turns])
        return tokens_of(owner, turns)

    monkeypatch.setattr(predict_module, "prompt_tokens", noting)
    return texts_of_turns


def test_in_a_terminal_it_goes_on_with_the_conversation_until_the_context_is_full(
    learnt: Answering, prompts: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    too_long = "Say one. " * 90
    typed = f"Say two\n\n{too_long}" + "\nSay six\nSay one\n" * 3
    monkeypatch.setattr("sys.stdin", Terminal(typed))

    lines = learnt.answers(max_new_tokens=8).splitlines()

    assert "Ctrl-D" in lines[0]
    assert lines[1] == "> two two"
    assert lines[2].startswith("> > (")
    assert numbers_in(lines[2])[1:] == [128]  # tokens of the line, and of the model
    assert any(line.startswith("> (") for line in lines[3:])  # the context is full
    assert lines[-1] == "> "
    assert ["Say two", "two two", "Say six"] in prompts


def test_in_a_terminal_ctrl_c_ends_an_answer_and_then_the_conversation(
    learnt: Answering, prompts: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted_pieces(*_: Any) -> Iterator[str]:
        yield "two"
        raise KeyboardInterrupt

    monkeypatch.setattr("sys.stdin", InterruptedTerminal("Say two\nSay six\n"))
    monkeypatch.setattr(predict_module, "_pieces", interrupted_pieces)

    lines = learnt.answers().splitlines()

    assert lines[1:] == ["> two", "> two", "> "]
    assert prompts[-1] == ["Say two", "two", "Say six"]


def test_checkpoints_of_adapters_are_small(chat: Path, tmp_path: Path) -> None:
    """At most 2 % of a full one, in a model whose width is 192: rank 1, and AdamW's two moments of
    each adapter.
    """
    directory = write_model(
        tmp_path / "base", "llama", hidden_size=192, intermediate_size=512, num_hidden_layers=4
    )

    def checkpoint_bytes(method: str, **settings: Any) -> int:
        run_dir = tmp_path / method
        train(
            run_dir,
            directory,
            chat,
            method=method,
            length="2 steps",
            save_every="1 steps",
            evaluate_every="2 steps",
            sample_tokens=0,
            **settings,
        )
        files = (run_dir / "checkpoints" / "step-00000002").iterdir()
        return sum(file.stat().st_size for file in files)

    of_adapters = checkpoint_bytes(
        "lora", **{"lora.rank": 1, "lora.target_modules": ("q_proj", "v_proj")}
    )
    of_all_weights = checkpoint_bytes("full")

    assert of_adapters <= 0.02 * of_all_weights


# --- kills ----------------------------------------------------------------------------------------


@pytest.mark.fast("lora")
@pytest.mark.parametrize("method", ["lora", "full"])
def test_stopped_and_resumed_without_the_directory_of_its_model(
    method: str, chat: Path, tmp_path: Path
) -> None:
    """All that a resume needs is in the run's directory."""
    directory = write_model(tmp_path / "base")
    spec = {"model": str(directory), "chat": str(chat)}

    def train_session(run_dir: Path, **changes: Any) -> None:
        session(spec | {"run_dir": str(run_dir), "changes": {"method": method, **changes}})

    train_session(tmp_path / "whole")
    train_session(tmp_path / "run", stop_after="5 steps")
    for file in directory.iterdir():
        file.unlink()
    train_session(tmp_path / "run")

    assert outcome(tmp_path / "run") == outcome(tmp_path / "whole")


@pytest.fixture(scope="module")
def processes(scratch: Path) -> Iterator[Ranks]:
    """They fork from this process, which has imported transformers."""
    import peft
    import transformers

    assert peft.LoraConfig
    assert transformers.AutoModelForCausalLM
    (scratch / "processes").mkdir()
    with Ranks(scratch / "processes") as ranks:
        yield ranks


def train_in_process(processes: Ranks, run_dir: Path, spec: dict[str, Any]) -> int:
    """A session of a run. Returns the status with which its process ended."""
    spec = spec | {"run_dir": str(run_dir)}
    (ended,) = processes.outcomes(processes.start(1, session, spec=spec))
    assert ended.status in (0, -signal.SIGKILL), ended.text
    return ended.status


@pytest.mark.slow
@pytest.mark.parametrize("method", ["lora", "full"])
def test_killed_several_times_it_ends_with_the_same_bits(
    method: str, processes: Ranks, model: Path, chat: Path, tmp_path: Path
) -> None:
    spec = {"model": str(model), "chat": str(chat), "changes": {"method": method}}
    assert train_in_process(processes, tmp_path / "whole", spec) == 0

    for kill in (
        {"operation": 12},
        {"pass": 3},
        {"pass": 6},
        {"operation": 40},
        {"pass": 3},
        {"operation": 25},
    ):
        status = train_in_process(processes, tmp_path / "run", spec | kill)
        assert status == -signal.SIGKILL, kill
    assert train_in_process(processes, tmp_path / "run", spec) == 0

    assert outcome(tmp_path / "run") == outcome(tmp_path / "whole")


# --- what is refused ------------------------------------------------------------------------------


def refusal(model: Path | None, chat: Path, **changes: Any) -> str | None:
    """The code of the error of a recipe that cannot be built."""
    with pytest.raises((sf.ConfigError, sf.DataError)) as problem:
        finetune.build(config(None, model, chat, **changes))
    return problem.value.code


def test_a_directory_that_is_no_model_is_refused(model: Path, chat: Path, tmp_path: Path) -> None:
    assert refusal(tmp_path / "absent", chat) == "model-not-found"
    place = tmp_path / "place"
    place.mkdir()
    assert refusal(place, chat) == "model-without-config"
    (place / "adapter_config.json").write_text("{}")
    assert refusal(place, chat) == "model-is-adapter"
    (place / "adapter_config.json").unlink()
    (place / "config.json").write_text('{"model_type": "no-such-model"}')
    assert refusal(place, chat) == "model-without-weights"
    shutil.copy(model / "model.safetensors", place)
    assert refusal(place, chat) == "model-unknown"
    (place / "config.json").write_text('{"model_type": "t5"}')
    assert refusal(place, chat) == "model-not-causal"
    settings = json.loads((model / "config.json").read_text())
    (place / "config.json").write_text(json.dumps(settings | {"n_layer": 3}))
    assert refusal(place, chat) == "model-tokenizer-unreadable"
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(model / name, place)
    assert refusal(place, chat) == "model-larger-than-weights"
    (place / "config.json").write_text(json.dumps(settings | {"vocab_size": 280}))
    assert refusal(place, chat) == "tokenizer-larger-than-model"


@pytest.mark.parametrize(
    ("code", "changes"),
    [
        ("tokens-exceed-context", {"data.max_tokens": 129}),
        ("lora-without-layers", {"lora.target_modules": ("q_proj",)}),
        ("lora-of-no-modules", {"lora.target_modules": ()}),
        ("lora-without-effect", {"method": "full", "lora.rank": 3}),
        ("init-from-without-effect", {"init_from": "runs/a"}),
        ("setting-out-of-range", {"lora.rank": 0}),
        ("setting-out-of-range", {"lora.alpha": 0.0}),
        ("setting-out-of-range", {"lora.dropout": 1.0}),
        ("compile-of-many-shapes", {"compile": True}),
        ("compile-of-many-shapes", {"compile": True, "batch_size": 4, "micro_batch_size": 2}),
    ],
)
def test_wrong_settings_are_refused(
    code: str, changes: dict[str, Any], model: Path, chat: Path
) -> None:
    assert refusal(model, chat, **changes) == code


def test_a_file_of_chats_that_is_not_there_is_refused(model: Path) -> None:
    assert refusal(model, Path("absent.jsonl")) == "path-missing"


SHORT = {"instruction": "a", "response": "b"}
LONG_ANSWER = {"instruction": "a", "response": "b " * 80}
LONG_QUESTION = {"instruction": "a " * 80, "response": "b"}
FORTY_TOKENS: dict[str, Any] = {"data.val_fraction": 0.0, "data.max_tokens": 40}


def test_long_answers_are_cut_at_their_end_and_long_questions_left_out(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    chat = write_chat(tmp_path / "chat.jsonl", [SHORT, LONG_ANSWER, LONG_QUESTION])

    data = finetune.build(config(None, model, chat, **FORTY_TOKENS)).parts.pipeline.dataset

    assert len(data) == 2
    assert data.lengths.max() == 39
    tokenizer = texts.load_tokenizer(model, template=None)
    cut = tokenizer.decode(data.tokens[data.starts[1] : data.starts[1] + 39])
    assert cut.startswith("<|user|>\na<|endoftext|>\n<|assistant|>\nb b ")
    assert [1, 3, 40, 1] in [numbers_in(line) for line in capsys.readouterr().err.splitlines()]


def test_long_conversations_are_skipped_or_refused_if_that_is_asked_for(
    model: Path, tmp_path: Path
) -> None:
    chat = write_chat(tmp_path / "chat.jsonl", [SHORT, LONG_ANSWER, LONG_QUESTION])
    skip = FORTY_TOKENS | {"data.on_long": "skip"}
    error = FORTY_TOKENS | {"data.on_long": "error"}

    assert len(finetune.build(config(None, model, chat, **skip)).parts.pipeline.dataset) == 1
    assert refusal(model, chat, **error) == "conversation-too-long"


def test_long_questions_alone_are_refused(model: Path, tmp_path: Path) -> None:
    chat = write_chat(tmp_path / "chat.jsonl", [LONG_QUESTION])
    assert refusal(model, chat, **FORTY_TOKENS) == "conversations-without-answer-in-limit"


def test_a_template_that_fails_or_is_not_there_is_refused(
    model: Path, chat: Path, tmp_path: Path
) -> None:
    file = tmp_path / "template.jinja"
    file.write_text("{{ raise_exception('no roles here') }}")
    assert refusal(model, chat, **{"data.template": str(file)}) == "template-fails"
    assert refusal(model, chat, **{"data.template": "absent.jinja"}) == "template-unreadable"


def test_a_template_without_what_stands_before_an_answer_is_refused(
    model: Path, tmp_path: Path
) -> None:
    file = tmp_path / "template.jinja"
    file.write_text("{{ messages[-1]['content'] }}")
    chat = write_chat(tmp_path / "chat.jsonl", [SHORT])
    settings = {"data.template": str(file), "data.val_fraction": 0.0}
    assert refusal(model, chat, **settings) == "template-prompt-not-in-text"


def test_a_tokenizer_without_a_template_gets_a_default_which_needs_an_end_token(
    chat: Path, tmp_path: Path
) -> None:
    """Padding needs no token of its own."""
    bare = write_model(tmp_path / "bare", chat_template=None)
    tokenizer = texts.load_tokenizer(bare, template=None)
    row = read_conversations(str(chat), setting="data.path").rows[0]

    text, [(start, end)] = rendered(tokenizer, row, train_on="answers")

    assert tokenizer.pad_token is None
    assert text[:start] == "User: What is 0 plus 4?\nAssistant:"
    assert text[start:end] == " 0 plus 4 is 4.<|endoftext|>\n"

    file = bare / "tokenizer_config.json"
    settings = json.loads(file.read_text())
    del settings["eos_token"]
    file.write_text(json.dumps(settings))
    assert refusal(bare, chat) == "tokenizer-without-template"


def test_a_template_that_rewrites_earlier_answers_needs_the_last_alone(
    model: Path, chat: Path, tmp_path: Path
) -> None:
    """As those that leave out what a model thought before its earlier answers."""
    file = tmp_path / "template.jinja"
    file.write_text(
        "{% for message in messages %}{{ message['role'] }}:"
        "{% if message['role'] == 'assistant' and loop.last %}<think></think>{% endif %}"
        "{{ message['content'] }}{{ eos_token }}\n{% endfor %}"
        "{% if add_generation_prompt %}assistant:{% endif %}"
    )
    settings = {"data.template": str(file)}

    assert refusal(model, chat, **settings) == "template-rewrites-answers"
    finetune.build(config(None, model, chat, **settings, **{"data.train_on": "last"}))


@pytest.mark.slow
def test_a_plan_without_a_model_trains_and_writes_nothing(
    chat: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its parameters are those of the small GPT that a run would train first."""
    monkeypatch.chdir(tmp_path)

    main(["plan", "finetune", f"--data.path={chat}", "--length=2 steps", "--batch-size=64 tokens"])

    plan = capsys.readouterr()
    assert "runs/finetune-base" in plan.err
    assert "1,088,256 frozen  1,219,328" in plan.out
    assert list(tmp_path.iterdir()) == []
    tokenizer = gpt_corpus.read_corpus(gpt.Data()).tokenizer
    assert documentation.small_config().vocab_size == tokenizer.vocab_size


@pytest.mark.slow
def test_questions_on_the_standard_library() -> None:
    answers = {}
    for row in documentation.questions():
        question, answer = row.messages
        answers[question["content"]] = answer["content"]
    assert answers["What is the module fnmatch for?"] == "Filename matching with shell patterns."
    assert len(answers) > 1000
