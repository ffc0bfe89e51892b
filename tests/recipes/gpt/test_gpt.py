"""The gpt recipe: its configurations, what it scores, and that watching it changes nothing; 15
seconds.
"""

from __future__ import annotations

import dataclasses
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
from surefoot.config.tree import layered
from surefoot.data.text import token_cache
from surefoot.program import find_program
from surefoot.recipes import gpt
from surefoot.recipes.gpt.corpus import read_corpus
from surefoot.recipes.shared_errors import read_inputs

SENTENCE = "the cat sat on the mat and the dog ran to the cat while a bird sang in the old tree by the river bank"
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


def trained(asked: gpt.Config) -> sf.Run:
    run = gpt.build(asked)
    run.train()
    return run


def weights(run: sf.Run) -> dict[str, torch.Tensor]:
    return run.state.models["model"].state_dict()


# --- scores ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("tokenizer", ["bpe", "bytes", "characters"])
def test_perplexity_and_bits_per_byte_are_those_of_the_held_out_text(
    tokenizer: str, path: Path
) -> None:
    """From the model's own logits, window by window, in float64."""
    asked = config(path, **{"data.tokenizer": tokenizer})
    run = trained(asked)
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
    size = len(held_out.encode()) - first_bytes  # the first token is predicted from nothing
    assert scores["val/loss"] == pytest.approx(nats / (len(tokens) - 1), rel=1e-5)
    assert scores["val/perplexity"] == pytest.approx(math.exp(nats / (len(tokens) - 1)), rel=1e-4)
    assert scores["val/bits_per_byte"] == pytest.approx(nats / math.log(2) / size, rel=1e-5)


def test_a_part_of_the_held_out_text_is_evaluated_while_training_and_all_of_it_at_the_end(
    path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A resume may evaluate another part, which it says; bits per byte are those of the part's own
    text.
    """
    changes: dict[str, Any] = {
        "run_dir": tmp_path / "run",
        "data.tokenizer": "characters",
        "length": "4 steps",
    }
    trained(config(path, val_tokens=100, stop_after="2 steps", **changes))
    capsys.readouterr()
    run = trained(config(path, val_tokens=200, **changes))
    assert len(lines_naming(capsys.readouterr().out, "note: ", " val ")) == 1
    lines = [
        json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    ]
    (end,) = [line for line in lines if line["kind"] == "final_eval"]
    all_of_it = trained(config(path, **changes | {"run_dir": None})).evaluate()
    assert end["val_all/loss"] == pytest.approx(all_of_it["val/loss"], rel=1e-6)
    assert end["val_all/bits_per_byte"] == pytest.approx(all_of_it["val/bits_per_byte"], rel=1e-6)
    assert run.splits is not None
    assert len(run.splits["val"].data) == 7  # of 32 tokens


@pytest.mark.slow
def test_a_model_that_has_learned_something_answers_the_questions(path: Path) -> None:
    """Eight languages of eight letters each take turns every 200 words: an ending is mostly in the
    language before it.
    """
    generator = np.random.default_rng(0)
    letters = "".join(chr(code) for code in range(ord("A"), ord("A") + 64))
    stretches = [
        " ".join(
            "".join(generator.choice(list(letters[8 * kind : 8 * kind + 8]), size=3))
            for _ in range(200)
        )
        for kind in generator.integers(8, size=60)
    ]
    path.write_text(" ".join(stretches))
    changes = {
        "length": "150 steps",
        "evaluate_every": "150 steps",
        "cloze_questions": 60,
        "optimizer.lr": 1e-2,
        "data.val_fraction": 0.3,
    }
    scores = trained(config(path, **changes, **{"data.tokenizer": "characters"})).evaluate()
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
    plain = weights(trained(config(path, **noisy)))
    watched = weights(trained(config(path, **noisy, **changes)))
    assert [name for name in plain if not torch.equal(plain[name], watched[name])] == []


def test_samples_are_shown_as_often_as_asked_for_and_at_the_end(
    path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trained(config(path, sample_every="2 steps", sample_count=2))
    said = capsys.readouterr().out
    assert said.count("--- 2 of 2 ---") == 3
    headings = [line for line in lines_naming(said, "--- ") if "0.7" in line]
    assert [numbers_in(line)[0] for line in headings] == [2, 4, 6]
    assert [numbers_in(line)[-2:] for line in headings] == [[0.7, 0]] * 3  # temperature, seed


# --- the tokenizer --------------------------------------------------------------------------------


def test_inputs_that_cannot_be_read_are_refused_as_other_files(tmp_path: Path) -> None:
    with refused("file-unreadable", sf.DataError, path=tmp_path / "missing.txt"):
        read_inputs(tmp_path / "missing.txt")


def test_a_run_goes_on_with_the_tokenizer_it_began_with(path: Path, tmp_path: Path) -> None:
    asked = config(path, run_dir=str(tmp_path / "run"), stop_after="2 steps")
    trained(asked)
    saved = tmp_path / "run" / "tokenizer.json"
    before = saved.read_text()
    other = sf.tokenizers.BPETokenizer.train(["something else entirely " * 9], vocab_size=270)
    saved.write_text(other.to_json())
    with refused("data-changed", sf.CheckpointError):
        trained(dataclasses.replace(asked, stop_after=None))
    saved.write_text("{")
    with refused("run-file-damaged", sf.CheckpointError, path=saved) as caught:
        gpt.build(asked)
    assert caught.value.fields["cause"]["error"] == "DataError"
    saved.write_text(before)
    trained(dataclasses.replace(asked, stop_after=None))


def test_another_tokenizer_at_resume_is_refused_by_its_name(path: Path, tmp_path: Path) -> None:
    """The run's own is used, so the tokens would be the same: the setting must not be ignored in
    silence.
    """
    trained(config(path, run_dir=str(tmp_path / "run"), stop_after="2 steps"))
    with refused("settings-changed", sf.CheckpointError):
        trained(config(path, run_dir=str(tmp_path / "run"), **{"data.vocab_size": 280}))


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
    trained(config(path, run_dir=str(tmp_path / "first")))
    other = tmp_path / "other.txt"
    other.write_text("a quite different text, " * 900)
    changes = {
        "init_from": str(tmp_path / "first" / where),
        "data.tokenizer": None,
        "data.vocab_size": None,
    }
    asked = config(other, run_dir=str(tmp_path / "second"), **changes)
    trained(dataclasses.replace(asked, stop_after="2 steps"))
    held = (tmp_path / "first" / "tokenizer.json").read_text()
    assert (tmp_path / "second" / "tokenizer.json").read_text() == held
    shutil.rmtree(tmp_path / "first")  # a run goes on without the one it began from
    trained(asked)
    own = dataclasses.replace(asked.data, tokenizer="bpe", vocab_size=300)
    assert (
        gpt.build(dataclasses.replace(asked, data=own, run_dir=None)).parts.files["tokenizer.json"]
        != held
    )


def test_a_run_names_the_directory_that_keeps_its_tokens_and_resumes_without_one(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(token_cache, "MIN_CHARACTERS", 1000)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    settings: dict[str, Any] = {"run_dir": str(tmp_path / "run"), "stop_after": "3 steps"}
    first = trained(config(path, **settings))
    of_text, of_tokens = first.parts.settings.data_summary[0].split(", ")
    assert of_text.split()[-1] == str(path)
    assert of_tokens.split()[-1] == f"{tmp_path}/cache/surefoot/tokens"
    shutil.rmtree(tmp_path / "cache")
    resumed = trained(config(path, **settings | {"data.cache": False, "stop_after": None}))
    assert resumed.parts.settings.data_summary[0] == of_text
    assert resumed.state.step == 6
    assert not (tmp_path / "cache").exists()
    assert "cache" not in json.dumps(resumed.parts.plan.identity)


def test_a_vocabulary_for_weights_that_have_one_is_refused(path: Path, tmp_path: Path) -> None:
    trained(config(path, run_dir=str(tmp_path / "first")))
    with refused("vocab-size-without-effect", value=280):
        gpt.build(
            config(
                path,
                init_from=str(tmp_path / "first"),
                **{"data.tokenizer": None, "data.vocab_size": 280},
            )
        )


def test_a_tokenizer_s_file_may_be_of_any_kind_and_another_at_its_place_is_noticed(
    path: Path, tmp_path: Path
) -> None:
    file = tmp_path / "characters.json"
    file.write_text(sf.tokenizers.CharacterTokenizer.from_text(text() + "!").to_json())
    asked = config(
        path, run_dir=str(tmp_path / "run"), stop_after="2 steps", **{"data.tokenizer": str(file)}
    )
    assert trained(asked).parts.files["tokenizer.json"] == file.read_text()
    file.write_text(sf.tokenizers.CharacterTokenizer.from_text(text() + "?").to_json())
    with refused("settings-changed", sf.CheckpointError):
        trained(dataclasses.replace(asked, stop_after=None))


def test_a_run_goes_on_where_the_tokenizer_s_file_is_gone(path: Path, tmp_path: Path) -> None:
    """Its own copy is what it uses."""
    file = tmp_path / "characters.json"
    file.write_text(sf.tokenizers.CharacterTokenizer.from_text(text() + "!").to_json())
    asked = config(
        path, run_dir=str(tmp_path / "run"), stop_after="2 steps", **{"data.tokenizer": str(file)}
    )
    trained(asked)
    file.unlink()
    assert trained(dataclasses.replace(asked, stop_after=None)).state.step == 6


def test_only_a_tokenizer_that_belongs_to_the_weights_is_taken(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run = trained(config(path, run_dir="first"))
    Path("deep/weights").mkdir(parents=True)
    weights_file = Path("first/checkpoints/step-00000006/model.safetensors")
    shutil.copy(weights_file, "deep/weights/x.safetensors")
    Path("tokenizer.json").write_text(
        sf.tokenizers.CharacterTokenizer.from_text("abc").to_json()
    )  # of something else
    changes = {"data.tokenizer": None, "data.vocab_size": None}
    built = gpt.build(config(path, init_from="deep/weights/x.safetensors", **changes))
    assert '"kind": "bpe"' in built.parts.files["tokenizer.json"]
    library = json.dumps(json.loads(run.parts.files["tokenizer.json"])["tokenizer"])
    Path("deep/weights/tokenizer.json").write_text(library)  # as others write it
    built = gpt.build(config(path, init_from="deep/weights/x.safetensors", **changes))
    assert built.parts.files["tokenizer.json"] == run.parts.files["tokenizer.json"]


def test_a_text_that_repeats_itself_is_trained_on_without_questions(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("ab" * 9000)
    built = gpt.build(
        config(tmp_path / "text.txt", **{"data.tokenizer": "characters", "cloze_questions": None})
    )
    assert list(built.parts.evaluator.splits) == ["val"]
    with refused("held-out-text-repetitive", sf.DataError):
        gpt.build(
            config(tmp_path / "text.txt", **{"data.tokenizer": "characters", "cloze_questions": 10})
        )


def test_evaluate_scores_with_the_run_s_own_tokenizer(
    path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Byte pairs trained again on a text that has changed would be other ones; and that the text
    has changed is said.
    """
    from surefoot.cli.main import main

    small = [
        "--model.layers=1",
        "--model.width=16",
        "--model.heads=2",
        "--model.context=32",
        "--data.vocab-size=300",
    ]
    asked = [
        f"--data.path={path}",
        f"--run-dir={tmp_path / 'run'}",
        "--length=6 steps",
        "--cloze-questions=0",
        *small,
    ]
    main(["train", "gpt", *asked])
    capsys.readouterr()
    main(["evaluate", str(tmp_path / "run")])
    before = capsys.readouterr()
    assert before.err == f"evaluating step 6 of {tmp_path / 'run'} on val\n"
    cut = len(text()) - round(0.05 * len(text()))  # what is held out stays
    path.write_text("q" * cut + text()[cut:])
    main(["evaluate", str(tmp_path / "run")])
    after = capsys.readouterr()
    assert after.out == before.out
    assert len(after.err.splitlines()) == len(before.err.splitlines()) + 1
    assert len(lines_naming(after.err, "warning: ")) == 1


def test_a_sample_of_a_model_that_overflows_is_a_warning_and_the_run_ends_saved(
    path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def overflowed(*arguments: Any, **settings: Any) -> list[int]:
        raise sf.DivergedError("overflowed")

    monkeypatch.setattr(sf.generate, "sample", overflowed)
    trained(config(path, run_dir=str(tmp_path / "run"), sample_every="2 steps"))
    said = capsys.readouterr().out
    warnings = lines_naming(said, "warning: ")
    assert [line.rpartition(": ")[2] for line in warnings] == ["overflowed"] * 3
    assert (tmp_path / "run" / "checkpoints" / "step-00000006").is_dir()


def test_the_last_step_is_saved_before_a_sample_is_tried(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*arguments: Any, **settings: Any) -> list[int]:
        raise ZeroDivisionError

    monkeypatch.setattr(sf.generate, "sample", broken)
    with pytest.raises(ZeroDivisionError):
        trained(config(path, run_dir=str(tmp_path / "run")))
    assert (tmp_path / "run" / "checkpoints" / "step-00000006").is_dir()


def test_a_tokenizer_left_by_a_run_that_never_began_is_not_taken_over(
    path: Path, tmp_path: Path
) -> None:
    (tmp_path / "run").mkdir()
    other = sf.tokenizers.BPETokenizer.train(["something else entirely " * 9], vocab_size=270)
    (tmp_path / "run" / "tokenizer.json").write_text(other.to_json())
    with refused("directory-has-other-files", files=["tokenizer.json"]):
        trained(config(path, run_dir=str(tmp_path / "run")))
    assert (tmp_path / "run" / "tokenizer.json").read_text() == other.to_json()


def test_the_tokenizer_is_made_from_what_is_trained_on_alone(path: Path) -> None:
    path.write_text(text() + "zzqzzq " * 200)  # only in the held-out end
    run = gpt.build(config(path))
    assert "zzq" not in run.parts.files["tokenizer.json"]


def test_shards_are_trained_on_with_the_tokenizer_that_made_them(
    path: Path, tmp_path: Path
) -> None:
    sf.data.write_shards(
        sf.tokenizers.ByteTokenizer().encode(text()),
        tmp_path / "shards",
        vocab_size=257,
        shard_tokens=7000,
    )
    shards = config(tmp_path / "shards", **{"data.tokenizer": "bytes"})
    whole = config(path, **{"data.tokenizer": "bytes"})
    assert trained(shards).evaluate()["val/bits_per_byte"] == pytest.approx(
        trained(whole).evaluate()["val/bits_per_byte"], abs=0.5
    )
    with refused("token-files-without-tokenizer", path=tmp_path / "shards"):
        gpt.build(config(tmp_path / "shards"))


def test_shards_are_not_trained_on_with_another_tokenizer_than_lies_beside_them(
    path: Path, tmp_path: Path
) -> None:
    trained_here = sf.tokenizers.BPETokenizer.train([text()], vocab_size=300)
    sf.data.prepare_shards(tmp_path / "shards", [path], tokenizer=trained_here, processes=1)
    weights = tmp_path / "weights"
    weights.mkdir()
    (weights / "tokenizer.json").write_text(
        sf.tokenizers.BPETokenizer.train([text()], vocab_size=310).to_json()
    )
    plain = {"data.vocab_size": None, "cloze_questions": 0}
    for other in ({"data.tokenizer": str(weights)}, {"init_from": str(weights)}):
        with refused("tokenizer-of-other-shards", path=tmp_path / "shards"):
            gpt.build(config(tmp_path / "shards", **plain, **other))
    for same in ({}, {"data.tokenizer": str(tmp_path / "shards")}):
        run = gpt.build(config(tmp_path / "shards", **plain, **same))
        assert run.parts.files["tokenizer.json"] == trained_here.to_json()


@pytest.mark.parametrize("left", ["prepare.json", "shard-00000.bin"])
def test_unfinished_shards_are_called_so(left: str, path: Path, tmp_path: Path) -> None:
    sf.data.prepare_shards(
        tmp_path / "shards", [path], tokenizer=sf.tokenizers.ByteTokenizer(), processes=1
    )
    for file in (tmp_path / "shards").iterdir():
        if file.name != left:
            file.unlink()
    with refused("token-shards-unfinished", sf.DataError):
        gpt.build(config(tmp_path / "shards"))


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
        gpt.build(config(tmp_path / "no such file", **wrong))
    said = str(caught.value)
    assert [
        name for name in ("vocab_size", "heads", "momentum", "power", "clip") if name not in said
    ] == []
    assert len(caught.value.problems) == 5


@pytest.mark.parametrize(("shape", "percent"), [("one_cycle", 30), ("cosine", 5), ("constant", 5)])
def test_a_warmup_that_is_not_given_is_that_of_the_shape(
    shape: str, percent: int, path: Path
) -> None:
    run = gpt.build(config(path, **{"length": "100 steps", "schedule.name": shape}))
    assert run.parts.plan.schedule.warmup == percent


def test_other_weights_to_start_from_are_another_run(path: Path, tmp_path: Path) -> None:
    """A run that has begun does not load them again: without an error they would be ignored."""
    trained(config(path, run_dir=str(tmp_path / "first")))
    trained(config(path, run_dir=str(tmp_path / "run"), stop_after="2 steps"))
    with refused_change("init_from", "None"):
        trained(config(path, run_dir=str(tmp_path / "run"), init_from=str(tmp_path / "first")))


def test_a_warmup_in_epochs_is_not_measured_before_the_data_are_known(path: Path) -> None:
    run = trained(config(path, **{"length": "60 steps", "schedule.warmup": "1 epochs"}))
    assert 1 < run.parts.plan.schedule.warmup < 60


@pytest.mark.parametrize(("tokenizer", "prompt"), [("bytes", ""), ("characters", "Q")])
def test_a_prompt_that_cannot_be_is_refused_before_training(
    tokenizer: str, prompt: str, path: Path
) -> None:
    kind, code = {
        "": (sf.ConfigError, "prompt-empty"),
        "Q": (sf.DataError, "character-unknown"),
    }[prompt]
    with refused(code, kind):
        gpt.build(config(path, sample_prompt=prompt, **{"data.tokenizer": tokenizer}))


def test_a_run_whose_tokenizer_is_gone_is_not_resumed_with_another(
    path: Path, tmp_path: Path
) -> None:
    trained(config(path, run_dir=str(tmp_path / "run"), stop_after="2 steps"))
    (tmp_path / "run" / "tokenizer.json").unlink()
    with refused("run-file-missing", sf.CheckpointError):
        gpt.build(config(path, run_dir=str(tmp_path / "run")))


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
    shape = gpt.network_shape(
        layered(gpt.Config, [("preset", gpt.PRESETS[name])])[0], vocab_size=50257
    )
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
        assert (asked.optimizer.name, asked.schedule.name) == ("adamw", "cosine")
        assert (asked.model.smear, asked.model.ngrams, asked.cloze_questions) == (False, 1, 200)


@pytest.mark.parametrize("preset", ["tiny", "shakespeare"])
def test_another_family_drops_what_a_preset_adds_to_its_own(preset: str) -> None:
    chosen = gpt.PRESETS[preset]
    asked, origins = layered(gpt.Config, [("preset", chosen), ("flag", {"model.family": "gpt2"})])
    kept = {"model.heads": chosen["model.heads"], "model.context": chosen.get("model.context", 128)}
    assert asked.model == gpt.Model(
        family="gpt2", heads=kept["model.heads"], context=kept["model.context"]
    )
    assert origins["model.smear"] == "default"
    assert gpt.network_shape(asked, vocab_size=300).tie_embeddings
    typed = {"model.family": "gpt2", "model.smear": True}
    with refused("model-shape-impossible"):
        gpt.network_shape(
            layered(gpt.Config, [("preset", chosen), ("flag", typed)])[0], vocab_size=300
        )


def test_rows_of_tables_that_are_not_there_are_refused() -> None:
    with refused("ngram-buckets-without-ngrams", value=100):
        gpt.check(gpt.Config(model=gpt.Model(ngram_buckets=100)))
    assert (
        gpt.network_shape(gpt.Config(model=gpt.Model(ngrams=2)), vocab_size=500).ngram_buckets
        == 32768
    )


def test_without_n_grams_the_rows_of_the_preset_are_dropped_and_typed_ones_refused() -> None:
    tiny = ("preset", gpt.PRESETS["tiny"])
    off, origins = layered(gpt.Config, [tiny, ("flag", {"model.ngrams": 1})])
    assert (off.model.ngram_buckets, origins["model.ngram_buckets"]) == (None, "default")
    assert gpt.network_shape(off, vocab_size=500).ngrams == 1
    assert layered(gpt.Config, [tiny, ("flag", {"model.ngrams": 3})])[0].model.ngram_buckets == 8192
    typed = layered(gpt.Config, [tiny, ("file", {"model.ngrams": 1, "model.ngram_buckets": 9})])[0]
    with refused("ngram-buckets-without-ngrams", value=9):
        gpt.network_shape(typed, vocab_size=500)
