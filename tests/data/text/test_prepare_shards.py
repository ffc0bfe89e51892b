"""Token shards from text: the tokens are those of each document, and neither kills nor processes
change a byte; 20 seconds.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import surefoot as sf
from refused import refused
from stated import numbers_in
from surefoot.data.text.shards import TokenShards
from surefoot.errors import DataError
from surefoot.recipes.readers.text import prepare_shards as prepare
from surefoot.recipes.readers.text.prepare_shards import prepare_shards
from waiting import wait_until

BYTES = sf.tokenizers.ByteTokenizer()


def test_how_far_it_is_is_said_every_ten_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter([0.0, 4.0, 9.9, 10.0, 12.0, 19.9, 20.0, 55.0])
    monkeypatch.setattr(prepare, "time", SimpleNamespace(monotonic=lambda: next(now)))
    file = SimpleNamespace(name="a.txt")
    seven = [(prepare.Position(0, number, 0), np.zeros(10)) for number in range(7)]
    lines: list[str] = []
    assert list(prepare._with_progress(iter(seven), [file], lines.append)) == seven  # type: ignore[arg-type,list-item]
    assert lines == [
        "file 1 of 1 (a.txt): 30 tokens of 3 documents, 3 tokens/s",
        "file 1 of 1 (a.txt): 60 tokens of 6 documents, 3 tokens/s",
        "file 1 of 1 (a.txt): 70 tokens of 7 documents, 1 tokens/s",
    ]


def test_a_file_that_comes_after_the_last_shard_is_refused(tmp_path: Path) -> None:
    """The last shard is not full: it would have had tokens of the new file."""
    first = tmp_path / "a.txt"
    second = tmp_path / "b.txt"
    out = tmp_path / "out"
    first.write_text("a" * 15)
    settings: dict[str, Any] = {"tokenizer": BYTES, "processes": 1, "shard_tokens": 10}
    prepare_shards(out, [first], **settings)
    (out / "tokens.json").unlink()  # killed between the last shard and the index
    second.write_text("b")
    with refused("shards-of-other-texts", DataError, changed=["files"]):
        prepare_shards(out, [first, second], **settings)


def documents(number: int = 60) -> list[str]:
    generator = np.random.default_rng(0)
    letters = [
        generator.integers(97, 123, size=int(generator.integers(0, 300)), dtype=np.uint8)
        for _ in range(number)
    ]
    return [one.tobytes().decode() for one in letters]


@pytest.fixture
def inputs(tmp_path: Path) -> list[Path]:
    """Three files of different kinds, with 60 documents, some of them empty."""
    texts = documents()
    texts[3] = texts[59] = ""
    (tmp_path / "a.jsonl").write_text(
        "".join(json.dumps({"text": text}) + "\n" for text in texts[:30])
    )
    (tmp_path / "b.txt").write_text(texts[30])
    (tmp_path / "c.jsonl").write_text(
        "".join(json.dumps({"text": text}) + "\n" for text in texts[31:])
    )
    (tmp_path / "expected.json").write_text(json.dumps([text for text in texts if text]))
    return [tmp_path / name for name in ("a.jsonl", "b.txt", "c.jsonl")]


@pytest.fixture(autouse=True)
def small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepare, "_DOCUMENTS_AT_ONCE", 7)


def whole(directory: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in directory.iterdir()}


def prepared(out: Path, inputs: list[Path], **settings: Any) -> TokenShards:
    return prepare_shards(
        out, inputs, **{"tokenizer": BYTES, "processes": 1, "shard_tokens": 1000} | settings
    )


def test_shards_hold_the_tokens_of_every_document_and_its_end(
    inputs: list[Path], tmp_path: Path
) -> None:
    shards = prepared(tmp_path / "out", inputs)
    expected = sf.data.encode_documents(json.loads((tmp_path / "expected.json").read_text()), BYTES)
    assert np.array_equal(np.concatenate(list(shards.arrays)), expected)
    assert {len(array) for array in shards.arrays[:-1]} == {1000}
    assert shards.vocab_size == 257
    shards.refuse_damaged()
    assert sf.tokenizers.load(tmp_path / "out").to_json() == BYTES.to_json()


@pytest.mark.parametrize("kind", ["bytes", "bpe"])
def test_the_number_of_processes_changes_no_byte(
    kind: str, inputs: list[Path], tmp_path: Path
) -> None:
    tokenizer = (
        BYTES if kind == "bytes" else sf.tokenizers.BPETokenizer.train(documents(), vocab_size=300)
    )
    for processes in (1, 2):
        prepared(tmp_path / str(processes), inputs, tokenizer=tokenizer, processes=processes)
    assert whole(tmp_path / "1") == whole(tmp_path / "2")


@pytest.mark.parametrize("shards", range(9))
def test_what_was_given_up_after_any_shard_ends_in_the_same_bytes(
    shards: int, inputs: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class GivenUpError(Exception):
        pass

    def given_up(pieces: Any, directory: Path, *, number: int, vocab_size: int) -> Any:
        if number == shards:
            (directory / f"shard-{number:05d}.bin").write_bytes(b"half of it")
            raise GivenUpError
        return write(pieces, directory, number=number, vocab_size=vocab_size)

    prepared(tmp_path / "whole", inputs)
    write = prepare.write_shard
    monkeypatch.setattr(prepare, "write_shard", given_up)
    with pytest.raises(GivenUpError):
        prepared(tmp_path / "out", inputs)
    monkeypatch.setattr(prepare, "write_shard", write)
    with refused("shards-unfinished", DataError):
        TokenShards.open(tmp_path / "out")
    said: list[str] = []
    prepared(tmp_path / "out", inputs, say=said.append)
    assert whole(tmp_path / "out") == whole(tmp_path / "whole")
    assert said[0] == "3 files: 2 .jsonl, 1 .txt"
    assert ("resuming after" in said[1]) == (shards > 0)
    assert (
        shards == 0
        or f"{shards} shard{'s' * (shards > 1)} with {1000 * shards:,} tokens" in said[1]
    )


def is_there(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.slow
def test_a_sigkill_leaves_no_process_behind_and_the_same_call_goes_on_to_the_same_bytes(
    tmp_path: Path,
) -> None:
    texts = "".join(json.dumps({"text": text * 20}) + "\n" for text in documents(600))
    (tmp_path / "a.jsonl").write_text(texts)
    out = tmp_path / "out"
    command = [
        sys.executable,
        "-c",
        "from surefoot.cli.main import main; main()",
        "data",
        "prepare",
        str(out),
    ]
    command += [
        str(tmp_path / "a.jsonl"),
        "--tokenizer=bytes",
        "--processes=2",
        "--shard-tokens=20000",
    ]
    with subprocess.Popen(command, stderr=subprocess.DEVNULL, start_new_session=True) as process:
        while not (out / "shard-00001.bin").exists() and process.poll() is None:
            time.sleep(0.001)
        os.kill(
            process.pid, signal.SIGKILL
        )  # that process alone: those that it started must notice
    assert process.returncode == -signal.SIGKILL
    assert not (out / "tokens.json").exists()
    assert wait_until(lambda: not is_there(process.pid)), "processes of a killed call go on"
    subprocess.run(command, check=True, stderr=subprocess.DEVNULL)
    prepare_shards(
        tmp_path / "whole", [tmp_path / "a.jsonl"], tokenizer=BYTES, processes=1, shard_tokens=20000
    )
    assert whole(out) == whole(tmp_path / "whole")


def test_a_finished_directory_is_checked_and_what_is_damaged_is_made_again(
    inputs: list[Path], tmp_path: Path
) -> None:
    prepared(tmp_path / "out", inputs)
    before = whole(tmp_path / "out")
    said = list[str]()
    times = [path.stat().st_mtime_ns for path in sorted((tmp_path / "out").iterdir())]
    prepared(tmp_path / "out", inputs, say=said.append)
    assert [path.stat().st_mtime_ns for path in sorted((tmp_path / "out").iterdir())] == times
    for spoil in ("flip", "delete"):
        shard = tmp_path / "out" / "shard-00003.bin"
        shard.write_bytes(b"\1" + shard.read_bytes()[1:]) if spoil == "flip" else shard.unlink()
        prepared(tmp_path / "out", inputs, say=said.append)
        assert "shard-00003.bin" in " ".join(said[1:])
        assert whole(tmp_path / "out") == before


@pytest.mark.parametrize(
    ("change", "changed"),
    [
        ({"shard_tokens": 999}, "shard_tokens"),
        ({"column": "body"}, "column"),
        (
            {"tokenizer": sf.tokenizers.CharacterTokenizer.from_text("abcdefghijklmnopqrstuvwxyz")},
            "tokenizer",
        ),
        ({"inputs": 2}, "files"),
    ],
)
def test_a_directory_of_other_settings_is_refused(
    change: dict[str, Any], changed: str, inputs: list[Path], tmp_path: Path
) -> None:
    prepared(tmp_path / "out", inputs)
    before = whole(tmp_path / "out")
    count = change.pop("inputs", 3)
    with refused("shards-of-other-texts", DataError, changed=[changed]):
        prepared(tmp_path / "out", inputs[:count], **change)
    assert whole(tmp_path / "out") == before


def test_a_file_that_has_changed_since_is_refused(inputs: list[Path], tmp_path: Path) -> None:
    prepared(tmp_path / "out", inputs)
    text = inputs[1].read_text()
    times = inputs[1].stat()
    inputs[1].write_text("other")
    with refused("shards-of-other-texts", DataError, changed=["files"]) as caught:
        prepared(tmp_path / "out", inputs)
    assert "b.txt has changed" in str(caught.value.problem)
    inputs[1].write_text(text.upper())
    os.utime(inputs[1], ns=(times.st_atime_ns, times.st_mtime_ns + 1))
    with refused("shards-of-other-texts", DataError, changed=["files"]) as caught:
        prepared(tmp_path / "out", inputs)
    assert "b.txt was rewritten" in str(caught.value.problem)
    inputs[1].write_text(text)
    os.utime(inputs[1], ns=(times.st_atime_ns, times.st_mtime_ns))
    prepared(tmp_path / "out", inputs)


def test_shards_of_someone_else_are_not_touched(inputs: list[Path], tmp_path: Path) -> None:
    sf.data.write_shards(np.arange(9), tmp_path / "out", vocab_size=9)
    before = whole(tmp_path / "out")
    with refused("shards-already-there", DataError, path=tmp_path / "out"):
        prepared(tmp_path / "out", inputs)
    assert whole(tmp_path / "out") == before
    (tmp_path / "out" / "prepare.json").write_text("{")
    with refused("shard-notes-damaged", DataError, path=tmp_path / "out" / "prepare.json"):
        prepared(tmp_path / "out", inputs)


def test_errors_in_the_text_name_file_and_line_from_several_processes_too(
    inputs: list[Path], tmp_path: Path
) -> None:
    inputs[2].write_text('{"text": "a"}\n{"txt": "b"}\n')
    with refused("column-missing", DataError, where=f"{inputs[2]}, line 2"):
        prepared(tmp_path / "out", inputs, processes=2)


@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.parametrize("kind", ["bytes", "bpe"])
def test_a_text_that_is_none_is_told_with_file_and_document(
    kind: str, processes: int, inputs: list[Path], tmp_path: Path
) -> None:
    lines = inputs[2].read_text().splitlines(keepends=True)
    inputs[2].write_text("".join([*lines[:17], '{"text": "bad \\ud83d here"}\n', *lines[17:]]))
    tokenizer = (
        BYTES if kind == "bytes" else sf.tokenizers.BPETokenizer.train(documents(), vocab_size=300)
    )
    with refused("text-with-half-character", DataError, position=4) as caught:
        prepared(tmp_path / "out", inputs, tokenizer=tokenizer, processes=processes)
    (place,) = caught.value.places
    assert place.startswith(f"{inputs[2]}, ")
    assert numbers_in(place.removeprefix(f"{inputs[2]}, ")) == [18, 1]  # the document, the first


def test_shards_below_the_directory_that_is_read_are_gone_on_with(tmp_path: Path) -> None:
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.txt").write_text("one text")
    prepared(tmp_path / "texts" / "out", [tmp_path / "texts"])
    (tmp_path / "texts" / "out" / "notes.txt").write_text("made on Monday")
    before = whole(tmp_path / "texts" / "out")
    prepared(tmp_path / "texts" / "out", [tmp_path / "texts"])
    assert whole(tmp_path / "texts" / "out") == before


@pytest.mark.slow
def test_a_script_without_a_guard_is_told_of_it_and_its_processes_write_nothing(
    inputs: list[Path], tmp_path: Path
) -> None:
    call = f"sf.data.prepare_shards(f'{{os.getpid()}}.out', [{str(inputs[0])!r}], tokenizer=sf.tokenizers.ByteTokenizer(), processes=2)"
    (tmp_path / "bare.py").write_text(f"import os\nimport surefoot as sf\n{call}\n")
    (tmp_path / "guarded.py").write_text(
        f"import os\nimport surefoot as sf\nif __name__ == '__main__':\n    {call}\n"
    )
    bare, guarded = (
        subprocess.run(
            [sys.executable, name], cwd=tmp_path, check=False, capture_output=True, text=True
        )
        for name in ("bare.py", "guarded.py")
    )
    assert 'if __name__ == "__main__":' in bare.stderr
    assert (bare.returncode, guarded.returncode) == (1, 0), guarded.stderr
    assert len(list(tmp_path.glob("*.out"))) == 2  # one of each script


def test_the_page_about_shards_shows_a_script_that_makes_them(
    inputs: list[Path], tmp_path: Path
) -> None:
    page = Path(__file__).parents[3] / "docs" / "guides" / "token-shards.md"
    (code,) = re.findall(r"```python\n(.*?)```", page.read_text(), flags=re.DOTALL)
    (tmp_path / "script.py").write_text(code)
    inputs[0].rename(tmp_path / "text.jsonl")
    subprocess.run([sys.executable, "script.py"], cwd=tmp_path, check=True)
    made = TokenShards.open(tmp_path / "shards")
    assert np.array_equal(
        made.arrays[0],
        prepared(tmp_path / "out", [tmp_path / "text.jsonl"], shard_tokens=9999).arrays[0],
    )


def test_a_shard_that_cannot_be_reached_is_not_made_again(
    inputs: list[Path], tmp_path: Path
) -> None:
    prepared(tmp_path / "out", inputs)
    (tmp_path / "out" / "shard-00002.bin").unlink()
    (tmp_path / "out" / "shard-00002.bin").mkdir()
    with refused("file-unreadable", DataError, path=tmp_path / "out" / "shard-00002.bin"):
        prepared(tmp_path / "out", inputs)


def test_what_cannot_be_prepared_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": ""}\n')
    with refused("shards-without-tokens", DataError, path=tmp_path / "out"):
        prepared(tmp_path / "out", [tmp_path / "a.jsonl"])
    for setting in ("processes", "shard_tokens"):
        with refused("setting-out-of-range", setting=setting, value=0):
            prepared(tmp_path / "out", [tmp_path / "a.jsonl"], **{setting: 0})


def test_a_place_that_cannot_be_written_is_an_error_that_says_so(
    inputs: list[Path], tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    with refused("shards-not-written", DataError, path=tmp_path / "file" / "out"):
        prepared(tmp_path / "file" / "out", inputs)


def test_until_there_is_a_shard_the_settings_may_change(inputs: list[Path], tmp_path: Path) -> None:
    """`--column txt`, then `--column text`."""
    with refused("column-missing", DataError, value="txt"):
        prepared(tmp_path / "out", inputs[:1], column="txt")
    prepared(tmp_path / "out", inputs, shard_tokens=2000)
    prepared(tmp_path / "whole", inputs, shard_tokens=2000)
    assert whole(tmp_path / "out") == whole(tmp_path / "whole")


def test_a_file_of_which_nothing_is_in_a_shard_yet_may_be_mended(
    inputs: list[Path], tmp_path: Path
) -> None:
    good = inputs[2].read_bytes()
    inputs[2].write_bytes(b"{}\n" + good)
    with refused("column-missing", DataError, where=f"{inputs[2]}, line 1"):
        prepared(tmp_path / "out", inputs)
    assert (tmp_path / "out" / "shard-00000.bin").exists()
    inputs[2].write_bytes(good)
    said: list[str] = []
    prepared(tmp_path / "out", inputs, say=said.append)
    assert "c.jsonl " in said[1]
    assert len(said) > 2  # and from where it goes on
    prepared(tmp_path / "whole", inputs)
    assert whole(tmp_path / "out") == whole(tmp_path / "whole")


@pytest.mark.parametrize("ended", [False, True])
def test_what_is_in_a_shard_may_not_change_and_what_to_do_is_said(
    ended: bool, inputs: list[Path], tmp_path: Path
) -> None:
    good = inputs[0].read_bytes()
    inputs[0].write_bytes(good if ended else good + b"{}\n")
    if ended:
        prepared(tmp_path / "out", inputs)
    else:
        with refused("column-missing", DataError, value="text"):
            prepared(tmp_path / "out", inputs)
    inputs[0].write_bytes(good + b"\n")
    with refused("shards-of-other-texts", DataError, changed=["files"]) as caught:
        prepared(tmp_path / "out", inputs)
    size_before = len(good) if ended else len(good) + 3
    sizes = numbers_in(caught.value.problem)[-2:]
    assert sizes == [size_before, len(good) + 1]
    what_to_delete = "this one" if ended else str(tmp_path)
    assert f"delete {what_to_delete}" in str(caught.value.remedies[0])
