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
    times = iter([0.0, 4.0, 9.9, 10.0, 12.0, 19.9, 20.0, 55.0])
    monkeypatch.setattr(prepare, "time", SimpleNamespace(monotonic=lambda: next(times)))
    file: Any = SimpleNamespace(name="a.txt")
    pieces = [(prepare.Position(0, number, 0), np.zeros(10)) for number in range(7)]
    lines: list[str] = []

    passed_on = list(prepare._with_progress(iter(pieces), [file], lines.append))

    assert passed_on == pieces
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
    """Texts of 0 to 299 letters."""
    generator = np.random.default_rng(0)
    texts = []
    for _ in range(number):
        size = int(generator.integers(0, 300))
        letters = generator.integers(97, 123, size=size, dtype=np.uint8)
        texts.append(letters.tobytes().decode())
    return texts


def write_rows(path: Path, texts: list[str]) -> None:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))


def input_texts() -> list[str]:
    texts = documents()
    texts[3] = ""
    texts[59] = ""
    return texts


@pytest.fixture
def inputs(tmp_path: Path) -> list[Path]:
    """Three files of different kinds, with 60 documents, some of them empty."""
    texts = input_texts()
    write_rows(tmp_path / "a.jsonl", texts[:30])
    (tmp_path / "b.txt").write_text(texts[30])
    write_rows(tmp_path / "c.jsonl", texts[31:])
    return [tmp_path / name for name in ("a.jsonl", "b.txt", "c.jsonl")]


@pytest.fixture(autouse=True)
def small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepare, "_DOCUMENTS_AT_ONCE", 7)


def contents(directory: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in directory.iterdir()}


def prepare_small(out: Path, inputs: list[Path], **changes: Any) -> TokenShards:
    settings: dict[str, Any] = {"tokenizer": BYTES, "processes": 1, "shard_tokens": 1000}
    return prepare_shards(out, inputs, **(settings | changes))


def build_tokenizer(kind: str) -> Any:
    if kind == "bytes":
        return BYTES
    return sf.tokenizers.BPETokenizer.train(documents(), vocab_size=300)


def test_shards_hold_the_tokens_of_every_document_and_its_end(
    inputs: list[Path], tmp_path: Path
) -> None:
    texts = [text for text in input_texts() if text]
    expected = sf.data.encode_documents(texts, BYTES)

    shards = prepare_small(tmp_path / "out", inputs)

    assert np.array_equal(np.concatenate(list(shards.arrays)), expected)
    assert {len(array) for array in shards.arrays[:-1]} == {1000}
    assert shards.vocab_size == 257
    shards.refuse_damaged()
    assert sf.tokenizers.load(tmp_path / "out").to_json() == BYTES.to_json()


@pytest.mark.parametrize("kind", ["bytes", "bpe"])
def test_the_number_of_processes_changes_no_byte(
    kind: str, inputs: list[Path], tmp_path: Path
) -> None:
    tokenizer = build_tokenizer(kind)

    prepare_small(tmp_path / "one", inputs, tokenizer=tokenizer, processes=1)
    prepare_small(tmp_path / "two", inputs, tokenizer=tokenizer, processes=2)

    assert contents(tmp_path / "two") == contents(tmp_path / "one")


@pytest.mark.parametrize("shards", range(9))
def test_what_was_given_up_after_any_shard_ends_in_the_same_bytes(
    shards: int, inputs: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class GivenUpError(Exception):
        pass

    def write_or_give_up(pieces: Any, directory: Path, *, number: int, vocab_size: int) -> Any:
        if number == shards:
            (directory / f"shard-{number:05d}.bin").write_bytes(b"half of it")
            raise GivenUpError
        return write_shard(pieces, directory, number=number, vocab_size=vocab_size)

    prepare_small(tmp_path / "whole", inputs)
    write_shard = prepare.write_shard
    with monkeypatch.context() as patch:
        patch.setattr(prepare, "write_shard", write_or_give_up)
        with pytest.raises(GivenUpError):
            prepare_small(tmp_path / "out", inputs)
    with refused("shards-unfinished", DataError):
        TokenShards.open(tmp_path / "out")

    lines: list[str] = []
    prepare_small(tmp_path / "out", inputs, say=lines.append)

    assert contents(tmp_path / "out") == contents(tmp_path / "whole")
    assert lines[0] == "3 files: 2 .jsonl, 1 .txt"
    assert ("resuming after" in lines[1]) == (shards > 0)
    if shards > 0:
        assert numbers_in(lines[1])[:2] == [shards, 1000 * shards]


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
    text = tmp_path / "a.jsonl"
    write_rows(text, [20 * document for document in documents(600)])
    out = tmp_path / "out"
    program = [sys.executable, "-c", "from surefoot.cli.main import main; main()"]
    flags = ["--tokenizer=bytes", "--processes=2", "--shard-tokens=20000"]
    command = [*program, "data", "prepare", str(out), str(text), *flags]

    with subprocess.Popen(command, stderr=subprocess.DEVNULL, start_new_session=True) as process:
        while not (out / "shard-00001.bin").exists() and process.poll() is None:
            time.sleep(0.001)
        # that process alone: those that it started must notice
        os.kill(process.pid, signal.SIGKILL)
    assert process.returncode == -signal.SIGKILL
    assert not (out / "tokens.json").exists()
    assert wait_until(lambda: not is_there(process.pid)), "processes of a killed call go on"

    subprocess.run(command, check=True, stderr=subprocess.DEVNULL)

    prepare_small(tmp_path / "whole", [text], shard_tokens=20000)
    assert contents(out) == contents(tmp_path / "whole")


@pytest.fixture
def out(inputs: list[Path], tmp_path: Path) -> Path:
    """A finished directory of the inputs."""
    prepare_small(tmp_path / "out", inputs)
    return tmp_path / "out"


def test_a_finished_directory_is_not_written_again(inputs: list[Path], out: Path) -> None:
    times = {path: path.stat().st_mtime_ns for path in out.iterdir()}

    prepare_small(out, inputs)

    assert {path: path.stat().st_mtime_ns for path in out.iterdir()} == times


@pytest.mark.parametrize("damage", ["flipped", "deleted"])
def test_what_is_damaged_is_made_again(damage: str, inputs: list[Path], out: Path) -> None:
    before = contents(out)
    shard = out / "shard-00003.bin"
    if damage == "flipped":
        shard.write_bytes(b"\1" + shard.read_bytes()[1:])
    else:
        shard.unlink()

    lines: list[str] = []
    prepare_small(out, inputs, say=lines.append)

    assert any("shard-00003.bin" in line for line in lines)
    assert contents(out) == before


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("shard_tokens", 999),
        ("column", "body"),
        (
            "tokenizer",
            sf.tokenizers.CharacterTokenizer.from_text("abcdefghijklmnopqrstuvwxyz"),
        ),
    ],
)
def test_a_directory_of_other_settings_is_refused(
    setting: str, value: Any, inputs: list[Path], out: Path
) -> None:
    before = contents(out)

    with refused("shards-of-other-texts", DataError, changed=[setting]):
        prepare_small(out, inputs, **{setting: value})
    assert contents(out) == before


def test_a_directory_of_other_files_is_refused(inputs: list[Path], out: Path) -> None:
    before = contents(out)

    with refused("shards-of-other-texts", DataError, changed=["files"]):
        prepare_small(out, inputs[:2])
    assert contents(out) == before


def test_a_file_whose_size_has_changed_is_refused(inputs: list[Path], out: Path) -> None:
    inputs[1].write_text("other")

    with refused("shards-of-other-texts", DataError, changed=["files"]) as caught:
        prepare_small(out, inputs)
    assert "b.txt has changed" in str(caught.value.problem)


def test_a_file_that_was_rewritten_is_refused_until_it_is_as_before(
    inputs: list[Path], out: Path
) -> None:
    text = inputs[1].read_text()
    times = inputs[1].stat()

    inputs[1].write_text(text.upper())
    os.utime(inputs[1], ns=(times.st_atime_ns, times.st_mtime_ns + 1))
    with refused("shards-of-other-texts", DataError, changed=["files"]) as caught:
        prepare_small(out, inputs)
    assert "b.txt was rewritten" in str(caught.value.problem)

    inputs[1].write_text(text)
    os.utime(inputs[1], ns=(times.st_atime_ns, times.st_mtime_ns))
    prepare_small(out, inputs)


def test_shards_of_someone_else_are_not_touched(inputs: list[Path], tmp_path: Path) -> None:
    out = tmp_path / "out"
    sf.data.write_shards(np.arange(9), out, vocab_size=9)
    before = contents(out)

    with refused("shards-already-there", DataError, path=out):
        prepare_small(out, inputs)
    assert contents(out) == before


def test_damaged_notes_are_refused(inputs: list[Path], out: Path) -> None:
    (out / "prepare.json").write_text("{")

    with refused("shard-notes-damaged", DataError, path=out / "prepare.json"):
        prepare_small(out, inputs)


def test_errors_in_the_text_name_file_and_line_from_several_processes_too(
    inputs: list[Path], tmp_path: Path
) -> None:
    inputs[2].write_text('{"text": "a"}\n{"txt": "b"}\n')
    with refused("column-missing", DataError, where=f"{inputs[2]}, line 2"):
        prepare_small(tmp_path / "out", inputs, processes=2)


@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.parametrize("kind", ["bytes", "bpe"])
def test_a_text_that_is_none_is_told_with_file_and_document(
    kind: str, processes: int, inputs: list[Path], tmp_path: Path
) -> None:
    rows = inputs[2].read_text().splitlines(keepends=True)
    rows.insert(17, '{"text": "bad \\ud83d here"}\n')
    inputs[2].write_text("".join(rows))
    tokenizer = build_tokenizer(kind)

    with refused("text-with-half-character", DataError, position=4) as caught:
        prepare_small(tmp_path / "out", inputs, tokenizer=tokenizer, processes=processes)
    (place,) = caught.value.places
    path, _, document = place.rpartition(", ")
    assert path == str(inputs[2])
    assert numbers_in(document) == [18, 1]  # the document, the first


def test_shards_below_the_directory_that_is_read_are_gone_on_with(tmp_path: Path) -> None:
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.txt").write_text("one text")
    prepare_small(tmp_path / "texts" / "out", [tmp_path / "texts"])
    (tmp_path / "texts" / "out" / "notes.txt").write_text("made on Monday")
    before = contents(tmp_path / "texts" / "out")
    prepare_small(tmp_path / "texts" / "out", [tmp_path / "texts"])
    assert contents(tmp_path / "texts" / "out") == before


@pytest.mark.slow
def test_a_script_without_a_guard_is_told_of_it_and_its_processes_write_nothing(
    inputs: list[Path], tmp_path: Path
) -> None:
    def run(name: str, call: str) -> subprocess.CompletedProcess[str]:
        (tmp_path / name).write_text(f"import os\nimport surefoot as sf\n{call}\n")
        return subprocess.run(
            [sys.executable, name], cwd=tmp_path, check=False, capture_output=True, text=True
        )

    call = (
        f"sf.data.prepare_shards(f'{{os.getpid()}}.out', [{str(inputs[0])!r}],"
        " tokenizer=sf.tokenizers.ByteTokenizer(), processes=2)"
    )

    bare = run("bare.py", call)
    guarded = run("guarded.py", f"if __name__ == '__main__':\n    {call}")

    assert 'if __name__ == "__main__":' in bare.stderr
    assert bare.returncode == 1
    assert guarded.returncode == 0, guarded.stderr
    assert len(list(tmp_path.glob("*.out"))) == 2  # one of each script


def test_the_page_about_shards_shows_a_script_that_makes_them(
    inputs: list[Path], tmp_path: Path
) -> None:
    page = Path(__file__).parents[3] / "docs" / "guides" / "token-shards.md"
    (code,) = re.findall(r"```python\n(.*?)```", page.read_text(), flags=re.DOTALL)
    (tmp_path / "script.py").write_text(code)
    inputs[0].rename(tmp_path / "text.jsonl")
    expected = prepare_small(tmp_path / "out", [tmp_path / "text.jsonl"], shard_tokens=9999)

    subprocess.run([sys.executable, "script.py"], cwd=tmp_path, check=True)

    shards = TokenShards.open(tmp_path / "shards")
    assert np.array_equal(shards.arrays[0], expected.arrays[0])


def test_a_shard_that_cannot_be_reached_is_not_made_again(inputs: list[Path], out: Path) -> None:
    shard = out / "shard-00002.bin"
    shard.unlink()
    shard.mkdir()

    with refused("file-unreadable", DataError, path=shard):
        prepare_small(out, inputs)


def test_texts_without_tokens_are_refused(tmp_path: Path) -> None:
    write_rows(tmp_path / "a.jsonl", [""])

    with refused("shards-without-tokens", DataError, path=tmp_path / "out"):
        prepare_small(tmp_path / "out", [tmp_path / "a.jsonl"])


@pytest.mark.parametrize("setting", ["processes", "shard_tokens"])
def test_settings_out_of_range_are_refused(
    setting: str, inputs: list[Path], tmp_path: Path
) -> None:
    with refused("setting-out-of-range", setting=setting, value=0):
        prepare_small(tmp_path / "out", inputs, **{setting: 0})


def test_a_place_that_cannot_be_written_is_an_error_that_says_so(
    inputs: list[Path], tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    with refused("shards-not-written", DataError, path=tmp_path / "file" / "out"):
        prepare_small(tmp_path / "file" / "out", inputs)


def test_until_there_is_a_shard_the_settings_may_change(inputs: list[Path], tmp_path: Path) -> None:
    """`--column txt`, then `--column text`."""
    prepare_small(tmp_path / "whole", inputs, shard_tokens=2000)

    with refused("column-missing", DataError, value="txt"):
        prepare_small(tmp_path / "out", inputs[:1], column="txt")
    prepare_small(tmp_path / "out", inputs, shard_tokens=2000)

    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


def test_a_file_of_which_nothing_is_in_a_shard_yet_may_be_mended(
    inputs: list[Path], tmp_path: Path
) -> None:
    intact = inputs[2].read_bytes()
    inputs[2].write_bytes(b"{}\n" + intact)
    with refused("column-missing", DataError, where=f"{inputs[2]}, line 1"):
        prepare_small(tmp_path / "out", inputs)
    assert (tmp_path / "out" / "shard-00000.bin").exists()

    inputs[2].write_bytes(intact)
    lines: list[str] = []
    prepare_small(tmp_path / "out", inputs, say=lines.append)

    assert "c.jsonl " in lines[1]
    assert len(lines) > 2  # and from where it goes on
    prepare_small(tmp_path / "whole", inputs)
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


def test_what_is_in_a_shard_may_not_change_and_what_to_do_is_said(
    inputs: list[Path], tmp_path: Path
) -> None:
    intact = inputs[0].read_bytes()
    damaged = intact + b"{}\n"
    inputs[0].write_bytes(damaged)
    with refused("column-missing", DataError, value="text"):
        prepare_small(tmp_path / "out", inputs)

    inputs[0].write_bytes(intact + b"\n")
    with refused("shards-of-other-texts", DataError, changed=["files"]) as caught:
        prepare_small(tmp_path / "out", inputs)
    assert numbers_in(caught.value.problem)[-2:] == [len(damaged), len(intact) + 1]
    assert f"delete {tmp_path}" in str(caught.value.remedies[0])


def test_what_is_in_a_finished_directory_may_not_change_and_what_to_do_is_said(
    inputs: list[Path], out: Path
) -> None:
    intact = inputs[0].read_bytes()

    inputs[0].write_bytes(intact + b"\n")
    with refused("shards-of-other-texts", DataError, changed=["files"]) as caught:
        prepare_small(out, inputs)
    assert numbers_in(caught.value.problem)[-2:] == [len(intact), len(intact) + 1]
    assert "delete this one" in str(caught.value.remedies[0])
