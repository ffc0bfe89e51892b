"""The gpt recipe: its configurations, what it scores, and that watching it changes nothing; 15
seconds.
"""

from __future__ import annotations

import json
import math
import shutil
import typing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import surefoot as sf
from refused import refused, refused_change
from stated import lines_naming, numbers_in
from surefoot.cli.main import main
from surefoot.config.tree import layered
from surefoot.data.text import token_cache
from surefoot.program import find_program
from surefoot.recipes import gpt
from surefoot.recipes.gpt.corpus import read_corpus
from surefoot.recipes.shared_errors import read_inputs
from surefoot.tracking.jsonl import records

SENTENCE = (
    "the cat sat on the mat and the dog ran to the cat "
    "while a bird sang in the old tree by the river bank"
)
WORDS = SENTENCE.split()


def text(words: int = 4000) -> str:
    generator = np.random.default_rng(0)
    return " ".join(WORDS[place] for place in generator.integers(len(WORDS), size=words)) + "\n"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    file = tmp_path / "text.txt"
    file.write_text(text())
    return file


def config(path: Path | None, **changes: Any) -> gpt.Config:
    small = {
        "run_dir": None,
        "length": "6 steps",
        "evaluate_every": "6 steps",
        "data.path": None if path is None else str(path),
        "data.vocab_size": 300 if changes.get("data.tokenizer", "bpe") == "bpe" else None,
        "model.layers": 1,
        "model.width": 16,
        "model.heads": 2,
        "model.context": 32,
        "sample_tokens": 8,
        "cloze_questions": 12,
        "report": False,
    }
    return layered(gpt.Config, [("test", small | changes)])[0]


def build(path: Path | None, **changes: Any) -> sf.Run:
    return gpt.build(config(path, **changes))


def train(path: Path | None, **changes: Any) -> sf.Run:
    run = build(path, **changes)
    run.train()
    return run


def assert_equal_weights(one: sf.Run, other: sf.Run) -> None:
    of_one = dict(one.state.models["model"].state_dict())
    of_other = dict(other.state.models["model"].state_dict())
    torch.testing.assert_close(of_one, of_other, rtol=0, atol=0)


def write_tokenizer(file: Path, tokenizer: Any) -> str:
    """Returns the text of the file."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(tokenizer.to_json())
    return file.read_text()


def other_tokenizer() -> sf.tokenizers.BPETokenizer:
    return sf.tokenizers.BPETokenizer.train(["something else entirely " * 9], vocab_size=270)


# --- scores ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("tokenizer", ["bpe", "bytes", "characters"])
def test_perplexity_and_bits_per_byte_are_those_of_the_held_out_text(
    tokenizer: str, path: Path
) -> None:
    """From the model's own logits, window by window, in float64."""
    run = train(path, **{"data.tokenizer": tokenizer})

    scores = run.evaluate()

    held_out = text()[-round(0.05 * len(text())) :]
    corpus = read_corpus(gpt.Data(path=str(path), tokenizer=tokenizer, vocab_size=300))
    tokens = torch.from_numpy(corpus.val.astype(np.int64))
    nats = 0.0
    model = run.state.models["model"].eval()
    with torch.no_grad():
        for first in range(0, len(tokens) - 1, 32):
            window = tokens[first : first + 33]
            logits = model(window[None, :-1]).double()
            nats += float(F.cross_entropy(logits[0], window[1:], reduction="sum"))
    first_bytes = int(corpus.tokenizer.byte_counts[int(tokens[0])])
    predicted_bytes = (
        len(held_out.encode()) - first_bytes
    )  # the first token is predicted from nothing
    loss = nats / (len(tokens) - 1)
    bits_per_byte = nats / math.log(2) / predicted_bytes
    assert scores["val/loss"] == pytest.approx(loss, rel=1e-5)
    assert scores["val/perplexity"] == pytest.approx(math.exp(loss), rel=1e-4)
    assert scores["val/bits_per_byte"] == pytest.approx(bits_per_byte, rel=1e-5)


def test_a_part_of_the_held_out_text_is_evaluated_while_training_and_all_of_it_at_the_end(
    path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A resume may evaluate another part, which it says; bits per byte are those of the part's own
    text.
    """
    settings: dict[str, Any] = {"data.tokenizer": "characters", "length": "4 steps"}
    run_dir = tmp_path / "run"
    train(path, run_dir=run_dir, val_tokens=100, stop_after="2 steps", **settings)
    capsys.readouterr()

    run = train(path, run_dir=run_dir, val_tokens=200, **settings)

    assert len(lines_naming(capsys.readouterr().out, "note: ", " val ")) == 1
    all_records = records(run_dir / "metrics.jsonl")
    (final,) = [record for record in all_records if record["kind"] == "final_eval"]
    of_all = train(path, **settings).evaluate()
    assert final["val_all/loss"] == pytest.approx(of_all["val/loss"], rel=1e-6)
    assert final["val_all/bits_per_byte"] == pytest.approx(of_all["val/bits_per_byte"], rel=1e-6)
    assert run.splits is not None
    assert len(run.splits["val"].data) == 7  # of 32 tokens


@pytest.mark.slow
def test_a_model_that_has_learned_something_answers_the_questions(path: Path) -> None:
    """Eight languages of eight letters each take turns every 200 words: an ending is mostly in the
    language before it.
    """
    generator = np.random.default_rng(0)
    letters = [chr(code) for code in range(ord("A"), ord("A") + 64)]
    words = []
    for language in generator.integers(8, size=60):
        letters_of_language = letters[8 * language : 8 * language + 8]
        for _ in range(200):
            words.append("".join(generator.choice(letters_of_language, size=3)))
    path.write_text(" ".join(words))
    changes = {
        "length": "150 steps",
        "evaluate_every": "150 steps",
        "cloze_questions": 60,
        "optimizer.lr": 1e-2,
        "data.val_fraction": 0.3,
    }

    scores = train(path, **changes, **{"data.tokenizer": "characters"}).evaluate()

    assert scores["cloze/accuracy"] > 0.6  # chance is 0.25, three standard errors are 0.17


# --- law 5 with everything that the recipe can watch ----------------------------------------------


@pytest.mark.parametrize(
    "changes",
    [
        {"sample_every": "1 steps"},
        {"cloze_questions": 0, "sample_tokens": 0},
        {"evaluate_every": "1 steps", "log_every": "1 steps"},
    ],
    ids=str,
)
def test_sampling_and_scoring_change_no_bit(changes: dict[str, Any], path: Path) -> None:
    noisy = {"model.dropout": 0.2}
    plain = train(path, **noisy)
    watched = train(path, **noisy, **changes)
    assert_equal_weights(plain, watched)


def test_samples_are_shown_as_often_as_asked_for_and_at_the_end(
    path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train(path, sample_every="2 steps", sample_count=2)

    text_printed = capsys.readouterr().out
    assert text_printed.count("--- 2 of 2 ---") == 3
    headings = [numbers_in(line) for line in lines_naming(text_printed, "--- ", "0.7")]
    assert [step for step, *_ in headings] == [2, 4, 6]
    for *_, temperature, seed in headings:
        assert temperature == 0.7
        assert seed == 0


# --- the tokenizer --------------------------------------------------------------------------------


def test_inputs_that_cannot_be_read_are_refused_as_other_files(tmp_path: Path) -> None:
    with refused("file-unreadable", sf.DataError, path=tmp_path / "missing.txt"):
        read_inputs(tmp_path / "missing.txt")


def test_a_run_goes_on_with_the_tokenizer_it_began_with(path: Path, tmp_path: Path) -> None:
    run_dir = str(tmp_path / "run")
    train(path, run_dir=run_dir, stop_after="2 steps")
    saved = tmp_path / "run" / "tokenizer.json"
    as_it_began = saved.read_text()

    write_tokenizer(saved, other_tokenizer())
    with refused("data-changed", sf.CheckpointError):
        train(path, run_dir=run_dir)

    saved.write_text("{")
    with refused("run-file-damaged", sf.CheckpointError, path=saved) as caught:
        build(path, run_dir=run_dir)
    assert caught.value.fields["cause"]["error"] == "DataError"

    saved.write_text(as_it_began)
    assert train(path, run_dir=run_dir).state.step == 6


def test_another_tokenizer_at_resume_is_refused_by_its_name(path: Path, tmp_path: Path) -> None:
    """The run's own is used, so the tokens would be the same: the setting must not be ignored in
    silence.
    """
    run_dir = str(tmp_path / "run")
    train(path, run_dir=run_dir, stop_after="2 steps")
    with refused("settings-changed", sf.CheckpointError):
        train(path, run_dir=run_dir, **{"data.vocab_size": 280})


def test_weights_change_what_a_resume_compares_only_if_no_tokenizer_is_named(
    path: Path, tmp_path: Path
) -> None:
    def chosen(tokenizer: str | None, init: Path | None) -> str:
        data = gpt.Data(path=str(path), tokenizer=tokenizer, vocab_size=300, cache=False)
        return read_corpus(data, init=init).chosen

    without_run = tmp_path / "weights.safetensors"
    assert chosen("bpe", without_run) == chosen("bpe", None) == chosen(None, None)
    assert chosen(None, without_run) != chosen(None, None)


@pytest.mark.fast(".")
@pytest.mark.parametrize(
    "where", [".", "checkpoints/step-00000006", "checkpoints/step-00000006/model.safetensors"]
)
def test_loaded_weights_keep_the_tokenizer_that_gives_them_their_meaning(
    where: str, path: Path, tmp_path: Path
) -> None:
    first_dir = tmp_path / "first"
    second_dir = tmp_path / "second"
    train(path, run_dir=str(first_dir))
    tokenizer = (first_dir / "tokenizer.json").read_text()
    other = tmp_path / "other.txt"
    other.write_text("a quite different text, " * 900)
    settings = {
        "run_dir": str(second_dir),
        "init_from": str(first_dir / where),
        "data.tokenizer": None,
        "data.vocab_size": None,
    }

    train(other, stop_after="2 steps", **settings)
    assert (second_dir / "tokenizer.json").read_text() == tokenizer

    shutil.rmtree(first_dir)  # a run goes on without the one it began from
    assert train(other, **settings).state.step == 6


def test_loaded_weights_get_a_tokenizer_of_the_text_if_one_is_named(
    path: Path, tmp_path: Path
) -> None:
    train(path, run_dir=str(tmp_path / "first"))
    other = tmp_path / "other.txt"
    other.write_text("a quite different text, " * 900)

    run = build(other, init_from=str(tmp_path / "first"), **{"data.tokenizer": "bpe"})

    of_weights = (tmp_path / "first" / "tokenizer.json").read_text()
    assert run.parts.files["tokenizer.json"] != of_weights


def test_a_run_names_the_directory_that_keeps_its_tokens_and_resumes_without_one(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(token_cache, "MIN_CHARACTERS", 1000)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    run_dir = str(tmp_path / "run")

    first = train(path, run_dir=run_dir, stop_after="3 steps")
    of_text, of_tokens = first.parts.settings.data_summary[0].split(", ")
    assert of_text.split()[-1] == str(path)
    assert of_tokens.split()[-1] == f"{tmp_path}/cache/surefoot/tokens"

    shutil.rmtree(tmp_path / "cache")
    resumed = train(path, run_dir=run_dir, **{"data.cache": False})
    assert resumed.parts.settings.data_summary[0] == of_text
    assert resumed.state.step == 6
    assert not (tmp_path / "cache").exists()
    assert "cache" not in json.dumps(resumed.parts.plan.identity)


def test_a_vocabulary_for_weights_that_have_one_is_refused(path: Path, tmp_path: Path) -> None:
    first_dir = str(tmp_path / "first")
    train(path, run_dir=first_dir)
    with refused("vocab-size-without-effect", value=280):
        build(path, init_from=first_dir, **{"data.tokenizer": None, "data.vocab_size": 280})


def test_a_tokenizer_s_file_may_be_of_any_kind_and_another_at_its_place_is_noticed(
    path: Path, tmp_path: Path
) -> None:
    file = tmp_path / "characters.json"
    settings = {"run_dir": str(tmp_path / "run"), "data.tokenizer": str(file)}
    written = write_tokenizer(file, sf.tokenizers.CharacterTokenizer.from_text(text() + "!"))

    run = train(path, stop_after="2 steps", **settings)
    assert run.parts.files["tokenizer.json"] == written

    write_tokenizer(file, sf.tokenizers.CharacterTokenizer.from_text(text() + "?"))
    with refused("settings-changed", sf.CheckpointError):
        train(path, **settings)


def test_a_run_goes_on_where_the_tokenizer_s_file_is_gone(path: Path, tmp_path: Path) -> None:
    """Its own copy is what it uses."""
    file = tmp_path / "characters.json"
    settings = {"run_dir": str(tmp_path / "run"), "data.tokenizer": str(file)}
    write_tokenizer(file, sf.tokenizers.CharacterTokenizer.from_text(text() + "!"))
    train(path, stop_after="2 steps", **settings)

    file.unlink()

    assert train(path, **settings).state.step == 6


def test_only_a_tokenizer_that_belongs_to_the_weights_is_taken(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    trained = train(path, run_dir="first").parts.files["tokenizer.json"]
    Path("deep/weights").mkdir(parents=True)
    weights_file = Path("first/checkpoints/step-00000006/model.safetensors")
    shutil.copy(weights_file, "deep/weights/x.safetensors")
    settings = {
        "init_from": "deep/weights/x.safetensors",
        "data.tokenizer": None,
        "data.vocab_size": None,
    }

    of_something_else = sf.tokenizers.CharacterTokenizer.from_text("abc")
    write_tokenizer(Path("tokenizer.json"), of_something_else)
    assert '"kind": "bpe"' in build(path, **settings).parts.files["tokenizer.json"]

    as_others_write_it = json.dumps(json.loads(trained)["tokenizer"])
    Path("deep/weights/tokenizer.json").write_text(as_others_write_it)
    assert build(path, **settings).parts.files["tokenizer.json"] == trained


def test_a_text_that_repeats_itself_is_trained_on_without_questions(tmp_path: Path) -> None:
    file = tmp_path / "text.txt"
    file.write_text("ab" * 9000)
    characters = {"data.tokenizer": "characters"}

    run = build(file, cloze_questions=None, **characters)
    assert list(run.parts.evaluator.splits) == ["val"]

    with refused("held-out-text-repetitive", sf.DataError):
        build(file, cloze_questions=10, **characters)


def test_evaluate_scores_with_the_run_s_own_tokenizer(
    path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Byte pairs trained again on a text that has changed would be other ones; and that the text
    has changed is said.
    """
    run_dir = str(tmp_path / "run")
    flags = [
        f"--data.path={path}",
        f"--run-dir={run_dir}",
        "--length=6 steps",
        "--cloze-questions=0",
        "--model.layers=1",
        "--model.width=16",
        "--model.heads=2",
        "--model.context=32",
        "--data.vocab-size=300",
    ]
    main(["train", "gpt", *flags])
    capsys.readouterr()

    main(["evaluate", run_dir])
    before = capsys.readouterr()
    assert before.err == f"evaluating step 6 of {run_dir} on val\n"

    cut = len(text()) - round(0.05 * len(text()))  # what is held out stays
    path.write_text("q" * cut + text()[cut:])
    main(["evaluate", run_dir])
    after = capsys.readouterr()
    assert after.out == before.out
    assert len(after.err.splitlines()) == len(before.err.splitlines()) + 1
    assert len(lines_naming(after.err, "warning: ")) == 1


def test_a_sample_of_a_model_that_overflows_is_a_warning_and_the_run_ends_saved(
    path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def overflow(*arguments: Any, **settings: Any) -> list[int]:
        raise sf.DivergedError("overflowed")

    monkeypatch.setattr(sf.generate, "sample", overflow)

    train(path, run_dir=str(tmp_path / "run"), sample_every="2 steps")

    warnings = lines_naming(capsys.readouterr().out, "warning: ")
    assert [line.rpartition(": ")[2] for line in warnings] == ["overflowed"] * 3
    assert (tmp_path / "run" / "checkpoints" / "step-00000006").is_dir()


def test_the_last_step_is_saved_before_a_sample_is_tried(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: Any, **settings: Any) -> list[int]:
        raise ZeroDivisionError

    monkeypatch.setattr(sf.generate, "sample", fail)
    with pytest.raises(ZeroDivisionError):
        train(path, run_dir=str(tmp_path / "run"))
    assert (tmp_path / "run" / "checkpoints" / "step-00000006").is_dir()


def test_a_tokenizer_left_by_a_run_that_never_began_is_not_taken_over(
    path: Path, tmp_path: Path
) -> None:
    file = tmp_path / "run" / "tokenizer.json"
    written = write_tokenizer(file, other_tokenizer())
    with refused("directory-has-other-files", files=["tokenizer.json"]):
        train(path, run_dir=str(tmp_path / "run"))
    assert file.read_text() == written


def test_the_tokenizer_is_made_from_what_is_trained_on_alone(path: Path) -> None:
    path.write_text(text() + "zzqzzq " * 200)  # only in the held-out end
    assert "zzq" not in build(path).parts.files["tokenizer.json"]


def test_shards_are_trained_on_with_the_tokenizer_that_made_them(
    path: Path, tmp_path: Path
) -> None:
    shards = tmp_path / "shards"
    tokens = sf.tokenizers.ByteTokenizer().encode(text())
    sf.data.write_shards(tokens, shards, vocab_size=257, shard_tokens=7000)

    of_shards = train(shards, **{"data.tokenizer": "bytes"}).evaluate()
    of_text = train(path, **{"data.tokenizer": "bytes"}).evaluate()

    assert of_shards["val/bits_per_byte"] == pytest.approx(of_text["val/bits_per_byte"], abs=0.5)
    with refused("token-files-without-tokenizer", path=shards):
        build(shards)


def test_shards_are_not_trained_on_with_another_tokenizer_than_lies_beside_them(
    path: Path, tmp_path: Path
) -> None:
    shards = tmp_path / "shards"
    weights = tmp_path / "weights"
    of_shards = sf.tokenizers.BPETokenizer.train([text()], vocab_size=300)
    of_weights = sf.tokenizers.BPETokenizer.train([text()], vocab_size=310)
    sf.data.prepare_shards(shards, [path], tokenizer=of_shards, processes=1)
    write_tokenizer(weights / "tokenizer.json", of_weights)
    settings: dict[str, Any] = {"data.vocab_size": None, "cloze_questions": 0}

    for other in ({"data.tokenizer": str(weights)}, {"init_from": str(weights)}):
        with refused("tokenizer-of-other-shards", path=shards):
            build(shards, **settings, **other)
    for same in ({}, {"data.tokenizer": str(shards)}):
        run = build(shards, **settings, **same)
        assert run.parts.files["tokenizer.json"] == of_shards.to_json()


@pytest.mark.parametrize("only_file", ["prepare.json", "shard-00000.bin"])
def test_unfinished_shards_are_called_so(only_file: str, path: Path, tmp_path: Path) -> None:
    shards = tmp_path / "shards"
    sf.data.prepare_shards(shards, [path], tokenizer=sf.tokenizers.ByteTokenizer(), processes=1)
    for file in shards.iterdir():
        if file.name != only_file:
            file.unlink()
    with refused("token-shards-unfinished", sf.DataError):
        build(shards)


# --- settings -------------------------------------------------------------------------------------


def test_all_that_is_wrong_is_told_at_once_before_the_text_is_read(tmp_path: Path) -> None:
    wrong = {
        "data.tokenizer": "bytes",
        "data.vocab_size": 512,
        "model.heads": 3,
        "optimizer.momentum": 0.9,
        "schedule.power": 2.0,
        "clip": "norm -1",
    }
    with pytest.raises(sf.ConfigError) as caught:
        build(tmp_path / "no such file", **wrong)
    message = str(caught.value)
    for name in ("vocab_size", "heads", "momentum", "power", "clip"):
        assert name in message
    assert len(caught.value.problems) == 5


@pytest.mark.parametrize(("shape", "percent"), [("one_cycle", 30), ("cosine", 5), ("constant", 5)])
def test_a_warmup_that_is_not_given_is_that_of_the_shape(
    shape: str, percent: int, path: Path
) -> None:
    run = build(path, length="100 steps", **{"schedule.name": shape})
    assert run.parts.plan.schedule.warmup == percent


def test_other_weights_to_start_from_are_another_run(path: Path, tmp_path: Path) -> None:
    """A run that has begun does not load them again: without an error they would be ignored."""
    first_dir = str(tmp_path / "first")
    run_dir = str(tmp_path / "run")
    train(path, run_dir=first_dir)
    train(path, run_dir=run_dir, stop_after="2 steps")
    with refused_change("init_from", "None"):
        train(path, run_dir=run_dir, init_from=first_dir)


def test_a_warmup_in_epochs_is_not_measured_before_the_data_are_known(path: Path) -> None:
    run = build(path, length="60 steps", **{"schedule.warmup": "1 epochs"})
    assert 1 < run.parts.plan.schedule.warmup < 60


def test_an_empty_prompt_is_refused_before_training(path: Path) -> None:
    with refused("prompt-empty"):
        build(path, sample_prompt="", **{"data.tokenizer": "bytes"})


def test_a_prompt_that_the_tokenizer_does_not_know_is_refused_before_training(path: Path) -> None:
    with refused("character-unknown", sf.DataError):
        build(path, sample_prompt="Q", **{"data.tokenizer": "characters"})


def test_a_run_whose_tokenizer_is_gone_is_not_resumed_with_another(
    path: Path, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    train(path, run_dir=str(run_dir), stop_after="2 steps")
    (run_dir / "tokenizer.json").unlink()
    with refused("run-file-missing", sf.CheckpointError):
        build(path, run_dir=str(run_dir))


@pytest.mark.parametrize("name", gpt.PRESETS)
def test_a_preset_is_a_complete_configuration_whose_model_can_be_built(name: str) -> None:
    asked = layered(gpt.Config, [("preset", gpt.PRESETS[name])])[0]
    shape = gpt.network_shape(asked, vocab_size=50257)
    with torch.device("meta"):
        model = sf.models.GPT(shape)
    assert sum(parameter.numel() for parameter in model.parameters()) == shape.parameters
    asked.optimizer.spec()
    asked.schedule.spec()


@pytest.mark.parametrize("name", ["shakespeare", "gpt2-124m", "gpt2-1558m", "modern-124m"])
def test_a_preset_for_other_text_does_not_train_on_the_standard_library(name: str) -> None:
    asked = layered(gpt.Config, [("preset", gpt.PRESETS[name]), ("flag", {"preset": name})])[0]
    with refused("preset-without-data", value=name):
        gpt.build(asked)


@pytest.mark.parametrize(
    ("name", "millions"),
    [
        ("gpt2-124m", 124.4),
        ("gpt2-350m", 354.8),
        ("gpt2-774m", 774.0),
        ("gpt2-1558m", 1557.6),
        ("modern-124m", 123.5),
    ],
)
def test_presets_have_the_sizes_they_are_called_after(name: str, millions: float) -> None:
    asked = layered(gpt.Config, [("preset", gpt.PRESETS[name])])[0]
    shape = gpt.network_shape(asked, vocab_size=50257)
    assert shape.parameters / 1e6 == pytest.approx(millions, abs=0.06)


def test_the_names_of_presets_are_those_that_help_shows() -> None:
    hint = typing.get_type_hints(gpt.Config)["preset"]
    names, _ = typing.get_args(hint)
    assert {*typing.get_args(names)} == {*gpt.PRESETS}


def test_the_default_preset_is_tiny_and_no_other_preset_has_its_settings() -> None:
    program = find_program("gpt")
    assert program.preset(None) == program.preset("tiny") == gpt.PRESETS["tiny"]
    for name in {*gpt.PRESETS} - {"tiny", "shakespeare"}:
        asked = layered(gpt.Config, [("preset", program.preset(name))])[0]
        assert asked.optimizer.name == "adamw"
        assert asked.schedule.name == "cosine"
        assert asked.model.smear is False
        assert asked.model.ngrams == 1
        assert asked.cloze_questions == 200


@pytest.mark.parametrize("preset", ["tiny", "shakespeare"])
def test_another_family_drops_what_a_preset_adds_to_its_own(preset: str) -> None:
    values = gpt.PRESETS[preset]
    heads = values["model.heads"]
    context = values.get("model.context", 128)

    asked, origins = layered(gpt.Config, [("preset", values), ("flag", {"model.family": "gpt2"})])

    assert asked.model == gpt.Model(family="gpt2", heads=heads, context=context)
    assert origins["model.smear"] == "default"
    assert gpt.network_shape(asked, vocab_size=300).tie_embeddings


@pytest.mark.parametrize("preset", ["tiny", "shakespeare"])
def test_a_setting_of_another_family_that_is_typed_is_refused(preset: str) -> None:
    flags = {"model.family": "gpt2", "model.smear": True}
    asked = layered(gpt.Config, [("preset", gpt.PRESETS[preset]), ("flag", flags)])[0]
    with refused("model-shape-impossible"):
        gpt.network_shape(asked, vocab_size=300)


def test_rows_of_tables_that_are_not_there_are_refused() -> None:
    with refused("ngram-buckets-without-ngrams", value=100):
        gpt.check(gpt.Config(model=gpt.Model(ngram_buckets=100)))


def test_tables_of_n_grams_have_a_usual_number_of_rows() -> None:
    asked = gpt.Config(model=gpt.Model(ngrams=2))
    assert gpt.network_shape(asked, vocab_size=500).ngram_buckets == 32768


def tiny_with(source: str, **values: Any) -> tuple[gpt.Config, Any]:
    """The preset "tiny" with other settings, and the origins of all."""
    return layered(gpt.Config, [("preset", gpt.PRESETS["tiny"]), (source, values)])


def test_without_n_grams_the_rows_of_the_preset_are_dropped() -> None:
    asked, origins = tiny_with("flag", **{"model.ngrams": 1})
    assert asked.model.ngram_buckets is None
    assert origins["model.ngram_buckets"] == "default"
    assert gpt.network_shape(asked, vocab_size=500).ngrams == 1


def test_with_other_n_grams_the_rows_of_the_preset_stay() -> None:
    asked, _ = tiny_with("flag", **{"model.ngrams": 3})
    assert asked.model.ngram_buckets == 8192


def test_without_n_grams_rows_that_are_typed_are_refused() -> None:
    asked, _ = tiny_with("file", **{"model.ngrams": 1, "model.ngram_buckets": 9})
    with refused("ngram-buckets-without-ngrams", value=9):
        gpt.network_shape(asked, vocab_size=500)
