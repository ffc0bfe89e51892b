"""Parallel text from files: every form, and what is wrong with it by file and line; and phrases
from CLDR; 4 seconds.
"""

from __future__ import annotations

import datetime
import gzip
import json
import random
import re
from pathlib import Path

import pytest

from data_sets import DATA, needs
from surefoot.data.translation.files import ParallelText, load_pairs, split_pairs
from surefoot.data.translation.phrases import _amounts, _day, cldr_phrases, locale
from surefoot.errors import ConfigError, DataError

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


def refused(path: Path, **settings: str) -> str:
    with pytest.raises(DataError) as caught:
        load_pairs(path, **settings)
    said = str(caught.value)
    assert len(said.splitlines()) <= 5
    return said


def test_unequal_line_counts_are_told_with_both_files(tmp_path: Path) -> None:
    write_both(tmp_path, "train", PAIRS)
    write(tmp_path / "train.de", ["only one"])
    said = refused(tmp_path)
    assert f"{tmp_path / 'train.en'} has 40 lines, but {tmp_path / 'train.de'} has 1" in said


@pytest.mark.parametrize("gz", ["", ".gz"])
def test_bytes_that_are_no_text_are_told_with_file_and_line(gz: str, tmp_path: Path) -> None:
    write_both(tmp_path, "train", PAIRS, gz=gz)
    data = b"one\ntwo\nth\xfcree\n"
    (tmp_path / f"train.en{gz}").write_bytes(gzip.compress(data) if gz else data)
    assert f"train.en{gz}, line 3 is not UTF-8 text: byte 3 of the line is 0xfc" in refused(
        tmp_path
    )


@pytest.mark.parametrize("side", ["en", "de"])
def test_an_empty_side_is_told_with_file_and_line(side: str, tmp_path: Path) -> None:
    write_both(tmp_path, "train", PAIRS)
    lines = (tmp_path / f"train.{side}").read_text().split("\n")
    (tmp_path / f"train.{side}").write_text("\n".join([*lines[:6], " \t", *lines[7:]]))
    said = refused(tmp_path)
    assert f"train.{side}, line 7: the {'source' if side == 'en' else 'target'} is empty" in said


def test_a_missing_language_is_told_with_those_that_are_there(tmp_path: Path) -> None:
    write_both(tmp_path, "train", PAIRS)
    (tmp_path / "train.fr.gz").write_bytes(gzip.compress(b"x"))
    assert "train.es is missing (.gz too); train is available in: de, en, fr" in refused(
        tmp_path, target="es"
    )
    said = refused(tmp_path, source="it", target="es")
    assert "neither train.it and train.es nor train.tsv" in said
    assert "train.fr.gz" in said
    write(tmp_path / "val.en", ["x"])
    assert "val.de is missing" in refused(tmp_path)


def test_one_language_twice_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="source and target are both 'en'"):
        load_pairs(tmp_path, target="en")


@pytest.mark.parametrize(
    ("name", "line", "says"),
    [
        ("c.tsv", "only one column", "line 3: 1 column; expected a source and a target"),
        ("c.tsv", "one\t ", "line 3: the target is empty, and its source is 'one'"),
        (
            "c.jsonl",
            '{"en": "x", "fr": "y"}',
            "line 3: no text under 'en' and 'de'; its keys: en, fr",
        ),
        (
            "c.jsonl",
            '{"translation": {"en": "x", "de": 7}}',
            "line 3: the value of 'de' is not text: 7",
        ),
        ("c.jsonl", "[1]", "line 3: no text under 'en' and 'de'; its keys: none"),
        ("c.jsonl", '{"en": ', "line 3 is not JSON"),
        ("c.jsonl", "", "line 3 is not JSON"),
        ("c.jsonl", '{"en": "", "de": "y"}', "line 3: the source is empty, and its target is 'y'"),
    ],
)
def test_a_line_that_is_no_pair_is_told_by_its_number(
    name: str, line: str, says: str, tmp_path: Path
) -> None:
    good = [
        f"{one}\t{other}" if name == "c.tsv" else json_line((one, other), inside=False)
        for one, other in PAIRS
    ]
    write(tmp_path / name, [*good[:2], line, *good[2:]])
    said = refused(tmp_path / name)
    assert f"{tmp_path / name}, {says}" in said


def test_a_header_counts_as_a_line(tmp_path: Path) -> None:
    write(tmp_path / "c.tsv", ["en\tde", "a\tb", "c"])
    assert "line 3: 1 column" in refused(tmp_path / "c.tsv")
    write(tmp_path / "c.tsv", ["en\tde", "a\tb", "\td"])
    assert "line 3: the source is empty" in refused(tmp_path / "c.tsv")


def test_other_files_are_refused_by_what_they_are(tmp_path: Path) -> None:
    assert "no file or directory" in refused(tmp_path / "nothing")
    (tmp_path / "c.txt").write_text("x")
    assert "does not end in .tsv, .jsonl, .en or .de" in refused(tmp_path / "c.txt")
    (tmp_path / "c.tsv").write_text("")
    assert "c.tsv is empty" in refused(tmp_path / "c.tsv")
    (tmp_path / "c.tsv.gz").write_bytes(gzip.compress(b"a\tb\n" * 99)[:-9])
    assert "c.tsv.gz is truncated or damaged" in refused(tmp_path / "c.tsv.gz")
    (tmp_path / "d.tsv.gz").write_bytes(b"a\n")  # unpacked, by a browser say
    assert "d.tsv.gz, line 1: 1 column" in refused(tmp_path / "d.tsv.gz")
    with pytest.raises(
        DataError,
        match=r"val_fraction = 0\.0 of 40 pairs leaves 40 for training and 0 for validation",
    ):
        split_pairs(PAIRS, val_fraction=0.0)


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
        with pytest.raises(ConfigError, match=f"similar names: .*{near}"):
            locale(name)
    with pytest.raises(ConfigError, match="both 'de'"):
        cldr_phrases("de", "de")
    with pytest.raises(ConfigError, match="count = 0"):
        cldr_phrases(count=0)


def test_half_a_character_in_json_is_told_by_its_line(tmp_path: Path) -> None:
    (tmp_path / "pairs.jsonl").write_text(
        '{"en": "a", "de": "b"}\n{"en": "a \\ud800 b", "de": "x"}\n'
    )
    with pytest.raises(DataError, match=r"pairs\.jsonl, line 2 holds half a surrogate pair"):
        load_pairs(tmp_path / "pairs.jsonl", source="en", target="de")


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
