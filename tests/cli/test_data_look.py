"""`surefoot data look` as it is typed: files, fields, what each recipe makes of a path, samples; 15
seconds.
"""

from __future__ import annotations

import json
import re
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import surefoot as sf
from command_line import error_of
from refused import refused
from stated import numbers_by_line, numbers_in
from surefoot.cli.main import main
from surefoot.recipes import NAMES
from surefoot.recipes.data_look import contents
from surefoot.recipes.images import look as images_look


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["surefoot"])
    return tmp_path


def look(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, str]:
    """What is printed on a path, as "", and on each recipe. All may refuse the path."""
    with suppress(SystemExit):
        main(["data", "look", *arguments])
    heading = rf"(?m)^({'|'.join(NAMES)})\n"
    of_path, *others = re.split(heading, capsys.readouterr().out)
    recipes = others[::2]
    texts = others[1::2]
    return {"": of_path, **dict(zip(recipes, texts, strict=True))}


def numbers_of_lines(text: str) -> list[list[float]]:
    return [numbers_in(line) for line in text.splitlines()]


def write_pictures(label: str, count: int, **image: Any) -> None:
    """Write pictures of one class."""
    Path("data", label).mkdir(parents=True)
    for number in range(count):
        Image.new(**image).save(f"data/{label}/{number}.png")


def test_text_is_shown_with_its_end_tokens_and_what_is_left_out_with_the_reason(
    capsys: pytest.CaptureFixture[str],
) -> None:
    Path("data").mkdir()
    for number in range(4):
        Path("data", f"{number}.txt").write_text(f"text {number} of four\n" * 10)
    for name in ("README.md", "._0.txt", "scan.pdf"):
        Path("data", name).write_text("x")
    Path("data", "empty.txt").touch()
    parts = look(capsys, "data", "--samples=9")
    assert set(parts) == {"", *NAMES}
    assert "5 .txt, 600 bytes" in parts[""]
    assert ": empty.txt" in parts[""]
    files_read = [numbers[:2] for numbers in numbers_of_lines(parts["gpt"])]
    assert [4, 8] in files_read
    assert re.search(r"<\|endoftext\|>text \d of four", parts["gpt"])
    for name in ("README.md", "scan.pdf", "._0.txt"):
        assert f"{name}: " in parts["gpt"]
    for recipe in set(NAMES) - {"gpt"}:
        assert "\n  refused " in f"\n{parts[recipe]}", recipe


def test_settings_of_a_recipe_follow_it(capsys: pytest.CaptureFixture[str]) -> None:
    Path("a.txt").write_text("abcdefgh" * 100)
    options = ["--recipe=gpt", "--data.tokenizer=characters", "--model.context=5", "--samples=1"]
    parts = look(capsys, "a.txt", *options)
    assert set(parts) == {"", "gpt"}
    last_numbers = [numbers[-1] for numbers in numbers_by_line(parts["gpt"])]
    assert 8 in last_numbers
    assert re.search(r"sample 1 +[a-h]{6}\n", parts["gpt"])
    assert "<|endoftext|>" not in parts["gpt"]


def test_a_window_that_cuts_a_character_is_not_odd(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--recipe=gpt", "--model.context=7", "--samples=40"]
    Path("a.txt").write_text("ä語" * 200)
    assert "U+FFFD" not in look(capsys, "a.txt", *options)["gpt"]
    Path("a.txt").write_text("a\ufffdb" * 200)
    assert "U+FFFD" in look(capsys, "a.txt", *options)["gpt"]


def test_only_the_beginning_of_a_long_text_is_encoded(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("surefoot.recipes.gpt.look._ENCODED", 100)
    options = ["--recipe=gpt", "--model.context=7", "--data.val-fraction=0.1"]
    Path("a.txt").write_text("ab" * 1000)
    text = look(capsys, "a.txt", *options)["gpt"]
    numbers = numbers_of_lines(text.replace("%", ""))
    assert [1, 2000, 10, 100] in numbers  # the first 100 characters of each part are encoded
    tokens = [of_line[:2] for of_line in numbers]
    assert [101, 101] in tokens


@pytest.mark.parametrize(
    ("arguments", "status", "reason"),
    [
        ([], 2, "needs a path"),
        (["a.txt", "--seed=3"], 2, "[setting-unknown]"),
        (["a.txt", "--recipe=gtp"], 2, "[recipe-unknown]"),
        (["gone"], 3, "[path-missing]"),
        (["a.txt", "--recipe=images"], 3, "a.txt"),
    ],
)
def test_a_mistake_is_refused(
    arguments: list[str], status: int, reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("a.txt").write_text("one")
    assert reason in error_of(capsys, "data", "look", *arguments, status=status)


def test_fields_of_rows_are_counted(capsys: pytest.CaptureFixture[str]) -> None:
    rows = [{"text": "one", "id": 1}, {"text": "two"}]
    Path("a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    parts = look(capsys, "a.jsonl")
    assert "a.jsonl: 2 rows; keys text (2), id (1)" in parts[""]


def test_the_most_frequent_kinds_of_files_are_counted(
    capsys: pytest.CaptureFixture[str],
) -> None:
    Path("data").mkdir()
    for number in range(25):
        Path("data", f"a{number}").write_text("one")  # without a suffix
        Path("data", f"b.kind{number:02}").write_text("one")
    _, most_frequent, *others, rest = look(capsys, "data")[""].rstrip().splitlines()
    assert numbers_in(most_frequent) == [25, 75]
    assert len(others) == 19
    assert numbers_in(rest) == [6]


def test_pictures_are_a_sheet_with_classes_counts_and_sizes(
    capsys: pytest.CaptureFixture[str],
) -> None:
    write_pictures("cat", 11, mode="RGB", size=(20, 10), color="red")
    write_pictures("dog", 3, mode="RGB", size=(20, 10), color="blue")
    options = ["--recipe=images", "--png=sheet.png", "--samples=2"]
    options += ["--augmentation.crop-padding=0", "--augmentation.randaugment=0"]

    text = look(capsys, "data", *options)["images"]

    (cats,) = re.findall(r"class 0: cat: (.*)", text)
    assert len(numbers_in(cats)) >= 2
    assert "20 x 10" in text
    assert re.search(r"\b5 pictures: dog", text)
    with Image.open("sheet.png") as sheet:
        assert sheet.width > sheet.height / 2
        middle = sheet.width // 4
        assert sheet.getpixel((middle, sheet.height // 4)) == (255, 0, 0)
        assert sheet.getpixel((middle, 3 * sheet.height // 4)) == (0, 0, 255)


def test_damaged_pictures_are_named_and_stop_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    for label in ("cat", "dog"):
        Path("data", label).mkdir(parents=True)
        for number in range(8):
            Image.effect_noise((32, 32), 50).save(f"data/{label}/{number}.jpg")
    damaged = Path("data/cat/3.jpg")
    content = damaged.read_bytes()
    damaged.write_bytes(content[: len(content) // 2])
    parts = look(capsys, "data", "--recipe=images", "--png=sheet.png", "--data.on-corrupt=skip")
    assert ": 3.jpg" in parts["images"]


def test_the_sheet_shows_pictures_as_the_first_epoch_reads_them() -> None:
    augmentation = sf.data.Augmentation(randaugment=2, flip=True)
    images = np.random.default_rng(0).integers(0, 256, (4, 16, 16, 1), dtype=np.uint8)
    arrays = sf.data.ImageArrays(
        images, np.arange(4), mean=(0.5,), std=(0.25,), augmentation=augmentation, seed=3
    )
    expected, _ = arrays.gather(np.arange(4), np.zeros(4, dtype=np.int64))
    for sample in range(4):
        shown = images_look._in_first_epoch(arrays, sample, seed=3)
        assert torch.equal(shown, expected[sample])


def test_a_path_that_every_recipe_refuses_ends_with_a_status(
    capsys: pytest.CaptureFixture[str],
) -> None:
    Path("data").mkdir()
    Path("data/a.pdf").write_bytes(b"%PDF-1.4")
    with pytest.raises(SystemExit) as end:
        main(["data", "look", "data"])
    assert end.value.code == sf.DataError.exit_status
    assert capsys.readouterr().out.count("refused") == len(NAMES)


def test_without_a_name_the_sheet_is_a_new_file(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    for label in ("cat", "dog"):
        write_pictures(label, 8, mode="L", size=(8, 8))
    text = look(capsys, "data", "--recipe=images")["images"]
    file = re.search(r"pictures  (\S+pictures\.png):", text)
    assert file is not None
    with Image.open(file[1]) as sheet:
        assert sheet.size == (3 * 98 + 2, 2 * 98 + 2)


def test_pairs_show_what_the_loss_counts_and_what_is_odd(
    capsys: pytest.CaptureFixture[str],
) -> None:
    sources = [f"a sentence with number {number}" for number in range(100)]
    targets = [f"ein Satz mit der Nummer {number}" for number in range(98)]
    Path("data").mkdir()
    Path("data/train.en").write_text("\n".join(sources) + "\n")
    Path("data/train.de").write_text("\n".join([*targets, "ja", sources[99]]) + "\n")
    Path("data/val.en").write_text("one\n")
    Path("data/val.de").write_text("eins\n")
    text = look(capsys, "data", "--recipe=translation", "--samples=1")["translation"]
    numbers = numbers_of_lines(text)
    assert [100, 1] in numbers
    assert "de: <begin>>>>ein Satz mit der Nummer 0<end><<<" in text
    assert [1, 100] in numbers  # pairs are equal on both sides
    assert [1, 100, 3] in numbers  # has one side that is 3 times as long


def write_chats(count: int) -> None:
    lines = []
    for number in range(count):
        question = {"role": "user", "content": f"{number} + 1?"}
        answer = {"role": "assistant", "content": f"{number + 1}"}
        lines.append(json.dumps({"messages": [question, answer]}) + "\n")
    Path("a.jsonl").write_text("".join(lines))


def test_chats_show_the_template_and_the_tokens_that_the_loss_counts(
    capsys: pytest.CaptureFixture[str],
) -> None:
    pytest.importorskip("transformers")
    write_chats(30)
    parts = look(capsys, "a.jsonl", "--recipe=finetune", "--samples=1", "--data.val-fraction=0")
    assert "User: 0 + 1?\n            Assistant:>>> 1<|endoftext|>" in parts["finetune"]


def test_some_of_many_chats_are_laid_out(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("transformers")
    monkeypatch.setattr("surefoot.recipes.finetune.look._LAID_OUT", 10)
    write_chats(41)
    text = look(capsys, "a.jsonl", "--recipe=finetune", "--data.val-fraction=0")["finetune"]
    numbers = numbers_by_line(text)
    rows = [of_line[0] for of_line in numbers]
    assert 41 in rows
    lines_with_9 = [of_line for of_line in numbers if 9 in of_line]
    assert len(lines_with_9) >= 2  # laid out, and for training


def test_chats_are_cut_at_the_context_of_the_model_and_an_old_run_changes_nothing(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    transformers = pytest.importorskip("transformers")
    from surefoot.recipes.finetune import look

    Path("model").mkdir()
    look._write_bytes(Path("model"))
    shape = {"n_positions": 20, "n_embd": 8, "n_layer": 1, "n_head": 1, "vocab_size": 257}
    transformers.GPT2LMHeadModel(transformers.GPT2Config(**shape)).save_pretrained("model")
    runs: list[object] = []

    def behavior_in(run: object) -> int:
        runs.append(run)
        return 10

    monkeypatch.setattr("surefoot.recipes.finetune.corpus.behavior_in", behavior_in)
    write_chats(10)
    Path("a.jsonl").write_text(Path("a.jsonl").read_text().replace("+ 1?", "+ 1? " + "x" * 30))
    look_at = ["data", "look", "a.jsonl"]
    options = ["--recipe=finetune", "--model=model", "--data.val-fraction=0"]

    message = error_of(capsys, *look_at, *options, status=3)
    assert 20 in numbers_in(message)
    assert runs == [None]
    message = error_of(capsys, *look_at, *options, "--data.max-tokens=21")
    assert 20 in numbers_in(message)


def test_a_plan_names_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    Path("my text.txt").write_text("to be or not to be\n" * 100)
    small = ["--model.layers=1", "--model.width=16", "--model.heads=2", "--model.context=8"]
    small += ["--batch-size=4", "--length=2 steps", "--cloze-questions=0", "--device=cpu"]
    main(["plan", "gpt", "--data.path=my text.txt", "--data.tokenizer=bytes", *small])
    text = capsys.readouterr().out
    line = "surefoot data look 'my text.txt' --recipe gpt --data.tokenizer bytes\n"
    assert line in text


def test_the_command_of_a_plan_has_the_settings_of_the_data() -> None:
    from surefoot.cli.plan import _look_at
    from surefoot.program import find_program
    from surefoot.recipes import finetune, translation

    data = translation.Data(path="pairs", source="fr", target="nl", max_source_tokens=64)
    line = _look_at(find_program("translation"), translation.Config(data=data))
    flags = "--data.source fr --data.target nl --data.max-source-tokens 64"
    assert line == f"surefoot data look pairs --recipe translation {flags}"
    chats = finetune.Config(data=finetune.Data(path="a.jsonl"), model="my model")
    line = _look_at(find_program("finetune"), chats)
    assert line == "surefoot data look a.jsonl --recipe finetune --model 'my model'"


def test_a_plan_of_data_without_a_path_names_no_command(
    capsys: pytest.CaptureFixture[str],
) -> None:
    small = ["--batch-size=4", "--length=2 steps", "--device=cpu", "--data.size=8"]
    main(["plan", "images", "--data.path=synthetic", *small])
    assert "surefoot data look" not in capsys.readouterr().out


def test_a_link_to_nothing_stops_the_look(capsys: pytest.CaptureFixture[str]) -> None:
    Path("data").mkdir()
    Path("data", "a.txt").symlink_to("gone")
    with refused("link-to-nothing", sf.DataError):
        contents(Path("data"))
