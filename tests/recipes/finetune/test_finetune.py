"""The finetune recipe: its tokens, masks and losses against a plain loop, kills, and what it
refuses.
"""

from __future__ import annotations

import json
import shutil
import signal
from collections.abc import Iterator
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
from surefoot.recipes.finetune.conversations import (
    read_conversations,
)
from surefoot.recipes.finetune.template import rendered
from surefoot.recipes.gpt import corpus as gpt_corpus
from surefoot.tracking.jsonl import records
from tuned_runs import CHAT_TEMPLATE, FAMILIES, config, outcome, session, write_chat, write_model

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
        plain.load_state_dict(
            {name: initial[name] for name in plain.state_dict()}
        )  # the same adapters
    plain.train()
    trained = [each for each in plain.parameters() if each.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=5e-3, weight_decay=0.0)
    data = run.parts.pipeline.dataset
    losses = []
    for step in range(8):
        optimizer.param_groups[0]["lr"] = 5e-3 * run.parts.task.factors(step)
        ids = np.concatenate([part for part, _ in run.parts.pipeline.plan.micro_batches(step)])
        rows = [slice(data.starts[one], data.starts[one + 1]) for one in ids]
        longest = max(row.stop - row.start for row in rows)
        inputs = torch.zeros(len(rows), longest, dtype=torch.long)
        labels = torch.full((len(rows), longest), -100)
        mask = torch.zeros(len(rows), longest, dtype=torch.long)
        for nth, row in enumerate(rows):
            size = row.stop - row.start
            inputs[nth, :size] = torch.from_numpy(data.tokens[row])
            mask[nth, :size] = 1
            answer = torch.from_numpy(data.is_answer[row])
            labels[nth, :size][answer] = inputs[nth, :size][answer]
        loss = plain(input_ids=inputs, attention_mask=mask, labels=labels).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
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
    off = {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0} if family == "gpt2" else {}
    off |= {"dropout": 0.0} if family == "opt" else {}
    directory = write_model(tmp_path / family, family, **off)
    asked = config(
        tmp_path / "run",
        directory,
        chat,
        method=method,
        **({"lora.dropout": 0.0} if method == "lora" else {}),
    )
    run = finetune.build(asked)
    expected = plain_losses(run, directory, asked)
    run.train()
    losses = [
        record["loss"]
        for record in records(tmp_path / "run" / "metrics.jsonl")
        if record["kind"] == "train"
    ]
    np.testing.assert_allclose(losses, expected, rtol=0, atol=1e-5)
    assert losses[-1] < losses[0] - 0.1


def test_only_answers_are_targets_and_rows_are_not_joined(model: Path, chat: Path) -> None:
    asked = config(None, model, chat, **{"data.val_fraction": 0.0})
    tokenizer = texts.load_tokenizer(model, template=None)
    rows = texts.read_corpus(asked, tokenizer, context=128, default=None).train
    inputs_BT, targets_BT = rows.gather(np.array([0, len(rows) - 1]), np.zeros(2, np.int64))
    answers = [tokenizer.decode([each for each in row if each >= 0]) for row in targets_BT.tolist()]
    assert answers == ["0 plus 4 is 4.<|endoftext|>\n", "9.<|endoftext|>\n10 does.<|endoftext|>\n"]
    real = inputs_BT[0][: rows.lengths[0]].tolist()
    assert (
        tokenizer.decode(real)
        == "<|user|>\nWhat is 0 plus 4?<|endoftext|>\n<|assistant|>\n0 plus 4 is 4.<|endoftext|>"
    )
    last = texts.read_corpus(
        config(None, model, chat, **{"data.val_fraction": 0.0, "data.train_on": "last"}),
        tokenizer,
        context=128,
        default=None,
    ).train
    _, targets_BT = last.gather(np.array([len(last) - 1]), np.zeros(1, np.int64))
    assert tokenizer.decode(targets_BT[targets_BT >= 0]) == "10 does.<|endoftext|>\n"


def test_what_a_row_says_is_in_the_text_and_the_mask(model: Path, tmp_path: Path) -> None:
    """Calls of tools, definitions of tools, and weights; what nothing uses is in the header."""
    template = tmp_path / "template.jinja"
    template.write_text(
        "{% if tools %}{{ tools | map(attribute='name') | join }}\n{% endif %}"
        "{% for m in messages %}<|{{ m.role }}|>{{ m.content or '' }}"
        "{% for call in m.tool_calls or [] %}call {{ call.name }}{% endfor %}{{ eos_token }}\n"
        "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    ask = {"role": "user", "content": "a?"}
    answer = {"role": "assistant", "content": "b"}
    calling = {"role": "assistant", "content": None, "tool_calls": [{"name": "add"}], "id": 1}
    rows = [
        {
            "tools": [{"name": "add"}],
            "messages": [ask, calling, {"role": "tool", "content": "2"}, answer],
        },
        {"messages": [ask, answer | {"weight": 0}, ask, {"role": "assistant", "content": "c"}]},
        {"messages": [{"role": "user", "content": "<|assistant|> hi"}, answer | {"weight": 0}]},
        {"messages": [{"role": "user", "content": "<|assistant|> hi"}, answer], "source": "x"},
    ]
    changes = {"data.val_fraction": 0.0, "data.template": str(template)}
    asked = config(None, model, write_chat(tmp_path / "chat.jsonl", rows), **changes)
    tokenizer = texts.load_tokenizer(model, template=str(template))
    corpus = texts.read_corpus(asked, tokenizer, context=128, default=None)
    data = corpus.train
    spans = [slice(data.starts[row], data.starts[row + 1]) for row in range(len(data))]
    assert tokenizer.decode(data.tokens[spans[0]]) == (
        "add\n<|user|>a?<|endoftext|>\n<|assistant|>call add<|endoftext|>\n"
        "<|tool|>2<|endoftext|>\n<|assistant|>b<|endoftext|>\n"
    )
    answers = [tokenizer.decode(data.tokens[row][data.is_answer[row]]) for row in spans]
    assert answers == [
        "call add<|endoftext|>\nb<|endoftext|>\n",
        "c<|endoftext|>\n",
        "b<|endoftext|>\n",
    ]
    said = corpus.about.split("; ")
    unused, left_out, unwritten, marks = said[1:]
    assert unused.endswith(": source (1 row)")
    assert left_out.startswith("left out: 1 row ")
    assert left_out.endswith(" (weight, train)")
    assert unwritten.endswith(": id (1 row)")
    assert (numbers_in(marks), marks.endswith(": <|assistant|>")) == ([1], True)
    only = write_chat(tmp_path / "only.jsonl", rows[2:3])
    with refused("chats-without-trained-answers", sf.DataError):
        texts.read_corpus(
            config(None, model, only, **changes), tokenizer, context=128, default=None
        )


def test_a_run_that_began_earlier_has_the_tokens_that_it_had(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ask = {"role": "user", "content": "a?"}
    answer = {"role": "assistant", "content": "b"}
    plain: list[Any] = [{"messages": [ask, answer]}, {"instruction": "c", "response": "d"}]
    full: list[Any] = [
        {"messages": [ask, answer | {"weight": 0, "name": "n"}], "system": "s"},
        {"instruction": "c", "response": "d", "context": "e", "history": [["f", "g"]]},
    ]
    tokenizer = texts.load_tokenizer(model, template=None)

    def data(rows: list[Any]) -> dict[str, Any]:
        chat = write_chat(tmp_path / "chat.jsonl", rows)
        asked = config(tmp_path / "run", model, chat, **{"data.val_fraction": 0.0})
        return texts.read_corpus(asked, tokenizer, context=128, default=None).train.fingerprint()

    expected = data(plain)
    assert data(full) != expected
    monkeypatch.setattr(texts, "behavior_in", lambda run: BUFFERS_IN_ORDER)
    assert data(full) == expected


def test_a_sample_asks_for_an_answer_that_is_trained(model: Path, tmp_path: Path) -> None:
    ask = {"role": "user", "content": "a?"}
    answer = {"role": "assistant", "content": "b"}
    other = {"role": "user", "content": "c?"}
    rows = [{"messages": [ask, answer | {"weight": 0}, other, answer]}]
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
    corpus = texts.read_corpus(config(None, model, place), tokenizer, context=128, default=None)
    assert (len(corpus.rows), len(corpus.held_out)) == (4, 2)
    off = config(None, model, place, **{"data.val_fraction": 0.0})
    corpus = texts.read_corpus(off, tokenizer, context=128, default=None)
    assert (len(corpus.rows), len(corpus.held_out)) == (4, 0)
    assert "read 1 of 2 files" in corpus.about


def test_padding_changes_no_loss(model: Path, chat: Path) -> None:
    run = finetune.build(config(None, model, chat, **{"lora.dropout": 0.0}))
    data = run.parts.pipeline.dataset
    ids = np.array([int(data.lengths.argmin()), int(data.lengths.argmax())])
    assert data.lengths[ids[0]] < data.lengths[ids[1]]
    net = run.state.model.eval()
    apart = []
    for one in ids:
        inputs_BT, targets_BT = data.gather(np.array([one]), np.zeros(1, np.int64))
        logits_BTV = net(input_ids=inputs_BT).logits
        apart.append(F.cross_entropy(logits_BTV[0], targets_BT[0], reduction="sum"))
    assert run.parts.task.loss is not None
    loss: Any = run.parts.task.loss(net, data.gather(ids, np.zeros(2, np.int64)))
    loss = loss[0]
    torch.testing.assert_close(loss.total, torch.stack(apart).sum(), rtol=1e-5, atol=1e-5)


# --- what a run leaves ----------------------------------------------------------------------------


def trained(run_dir: Path, model: Path, chat: Path, **changes: Any) -> sf.Run:
    """A finished run of the command, whose directory alone is enough to use it."""
    asked = config(run_dir, model, chat, **changes)
    run = finetune.build(asked)
    program = find_program("finetune")
    run.configuration = program.config_text(asked, {}, program.described)
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

    run = trained(tmp_path / "run", write_model(tmp_path / "base", family), chat, method=method)
    expected = logits(run.state.model)
    done = sf.load(tmp_path / "run").export()
    exported = AutoModelForCausalLM.from_pretrained(done.directory)
    assert exported.config.pad_token_id is None
    assert exported.config.use_cache
    torch.testing.assert_close(logits(exported), expected, rtol=1e-5, atol=1e-5)
    tokenizer = AutoTokenizer.from_pretrained(done.directory)
    assert tokenizer.chat_template == CHAT_TEMPLATE
    heads = exported.get_input_embeddings().weight, exported.get_output_embeddings().weight
    assert (heads[0] is heads[1]) == exported.config.tie_word_embeddings
    if method == "full":
        with refused("layout-without-adapter"):
            sf.load(tmp_path / "run").export(layout="peft")
        return
    from peft import AutoPeftModelForCausalLM

    adapter = sf.load(tmp_path / "run").export(tmp_path / "adapter", layout="peft")
    assert not (adapter.directory / "model.safetensors").exists()
    torch.testing.assert_close(
        logits(AutoPeftModelForCausalLM.from_pretrained(adapter.directory)), expected
    )


def test_it_answers_a_prompt_and_a_file_of_prompts(
    model: Path, chat: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once it has learnt the answers by heart, with a cache and without, in a batch and alone."""
    rows = [
        {"instruction": f"Say {word}", "response": f"{word} {word}"}
        for word in ("one", "two", "six")
    ]
    chat = write_chat(tmp_path / "few.jsonl", rows)
    learnt = {
        "length": "60 steps",
        "method": "full",
        "optimizer.lr": 1e-2,
        "data.val_fraction": 0.0,
    }
    directory = write_model(tmp_path / "base", attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0)
    run_dir = tmp_path / "run"
    run = trained(
        run_dir, directory, chat, **learnt, evaluate_every="60 steps", save_every="60 steps"
    )
    sample = run.sample()
    assert sample == "Say one\n  reference: one one\n  output:    one one"
    asked = config(run_dir, directory, chat, **learnt)
    program = find_program("finetune")
    (tmp_path / "prompts.txt").write_text("Say six\nSay two\n")

    def answers(*inputs: str, **options: Any) -> str:
        request = program.names["Predict"](temperature=0.0, **options)
        checkpoint = choose_checkpoint(run_dir, None)
        return "".join(
            program.names["predict"](asked, request, inputs, run=run_dir, checkpoint=checkpoint)
        )

    assert answers("Say two") == "two two\n"
    lines = answers("Say one", file=str(tmp_path / "prompts.txt")).splitlines()
    assert [json.loads(line)["answer"] for line in lines] == ["one one", "six six", "two two"]
    with refused("predict-without-input"):
        answers()
    with refused("prompt-too-long", context=128):
        answers("Say two. " * 90)

    class Terminal(StringIO):
        def isatty(self) -> bool:
            return True

    prompts = list[Any]()
    tokens_of = predict_module.prompt_tokens
    monkeypatch.setattr(
        predict_module,
        "prompt_tokens",
        lambda owner, turns: (prompts.append(turns), tokens_of(owner, turns))[1],
    )
    monkeypatch.setattr(
        "sys.stdin", Terminal("Say two\n\n" + "Say one. " * 90 + "\nSay six\nSay one\n" * 3)
    )
    lines = answers(max_new_tokens=8).splitlines()
    assert "Ctrl-D" in lines[0]
    assert lines[1] == "> two two"
    assert lines[2].startswith("> > (")
    assert numbers_in(lines[2])[1:] == [128]  # tokens of the line, and of the model
    assert any(line.startswith("> (") for line in lines[3:])  # the context is full
    assert lines[-1] == "> "
    assert ["Say two", "two two", "Say six"] in [
        [each["content"] for each in turns] for turns in prompts
    ]

    class Interrupted(Terminal):
        def readline(self, _: int | None = -1) -> str:  # type: ignore[override]
            if not (line := super().readline()):
                raise KeyboardInterrupt
            return line

    def pieces(*_: Any) -> Iterator[str]:
        yield "two"
        raise KeyboardInterrupt

    monkeypatch.setattr("sys.stdin", Interrupted("Say two\nSay six\n"))
    monkeypatch.setattr(predict_module, "_pieces", pieces)
    assert answers().splitlines()[1:] == ["> two", "> two", "> "]
    assert [each["content"] for each in prompts[-1]] == ["Say two", "two", "Say six"]


def test_checkpoints_of_adapters_are_small(chat: Path, tmp_path: Path) -> None:
    """At most 2 % of a full one, in a model whose width is 192: rank 2, and AdamW's two moments of
    each adapter.
    """
    directory = write_model(
        tmp_path / "base", "llama", hidden_size=192, intermediate_size=512, num_hidden_layers=4
    )
    changes = {
        "length": "2 steps",
        "save_every": "1 steps",
        "evaluate_every": "2 steps",
        "sample_tokens": 0,
    }
    for method in ("lora", "full"):
        rank = (
            {"lora.rank": 1, "lora.target_modules": ("q_proj", "v_proj")}
            if method == "lora"
            else {}
        )
        trained(tmp_path / method, directory, chat, **changes, method=method, **rank)
    sizes = {
        method: sum(
            file.stat().st_size
            for file in (tmp_path / method / "checkpoints" / "step-00000002").iterdir()
        )
        for method in ("lora", "full")
    }
    assert sizes["lora"] <= 0.02 * sizes["full"], sizes


# --- kills ----------------------------------------------------------------------------------------


@pytest.mark.fast("lora")
@pytest.mark.parametrize("method", ["lora", "full"])
def test_stopped_and_resumed_without_the_directory_of_its_model(
    method: str, chat: Path, tmp_path: Path
) -> None:
    """All that a resume needs is in the run's directory."""
    directory = write_model(tmp_path / "base")
    whole = config(tmp_path / "whole", directory, chat, method=method)
    session_of(whole)
    session_of(config(tmp_path / "run", directory, chat, method=method, stop_after="5 steps"))
    for file in directory.iterdir():
        file.unlink()
    session_of(config(tmp_path / "run", directory, chat, method=method))
    assert outcome(tmp_path / "run") == outcome(tmp_path / "whole")


def session_of(asked: finetune.Config) -> None:
    run_dir = Path(str(asked.run_dir))
    with finetune.build(asked) as run:
        for step in run:
            with run_dir.with_suffix(".ids").open("a") as file:
                file.write(
                    f"[{step.index}, {[part.sample_ids.tolist() for part in step.micro_batches]}]\n"
                )


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


def status(processes: Ranks, **spec: Any) -> int:
    (ended,) = processes.outcomes(processes.start(1, session, spec=spec))
    assert ended.status in (0, -signal.SIGKILL), ended.text
    return ended.status


@pytest.mark.slow
@pytest.mark.parametrize("method", ["lora", "full"])
def test_killed_several_times_it_ends_with_the_same_bits(
    method: str, processes: Ranks, model: Path, chat: Path, tmp_path: Path
) -> None:
    spec = {"model": str(model), "chat": str(chat), "changes": {"method": method}}
    assert status(processes, run_dir=str(tmp_path / "whole"), **spec) == 0
    for kill in (
        {"operation": 12},
        {"pass": 3},
        {"pass": 6},
        {"operation": 40},
        {"pass": 3},
        {"operation": 25},
    ):
        assert (
            status(processes, run_dir=str(tmp_path / "run"), **spec, **kill) == -signal.SIGKILL
        ), kill
    assert status(processes, run_dir=str(tmp_path / "run"), **spec) == 0
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


def test_wrong_settings_are_refused(model: Path, chat: Path) -> None:
    wrong = {
        "tokens-exceed-context": {"data.max_tokens": 129},
        "lora-without-layers": {"lora.target_modules": ("q_proj",)},
        "lora-of-no-modules": {"lora.target_modules": ()},
        "lora-without-effect": {"method": "full", "lora.rank": 3},
        "init-from-without-effect": {"init_from": "runs/a"},
    }
    for code, changes in wrong.items():
        assert refusal(model, chat, **changes) == code
    for name, value in {"lora.rank": 0, "lora.alpha": 0.0, "lora.dropout": 1.0}.items():
        assert refusal(model, chat, **{name: value}) == "setting-out-of-range"
    assert refusal(model, Path("absent.jsonl")) == "path-missing"
    for size in ({}, {"batch_size": 4, "micro_batch_size": 2}):
        assert refusal(model, chat, compile=True, **size) == "compile-of-many-shapes"


def test_long_conversations_are_cut_at_their_end_skipped_or_refused(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [{"instruction": "a", "response": "b"}, {"instruction": "a", "response": "b " * 80}]
    rows += [{"instruction": "a " * 80, "response": "b"}]
    chat = write_chat(tmp_path / "chat.jsonl", rows)
    changes: dict[str, Any] = {"data.val_fraction": 0.0, "data.max_tokens": 40}
    data = finetune.build(config(None, model, chat, **changes)).parts.pipeline.dataset
    assert len(data) == 2
    assert data.lengths.max() == 39
    first = texts.load_tokenizer(model, template=None).decode(
        data.tokens[data.starts[1] : data.starts[1] + 39]
    )
    assert first.startswith("<|user|>\na<|endoftext|>\n<|assistant|>\nb b ")
    assert [1, 3, 40, 1] in [numbers_in(line) for line in capsys.readouterr().err.splitlines()]
    data = finetune.build(
        config(None, model, chat, **changes, **{"data.on_long": "skip"})
    ).parts.pipeline.dataset
    assert len(data) == 1
    assert refusal(model, chat, **changes, **{"data.on_long": "error"}) == "conversation-too-long"
    only = write_chat(tmp_path / "only.jsonl", rows[2:])
    assert refusal(model, only, **changes) == "conversations-without-answer-in-limit"


def test_templates(model: Path, chat: Path, tmp_path: Path) -> None:
    """The tokenizer's own, a file, or a default, which needs an end token; padding needs no token
    of its own.
    """
    file = tmp_path / "template.jinja"
    file.write_text("{{ raise_exception('no roles here') }}")
    assert refusal(model, chat, **{"data.template": str(file)}) == "template-fails"
    assert refusal(model, chat, **{"data.template": "absent.jinja"}) == "template-unreadable"
    file.write_text(
        "{{ messages[-1]['content'] }}"
    )  # what stands before an answer is no part of the text
    only = write_chat(tmp_path / "only.jsonl", [{"instruction": "a", "response": "b"}])
    without_prompt = {"data.template": str(file), "data.val_fraction": 0.0}
    assert refusal(model, only, **without_prompt) == "template-prompt-not-in-text"
    bare = write_model(tmp_path / "bare", chat_template=None)
    tokenizer = texts.load_tokenizer(bare, template=None)
    assert tokenizer.pad_token is None
    row = read_conversations(str(chat), setting="data.path").rows[0]
    text, [(start, end)] = rendered(tokenizer, row, train_on="answers")
    assert (text[:start], text[start:end]) == (
        "User: What is 0 plus 4?\nAssistant:",
        " 0 plus 4 is 4.<|endoftext|>\n",
    )
    settings = json.loads((bare / "tokenizer_config.json").read_text())
    del settings["eos_token"]
    (bare / "tokenizer_config.json").write_text(json.dumps(settings))
    assert refusal(bare, chat) == "tokenizer-without-template"


def test_a_template_that_rewrites_earlier_answers_needs_the_last_alone(
    model: Path, chat: Path, tmp_path: Path
) -> None:
    """As those that leave out what a model thought before its earlier answers."""
    file = tmp_path / "template.jinja"
    file.write_text(
        "{% for message in messages %}{{ message['role'] }}:"
        "{% if message['role'] == 'assistant' and loop.last %}<think></think>{% endif %}{{ message['content'] }}{{ eos_token }}\n{% endfor %}"
        "{% if add_generation_prompt %}assistant:{% endif %}"
    )
    assert refusal(model, chat, **{"data.template": str(file)}) == "template-rewrites-answers"
    finetune.build(
        config(None, model, chat, **{"data.template": str(file), "data.train_on": "last"})
    )


@pytest.mark.slow
def test_a_plan_without_a_model_trains_and_writes_nothing(
    chat: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its parameters are those of the small GPT that a run would train first."""
    monkeypatch.chdir(tmp_path)
    main(
        [
            "plan",
            "finetune",
            "--data.path",
            str(chat),
            "--length",
            "2 steps",
            "--batch-size",
            "64 tokens",
        ]
    )
    assert list(tmp_path.iterdir()) == []
    plan = capsys.readouterr()
    assert "runs/finetune-base" in plan.err
    assert "1,088,256 frozen  1,219,328" in plan.out
    assert (
        documentation.small_config().vocab_size
        == gpt_corpus.read_corpus(gpt.Data()).tokenizer.vocab_size
    )


@pytest.mark.slow
def test_questions_on_the_standard_library() -> None:
    rows = {
        row.messages[0]["content"]: row.messages[1]["content"] for row in documentation.questions()
    }
    assert rows["What is the module fnmatch for?"] == "Filename matching with shell patterns."
    assert len(rows) > 1000
