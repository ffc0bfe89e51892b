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


def write_bytes(path: Path, data: bytes) -> None:
    """Compressed if the name of the file says so."""
    if path.suffix == ".gz":
        data = gzip.compress(data)
    path.write_bytes(data)


def write(path: Path, lines: list[str], *, end: str = "\n") -> None:
    write_bytes(path, "".join(line + end for line in lines).encode())


def write_both(folder: Path, name: str, pairs: list[tuple[str, str]], *, gz: str = "") -> None:
    write(folder / f"{name}.en{gz}", [one for one, _ in pairs])
    write(folder / f"{name}.de{gz}", [other for _, other in pairs])


def tab_lines(pairs: list[tuple[str, str]]) -> list[str]:
    return [f"{one}\t{other}" for one, other in pairs]


def all_pairs(text: ParallelText) -> list[tuple[str, str]]:
    """Those of both sides of a division, sorted."""
    return sorted(text.train + text.val)


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

    text = load_pairs(tmp_path, source="de", target="en")

    assert text.train == [(other, one) for one, other in PAIRS[:30]]
    assert text.test is None


@needs("multi30k")
def test_multi30k_is_read_by_its_own_file_names() -> None:
    text = load_pairs(DATA / "multi30k")

    assert text.test is not None
    assert [len(text.train), len(text.val), len(text.test)] == [29_000, 1_014, 1_000]
    assert text.test[0] == (
        "A man in an orange hat starring at something.",
        "Ein Mann mit einem orangefarbenen Hut, der etwas anstarrt.",
    )


@needs("multi30k")
def test_other_languages_of_multi30k_are_read() -> None:
    _, french = load_pairs(DATA / "multi30k", target="fr").train[0]

    assert french.startswith("Deux jeunes hommes")


def json_lines(pairs: list[tuple[str, str]]) -> list[str]:
    return [json.dumps({"de": other, "en": one, "id": 7}) for one, other in pairs]


def nested_json_lines(pairs: list[tuple[str, str]]) -> list[str]:
    rows = [{"translation": {"de": other, "en": one, "id": 7}} for one, other in pairs]
    return [json.dumps(row) for row in rows]


def named_tab_lines(pairs: list[tuple[str, str]]) -> list[str]:
    rows = [f"{place}\t{other}\t{one}" for place, (one, other) in enumerate(pairs)]
    return ["id\tde\ten", *rows]


@pytest.mark.parametrize(
    ("name", "lines"),
    [
        pytest.param("corpus.tsv", tab_lines(PAIRS), id="tsv"),
        pytest.param("corpus.tsv.gz", tab_lines(PAIRS), id="tsv.gz"),
        pytest.param("corpus.tsv", named_tab_lines(PAIRS), id="tsv named"),
        pytest.param(
            "corpus.tsv", [f"{line}\tCC-BY" for line in tab_lines(PAIRS)], id="tsv of 3 columns"
        ),
        pytest.param("corpus.jsonl", json_lines(PAIRS), id="jsonl"),
        pytest.param("corpus.jsonl", nested_json_lines(PAIRS), id="jsonl nested"),
    ],
)
def test_one_file_is_divided_by_a_hash_of_the_source(
    name: str, lines: list[str], tmp_path: Path
) -> None:
    write(tmp_path / name, lines)

    text = load_pairs(tmp_path / name, val_fraction=0.2)

    assert (text.train, text.val) == split_pairs(PAIRS, val_fraction=0.2)
    assert all_pairs(text) == sorted(PAIRS)


def test_two_files_are_divided_by_a_hash_of_the_source(tmp_path: Path) -> None:
    write_both(tmp_path, "corpus", PAIRS)

    text = load_pairs(tmp_path / "corpus.en", val_fraction=0.2)

    assert (text.train, text.val) == split_pairs(PAIRS, val_fraction=0.2)
    assert all_pairs(text) == sorted(PAIRS)


def test_a_directory_may_hold_tables(tmp_path: Path) -> None:
    write(tmp_path / "train.tsv", tab_lines(PAIRS[:30]))
    write(tmp_path / "test.jsonl.gz", nested_json_lines(PAIRS[30:]))

    text = load_pairs(tmp_path, val_fraction=0.2)

    assert text.test == PAIRS[30:]
    assert all_pairs(text) == sorted(PAIRS[:30])


def test_a_common_beginning_names_both_files(tmp_path: Path) -> None:
    write_both(tmp_path, "europarl-v7", PAIRS, gz=".gz")

    by_beginning = load_pairs(tmp_path / "europarl-v7", val_fraction=0.2)
    by_file = load_pairs(tmp_path / "europarl-v7.de.gz", val_fraction=0.2)

    assert by_beginning == by_file


def test_space_around_a_sentence_and_carriage_returns_are_taken_away(tmp_path: Path) -> None:
    write_both(tmp_path, "train", PAIRS)
    write(tmp_path / "val.en", [" a b", "c "], end="\r\n")
    marked_without_last_line_feed = "\ufeffx\ny".encode()
    (tmp_path / "val.de").write_bytes(marked_without_last_line_feed)

    assert load_pairs(tmp_path).val == [("a b", "x"), ("c", "y")]


def test_equal_sources_stay_on_one_side() -> None:
    other_targets = [(one, f"{other}!") for one, other in PAIRS]

    training, validation = split_pairs([*PAIRS, *other_targets], val_fraction=0.3)

    training_sources = {one for one, _ in training}
    validation_sources = {one for one, _ in validation}
    assert not training_sources & validation_sources


def test_more_pairs_move_none_to_the_other_side() -> None:
    _, validation = split_pairs(PAIRS, val_fraction=0.3)
    _, validation_of_fewer = split_pairs(PAIRS[:20], val_fraction=0.3)

    assert [pair for pair in validation_of_fewer if pair not in validation] == []


# --- what is wrong --------------------------------------------------------------------------------


def test_unequal_line_counts_are_refused(tmp_path: Path) -> None:
    write_both(tmp_path, "train", PAIRS)
    write(tmp_path / "train.de", ["only one"])
    with refused("pairs-line-counts", DataError, lines=[40, 1]):
        load_pairs(tmp_path)


@pytest.mark.parametrize("gz", ["", ".gz"])
def test_bytes_that_are_no_text_are_told_with_file_and_line(gz: str, tmp_path: Path) -> None:
    write_both(tmp_path, "train", PAIRS, gz=gz)
    file = tmp_path / f"train.en{gz}"
    write_bytes(file, b"one\ntwo\nth\xfcree\n")

    with refused("text-not-utf-8", DataError, path=str(file), line=3):
        load_pairs(tmp_path)


EMPTY = ["", " \t", "\u200b", "\ufeff\u2060 ", "\u3164", "\u2800"]


def write_with_empty_line(folder: Path, language: str, empty: str) -> None:
    """All pairs, of which the seventh has no sentence in this language."""
    write_both(folder, "train", PAIRS)
    file = folder / f"train.{language}"
    lines = file.read_text().split("\n")
    lines[6] = empty
    file.write_text("\n".join(lines))


@pytest.mark.parametrize("empty", EMPTY)
@pytest.mark.parametrize(("language", "side"), [("en", "source"), ("de", "target")])
def test_an_empty_side_is_told_with_file_and_line(
    language: str, side: str, empty: str, tmp_path: Path
) -> None:
    write_with_empty_line(tmp_path, language, empty)

    with refused("pairs-side-empty", DataError, count=1, lines=[7]) as caught:
        load_pairs(tmp_path)
    assert f"train.{language}, line 7: the {side}" in str(caught.value)


@pytest.mark.parametrize("empty", EMPTY)
@pytest.mark.parametrize("language", ["en", "de"])
def test_a_pair_with_an_empty_side_may_be_skipped(
    language: str, empty: str, tmp_path: Path
) -> None:
    write_with_empty_line(tmp_path, language, empty)

    text = load_pairs(tmp_path, val_fraction=0.2, on_empty="skip")

    assert all_pairs(text) == sorted(PAIRS[:6] + PAIRS[7:])
    assert text.left_out == 1
    assert any(numbers_in(note) == [1] for note in text.notes)


def test_a_missing_language_is_told_with_those_that_are_there(tmp_path: Path) -> None:
    write_both(tmp_path, "train", PAIRS)
    write(tmp_path / "train.fr.gz", ["x"])

    with refused("pairs-language-missing", DataError, language="es", available=["de", "en", "fr"]):
        load_pairs(tmp_path, target="es")


def test_two_missing_languages_are_told_with_the_files_that_are_there(tmp_path: Path) -> None:
    write_both(tmp_path, "train", PAIRS)
    write(tmp_path / "train.fr.gz", ["x"])

    with refused("pairs-no-training-text", DataError) as caught:
        load_pairs(tmp_path, source="it", target="es")
    assert "train.fr.gz" in str(caught.value)


def test_a_language_that_one_part_does_not_have_is_refused(tmp_path: Path) -> None:
    write_both(tmp_path, "train", PAIRS)
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
    lines = tab_lines(PAIRS) if name == "c.tsv" else json_lines(PAIRS)
    write(tmp_path / name, [*lines[:2], line, *lines[2:]])

    with refused(code, DataError) as caught:
        load_pairs(tmp_path / name)
    assert f"{tmp_path / name}, line 3" in str(caught.value)


def test_a_header_counts_as_a_line(tmp_path: Path) -> None:
    file = tmp_path / "c.tsv"

    write(file, ["en\tde", "a\tb", "c"])
    with refused("pairs-column-missing", DataError, where=f"{file}, line 3"):
        load_pairs(file)

    write(file, ["en\tde", "a\tb", "\td"])
    with refused("pairs-side-empty", DataError, lines=[3]):
        load_pairs(file)


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with refused("path-missing", DataError, path=tmp_path / "nothing"):
        load_pairs(tmp_path / "nothing")


def test_a_file_of_another_kind_is_refused(tmp_path: Path) -> None:
    (tmp_path / "c.txt").write_text("x")

    with refused("pairs-kind-unknown", DataError):
        load_pairs(tmp_path / "c.txt")


@pytest.mark.parametrize("content", ["", "\n", " \n\n"])
def test_a_file_without_text_is_refused(content: str, tmp_path: Path) -> None:
    (tmp_path / "c.tsv").write_text(content)

    with refused("no-text", DataError):
        load_pairs(tmp_path / "c.tsv")


def test_a_truncated_file_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "c.tsv.gz"
    file.write_bytes(gzip.compress(b"a\tb\n" * 99)[:-9])

    with refused("file-truncated", DataError, path=file):
        load_pairs(file)


def test_a_file_that_was_unpacked_under_its_old_name_is_read(tmp_path: Path) -> None:
    (tmp_path / "d.tsv.gz").write_bytes(b"a\n")  # by a browser, say

    with refused("pairs-column-missing", DataError, columns=1):
        load_pairs(tmp_path / "d.tsv.gz")


def test_a_division_without_validation_pairs_is_refused() -> None:
    with refused("part-without-data", DataError, value=0.0, training=40, validation=0):
        split_pairs(PAIRS, val_fraction=0.0)


# --- what is no pair, and what is not read --------------------------------------------------------

WORDS = [(f"word {number}", f"Wort {number}, so") for number in range(12)]
TSV = tab_lines(WORDS)


def load_sorted_pairs(path: Path, **settings: str) -> list[tuple[str, str]]:
    return all_pairs(load_pairs(path, val_fraction=0.3, **settings))


HEADERS = [
    "English\tGerman",
    "english\tdeutsch",
    "EN\tDE",
    "en-US\tde_DE",
    "eng\tdeu",
    "ENG\tGER",
    "source\ttarget",
    "src\ttgt",
    "Source text\tTarget text",
    "text\ttranslation",
    "sentence1\tsentence2",
    "Sentence (English)\tSentence (German)",
    "text_en\ttext_de",
    "input\toutput",
    '"English"\t"German"',
    "\ufeffEnglish\tGerman",
    "English words/sentences\tGerman words/sentences",
    "sourceText\ttargetText",
    "EnglishSentence\tGermanSentence",
    "source_string\ttarget_string",
]


@pytest.mark.parametrize("header", [*HEADERS, "0\t1"])
def test_a_header_of_a_table_is_no_pair(header: str, tmp_path: Path) -> None:
    write(tmp_path / "c.tsv", [header, *TSV])

    text = load_pairs(tmp_path / "c.tsv", val_fraction=0.3)

    assert all_pairs(text) == sorted(WORDS)
    (note,) = text.notes
    assert note.startswith("c.tsv: ")
    assert numbers_in(note) == [1]


@pytest.mark.parametrize("header", HEADERS)
def test_a_header_of_two_text_files_is_no_pair(header: str, tmp_path: Path) -> None:
    name, other_name = header.replace('"', "").split("\t")
    write_both(tmp_path, "train", [(name, other_name), *WORDS])

    assert load_sorted_pairs(tmp_path / "train.en") == sorted(WORDS)


@pytest.mark.parametrize(
    "first",
    ["it\tes", "is\tist", "no\tnein", "German\tDeutsch", "Text\tText", "Phrase\tSatz", "a\tb"],
)
def test_words_that_headers_also_have_are_a_pair(first: str, tmp_path: Path) -> None:
    write(tmp_path / "c.tsv", [first, *TSV])
    assert len(load_sorted_pairs(tmp_path / "c.tsv")) == 13


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

    write(tmp_path / "c.tsv", [*TSV, first])  # the remedy, if it is a pair
    assert len(load_sorted_pairs(tmp_path / "c.tsv")) == 13


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
    lines = []
    for number, (one, other) in enumerate(WORDS):
        lines.append(form.format(n=number, m=number + 7, one=one, other=other))
    if header is not None and columns != "columns 1 and 2 of 3":
        width = len(lines[0].split("\t"))
        header_of_width = "\t".join(header.split("\t")[:width])
        lines.insert(0, header_of_width)
    write(tmp_path / "c.tsv", lines)

    text = load_pairs(tmp_path / "c.tsv", val_fraction=0.3)

    assert all_pairs(text) == sorted(WORDS)
    assert columns in text.notes[0]


def test_numbers_that_pandas_writes_as_names_of_columns_are_no_pair(tmp_path: Path) -> None:
    lines = [f"{number}\t{line}" for number, line in enumerate(TSV)]
    write(tmp_path / "c.tsv", ["\t0\t1", *lines])

    assert load_sorted_pairs(tmp_path / "c.tsv") == sorted(WORDS)


def test_words_of_a_dictionary_are_text_beside_their_kind(tmp_path: Path) -> None:
    words = [(letter * 3, f"{letter}-wort.") for letter in "abcdefghijkl"]
    write(tmp_path / "c.tsv", [f"{line}\tnoun" for line in tab_lines(words)])

    assert load_sorted_pairs(tmp_path / "c.tsv") == words


SUMS = [f"{number} + 1\t{number + 1}" for number in range(20)]


def test_two_columns_are_pairs_of_anything(tmp_path: Path) -> None:
    write(tmp_path / "c.tsv", SUMS)

    assert len(load_sorted_pairs(tmp_path / "c.tsv")) == 20


def test_three_columns_of_numbers_are_refused(tmp_path: Path) -> None:
    write(tmp_path / "c.tsv", [f"{line}\t0.5" for line in SUMS])

    with refused("pairs-columns-unclear", DataError, columns=3):
        load_pairs(tmp_path / "c.tsv")


@pytest.mark.parametrize("ids", ["alpha", "alpha\ttraining"])
def test_words_before_sentences_may_be_ids(ids: str, tmp_path: Path) -> None:
    write(tmp_path / "c.tsv", [f"{ids}\tThe {one}\tDer {other}" for one, other in WORDS])

    with refused("pairs-columns-unclear", DataError):
        load_pairs(tmp_path / "c.tsv")


CHINESE = [(f"\u4f60\u597d{one}", f"The {other}") for one, other in WORDS]


@pytest.mark.parametrize(
    ("pairs", "remark"),
    [
        pytest.param(CHINESE, "by a user", id="Chinese"),
        pytest.param(WORDS, "a word", id="glossary"),
    ],
)
def test_columns_without_white_space_are_text(
    pairs: list[tuple[str, str]], remark: str, tmp_path: Path
) -> None:
    write(tmp_path / "c.tsv", [f"{line}\t{remark}" for line in tab_lines(pairs)])

    assert load_sorted_pairs(tmp_path / "c.tsv") == sorted(pairs)


def test_empty_quotes_are_no_pair(tmp_path: Path) -> None:
    write(tmp_path / "c.tsv", ['""\t""'] * 3)
    with refused("pairs-none-complete", DataError):
        load_pairs(tmp_path / "c.tsv")


def test_files_of_different_folders_are_no_pairs(tmp_path: Path) -> None:
    for name in ("a/train.en", "b/train.en", "b/train.de"):
        file = tmp_path / name
        file.parent.mkdir(exist_ok=True)
        write(file, ["word"])

    with refused("pairs-no-training-text", DataError) as caught:
        load_pairs(tmp_path)
    assert "a, b" in str(caught.value)


def test_a_name_that_is_too_long_with_its_language_is_refused(tmp_path: Path) -> None:
    with refused("path-not-usable", setting="path"):
        load_pairs(tmp_path / ("a" * 252))


SPOKEN = [(f'He said "{one}"\tand went', f"{other}\nund so") for one, other in WORDS]
RAW = [(f'"{one}," he said', f'"{other}"') for one, other in WORDS]


@pytest.mark.parametrize("quoting", [csv.QUOTE_MINIMAL, csv.QUOTE_ALL])
def test_quotes_of_a_spreadsheet_are_taken_off(quoting: int, tmp_path: Path) -> None:
    with (tmp_path / "c.tsv").open("w", newline="") as file:
        csv.writer(file, "excel-tab", quoting=quoting).writerows(SPOKEN)

    expected = [(one, other.replace("\n", " ")) for one, other in SPOKEN]
    assert load_sorted_pairs(tmp_path / "c.tsv") == sorted(expected)


def test_quotes_of_speech_stay(tmp_path: Path) -> None:
    write(tmp_path / "c.tsv", tab_lines(RAW))

    assert load_sorted_pairs(tmp_path / "c.tsv") == sorted(RAW)


def test_quotes_of_a_spreadsheet_among_those_of_speech_stay_and_are_told(tmp_path: Path) -> None:
    mixed = [*RAW, ('"a ""b"" c"', "d")]
    write(tmp_path / "c.tsv", tab_lines(mixed))

    text = load_pairs(tmp_path / "c.tsv", val_fraction=0.3)

    assert all_pairs(text) == sorted(mixed)
    assert "line 13 " in text.notes[0]


BLANK = ["", " ", ""]


@pytest.mark.parametrize(
    ("name", "lines"), [("train.tsv", TSV), ("train.jsonl", nested_json_lines(WORDS))]
)
def test_blank_lines_at_the_end_are_no_pairs(name: str, lines: list[str], tmp_path: Path) -> None:
    write(tmp_path / name, [*lines, *BLANK])

    assert load_sorted_pairs(tmp_path) == sorted(WORDS)


def test_blank_lines_at_the_end_of_one_of_two_files_are_no_pairs(tmp_path: Path) -> None:
    write_both(tmp_path, "train", WORDS)
    write(tmp_path / "train.en", [one for one, _ in WORDS] + BLANK)

    assert load_sorted_pairs(tmp_path) == sorted(WORDS)


def test_null_is_an_empty_side(tmp_path: Path) -> None:
    empty = ['{"en": "x", "de": null}', '{"en": NaN, "de": "y"}', '{"translation": null}']
    write(tmp_path / "c.jsonl", [*json_lines(WORDS), *empty])

    with refused("pairs-side-empty", DataError, count=3, lines=[13, 14, 15]):
        load_pairs(tmp_path / "c.jsonl")
    assert load_sorted_pairs(tmp_path / "c.jsonl", on_empty="skip") == sorted(WORDS)


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
    first_name = next(iter(files))

    with refused("text-with-nul", DataError) as caught:
        load_pairs(tmp_path / first_name)
    assert caught.value.fields["where"].endswith(f", line {line}")


def test_files_that_are_not_read_are_told(tmp_path: Path) -> None:
    write_both(tmp_path, "train", WORDS)
    write(tmp_path / "train.tsv", TSV)
    write(tmp_path / "VALID.TSV", TSV)
    write(tmp_path / "dev.tsv", TSV)
    (tmp_path / "notes.txt").write_text("x")
    (tmp_path / "more").mkdir()
    write(tmp_path / "more" / "train.en", ["x"])

    text = load_pairs(tmp_path)

    assert text.train == text.val == WORDS
    note_of_counts, note_of_table = text.notes
    assert numbers_in(note_of_counts)[:2] == [2, 7]  # files read
    assert note_of_table.startswith("train.tsv ")
    assert "train.en" in note_of_table
    assert "train.de" in note_of_table


def test_keys_that_are_not_read_are_told(tmp_path: Path) -> None:
    lines = []
    for one, other in WORDS:
        row = {"id": 1, "translation": {"en": one, "de": other, "score": 2}}
        lines.append(json.dumps(row))
    write(tmp_path / "c.jsonl", lines)

    (note,) = load_pairs(tmp_path / "c.jsonl", val_fraction=0.3).notes

    assert note.startswith("c.jsonl: ")
    assert note.endswith(": score, id")


def test_columns_that_are_not_read_are_told(tmp_path: Path) -> None:
    write(tmp_path / "c.tsv", [*TSV, "a\tb\tc"])

    note = load_pairs(tmp_path / "c.tsv", val_fraction=0.3).notes[0]

    assert numbers_in(note) == [1, 1, 13]  # rows with more columns than this line, as that one


def read_pairs_as_before(path: Path) -> ParallelText:
    """As a run reads them that began with behavior 9."""
    return read_pairs(
        path, source="en", target="de", val_fraction=0.3, on_empty="error", behavior=9
    )


@pytest.mark.parametrize(
    ("name", "is_test"),
    [("latest", False), ("contest-1", False), ("eval", True), ("newstest2014", True)],
)
def test_a_test_part_has_a_word_of_it_in_its_name(name: str, is_test: bool, tmp_path: Path) -> None:
    write(tmp_path / "train.tsv", TSV)
    write(tmp_path / f"{name}.tsv", TSV)

    text = load_pairs(tmp_path, val_fraction=0.3)
    before = read_pairs_as_before(tmp_path)

    assert text.test == (WORDS if is_test else None)
    assert any(note.endswith(f" {name}") for note in text.notes) == is_test
    assert (before.test is not None) == ("test" in name)


def test_a_run_that_began_earlier_reads_its_pairs_as_before(tmp_path: Path) -> None:
    rows = ["English\tGerman", "\u200b\tx", 'a\0\t"b ""c"""', *TSV]
    write(tmp_path / "train.tsv", rows)
    write(tmp_path / "VAL.TSV", TSV)

    text = read_pairs_as_before(tmp_path)

    pairs = [tuple(row.split("\t")) for row in rows]
    assert (text.train, text.val) == split_pairs(pairs, val_fraction=0.3)
    assert text.notes == ()


# --- phrases --------------------------------------------------------------------------------------


def test_phrases_are_many_different_ones_and_the_same_every_time() -> None:
    phrases = cldr_phrases(count=22_000)

    assert len(phrases) == 22_000
    assert len({one for one, _ in phrases}) == 22_000
    assert cldr_phrases(count=500) == phrases[:500]
    assert cldr_phrases(count=500, seed=1) != phrases[:500]
    for one, other in phrases:
        assert one.strip()
        assert other.strip()
        assert "\n" not in one + other


@pytest.mark.parametrize(
    "pair",
    [("en", "de"), ("fr", "ja"), ("pt-BR", "ru"), ("ar", "zh_Hant"), ("sw", "hi"), ("vi", "ak")],
)
def test_any_two_languages_have_phrases_of_their_own(pair: tuple[str, str]) -> None:
    phrases = cldr_phrases(*pair, count=1000)

    assert len(phrases) == 1000
    assert sum(one != other for one, other in phrases) > 800
    text = "\n".join(f"{one}\n{other}" for one, other in phrases)
    assert "duration-" not in text
    assert "length-" not in text


@pytest.mark.parametrize(
    ("name", "near"), [("german", "de"), ("xx", "xh"), ("pt_BX", "pt_BR"), ("", "en")]
)
def test_a_language_that_cldr_does_not_have_is_told_with_near_ones(name: str, near: str) -> None:
    with refused("language-unknown", value=name) as caught:
        locale(name)
    assert near in caught.value.fields["similar"]


def test_phrases_of_one_language_are_refused() -> None:
    with refused("pairs-of-one-language", value="de"):
        cldr_phrases("de", "de")


def test_no_phrases_are_refused() -> None:
    with refused("setting-out-of-range", setting="count", value=0):
        cldr_phrases(count=0)


def test_dates_are_of_a_hundred_years_so_that_two_digits_tell_which() -> None:
    generator = random.Random(0)

    days = [_day(generator) for _ in range(20_000)]

    assert {day.year for day in days} == set(range(1970, 2070))
    assert max(days) - min(days) < datetime.timedelta(days=36_524)


def test_spans_of_time_are_of_two_or_three_units() -> None:
    english = locale("en")
    _, _, (draw, render), *_ = _amounts((english, locale("de")))
    generator = random.Random(0)

    unit_counts = set()
    for _ in range(400):
        text = render(draw(generator), english)
        unit_counts.add(len(re.findall(r"\d+", text)))

    assert unit_counts == {2, 3}
