"""The translation recipe: its loss and scores, its tokenizers, its settings, and that watching it
changes nothing; 10 seconds.
"""

from __future__ import annotations

import dataclasses
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
    names = ONES[language].split()
    return (
        " ".join(
            names[int(digit)] for digit in (str(number) if language == "en" else str(number)[::-1])
        )
        + "."
    )


def write(folder: Path, name: str, numbers: range) -> None:
    for language in ("en", "de"):
        (folder / f"{name}.{language}").write_text(
            "".join(f"{words(n, language)}\n" for n in numbers)
        )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Numbers digit by digit, in German backwards: a text that nobody has to download."""
    place = tmp_path / "numbers"
    place.mkdir()
    write(place, "train", range(0, 3000, 3))
    write(place, "val", range(1, 120, 3))
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


def trained(asked: translation.Config) -> sf.Run:
    run = translation.build(asked)
    run.train()
    return run


def weights(run: sf.Run) -> dict[str, torch.Tensor]:
    return run.state.models["model"].state_dict()


# --- loss and scores ------------------------------------------------------------------------------


def a_batch(*, longer: int = 0) -> tuple[Any, Any, Any]:
    """A model in float64, and a padded batch; `longer`: padded further."""
    torch.manual_seed(3)
    shape = sf.models.Seq2SeqConfig(
        encoder_layers=1, decoder_layers=1, heads=2, width=16, mlp_width=32, vocab_size=40
    )
    pairs = sf.data.TokenPairs([[5, 6, 7], [9], [4, 4]], [[8], [7, 6, 5, 4], [3, 9]])
    source_BS, target_BT = pairs.gather(torch.arange(3).numpy(), torch.zeros(3).numpy())
    source_BS, target_BT = F.pad(source_BS, (0, longer)), F.pad(target_BT, (0, longer))
    return sf.models.Seq2Seq(shape).double(), source_BS, target_BT


@pytest.mark.parametrize("label_smoothing", [0.0, 0.1])
@pytest.mark.parametrize("longer", [0, 4])
def test_the_loss_is_the_mean_over_real_target_tokens_however_they_are_padded(
    longer: int, label_smoothing: float
) -> None:
    model, source_BS, target_BT = a_batch(longer=longer)
    found = corpus.cross_entropy(label_smoothing)(model, (source_BS, target_BT))
    rows = [  # one pair at a time, without padding
        F.cross_entropy(
            model(source[source != 0][None], target[target != 0][None, :-1])[0],
            target[target != 0][1:],
            label_smoothing=label_smoothing,
            reduction="sum",
        )
        for source, target in zip(source_BS, target_BT, strict=True)
    ]
    assert int(found.count) == 2 + 5 + 3 == corpus.targets_of((source_BS, target_BT))
    assert_close(found.value, sum(rows) / 10, rtol=1e-12, atol=1e-12)


def test_metrics_are_without_smoothing_and_over_real_tokens() -> None:
    model, source_BS, target_BT = a_batch(longer=3)
    loss, means = corpus.cross_entropy(0.1)(model.eval(), (source_BS, target_BT))
    logits = model(source_BS, target_BT[:, :-1])
    targets = target_BT[:, 1:]
    real = targets != 0
    assert_close(loss.value, F.cross_entropy(logits[real], targets[real]), rtol=1e-12, atol=1e-12)
    assert_close(
        means["accuracy"].value.double(), (logits.argmax(-1) == targets)[real].double().mean()
    )


def test_off_the_cpu_the_padding_is_ignored_where_it_stands() -> None:
    """There its places cannot be counted without waiting: the loss must give the same with them."""
    model, source_BS, target_BT = a_batch(longer=3)
    gathered = corpus.cross_entropy(0.1)(model, (source_BS, target_BT))
    whole = model(
        source_BS,
        target_BT[:, :-1],
        loss=lambda hidden, head: sf.losses.linear_cross_entropy(
            hidden, head, target_BT[:, 1:], ignore_index=0, label_smoothing=0.1
        ),
    )
    assert_close(whole.value, gathered.value, rtol=1e-12, atol=1e-12)


@pytest.mark.slow
def test_micro_batches_change_no_update(folder: Path) -> None:
    plain = {"optimizer.name": "sgd", "optimizer.lr": 0.1}
    whole, cut = (
        weights(trained(config(folder, micro_batch_size=size, **plain))) for size in (16, 4)
    )
    assert_close(whole, cut, rtol=1e-4, atol=1e-5)


def test_the_scores_of_a_run_are_those_of_its_own_translations(folder: Path) -> None:
    """BLEU and chrF by sacrebleu's own functions; loss pair by pair."""
    run = trained(
        config(
            folder,
            length="20 steps",
            evaluate_every="20 steps",
            **{"optimizer.lr": 2e-2, "val_beam_size": 2},
        )
    )
    scores = run.evaluate()
    model = run.state.models["model"].eval()
    tokenizer = sf.tokenizers.SubwordTokenizer.from_json(run.parts.files["tokenizer.json"])
    sentences = [(words(n, "en"), words(n, "de")) for n in range(1, 120, 3)]
    search = TranslationSearch(tokenizer, tokenizer, beam_size=2, length_penalty=1.0)
    said = [translate(model, [one], search)[0] for one, _ in sentences]
    references = [other for _, other in sentences]
    assert scores["val/bleu"] == pytest.approx(
        corpus_bleu(said, [references], force=True).score, abs=1e-9
    )
    assert scores["val/chrf"] == pytest.approx(corpus_chrf(said, [references]).score, abs=1e-9)
    nats = count = 0.0
    for one, other in sentences:
        target = torch.tensor([BEGIN, *tokenizer.encode(other).tolist(), END])
        with torch.no_grad():
            logits = model(
                torch.tensor([[*tokenizer.encode(one).tolist(), END]]), target[None, :-1]
            )
        nats += float(F.cross_entropy(logits[0].double(), target[1:], reduction="sum"))
        count += len(target) - 1
    assert scores["val/loss"] == pytest.approx(nats / count, rel=1e-5)
    assert scores["val/perplexity"] == pytest.approx(math.exp(nats / count), rel=1e-5)


def test_a_translation_is_judged_by_its_own_reference_in_any_order_and_part(folder: Path) -> None:
    """`surefoot compare` scores drawn parts of a split."""
    split = translation.build(config(folder)).parts.evaluator.splits["val"]
    pairs = sorted(
        ((words(n, "en"), words(n, "de")) for n in range(1, 120, 3)),
        key=lambda pair: (len(pair[0]), pair),
    )
    drawn = torch.randint(len(pairs), (60,), generator=torch.Generator().manual_seed(0)).numpy()
    targets = split.data.gather(drawn, drawn)[1].tolist()
    ((_, metric),) = named_metrics(split.metrics)
    scored = metric.whole([pairs[index][1] for index in drawn], targets)  # type: ignore[union-attr]
    assert (scored["exact"], scored["bleu"]) == (1.0, pytest.approx(100.0))


def test_a_reference_may_have_the_token_of_padding(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A text may spell it out. Rows are told apart by their other tokens."""
    gathered = corpus.Bilingual.pairs

    def with_padding(self: corpus.Bilingual, sentences: list[tuple[str, str]]) -> Any:
        pairs = gathered(self, sentences)
        pairs.target[pairs.target_starts[0] + 1] = corpus.PADDING
        return pairs

    monkeypatch.setattr(corpus.Bilingual, "pairs", with_padding)
    split = translation.build(config(folder)).parts.evaluator.splits["val"]
    first = torch.zeros(1, dtype=torch.long).numpy()
    targets = split.data.gather(first, first)[1].tolist()
    assert corpus.PADDING in targets[0]
    ((_, metric),) = named_metrics(split.metrics)
    metric.whole(["eins"], targets)  # type: ignore[union-attr]


@pytest.mark.parametrize("label_smoothing", [0.0, 0.1])
def test_a_training_record_has_the_accuracy_and_the_perplexity_without_smoothing(
    label_smoothing: float, folder: Path, tmp_path: Path
) -> None:
    """Of the first step, by the initial weights."""
    plain = {"label_smoothing": label_smoothing, "model.dropout": 0.0, "run_dir": str(tmp_path)}
    asked = config(folder, length="1 steps", log_every="1 steps", **plain)
    run = translation.build(asked)
    model = run.state.models["model"].eval()
    source_BS, target_BT = run.parts.pipeline.first(0).batch
    with torch.no_grad():
        logits_BTV = model(source_BS, target_BT[:, :-1])
    targets_BT = target_BT[:, 1:]
    real = targets_BT != corpus.PADDING
    nats = float(F.cross_entropy(logits_BTV[real], targets_BT[real]))
    right = float((logits_BTV.argmax(dim=-1) == targets_BT)[real].double().mean())
    model.train()
    run.train()
    (record,) = [each for each in records(tmp_path / "metrics.jsonl") if each["kind"] == "train"]
    assert record["accuracy"] == pytest.approx(right)
    assert record["perplexity"] == pytest.approx(math.exp(nats), rel=1e-4)
    if label_smoothing:
        assert record["unsmoothed_loss"] == pytest.approx(nats, rel=1e-5)
        assert record["loss"] != record["unsmoothed_loss"]


def test_the_header_counts_the_pairs_of_an_evaluation(folder: Path) -> None:
    for pairs, said in ((None, "40 validation pairs"), (7, "7 of 40 validation pairs")):
        run = translation.build(config(folder, val_pairs=pairs))
        header_text = " ".join(header(run.parts, resumed=False).split())
        assert said in header_text


def test_translations_are_judged_by_the_tokenizer_that_their_language_needs() -> None:
    same = corpus_metrics(
        ["eins zwei drei vier.", "fünf"], ["eins zwei drei vier.", "sechs"], language="de"
    )
    assert same["exact"] == 0.5
    assert "tok:13a" in str(same["bleu_signature"])
    assert "version:" in str(same["chrf_signature"])
    chinese = corpus_metrics(["十二月十六日星期四"], ["十二月十六日星期四"], language="zh_Hant")
    assert chinese["bleu"] == pytest.approx(100.0)
    assert "tok:zh" in str(chinese["bleu_signature"])
    assert "tok:char" in str(
        corpus_metrics(["2021年12月16日"], ["x"], language="ja")["bleu_signature"]
    )


def test_the_test_part_is_scored_once_with_the_best_weights_and_the_signature_stands_in_the_records(
    folder: Path, tmp_path: Path
) -> None:
    trained(config(folder, run_dir=str(tmp_path / "run"), evaluate_every="2 steps"))
    found = list(records(tmp_path / "run" / "metrics.jsonl"))
    scored = [line for line in found if line["kind"] == "eval"]
    assert len(scored) == 3
    assert not any("test/bleu" in line for line in scored)
    ends = [line for line in found if line["kind"] == "final_eval"]
    assert len(ends) == 1
    assert ends[0]["test/bleu_signature"].startswith("nrefs:1|case:mixed|eff:no|tok:13a")
    assert 0 <= ends[0]["test/bleu"] <= 100


@pytest.mark.slow
def test_it_learns_to_translate(folder: Path) -> None:
    changes = {
        "model.width": 32,
        "model.mlp_width": 64,
        "optimizer.lr": 1e-2,
        "schedule.name": "cosine",
    }
    scores = trained(
        config(folder, length="200 steps", evaluate_every="200 steps", batch_size=32, **changes)
    ).evaluate()
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
    plain = weights(trained(config(folder, **noisy)))
    watched = weights(trained(config(folder, **noisy, **changes)))
    assert [name for name in plain if not torch.equal(plain[name], watched[name])] == []


def test_a_sample_shows_source_reference_and_translation(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trained(config(folder))
    said = capsys.readouterr().out
    assert said.count("  reference: ") == said.count("  output:    ") == 3
    assert f"{words(1, 'en')}\n  reference: {words(1, 'de')}\n  output:    " in said


# --- tokenizers -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes",
    [
        {},
        *(
            pytest.param(more, marks=pytest.mark.slow)
            for more in ({"data.shared_vocab": False}, {"data.tokenizer": "unigram"})
        ),
    ],
    ids=str,
)
def test_a_run_goes_on_to_the_same_bits_with_the_tokenizers_it_began_with(
    changes: dict[str, Any], folder: Path, tmp_path: Path
) -> None:
    noisy = changes | {"model.dropout": 0.1, "batch_size": "256 tokens"}
    whole = weights(trained(config(folder, **noisy)))
    asked = config(folder, run_dir=str(tmp_path / "run"), stop_after="3 steps", **noisy)
    trained(asked)
    files = sorted(path.name for path in (tmp_path / "run").glob("tokenizer*"))
    assert files == [
        "tokenizer.json",
        *(["tokenizer.target.json"] if "data.shared_vocab" in changes else []),
    ]
    resumed = weights(trained(dataclasses.replace(asked, stop_after=None)))
    assert [name for name in whole if not torch.equal(whole[name], resumed[name])] == []
    (tmp_path / "run" / files[-1]).write_text("{")
    with refused("run-file-damaged", sf.CheckpointError, path=tmp_path / "run" / files[-1]):
        translation.build(asked)


def test_another_tokenizer_at_resume_is_refused_by_its_name(folder: Path, tmp_path: Path) -> None:
    trained(config(folder, run_dir=str(tmp_path / "run"), stop_after="2 steps"))
    with refused_change("identity.data.tokenizer", "'bpe, 300 tokens'", "'unigram, 300 tokens'"):
        trained(config(folder, run_dir=str(tmp_path / "run"), **{"data.tokenizer": "unigram"}))


@pytest.mark.slow
def test_loaded_weights_keep_the_tokenizer_that_gives_them_their_meaning(
    folder: Path, tmp_path: Path
) -> None:
    first = trained(config(folder, run_dir=str(tmp_path / "first")))
    write(folder, "train", range(7000, 9000))
    with refused("vocab-size-without-effect", value=300):
        translation.build(config(folder, init_from=str(tmp_path / "first")))
    second = translation.build(
        config(folder, init_from=str(tmp_path / "first"), **{"data.vocab_size": None})
    )
    assert second.parts.files == first.parts.files
    with refused("tokenizer-unlike-that-of-weights", setting="data.shared_vocab", expected=True):
        translation.build(
            config(
                folder,
                init_from=str(tmp_path / "first"),
                **{"data.vocab_size": None, "data.shared_vocab": False},
            )
        )
    with refused("tokenizer-unlike-that-of-weights", value="unigram", expected="bpe"):
        translation.build(
            config(
                folder,
                init_from=str(tmp_path / "first"),
                **{"data.vocab_size": None, "data.tokenizer": "unigram"},
            )
        )


def test_the_tokenizer_is_made_from_what_is_trained_on_alone(folder: Path) -> None:
    for language in ("en", "de"):
        file = folder / f"val.{language}"
        file.write_text(file.read_text().replace(".", "zzqzzqzzq"))
    assert "zzq" not in translation.build(config(folder)).parts.files["tokenizer.json"]


def test_pairs_that_are_too_long_are_told_once_and_all_are_scored(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = translation.build(config(folder, **{"data.max_source_tokens": 4}))
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
        translation.build(config(folder, **SHORT))
    assert "val.en, line 7" in str(error.value.problem)


def test_a_long_pair_held_out_of_the_training_file_is_neither_trained_on_nor_scored(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sides = [(folder / f"train.{language}").read_text().splitlines() for language in ("en", "de")]
    pairs = [f"{one}\t{other}" for one, other in zip(*sides, strict=True)]
    (folder / "own.tsv").write_text("\n".join(pairs) + "\n")
    before = translation.build(
        config(folder, **SHORT, **{"data.path": str(folder / "own.tsv"), "data.val_fraction": 0.1})
    )
    capsys.readouterr()
    (folder / "own.tsv").write_text(
        "\n".join([*pairs, *(f"{number} {'one ' * 40}\tx" for number in range(99))]) + "\n"
    )
    run = translation.build(
        config(folder, **SHORT, **{"data.path": str(folder / "own.tsv"), "data.val_fraction": 0.1})
    )
    (note,) = lines_naming(capsys.readouterr().err, "note: ", "(model.context)")
    assert numbers_in(note)[-1] == 32
    splits = [len(made.parts.evaluator.splits["val"].data) for made in (before, run)]
    assert splits[0] == splits[1]
    assert run.evaluate()["val/bleu"] >= 0  # as many translations as references


SHORT = {"model.context": 32, "data.max_source_tokens": 32, "data.max_target_tokens": 32}


def test_pairs_with_an_empty_side_are_counted_and_can_be_left_out(folder: Path) -> None:
    train = folder / "train.de"
    lines = train.read_text().splitlines()
    train.write_text("\n".join(["", *lines[1:6], " ", *lines[7:9], "", "", *lines[11:]]))
    with refused("pairs-side-empty", sf.DataError, count=4, lines=[1, 7, 10]) as caught:
        translation.build(config(folder))
    assert Setting("data.on_empty", "skip") in caught.value.remedies
    run = translation.build(config(folder, **{"data.on_empty": "skip"}))
    assert [4] in map(numbers_in, run.parts.settings.data_summary[0].split("; "))
    assert len(run.parts.pipeline.dataset) == 996


def test_the_header_says_how_pairs_were_read(folder: Path, tmp_path: Path) -> None:
    pairs = zip(
        (folder / "train.en").read_text().splitlines(),
        (folder / "train.de").read_text().splitlines(),
        strict=True,
    )
    rows = [f"{number}\t{one}\t{other}" for number, (one, other) in enumerate(pairs)]
    (tmp_path / "own.tsv").write_text("\n".join(["id\tEnglish\tGerman", *rows]) + "\n")
    run = translation.build(
        config(folder, **{"data.path": str(tmp_path / "own.tsv"), "data.val_fraction": 0.1})
    )
    said = " ".join(header(run.parts, resumed=False).split())
    (of_file,) = [fact for fact in said.split("; ") if "own.tsv: " in fact]
    of_header, of_columns = of_file.partition("own.tsv: ")[2].split(", ")[:2]
    assert (numbers_in(of_header), numbers_in(of_columns)) == ([1], [2, 3, 3])


@pytest.mark.parametrize("name", ["multi30k", "multi30k-fast", "base", "big"])
def test_a_preset_for_other_data_does_not_train_on_phrases(name: str) -> None:
    asked = layered(
        translation.Config, [("preset", translation.PRESETS[name]), ("flag", {"preset": name})]
    )[0]
    with refused("preset-without-data", value=name):
        translation.build(asked)


# --- what is given to predict ---------------------------------------------------------------------


def test_every_line_is_answered_by_a_line(folder: Path, tmp_path: Path) -> None:
    run = trained(config(folder))
    tokenizer = sf.tokenizers.SubwordTokenizer.from_json(run.parts.files["tokenizer.json"])
    search = TranslationSearch(tokenizer, tokenizer, beam_size=2, length_penalty=0.6)
    sentences = ["one two.", "", "three.", "  ", "four five six."]
    found = translate(run.state.models["model"], sentences, search, batch_size=2)
    assert len(found) == 5
    assert found[1] == found[3] == ""
    alone = [translate(run.state.models["model"], [one], search)[0] for one in sentences]
    assert found == alone
    (tmp_path / "in.txt").write_bytes(b"a\r\nb\n\nc")
    read = sentences_of(["x\ny\n", "", "z"], str(tmp_path / "in.txt"))
    assert [one.text for one in read] == ["x", "y", "", "z", "a", "b", "", "c"]


def test_a_sentence_that_is_too_long_is_told(folder: Path) -> None:
    run = translation.build(config(folder))
    tokenizer = sf.tokenizers.SubwordTokenizer.from_json(run.parts.files["tokenizer.json"])
    with refused("sentence-too-long", sf.DataError, sentence=2):
        translate(
            run.state.models["model"],
            ["one.", "one " * 600],
            TranslationSearch(tokenizer, tokenizer, 1, 1.0),
        )


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
        translation.build(config(tmp_path / "no such file", **wrong))
    said = str(caught.value)
    names = [name.split(".")[-1] for name in wrong]
    assert [name for name in names if name not in said] == []


@pytest.mark.parametrize(("name", "betas"), [("adamw", [0.9, 0.98]), ("sgd", None)])
def test_betas_are_the_published_ones_where_the_optimizer_has_any(
    name: str, betas: Any, folder: Path
) -> None:
    run = translation.build(config(folder, **{"optimizer.name": name}))
    assert json.loads(json.dumps(run.parts.plan.identity["optimizer"])).get(
        "betas"
    ) == betas or betas in [
        one.get("betas")
        for one in run.parts.plan.identity["optimizer"].values()
        if isinstance(one, dict)
    ]


def test_a_checkpoint_is_the_best_by_what_was_asked_for(folder: Path) -> None:
    watched = {
        best: translation.build(
            config(folder, best=best, **{"early_stopping.patience": 2})
        ).parts.run_state.best
        for best in ("bleu", "loss")
    }
    assert watched["bleu"] is not None
    assert watched["loss"] is not None
    assert (watched["bleu"].direction, watched["bleu"].score) == ("max", "val/bleu")
    assert (watched["loss"].direction, watched["loss"].score) == ("min", "val/loss")


def test_phrases_are_what_there_is_without_a_path() -> None:
    run = translation.build(
        config(None, **{"data.phrase_count": 400, "data.target": "fr", "data.vocab_size": None})
    )
    assert 350 < len(run.parts.pipeline.dataset) < 400
    with refused("language-unknown", value="frr_X"):
        translation.build(config(None, **{"data.target": "frr_X"}))


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
