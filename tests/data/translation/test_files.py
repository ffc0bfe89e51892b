"""Parallel text from files: every form, and what is wrong with it by file and line; and phrases
from CLDR; 4 seconds.
"""

from __future__ import annotations

import csv
import datetime
import gzip
import json
import random
import re
from pathlib import Path

import pytest

from data_sets import DATA, needs
from refused import refused
from stated import numbers_in
from surefoot.errors import DataError
from surefoot.recipes.readers.pairs.files import ParallelText, load_pairs, read_pairs, split_pairs
from surefoot.recipes.readers.pairs.phrases import _amounts, _day, cldr_phrases, locale

PAIRS = [(f"sentence {n} \u2028 with a\u0085 strange space", f"Satz {n}, weiß") for n in range(40)]


def write(path: Path, lines: list[str], *, end: str = "\n") -> None:
    data = "".join(line + end for line in lines).encode()
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)


def write_both(folder: Path, name: str, pairs: list[tuple[str, str]], *, gz: str = "") -> None:
    write(folder / f"{name}.en{gz}", [one for one, _ in pairs])
    write(folder / f"{name}.de{gz}", [other for _, other in pairs])


# --- every form -----------------------------------------------------------------------------------


@pytest.mark.parametrize("gz", ["", ".gz"])
@pytest.mark.parametrize("validation", ["val", "valid", "validation", "dev"])
def test_parts_of_a_directory_are_read_line_by_line(
    validation: str, gz: str, tmp_path: Path
) -> None:
    write_both(tmp_path, "train", PAIRS[:30], gz=gz)
    write_both(tmp_path, validation, PAIRS[30:35])
    write_both(tmp_path, "test", PAIRS[35:], gz=gz)
    (tmp_path / "README").write_text("whatever")
    assert load_pairs(tmp_path) == ParallelText(PAIRS[:30], PAIRS[30:35], PAIRS[35:])


def test_the_other_direction_is_the_other_way_round(tmp_path: Path) -> None:
    write_both(tmp_path, "train", PAIRS[:30])
    write_both(tmp_path, "val", PAIRS[30:])
    found = load_pairs(tmp_path, source="de", target="en")
    assert found.train == [(other, one) for one, other in PAIRS[:30]]
    assert found.test is None


@needs("multi30k")
def test_multi30k_is_read_by_its_own_file_names() -> None:
    found = load_pairs(DATA / "multi30k")
    assert found.test is not None
    assert [len(found.train), len(found.val), len(found.test)] == [29_000, 1_014, 1_000]
    assert found.test[0] == (
        "A man in an orange hat starring at something.",
        "Ein Mann mit einem orangefarbenen Hut, der etwas anstarrt.",
    )
    assert load_pairs(DATA / "multi30k", target="fr").train[0][1].startswith("Deux jeunes hommes")


def json_line(pair: tuple[str, str], *, inside: bool) -> str:
    found = {"de": pair[1], "en": pair[0], "id": 7}
    return json.dumps({"translation": found} if inside else found)


@pytest.mark.parametrize(
    "form",
    ["tsv", "tsv named", "tsv with a third column", "jsonl", "jsonl inside", "tsv.gz", "files"],
)
def test_one_file_is_divided_by_a_hash_of_the_source(form: str, tmp_path: Path) -> None:
    lines = {
        "tsv": [f"{one}\t{other}" for one, other in PAIRS],
        "tsv named": [
            "id\tde\ten",
            *(f"{place}\t{other}\t{one}" for place, (one, other) in enumerate(PAIRS)),
        ],
        "tsv with a third column": [f"{one}\t{other}\tCC-BY" for one, other in PAIRS],
        "jsonl": [json_line(pair, inside=False) for pair in PAIRS],
        "jsonl inside": [json_line(pair, inside=True) for pair in PAIRS],
    }
    kind = form.split(maxsplit=1)[0]
    path = tmp_path / f"corpus.{kind}"
    if form == "files":
        write_both(tmp_path, "corpus", PAIRS)
        path = tmp_path / "corpus.en"
    else:
        write(path, lines[form.removesuffix(".gz")])
    found = load_pairs(path, val_fraction=0.2)
    assert (found.train, found.val) == split_pairs(PAIRS, val_fraction=0.2)
    assert sorted(found.train + found.val) == sorted(PAIRS)


def test_a_directory_may_hold_tables(tmp_path: Path) -> None:
    write(tmp_path / "train.tsv", [f"{one}\t{other}" for one, other in PAIRS[:30]])
    write(tmp_path / "test.jsonl.gz", [json_line(pair, inside=True) for pair in PAIRS[30:]])
    found = load_pairs(tmp_path, val_fraction=0.2)
    assert found.test == PAIRS[30:]
    assert sorted(found.train + found.val) == sorted(PAIRS[:30])


def test_a_common_beginning_names_both_files(tmp_path: Path) -> None:
    write_both(tmp_path, "europarl-v7", PAIRS, gz=".gz")
    assert load_pairs(tmp_path / "europarl-v7", val_fraction=0.2) == load_pairs(
        tmp_path / "europarl-v7.de.gz", val_fraction=0.2
    )


def test_space_around_a_sentence_and_carriage_returns_are_taken_away(tmp_path: Path) -> None:
    write_both(tmp_path, "train", PAIRS)
    write(tmp_path / "val.en", [" a b", "c "], end="\r\n")
    (tmp_path / "val.de").write_bytes(
        "\ufeffx\ny".encode()
    )  # with a mark, and without a last line feed
    assert load_pairs(tmp_path).val == [("a b", "x"), ("c", "y")]


def test_equal_sources_stay_on_one_side_and_more_pairs_move_none() -> None:
    several = [*PAIRS, *((one, f"{other}!") for one, other in PAIRS)]
    training, held_out = split_pairs(several, val_fraction=0.3)
    assert not {one for one, _ in training} & {one for one, _ in held_out}
    fewer = split_pairs(PAIRS[:20], val_fraction=0.3)
    assert [pair for pair in fewer[1] if pair not in held_out] == []


# --- what is wrong --------------------------------------------------------------------------------


def test_unequal_line_counts_are_refused(tmp_path: Path) -> None:
    write_both(tmp_path, "train", PAIRS)
    write(tmp_path / "train.de", ["only one"])
    with refused("pairs-line-counts", DataError, lines=[40, 1]):
        load_pairs(tmp_path)


@pytest.mark.parametrize("gz", ["", ".gz"])
def test_bytes_that_are_no_text_are_told_with_file_and_line(gz: str, tmp_path: Path) -> None:
    write_both(tmp_path, "train", PAIRS, gz=gz)
    data = b"one\ntwo\nth\xfcree\n"
    (tmp_path / f"train.en{gz}").write_bytes(gzip.compress(data) if gz else data)
    file = tmp_path / f"train.en{gz}"
    with refused("text-not-utf-8", DataError, path=str(file), line=3):
        load_pairs(tmp_path)


EMPTY = ["", " \t", "\u200b", "\ufeff\u2060 ", "\u3164", "\u2800"]


@pytest.mark.parametrize("empty", EMPTY)
@pytest.mark.parametrize("side", ["en", "de"])
def test_an_empty_side_is_told_with_file_and_line(side: str, empty: str, tmp_path: Path) -> None:
    write_both(tmp_path, "train", PAIRS)
    lines = (tmp_path / f"train.{side}").read_text().split("\n")
    (tmp_path / f"train.{side}").write_text("\n".join([*lines[:6], empty, *lines[7:]]))
    with refused("pairs-side-empty", DataError, count=1, lines=[7]) as caught:
        load_pairs(tmp_path)
    assert f"train.{side}, line 7: the {'source' if side == 'en' else 'target'}" in str(
        caught.value
    )
    text = load_pairs(tmp_path, val_fraction=0.2, on_empty="skip")
    assert sorted(text.train + text.val) == sorted(PAIRS[:6] + PAIRS[7:])
    assert text.left_out == 1
    assert any(numbers_in(note) == [1] for note in text.notes)


def test_a_missing_language_is_told_with_those_that_are_there(tmp_path: Path) -> None:
    write_both(tmp_path, "train", PAIRS)
    (tmp_path / "train.fr.gz").write_bytes(gzip.compress(b"x"))
    with refused("pairs-language-missing", DataError, language="es", available=["de", "en", "fr"]):
        load_pairs(tmp_path, target="es")
    with refused("pairs-no-training-text", DataError) as caught:
        load_pairs(tmp_path, source="it", target="es")
    assert "train.fr.gz" in str(caught.value)
    write(tmp_path / "val.en", ["x"])
    with refused("pairs-language-missing", DataError, language="de"):
        load_pairs(tmp_path)


def test_one_language_twice_is_refused(tmp_path: Path) -> None:
    with refused("pairs-of-one-language", setting="source", value="en"):
        load_pairs(tmp_path, target="en")


@pytest.mark.parametrize(
    ("name", "line", "code"),
    [
        ("c.tsv", "only one column", "pairs-column-missing"),
        ("c.tsv", "one\t ", "pairs-side-empty"),
        ("c.jsonl", '{"en": "x", "fr": "y"}', "pairs-keys-missing"),
        ("c.jsonl", '{"translation": {"en": "x", "de": 7}}', "pairs-value-not-text"),
        ("c.jsonl", "[1]", "pairs-keys-missing"),
        ("c.jsonl", '{"en": ', "line-not-json"),
        ("c.jsonl", '{"en": "", "de": "y"}', "pairs-side-empty"),
        ("c.jsonl", '{"en": "a \\ud800 b", "de": "y"}', "text-with-half-character"),
    ],
)
def test_a_line_that_is_no_pair_is_told_by_its_number(
    name: str, line: str, code: str, tmp_path: Path
) -> None:
    good = [
        f"{one}\t{other}" if name == "c.tsv" else json_line((one, other), inside=False)
        for one, other in PAIRS
    ]
    write(tmp_path / name, [*good[:2], line, *good[2:]])
    with refused(code, DataError) as caught:
        load_pairs(tmp_path / name)
    assert f"{tmp_path / name}, line 3" in str(caught.value)


def test_a_header_counts_as_a_line(tmp_path: Path) -> None:
    write(tmp_path / "c.tsv", ["en\tde", "a\tb", "c"])
    with refused("pairs-column-missing", DataError, where=f"{tmp_path / 'c.tsv'}, line 3"):
        load_pairs(tmp_path / "c.tsv")
    write(tmp_path / "c.tsv", ["en\tde", "a\tb", "\td"])
    with refused("pairs-side-empty", DataError, lines=[3]):
        load_pairs(tmp_path / "c.tsv")


def test_other_files_are_refused_by_what_they_are(tmp_path: Path) -> None:
    with refused("path-missing", DataError, path=tmp_path / "nothing"):
        load_pairs(tmp_path / "nothing")
    (tmp_path / "c.txt").write_text("x")
    with refused("pairs-kind-unknown", DataError):
        load_pairs(tmp_path / "c.txt")
    for empty in ("", "\n", " \n\n"):
        (tmp_path / "c.tsv").write_text(empty)
        with refused("no-text", DataError):
            load_pairs(tmp_path / "c.tsv")
    (tmp_path / "c.tsv.gz").write_bytes(gzip.compress(b"a\tb\n" * 99)[:-9])
    with refused("file-truncated", DataError, path=tmp_path / "c.tsv.gz"):
        load_pairs(tmp_path / "c.tsv.gz")
    (tmp_path / "d.tsv.gz").write_bytes(b"a\n")  # unpacked, by a browser say
    with refused("pairs-column-missing", DataError, columns=1):
        load_pairs(tmp_path / "d.tsv.gz")
    with refused("part-without-data", DataError, value=0.0, training=40, validation=0):
        split_pairs(PAIRS, val_fraction=0.0)


# --- what is no pair, and what is not read --------------------------------------------------------

WORDS = [(f"word {number}", f"Wort {number}, so") for number in range(12)]
TSV = [f"{one}\t{other}" for one, other in WORDS]


def pairs_of(path: Path, **settings: str) -> list[tuple[str, str]]:
    text = load_pairs(path, val_fraction=0.3, **settings)
    return sorted(text.train + text.val)


@pytest.mark.parametrize(
    "header",
    [
        *("English\tGerman", "english\tdeutsch", "EN\tDE", "en-US\tde_DE", "eng\tdeu", "ENG\tGER"),
        *("source\ttarget", "src\ttgt", "Source text\tTarget text", "text\ttranslation"),
        *("sentence1\tsentence2", "Sentence (English)\tSentence (German)", "text_en\ttext_de"),
        *("input\toutput", '"English"\t"German"', "\ufeffEnglish\tGerman", "0\t1"),
        *("English words/sentences\tGerman words/sentences", "sourceText\ttargetText"),
        *("EnglishSentence\tGermanSentence", "source_string\ttarget_string"),
    ],
)
def test_a_header_is_no_pair(header: str, tmp_path: Path) -> None:
    write(tmp_path / "c.tsv", [header, *TSV])
    text = load_pairs(tmp_path / "c.tsv", val_fraction=0.3)
    assert sorted(text.train + text.val) == sorted(WORDS)
    (note,) = text.notes
    assert note.startswith("c.tsv: ")
    assert numbers_in(note) == [1]
    both = header.replace('"', "").split("\t")
    if both != ["0", "1"]:  # which a text file has no reason to begin with
        for language, first, side in zip(("en", "de"), both, zip(*WORDS, strict=True), strict=True):
            write(tmp_path / f"train.{language}", [first, *side])
        assert pairs_of(tmp_path / "train.en") == sorted(WORDS)


@pytest.mark.parametrize(
    "first",
    ["it\tes", "is\tist", "no\tnein", "German\tDeutsch", "Text\tText", "Phrase\tSatz", "a\tb"],
)
def test_words_that_headers_also_have_are_a_pair(first: str, tmp_path: Path) -> None:
    write(tmp_path / "c.tsv", [first, *TSV])
    assert len(pairs_of(tmp_path / "c.tsv")) == 13


@pytest.mark.parametrize(
    ("first", "code"),
    [
        ("Englisch\tDeutsch", "pairs-first-line-unclear"),
        ("English\tEnglisch", "pairs-first-line-unclear"),
        ("lang1\tlang2", "pairs-first-line-unclear"),
        ("English\tFrench", "pairs-of-other-languages"),
        ("EN\tFR", "pairs-of-other-languages"),
    ],
)
def test_a_first_line_that_may_be_a_header_is_refused(
    first: str, code: str, tmp_path: Path
) -> None:
    write(tmp_path / "c.tsv", [first, *TSV])
    with refused(code, DataError) as caught:
        load_pairs(tmp_path / "c.tsv")
    assert "c.tsv, line 1" in str(caught.value)
    write(tmp_path / "c.tsv", [*TSV, first])  # the cure, if it is a pair
    assert len(pairs_of(tmp_path / "c.tsv")) == 13


@pytest.mark.parametrize(
    ("form", "columns"),
    [
        ("{n}\t{one}\t{m}\t{other}", "columns 2 and 4 of 4"),  # Tatoeba
        ("{n}\teng\t{one}\t{m}\tdeu\t{other}", "columns 3 and 6 of 6"),
        ("1.0{n}\t{one}\t{other}", "columns 2 and 3 of 3"),
        ("https://a/{n}\thttps://b/{n}\t{one}\t{other}", "columns 3 and 4 of 4"),
        ("doc{n}_s{m}\t{one}\t{other}", "columns 2 and 3 of 3"),
        ("{n}.jpg#0\tdev{n}\t{one}\t{other}", "columns 3 and 4 of 4"),
        ("{one}\t{other}\tCC-BY {n}", "columns 1 and 2 of 3"),
        ("example.com\tbeispiel.co.uk\t{one}\t{other}", "columns 3 and 4 of 4"),
        ("a{n}f3-99d\t{one}\t{other}", "columns 2 and 3 of 3"),
        ("doc_{n}.txt\t{one}\t{other}", "columns 2 and 3 of 3"),
        ("{one}\t{other}\tnewstest2014/{n}", "columns 1 and 2 of 3"),
    ],
)
@pytest.mark.parametrize("header", [None, "Nummer\tSatz\tNummer\tSatz\tx\ty"])
def test_columns_of_ids_are_no_sentences(
    form: str, columns: str, header: str | None, tmp_path: Path
) -> None:
    lines = [
        form.format(n=number, m=number + 7, one=one, other=other)
        for number, (one, other) in enumerate(WORDS)
    ]
    if header is not None and columns != "columns 1 and 2 of 3":
        width = len(lines[0].split("\t"))
        lines = ["\t".join(header.split("\t")[:width]), *lines]
    write(tmp_path / "c.tsv", lines)
    text = load_pairs(tmp_path / "c.tsv", val_fraction=0.3)
    assert sorted(text.train + text.val) == sorted(WORDS)
    assert columns in text.notes[0]


def test_numbers_that_pandas_writes_as_names_of_columns_are_no_pair(tmp_path: Path) -> None:
    lines = [f"{number}\t{line}" for number, line in enumerate(TSV)]
    write(tmp_path / "c.tsv", ["\t0\t1", *lines])
    assert pairs_of(tmp_path / "c.tsv") == sorted(WORDS)


def test_words_of_a_dictionary_are_text_beside_their_kind(tmp_path: Path) -> None:
    words = [(letter * 3, f"{letter}-wort.") for letter in "abcdefghijkl"]
    write(tmp_path / "c.tsv", [f"{one}\t{other}\tnoun" for one, other in words])
    assert pairs_of(tmp_path / "c.tsv") == words


def test_two_columns_are_pairs_of_anything(tmp_path: Path) -> None:
    write(tmp_path / "c.tsv", [f"{number} + 1\t{number + 1}" for number in range(20)])
    assert len(pairs_of(tmp_path / "c.tsv")) == 20
    write(tmp_path / "c.tsv", [f"{number} + 1\t{number + 1}\t0.5" for number in range(20)])
    with refused("pairs-columns-unclear", DataError, columns=3):
        load_pairs(tmp_path / "c.tsv")


@pytest.mark.parametrize("ids", ["alpha", "alpha\ttraining"])
def test_words_before_sentences_may_be_ids(ids: str, tmp_path: Path) -> None:
    write(tmp_path / "c.tsv", [f"{ids}\tThe {one}\tDer {other}" for one, other in WORDS])
    with refused("pairs-columns-unclear", DataError):
        load_pairs(tmp_path / "c.tsv")
    chinese = [f"\u4f60\u597d{one}\tThe {other}\tby a user" for one, other in WORDS]
    glossary = [f"{one}\t{other}\ta word" for one, other in WORDS]
    for lines in (chinese, glossary):  # columns without white space are text, too
        write(tmp_path / "c.tsv", lines)
        expected = [tuple(line.split("\t")[:2]) for line in lines]
        assert pairs_of(tmp_path / "c.tsv") == sorted(expected)


def test_empty_quotes_are_no_pair(tmp_path: Path) -> None:
    write(tmp_path / "c.tsv", ['""\t""'] * 3)
    with refused("pairs-none-complete", DataError):
        load_pairs(tmp_path / "c.tsv")


def test_files_of_different_folders_are_no_pairs(tmp_path: Path) -> None:
    for folder, languages in (("a", ["en"]), ("b", ["en", "de"])):
        (tmp_path / folder).mkdir()
        for language in languages:
            write(tmp_path / folder / f"train.{language}", [word for word, _ in WORDS])
    with refused("pairs-no-training-text", DataError) as caught:
        load_pairs(tmp_path)
    assert "a, b" in str(caught.value)


def test_a_name_that_is_too_long_with_its_language_is_refused(tmp_path: Path) -> None:
    with refused("path-not-usable", setting="path"):
        load_pairs(tmp_path / ("a" * 252))


SPOKEN = [(f'He said "{one}"\tand went', f"{other}\nund so") for one, other in WORDS]
RAW = [(f'"{one}," he said', f'"{other}"') for one, other in WORDS]


def test_quotes_of_a_spreadsheet_are_taken_off_and_those_of_speech_are_not(tmp_path: Path) -> None:
    for quoting in (csv.QUOTE_MINIMAL, csv.QUOTE_ALL):
        with (tmp_path / "c.tsv").open("w", newline="") as file:
            csv.writer(file, "excel-tab", quoting=quoting).writerows(SPOKEN)
        expected = [(one, other.replace("\n", " ")) for one, other in SPOKEN]
        assert pairs_of(tmp_path / "c.tsv") == sorted(expected)
    write(tmp_path / "c.tsv", [f"{one}\t{other}" for one, other in RAW])
    assert pairs_of(tmp_path / "c.tsv") == sorted(RAW)
    mixed = [*RAW, ('"a ""b"" c"', "d")]
    write(tmp_path / "c.tsv", [f"{one}\t{other}" for one, other in mixed])
    text = load_pairs(tmp_path / "c.tsv", val_fraction=0.3)
    assert sorted(text.train + text.val) == sorted(mixed)
    assert "line 13 " in text.notes[0]


@pytest.mark.parametrize("kind", ["tsv", "jsonl", "files"])
def test_blank_lines_at_the_end_are_no_pairs(kind: str, tmp_path: Path) -> None:
    blank = ["", " ", ""]
    if kind == "tsv":
        write(tmp_path / "train.tsv", [*TSV, *blank])
    elif kind == "jsonl":
        write(tmp_path / "train.jsonl", [*(json_line(pair, inside=True) for pair in WORDS), *blank])
    else:
        write_both(tmp_path, "train", WORDS)
        write(tmp_path / "train.en", [*(one for one, _ in WORDS), *blank])  # in one file only
    assert pairs_of(tmp_path) == sorted(WORDS)


def test_null_is_an_empty_side(tmp_path: Path) -> None:
    lines = [json_line(pair, inside=False) for pair in WORDS]
    empty = ['{"en": "x", "de": null}', '{"en": NaN, "de": "y"}', '{"translation": null}']
    write(tmp_path / "c.jsonl", [*lines, *empty])
    with refused("pairs-side-empty", DataError, count=3, lines=[13, 14, 15]):
        load_pairs(tmp_path / "c.jsonl")
    assert pairs_of(tmp_path / "c.jsonl", on_empty="skip") == sorted(WORDS)


@pytest.mark.parametrize(
    ("files", "line"),
    [
        ({"c.tsv": "a\tb\nc\0\td\n"}, 2),
        ({"c.jsonl": '{"en": "a", "de": "b"}\n{"en": "a\\u0000", "de": "b"}\n'}, 2),
        ({"c.en": "a\n\0\0\n", "c.de": "b\nx\n"}, 2),
        ({"c.en": "a\nb\n", "c.de": "b\0\nx\n"}, 1),
    ],
)
def test_nul_bytes_are_refused_with_their_line(
    files: dict[str, str], line: int, tmp_path: Path
) -> None:
    for name, content in files.items():
        (tmp_path / name).write_text(content)
    with refused("text-with-nul", DataError) as caught:
        load_pairs(tmp_path / next(iter(files)))
    assert caught.value.fields["where"].endswith(f", line {line}")


def test_what_is_not_read_is_said(tmp_path: Path) -> None:
    write_both(tmp_path, "train", WORDS)
    write(tmp_path / "train.tsv", TSV)
    write(tmp_path / "VALID.TSV", TSV)
    write(tmp_path / "dev.tsv", TSV)
    (tmp_path / "notes.txt").write_text("x")
    (tmp_path / "more").mkdir()
    write(tmp_path / "more" / "train.en", ["x"])
    text = load_pairs(tmp_path)
    assert (text.train, text.val) == (WORDS, WORDS)
    first, second = text.notes
    assert numbers_in(first)[:2] == [2, 7]  # files read
    assert second.startswith("train.tsv ")
    assert all(name in second for name in ("train.en", "train.de"))
    rows = [json.dumps({"id": 1, "translation": {"en": a, "de": b, "score": 2}}) for a, b in WORDS]
    write(tmp_path / "c.jsonl", rows)
    text = load_pairs(tmp_path / "c.jsonl", val_fraction=0.3)
    (note,) = text.notes
    assert (note.startswith("c.jsonl: "), note.endswith(": score, id")) == (True, True)
    write(tmp_path / "c.tsv", [*TSV, "a\tb\tc"])
    note = load_pairs(tmp_path / "c.tsv", val_fraction=0.3).notes[0]
    assert numbers_in(note) == [1, 1, 13]  # rows with more columns than this line, as that one


@pytest.mark.parametrize(
    ("name", "is_test"),
    [("latest", False), ("contest-1", False), ("eval", True), ("newstest2014", True)],
)
def test_a_test_part_has_a_word_of_it_in_its_name(name: str, is_test: bool, tmp_path: Path) -> None:
    write(tmp_path / "train.tsv", TSV)
    write(tmp_path / f"{name}.tsv", TSV)
    text = load_pairs(tmp_path, val_fraction=0.3)
    assert text.test == (WORDS if is_test else None)
    assert any(note.endswith(f" {name}") for note in text.notes) == is_test
    before = read_pairs(
        tmp_path, source="en", target="de", val_fraction=0.3, on_empty="error", behavior=9
    )
    assert (before.test is not None) == ("test" in name)


def test_a_run_that_began_earlier_reads_its_pairs_as_before(tmp_path: Path) -> None:
    rows = ["English\tGerman", "\u200b\tx", 'a\0\t"b ""c"""', *TSV]
    write(tmp_path / "train.tsv", rows)
    write(tmp_path / "VAL.TSV", TSV)
    before = read_pairs(
        tmp_path, source="en", target="de", val_fraction=0.3, on_empty="error", behavior=9
    )
    expected = [tuple(row.split("\t")) for row in rows]
    assert (before.train, before.val) == split_pairs(expected, val_fraction=0.3)
    assert before.notes == ()


# --- phrases --------------------------------------------------------------------------------------


def test_phrases_are_many_different_ones_and_the_same_every_time() -> None:
    found = cldr_phrases(count=22_000)
    assert len({one for one, _ in found}) == len(found) == 22_000
    assert cldr_phrases(count=500) == found[:500]
    assert cldr_phrases(count=500, seed=1) != found[:500]
    assert all(one.strip() and other.strip() and "\n" not in one + other for one, other in found)


@pytest.mark.parametrize(
    "pair",
    [("en", "de"), ("fr", "ja"), ("pt-BR", "ru"), ("ar", "zh_Hant"), ("sw", "hi"), ("vi", "ak")],
)
def test_any_two_languages_have_phrases_of_their_own(pair: tuple[str, str]) -> None:
    found = cldr_phrases(*pair, count=1000)
    assert len(found) == 1000
    assert sum(one != other for one, other in found) > 800
    assert not [one for pair in found for one in pair if "duration-" in one or "length-" in one]


def test_a_language_that_cldr_does_not_have_is_told_with_near_ones() -> None:
    for name, near in (("german", "de"), ("xx", "xh"), ("pt_BX", "pt_BR"), ("", "en")):
        with refused("language-unknown", value=name) as caught:
            locale(name)
        assert near in caught.value.fields["similar"]
    with refused("pairs-of-one-language", value="de"):
        cldr_phrases("de", "de")
    with refused("setting-out-of-range", setting="count", value=0):
        cldr_phrases(count=0)


def test_dates_are_of_a_hundred_years_so_that_two_digits_tell_which() -> None:
    generator = random.Random(0)
    drawn = [_day(generator) for _ in range(20_000)]
    assert {date.year for date in drawn} == set(range(1970, 2070))
    assert max(drawn) - min(drawn) < datetime.timedelta(days=36_524)


def test_spans_of_time_are_of_two_or_three_units() -> None:
    english = locale("en")
    _, _, (draw, render), *_ = _amounts((english, locale("de")))
    generator = random.Random(0)
    texts = {
        re.sub(r"\d+", "n", render(draw(generator), english)).replace("ns ", "n ")
        for _ in range(400)
    }
    counts = {len(re.findall("n ", text.replace(" and ", " "))) for text in texts}
    assert counts == {2, 3}
