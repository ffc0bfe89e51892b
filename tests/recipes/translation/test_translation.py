"""The translation recipe: its loss and scores, its tokenizers, its settings, and that watching it
changes nothing; 10 seconds.
"""

from __future__ import annotations

import json
import math
import typing
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from sacrebleu import corpus_bleu, corpus_chrf
from torch.testing import assert_close

import surefoot as sf
from refused import refused, refused_change
from stated import lines_naming, numbers_in
from surefoot.config.tree import layered
from surefoot.errors import Setting
from surefoot.metrics.contract import named_metrics
from surefoot.recipes import translation
from surefoot.recipes.generate.beam import BEGIN, END
from surefoot.recipes.translation import corpus
from surefoot.recipes.translation.predict import (
    TranslationSearch,
    corpus_metrics,
    sentences_of,
    translate,
)
from surefoot.run.messages import header
from surefoot.tracking.jsonl import records

ONES = {
    "en": "zero one two three four five six seven eight nine",
    "de": "null eins zwei drei vier fünf sechs sieben acht neun",
}


def words(number: int, language: str) -> str:
    """A number digit by digit, in German backwards."""
    names = ONES[language].split()
    digits = str(number) if language == "en" else str(number)[::-1]
    return " ".join(names[int(digit)] for digit in digits) + "."


VAL_NUMBERS = range(1, 120, 3)
VAL_PAIRS = [(words(number, "en"), words(number, "de")) for number in VAL_NUMBERS]


def write(folder: Path, name: str, numbers: range) -> None:
    for language in ("en", "de"):
        lines = [words(number, language) for number in numbers]
        (folder / f"{name}.{language}").write_text("\n".join(lines) + "\n")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Pairs of numbers in words: a text that nobody has to download."""
    place = tmp_path / "numbers"
    place.mkdir()
    write(place, "train", range(0, 3000, 3))
    write(place, "val", VAL_NUMBERS)
    write(place, "test", range(2, 90, 3))
    return place


def config(folder: Path | None, **changes: Any) -> translation.Config:
    small = {
        "run_dir": None,
        "length": "6 steps",
        "evaluate_every": "6 steps",
        "batch_size": 16,
        "data.path": None if folder is None else str(folder),
        "data.vocab_size": 300,
        "model.encoder_layers": 1,
        "model.decoder_layers": 1,
        "model.width": 16,
        "model.heads": 2,
        "model.mlp_width": 32,
        "precision": "fp32",
        "beam_size": 2,
        "ema": None,
        "report": False,
    }
    return layered(translation.Config, [("test", small | changes)])[0]


def build(folder: Path | None, **changes: Any) -> sf.Run:
    return translation.build(config(folder, **changes))


def train(folder: Path, **changes: Any) -> sf.Run:
    run = build(folder, **changes)
    run.train()
    return run


def tokenizer_of(run: sf.Run) -> sf.tokenizers.SubwordTokenizer:
    return sf.tokenizers.SubwordTokenizer.from_json(run.parts.files["tokenizer.json"])


def header_of(run: sf.Run) -> str:
    """The header of a run, on one line."""
    return " ".join(header(run.parts, resumed=False).split())


def weights(run: sf.Run) -> dict[str, torch.Tensor]:
    return run.state.models["model"].state_dict()


def assert_equal_bits(some: dict[str, torch.Tensor], others: dict[str, torch.Tensor]) -> None:
    assert some.keys() == others.keys()
    assert [name for name in some if not torch.equal(some[name], others[name])] == []


# --- loss and scores ------------------------------------------------------------------------------


def build_model_and_batch(*, longer: int = 0) -> tuple[Any, Any, Any]:
    """A model in float64, and a padded batch; `longer`: padded further."""
    torch.manual_seed(3)
    shape = sf.models.Seq2SeqConfig(
        encoder_layers=1, decoder_layers=1, heads=2, width=16, mlp_width=32, vocab_size=40
    )
    pairs = sf.data.TokenPairs([[5, 6, 7], [9], [4, 4]], [[8], [7, 6, 5, 4], [3, 9]])
    source_BS, target_BT = pairs.gather(torch.arange(3).numpy(), torch.zeros(3).numpy())
    model = sf.models.Seq2Seq(shape).double()
    return model, F.pad(source_BS, (0, longer)), F.pad(target_BT, (0, longer))


@pytest.mark.parametrize("label_smoothing", [0.0, 0.1])
@pytest.mark.parametrize("longer", [0, 4])
def test_the_loss_is_the_mean_over_real_target_tokens_however_they_are_padded(
    longer: int, label_smoothing: float
) -> None:
    model, source_BS, target_BT = build_model_and_batch(longer=longer)

    loss = corpus.cross_entropy(label_smoothing)(model, (source_BS, target_BT))

    total = 0.0
    for padded_source, padded_target in zip(source_BS, target_BT, strict=True):
        source = padded_source[padded_source != 0]
        target = padded_target[padded_target != 0]
        logits = model(source[None], target[None, :-1])[0]
        total += F.cross_entropy(
            logits, target[1:], label_smoothing=label_smoothing, reduction="sum"
        )
    assert int(loss.count) == 2 + 5 + 3 == corpus.targets_of((source_BS, target_BT))
    assert_close(loss.value, total / 10, rtol=1e-12, atol=1e-12)


def test_metrics_are_without_smoothing_and_over_real_tokens() -> None:
    model, source_BS, target_BT = build_model_and_batch(longer=3)

    loss, means = corpus.cross_entropy(0.1)(model.eval(), (source_BS, target_BT))

    logits = model(source_BS, target_BT[:, :-1])
    targets = target_BT[:, 1:]
    real = targets != 0
    is_right = (logits.argmax(-1) == targets)[real]
    assert_close(loss.value, F.cross_entropy(logits[real], targets[real]), rtol=1e-12, atol=1e-12)
    assert_close(means["accuracy"].value.double(), is_right.double().mean())


def test_off_the_cpu_the_padding_is_ignored_where_it_stands() -> None:
    """There its places cannot be counted without waiting: the loss must give the same with them."""
    model, source_BS, target_BT = build_model_and_batch(longer=3)

    def with_padding(hidden: Any, head: Any) -> Any:
        return sf.losses.linear_cross_entropy(
            hidden, head, target_BT[:, 1:], ignore_index=0, label_smoothing=0.1
        )

    without_padding = corpus.cross_entropy(0.1)(model, (source_BS, target_BT))
    whole = model(source_BS, target_BT[:, :-1], loss=with_padding)

    assert_close(whole.value, without_padding.value, rtol=1e-12, atol=1e-12)


@pytest.mark.slow
def test_micro_batches_change_no_update(folder: Path) -> None:
    sgd = {"optimizer.name": "sgd", "optimizer.lr": 0.1}
    whole = weights(train(folder, micro_batch_size=16, **sgd))
    cut = weights(train(folder, micro_batch_size=4, **sgd))
    assert_close(whole, cut, rtol=1e-4, atol=1e-5)


def test_the_scores_of_a_run_are_those_of_its_own_translations(folder: Path) -> None:
    """BLEU and chrF by sacrebleu's own functions; loss pair by pair."""
    steps = {"length": "20 steps", "evaluate_every": "20 steps"}
    run = train(folder, **steps, **{"optimizer.lr": 2e-2, "val_beam_size": 2})

    scores = run.evaluate()

    model = run.state.models["model"].eval()
    tokenizer = tokenizer_of(run)
    search = TranslationSearch(tokenizer, tokenizer, beam_size=2, length_penalty=1.0)
    outputs = [translate(model, [source], search)[0] for source, _ in VAL_PAIRS]
    references = [reference for _, reference in VAL_PAIRS]
    bleu = corpus_bleu(outputs, [references], force=True).score
    chrf = corpus_chrf(outputs, [references]).score
    assert scores["val/bleu"] == pytest.approx(bleu, abs=1e-9)
    assert scores["val/chrf"] == pytest.approx(chrf, abs=1e-9)

    nats = 0.0
    count = 0
    for source, reference in VAL_PAIRS:
        source_tokens = torch.tensor([[*tokenizer.encode(source).tolist(), END]])
        target = torch.tensor([BEGIN, *tokenizer.encode(reference).tolist(), END])
        with torch.no_grad():
            logits = model(source_tokens, target[None, :-1])
        nats += float(F.cross_entropy(logits[0].double(), target[1:], reduction="sum"))
        count += len(target) - 1
    assert scores["val/loss"] == pytest.approx(nats / count, rel=1e-5)
    assert scores["val/perplexity"] == pytest.approx(math.exp(nats / count), rel=1e-5)


def test_a_translation_is_judged_by_its_own_reference_in_any_order_and_part(folder: Path) -> None:
    """`surefoot compare` scores drawn parts of a split."""
    split = build(folder).parts.evaluator.splits["val"]
    ((_, metric),) = named_metrics(split.metrics)
    sorted_by_length = sorted(VAL_PAIRS, key=lambda pair: (len(pair[0]), pair))
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randint(len(VAL_PAIRS), (60,), generator=generator).numpy()
    _, targets = split.data.gather(drawn, drawn)
    references = [sorted_by_length[index][1] for index in drawn]

    scores = metric.whole(references, targets.tolist())  # type: ignore[union-attr]

    assert scores["exact"] == 1.0
    assert scores["bleu"] == pytest.approx(100.0)


def test_a_reference_may_have_the_token_of_padding(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A text may spell it out. Rows are told apart by their other tokens."""
    pairs_of = corpus.Bilingual.pairs

    def with_padding(self: corpus.Bilingual, sentences: list[tuple[str, str]]) -> Any:
        pairs = pairs_of(self, sentences)
        pairs.target[pairs.target_starts[0] + 1] = corpus.PADDING
        return pairs

    monkeypatch.setattr(corpus.Bilingual, "pairs", with_padding)
    split = build(folder).parts.evaluator.splits["val"]
    ((_, metric),) = named_metrics(split.metrics)
    first = torch.zeros(1, dtype=torch.long).numpy()
    targets = split.data.gather(first, first)[1].tolist()
    assert corpus.PADDING in targets[0]

    metric.whole(["eins"], targets)  # type: ignore[union-attr]


@pytest.mark.parametrize("label_smoothing", [0.0, 0.1])
def test_a_training_record_has_the_accuracy_and_the_perplexity_without_smoothing(
    label_smoothing: float, folder: Path, tmp_path: Path
) -> None:
    """Of the first step, by the initial weights."""
    plain = {"label_smoothing": label_smoothing, "model.dropout": 0.0, "run_dir": str(tmp_path)}
    run = build(folder, length="1 steps", log_every="1 steps", **plain)
    model = run.state.models["model"].eval()
    source_BS, target_BT = run.parts.pipeline.first(0).batch
    with torch.no_grad():
        logits_BTV = model(source_BS, target_BT[:, :-1])
    targets_BT = target_BT[:, 1:]
    real = targets_BT != corpus.PADDING
    nats = float(F.cross_entropy(logits_BTV[real], targets_BT[real]))
    is_right = (logits_BTV.argmax(dim=-1) == targets_BT)[real]
    accuracy = float(is_right.double().mean())
    model.train()

    run.train()

    all_records = records(tmp_path / "metrics.jsonl")
    (record,) = [record for record in all_records if record["kind"] == "train"]
    assert record["accuracy"] == pytest.approx(accuracy)
    assert record["perplexity"] == pytest.approx(math.exp(nats), rel=1e-4)
    if label_smoothing:
        assert record["unsmoothed_loss"] == pytest.approx(nats, rel=1e-5)
        assert record["loss"] != record["unsmoothed_loss"]


@pytest.mark.parametrize(
    ("val_pairs", "text"), [(None, "40 validation pairs"), (7, "7 of 40 validation pairs")]
)
def test_the_header_counts_the_pairs_of_an_evaluation(
    val_pairs: int | None, text: str, folder: Path
) -> None:
    assert text in header_of(build(folder, val_pairs=val_pairs))


@pytest.mark.parametrize(
    ("language", "sentence", "tokenizer"),
    [
        ("de", "eins zwei drei vier.", "tok:13a"),
        ("zh_Hant", "十二月十六日星期四", "tok:zh"),
        ("ja", "2021年12月16日", "tok:char"),
    ],
)
def test_translations_are_judged_by_the_tokenizer_that_their_language_needs(
    language: str, sentence: str, tokenizer: str
) -> None:
    scores = corpus_metrics([sentence], [sentence], language=language)
    assert scores["bleu"] == pytest.approx(100.0)
    assert tokenizer in str(scores["bleu_signature"])
    assert "version:" in str(scores["chrf_signature"])


def test_one_of_two_translations_is_exact() -> None:
    outputs = ["eins zwei drei vier.", "fünf"]
    references = ["eins zwei drei vier.", "sechs"]
    assert corpus_metrics(outputs, references, language="de")["exact"] == 0.5


def test_the_test_part_is_scored_once_with_the_best_weights_and_the_signature_stands_in_the_records(
    folder: Path, tmp_path: Path
) -> None:
    train(folder, run_dir=str(tmp_path / "run"), evaluate_every="2 steps")

    all_records = list(records(tmp_path / "run" / "metrics.jsonl"))
    evaluations = [record for record in all_records if record["kind"] == "eval"]
    assert len(evaluations) == 3
    assert not any("test/bleu" in record for record in evaluations)
    (final,) = [record for record in all_records if record["kind"] == "final_eval"]
    assert final["test/bleu_signature"].startswith("nrefs:1|case:mixed|eff:no|tok:13a")
    assert 0 <= final["test/bleu"] <= 100


@pytest.mark.slow
def test_it_learns_to_translate(folder: Path) -> None:
    changes = {
        "model.width": 32,
        "model.mlp_width": 64,
        "optimizer.lr": 1e-2,
        "schedule.name": "cosine",
    }
    steps = {"length": "200 steps", "evaluate_every": "200 steps"}

    scores = train(folder, **steps, batch_size=32, **changes).evaluate()

    assert scores["val/exact"] > 0.25  # by guessing less than one in a hundred
    assert scores["val/accuracy"] > 0.8


# --- law 5 ----------------------------------------------------------------------------------------


@pytest.mark.fast("{'sample_every': '1 steps'}")
@pytest.mark.parametrize(
    "changes",
    [{"sample_every": "1 steps"}, {"evaluate_every": "1 steps", "val_beam_size": 3}],
    ids=str,
)
def test_translating_meanwhile_changes_no_bit(changes: dict[str, Any], folder: Path) -> None:
    noisy = {"model.dropout": 0.2, "model.attention_dropout": 0.1, "model.activation_dropout": 0.1}
    plain = weights(train(folder, **noisy))
    watched = weights(train(folder, **noisy, **changes))
    assert_equal_bits(plain, watched)


def test_a_sample_shows_source_reference_and_translation(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train(folder)

    text = capsys.readouterr().out
    source, reference = VAL_PAIRS[0]
    assert text.count("  reference: ") == text.count("  output:    ") == 3
    assert f"{source}\n  reference: {reference}\n  output:    " in text


# --- tokenizers -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "files"),
    [
        pytest.param({}, ["tokenizer.json"], id="shared"),
        pytest.param(
            {"data.shared_vocab": False},
            ["tokenizer.json", "tokenizer.target.json"],
            marks=pytest.mark.slow,
            id="of each language",
        ),
        pytest.param(
            {"data.tokenizer": "unigram"}, ["tokenizer.json"], marks=pytest.mark.slow, id="unigram"
        ),
    ],
)
def test_a_run_goes_on_to_the_same_bits_with_the_tokenizers_it_began_with(
    changes: dict[str, Any], files: list[str], folder: Path, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    settings = changes | {"model.dropout": 0.1, "batch_size": "256 tokens"}
    whole = weights(train(folder, **settings))
    settings["run_dir"] = str(run_dir)

    train(folder, stop_after="3 steps", **settings)
    assert sorted(path.name for path in run_dir.glob("tokenizer*")) == files
    resumed = weights(train(folder, **settings))
    assert_equal_bits(whole, resumed)

    damaged = run_dir / files[-1]
    damaged.write_text("{")
    with refused("run-file-damaged", sf.CheckpointError, path=damaged):
        build(folder, **settings)


def test_another_tokenizer_at_resume_is_refused_by_its_name(folder: Path, tmp_path: Path) -> None:
    run_dir = str(tmp_path / "run")
    train(folder, run_dir=run_dir, stop_after="2 steps")
    with refused_change("identity.data.tokenizer", "'bpe, 300 tokens'", "'unigram, 300 tokens'"):
        train(folder, run_dir=run_dir, **{"data.tokenizer": "unigram"})


@pytest.mark.slow
def test_loaded_weights_keep_the_tokenizer_that_gives_them_their_meaning(
    folder: Path, tmp_path: Path
) -> None:
    first_dir = str(tmp_path / "first")
    first = train(folder, run_dir=first_dir)
    write(folder, "train", range(7000, 9000))
    loaded: dict[str, Any] = {"init_from": first_dir, "data.vocab_size": None}

    second = build(folder, **loaded)

    assert second.parts.files == first.parts.files
    with refused("vocab-size-without-effect", value=300):
        build(folder, init_from=first_dir)
    with refused("tokenizer-unlike-that-of-weights", setting="data.shared_vocab", expected=True):
        build(folder, **loaded, **{"data.shared_vocab": False})
    with refused("tokenizer-unlike-that-of-weights", value="unigram", expected="bpe"):
        build(folder, **loaded, **{"data.tokenizer": "unigram"})


def test_the_tokenizer_is_made_from_what_is_trained_on_alone(folder: Path) -> None:
    for language in ("en", "de"):
        file = folder / f"val.{language}"
        file.write_text(file.read_text().replace(".", "zzqzzqzzq"))
    assert "zzq" not in build(folder).parts.files["tokenizer.json"]


def test_pairs_that_are_too_long_are_told_once_and_all_are_scored(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = build(folder, **{"data.max_source_tokens": 4})
    (note,) = lines_naming(capsys.readouterr().err, "note: ", "data.max_source_tokens")
    left_out = 1000 - len(run.parts.pipeline.dataset)
    assert numbers_in(note) == [left_out, 1000, 4, 128]
    assert len(run.parts.evaluator.splits["val"].data) == 40


def test_a_pair_of_a_validation_file_that_the_model_cannot_take_is_named_by_its_line(
    folder: Path,
) -> None:
    val = folder / "val.en"
    lines = val.read_text().splitlines()
    val.write_text("\n".join([*lines[:6], "one " * 40, *lines[7:]]))
    with refused("pair-exceeds-context", sf.DataError, context=32) as error:
        build(folder, **SHORT)
    assert "val.en, line 7" in str(error.value.problem)


def test_a_long_pair_held_out_of_the_training_file_is_neither_trained_on_nor_scored(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = folder / "own.tsv"
    settings = SHORT | {"data.path": str(file), "data.val_fraction": 0.1}
    pairs = [f"{source}\t{target}" for source, target in training_pairs(folder)]
    long_pairs = [f"{number} {'one ' * 40}\tx" for number in range(99)]
    file.write_text("\n".join(pairs) + "\n")
    without_long = build(folder, **settings)
    capsys.readouterr()

    file.write_text("\n".join([*pairs, *long_pairs]) + "\n")
    with_long = build(folder, **settings)

    (note,) = lines_naming(capsys.readouterr().err, "note: ", "(model.context)")
    assert numbers_in(note)[-1] == 32
    val_pairs = len(with_long.parts.evaluator.splits["val"].data)
    assert val_pairs == len(without_long.parts.evaluator.splits["val"].data)
    assert with_long.evaluate()["val/bleu"] >= 0  # as many translations as references


SHORT = {"model.context": 32, "data.max_source_tokens": 32, "data.max_target_tokens": 32}


def training_pairs(folder: Path) -> list[tuple[str, str]]:
    sources = (folder / "train.en").read_text().splitlines()
    targets = (folder / "train.de").read_text().splitlines()
    return list(zip(sources, targets, strict=True))


def test_pairs_with_an_empty_side_are_counted_and_can_be_left_out(folder: Path) -> None:
    file = folder / "train.de"
    lines = file.read_text().splitlines()
    lines[0] = ""
    lines[6] = " "
    lines[9] = ""
    lines[10] = ""
    file.write_text("\n".join(lines))

    with refused("pairs-side-empty", sf.DataError, count=4, lines=[1, 7, 10]) as caught:
        build(folder)
    assert Setting("data.on_empty", "skip") in caught.value.remedies

    run = build(folder, **{"data.on_empty": "skip"})
    facts = run.parts.settings.data_summary[0].split("; ")
    assert [4] in [numbers_in(fact) for fact in facts]
    assert len(run.parts.pipeline.dataset) == 996


def test_the_header_says_how_pairs_were_read(folder: Path, tmp_path: Path) -> None:
    rows = ["id\tEnglish\tGerman"]
    for number, (source, target) in enumerate(training_pairs(folder)):
        rows.append(f"{number}\t{source}\t{target}")
    (tmp_path / "own.tsv").write_text("\n".join(rows) + "\n")

    run = build(folder, **{"data.path": str(tmp_path / "own.tsv"), "data.val_fraction": 0.1})

    (of_file,) = [fact for fact in header_of(run).split("; ") if "own.tsv: " in fact]
    of_header_line, of_columns = of_file.partition("own.tsv: ")[2].split(", ")[:2]
    assert numbers_in(of_header_line) == [1]
    assert numbers_in(of_columns) == [2, 3, 3]


@pytest.mark.parametrize("name", ["multi30k", "multi30k-fast", "base", "big"])
def test_a_preset_for_other_data_does_not_train_on_phrases(name: str) -> None:
    sources = [("preset", translation.PRESETS[name]), ("flag", {"preset": name})]
    asked = layered(translation.Config, sources)[0]
    with refused("preset-without-data", value=name):
        translation.build(asked)


# --- what is given to predict ---------------------------------------------------------------------


def test_every_line_is_answered_by_a_line(folder: Path) -> None:
    run = train(folder)
    model = run.state.models["model"]
    tokenizer = tokenizer_of(run)
    search = TranslationSearch(tokenizer, tokenizer, beam_size=2, length_penalty=0.6)
    sentences = ["one two.", "", "three.", "  ", "four five six."]

    answers = translate(model, sentences, search, batch_size=2)

    assert len(answers) == 5
    assert answers[1] == answers[3] == ""
    assert answers == [translate(model, [sentence], search)[0] for sentence in sentences]


def test_lines_of_arguments_and_of_a_file_are_sentences(tmp_path: Path) -> None:
    (tmp_path / "in.txt").write_bytes(b"a\r\nb\n\nc")
    sentences = sentences_of(["x\ny\n", "", "z"], str(tmp_path / "in.txt"))
    assert [sentence.text for sentence in sentences] == ["x", "y", "", "z", "a", "b", "", "c"]


def test_a_sentence_that_is_too_long_is_told(folder: Path) -> None:
    run = build(folder)
    tokenizer = tokenizer_of(run)
    search = TranslationSearch(tokenizer, tokenizer, beam_size=1, length_penalty=1.0)
    with refused("sentence-too-long", sf.DataError, sentence=2):
        translate(run.state.models["model"], ["one.", "one " * 600], search)


# --- settings -------------------------------------------------------------------------------------


def test_all_that_is_wrong_is_told_at_once_before_the_text_is_read(tmp_path: Path) -> None:
    wrong = {
        "data.source": "de",
        "data.vocab_size": 100,
        "data.max_source_tokens": 600,
        "model.heads": 3,
        "optimizer.momentum": 0.9,
        "schedule.power": 2.0,
        "clip": "norm -1",
        "label_smoothing": 1.0,
        "beam_size": 0,
        "length_penalty": -1.0,
    }
    with pytest.raises(sf.ConfigError) as caught:
        build(tmp_path / "no such file", **wrong)
    message = str(caught.value)
    names = [name.split(".")[-1] for name in wrong]
    assert [name for name in names if name not in message] == []


@pytest.mark.parametrize(("name", "betas"), [("adamw", [0.9, 0.98]), ("sgd", None)])
def test_betas_are_the_published_ones_where_the_optimizer_has_any(
    name: str, betas: Any, folder: Path
) -> None:
    run = build(folder, **{"optimizer.name": name})
    optimizer = json.loads(json.dumps(run.parts.plan.identity["optimizer"]))
    assert optimizer["name"] == name
    assert optimizer.get("betas") == betas


@pytest.mark.parametrize(
    ("best", "direction", "score"), [("bleu", "max", "val/bleu"), ("loss", "min", "val/loss")]
)
def test_a_checkpoint_is_the_best_by_what_was_asked_for(
    best: str, direction: str, score: str, folder: Path
) -> None:
    monitor = build(folder, best=best, **{"early_stopping.patience": 2}).parts.run_state.best
    assert monitor is not None
    assert (monitor.direction, monitor.score) == (direction, score)


def test_phrases_are_what_there_is_without_a_path() -> None:
    run = build(None, **{"data.phrase_count": 400, "data.target": "fr", "data.vocab_size": None})
    assert 350 < len(run.parts.pipeline.dataset) < 400


def test_a_language_without_phrases_is_refused() -> None:
    with refused("language-unknown", value="frr_X"):
        build(None, **{"data.target": "frr_X"})


@pytest.mark.parametrize("name", translation.PRESETS)
def test_a_preset_is_a_complete_configuration_whose_model_can_be_built(name: str) -> None:
    asked = layered(translation.Config, [("preset", translation.PRESETS[name])])[0]
    shape = translation.network_shape(asked, source=None, target=37_000)
    with torch.device("meta"):
        model = sf.models.Seq2Seq(shape)
    assert sum(parameter.numel() for parameter in model.parameters()) == shape.parameters
    translation.check(asked)


@pytest.mark.parametrize(("name", "millions"), [("base", 63.1), ("big", 214.3)])
def test_published_presets_have_the_published_sizes(name: str, millions: float) -> None:
    """Vaswani et al. 2017, table 3: 65 and 213 million, with about 37,000 tokens."""
    asked = layered(translation.Config, [("preset", translation.PRESETS[name])])[0]
    shape = translation.network_shape(asked, source=None, target=37_000)
    assert shape.parameters / 1e6 == pytest.approx(millions, abs=0.06)


def test_the_names_of_presets_are_those_that_help_shows() -> None:
    hint = typing.get_type_hints(translation.Config)["preset"]
    names, _ = typing.get_args(hint)
    assert {*typing.get_args(names)} == {*translation.PRESETS}
