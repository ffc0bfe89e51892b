"""Write docs/guides/files.md anew: what files may look like, for each recipe: python
docs/write_forms.py.

The suffixes, keys, columns and names of parts are those of the readers. A test reads every form of
this page and runs into every refusal.
"""

from __future__ import annotations

import gzip
import io
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from surefoot.data.part_names import PARTS
from surefoot.data.scan import ARROW, COMPRESSED, JSON_LINES, PARQUET, PICTURES, TABLES, TEXT
from surefoot.recipes.finetune.forms import FORMS
from surefoot.recipes.readers.images import arrays
from surefoot.recipes.readers.images.labels_file import FILE_COLUMNS, LABEL_COLUMNS
from surefoot.recipes.readers.text import token_files
from surefoot.recipes.readers.text.documents import NO_PROSE

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "guides" / "files.md"
HEAD = """# What files may look like

`surefoot data look PATH` shows what each recipe would make of your files, before any training. This
page is made from the lists that the readers use (`python docs/write_forms.py`).

For all recipes:

* A path is a file, or a directory that is searched. Suffixes count without case.
* Text may be compressed: {compressed} (`.zst` with the extra `zstd`).
* Links are followed. No folder is read twice. A link to nothing and a folder that cannot be read
  are errors.
* Names below the path that begin with `.` or `_` are left out. README, LICENSE and dataset cards
  are left out where files of data are.
* What was there and is not trained on is one line in the header of the run, and `surefoot data
  look` says why.

The codes below are those of [the errors](../reference/errors.md#codes).
"""


@dataclass(frozen=True)
class FileForm:
    """A form of files that a recipe takes: how it is recognized, and an example that is read."""

    recipe: str
    name: str
    recognized: str
    files: dict[str, str | bytes]
    shown: str = ""
    """Two lines of it; by default those of the first file."""

    @property
    def lines(self) -> list[str]:
        text = self.shown or next(iter(self.files.values()))
        assert isinstance(text, str)
        return text.splitlines()[:2]


@dataclass(frozen=True)
class Refusal:
    """Files that a recipe refuses, and the code of the error."""

    recipe: str
    what: str
    code: str
    files: dict[str, str | bytes] = field(default_factory=dict)


def forms() -> Iterator[FileForm]:
    yield from forms_of_text()
    yield from forms_of_chats()
    yield from forms_of_pairs()
    yield from forms_of_pictures()
    yield from forms_of_tables()


def forms_of_text() -> Iterator[FileForm]:
    prose = "To be, or not to be:\nthat is the question.\n" * 20
    yield FileForm("gpt", "text; a file is a document", named(TEXT), {"a.txt": prose})
    rows = '{"text": "To be, or not to be"}\n{"text": "That is the question."}\n'
    yield FileForm(
        "gpt",
        "JSON lines; a row is a document",
        f"{named(JSON_LINES)}, with the text in `--data.column`",
        {"a.jsonl": rows * 20},
    )
    yield FileForm(
        "gpt",
        "a table; a row is a document",
        f"{named(TABLES)}, with the text in `--data.column`",
        {"a.parquet": table_of({"text": ["To be, or not to be", "That is the question."] * 20})},
        shown="text\nTo be, or not to be",
    )
    for magic, form in token_files.FORMS.items():
        bits = 8 * np.dtype(form.dtype).itemsize
        header = np.zeros(256, "<i4")
        header[:3] = magic, form.version, 40
        content = header.tobytes() + np.arange(40, dtype=form.dtype).tobytes()
        yield FileForm(
            "gpt",
            f"token files of llm.c, of {bits} bits",
            f"`{token_files.TOKEN_FILE}` that begins with the number {magic}",
            {"train.bin": content},
            shown=f"256 numbers: {magic}, {form.version}, 40, 0, ...\ntokens: 0, 1, 2, ...",
        )
    yield FileForm(
        "gpt",
        "token files of nanoGPT, of 16 bits",
        "`train.bin` and `val.bin` without a header, and only with `--data.tokenizer gpt2`; no pickle"
        " beside them is read",
        {"train.bin": np.arange(40, dtype="<u2").tobytes()},
        shown="tokens: 0, 1, 2, ...\n3, 4, 5, ...",
    )


def forms_of_chats() -> Iterator[FileForm]:
    for form in FORMS:
        other = form.example.replace("2 + 2", "3 + 3").replace('"4"', '"6"')
        keys = " and ".join(f"`{key}`" for key in form.keys)
        yield FileForm(
            "finetune",
            form.name,
            f"rows with {keys}",
            {"rows.jsonl": f"{form.example}\n{other}\n"},
        )
    whole = f"[{FORMS[0].example},\n{FORMS[0].example}]\n"
    yield FileForm("finetune", "one JSON array", "it begins with `[`", {"rows.json": whole})
    row = FORMS[0].example
    yield FileForm(
        "finetune",
        "compressed JSON lines",
        "a name such as `rows.jsonl.gz`",
        {"rows.jsonl.gz": f"{row}\n{row}\n"},
    )
    messages = json.loads(row)["messages"]
    yield FileForm(
        "finetune",
        "a Parquet table",
        f"{named(PARQUET)}, with one of these forms as columns",
        {"rows.parquet": table_of({"messages": [messages, messages]})},
        shown=f"messages\n{json.dumps(messages)}",
    )
    yield FileForm(
        "finetune",
        "a directory",
        f"files named as parts ({parts_named()}), or files without such a name",
        {"train.jsonl": f"{row}\n{row}\n", "test.jsonl": f"{row}\n"},
        shown="train.jsonl\nvalidation.jsonl",
    )
    parts = [{**each, "content": [{"type": "text", "text": each["content"]}]} for each in messages]
    question, answer = messages
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 2, "b": 2}}}
    calls = [
        question,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "4"},
        answer,
    ]
    for name, recognized, content in (
        ("messages as JSON in a text", "`messages` is a text", {"messages": json.dumps(messages)}),
        ("content in text parts", "`content` is a list of `text` parts", {"messages": parts}),
        (
            "prompt and completion as messages",
            "both are lists; the answers of the completion are trained",
            {"prompt": [question], "completion": [answer]},
        ),
        ("calls of tools", "`tool_calls`; the `content` may be null", {"messages": calls}),
    ):
        line = json.dumps(content)
        yield FileForm("finetune", name, recognized, {"rows.jsonl": f"{line}\n{line}\n"})


def forms_of_pairs() -> Iterator[FileForm]:
    english = "".join(f"{number} apples\n" for number in range(200))
    german = "".join(f"{number} Äpfel\n" for number in range(200))
    yield FileForm(
        "translation",
        "two files with a line for each other",
        "`train.en` and `train.de`: the suffixes are the languages",
        {"train.en": english, "train.de": german},
        shown="train.en: 1 apple\ntrain.de: 1 Apfel",
    )
    sides = [*zip(english.splitlines(), german.splitlines(), strict=True)]
    numbered = [*enumerate(sides)]
    rows = "".join(f"{one}\t{other}\n" for one, other in sides)
    yield FileForm("translation", "columns of text with tabs", "`train.tsv`", {"train.tsv": rows})
    yield FileForm(
        "translation",
        "columns with a header",
        "its first line names languages, or source and target; other columns are not read",
        {"train.tsv": "English\tGerman\n" + rows},
    )
    yield FileForm(
        "translation",
        "columns of ids beside the text (Tatoeba)",
        "source and target are the first two columns of text",
        {"train.tsv": "".join(f"{n}\t{one}\t{n + 900}\t{other}\n" for n, (one, other) in numbered)},
    )
    yield FileForm(
        "translation",
        "cells in the quotes of a spreadsheet",
        "quotes are taken off where they stand as a spreadsheet writes them",
        {"train.tsv": "".join(f'"{one}, ""so"""\t"{other}, ""so"""\n' for one, other in sides)},
    )
    yield FileForm(
        "translation",
        "compressed files",
        "a name such as `train.en.gz` or `train.tsv.gz`",
        {"train.en.gz": english, "train.de.gz": german},
        shown="train.en.gz: 1 apple\ntrain.de.gz: 1 Apfel",
    )
    objects = "".join(f'{{"en": "{one}", "de": "{other}"}}\n' for one, other in sides)
    yield FileForm(
        "translation",
        "JSON lines",
        "`train.jsonl` with the languages as keys, also inside `translation`",
        {"train.jsonl": objects},
    )


def forms_of_pictures() -> Iterator[FileForm]:
    picture = picture_of("red")
    classes = {f"{label}/{n}.png": picture for label in ("cat", "dog") for n in range(5)}
    yield FileForm(
        "images",
        "a folder for each class",
        "folders of pictures; a picture ends in " + named(PICTURES),
        classes,
        shown="cat/1.png\ndog/1.jpg",
    )
    yield FileForm(
        "images",
        "parts with a folder for each class",
        f"folders named {parts_named()}, without case",
        {f"{part}/{name}": picture for part in ("Train", "Test") for name in classes},
        shown="train/cat/1.png\ntest/dog/7.png",
    )
    labels = "file,label\n" + "".join(f"{n}.png,{('cat', 'dog')[n % 2]}\n" for n in range(10))
    beside = {"labels.csv": labels, **{f"{n}.png": picture for n in range(10)}}
    yield FileForm(
        "images",
        "pictures beside a CSV file of their labels",
        f"it has one of the columns {named(FILE_COLUMNS)}, and one of {named(LABEL_COLUMNS)}",
        beside,
    )
    yield FileForm(
        "images",
        "parts with a CSV file of their labels",
        "a CSV file in the folder of each part, with the columns of the row above",
        {f"{part}/{name}": beside[name] for part in ("train", "test") for name in beside},
        shown="train/labels.csv\ntrain/0.png",
    )
    yield FileForm(
        "images",
        "IDX files (MNIST, Fashion-MNIST)",
        "`train-images-idx3-ubyte`, `train-labels-idx1-ubyte` and `t10k-...`, plain or `.gz`",
        {
            f"{part}-{kind}-ubyte.gz": idx_of(shape)
            for part in ("train", "t10k")
            for kind, shape in (("images-idx3", (10, 4, 4)), ("labels-idx1", (10,)))
        },
        shown="train-images-idx3-ubyte.gz\ntrain-labels-idx1-ubyte.gz",
    )
    row = bytes(1 + 3 * arrays.SIDE**2)
    yield FileForm(
        "images",
        "the binary version of CIFAR-10",
        f"`{arrays.TRAINING_FILES[0]}` to `{arrays.TRAINING_FILES[-1]}`, and `{arrays.TEST_FILE}`",
        dict.fromkeys((*arrays.TRAINING_FILES, arrays.TEST_FILE), row * 2),
        shown="\n".join(arrays.TRAINING_FILES),
    )


def forms_of_tables() -> Iterator[FileForm]:
    yield FileForm(
        "sf.data.Table",
        "Arrow or Parquet files",
        f"{named(PARQUET)}; {named(ARROW)}",
        {"a.parquet": table_of({"x": [0.5, 1.5], "label": [0, 1]})},
        shown="x, label\n0.5, 0",
    )


def refusals() -> Iterator[Refusal]:
    for suffix, (what, _) in NO_PROSE.items():
        text = '[{"text": "one"}]' if suffix == ".json" else "<p>one</p>"
        yield Refusal("gpt", f"`{suffix}`: {what}", "no-prose", {f"a{suffix}": text})
    yield Refusal("gpt", "text with NUL bytes", "text-with-nul", {"a.txt": b"one two\0 three " * 9})
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n"
    yield Refusal("gpt", "a pointer of git LFS", "git-lfs-pointer", {"a.txt": pointer})
    preferred = '{"prompt": "2?", "chosen": "2", "rejected": "3"}\n'
    yield Refusal("finetune", "preference pairs", "row-is-a-preference", {"a.jsonl": preferred})
    yield Refusal("finetune", "rows of no form", "row-form-unknown", {"a.jsonl": '{"a": "b"}\n'})
    yield Refusal("finetune", "a line that is no JSON", "line-not-json", {"a.jsonl": "one\n"})
    kind = {"a.csv": "prompt,completion\n2?,2\n"}
    yield Refusal("finetune", "CSV and Arrow files", "chats-in-another-kind-of-table", kind)
    unlike = {"train.en": "one\ntwo\n", "train.de": "eins\n"}
    yield Refusal("translation", "files of unlike length", "pairs-line-counts", unlike)
    empty = {"train.tsv": "one\teins\ntwo\t\n"}
    yield Refusal("translation", "a pair with one side", "pairs-side-empty", empty)
    unclear = {"train.tsv": "english\tguten Tag\n" + "one\teins\n" * 9}
    yield Refusal(
        "translation", "a first line that may be a header", "pairs-first-line-unclear", unclear
    )
    picture = picture_of("red")
    lone = {"cat/a.png": picture, "dog/a.txt": "one"}
    yield Refusal("images", "a class without pictures", "class-without-images", lone)
    yield Refusal("sf.data.Table", "a directory without tables", "no-table-in-directory", {"a": ""})


def named(suffixes: Sequence[str]) -> str:
    return ", ".join(f"`{suffix}`" for suffix in suffixes)


def parts_named() -> str:
    return ", ".join("/".join(f"`{name}`" for name in names) for names in PARTS.values())


def idx_of(shape: tuple[int, ...]) -> bytes:
    """Return an IDX file of bytes that count."""
    header = bytes([0, 0, 8, len(shape)]) + np.array(shape, ">i4").tobytes()
    return header + (np.arange(np.prod(shape)) % 10).astype(np.uint8).tobytes()


def table_of(columns: dict[str, list[object]]) -> bytes:
    import pyarrow
    from pyarrow.parquet import write_table

    file = io.BytesIO()
    write_table(pyarrow.table(columns), file)
    return file.getvalue()


def picture_of(color: str) -> bytes:
    from PIL import Image

    file = io.BytesIO()
    Image.new("RGB", (4, 4), color).save(file, "png")
    return file.getvalue()


def write(files: dict[str, str | bytes], root: Path) -> None:
    """Write the files of a form or a refusal below a directory."""
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        data = content.encode() if isinstance(content, str) else content
        path.write_bytes(gzip.compress(data) if name.endswith(".gz") else data)


def page() -> str:
    text = HEAD.format(compressed=named(COMPRESSED))
    all_forms = [*forms()]
    all_refusals = [*refusals()]
    for recipe in dict.fromkeys(form.recipe for form in all_forms):
        text += (
            f"\n## {recipe}\n\n| Form | Two lines of it | How it is recognized |\n|---|---|---|\n"
        )
        for form in all_forms:
            if form.recipe == recipe:
                shown = "<br>".join(f"`{as_cell(line)}`" for line in form.lines)
                text += f"| {form.name} | {shown} | {form.recognized} |\n"
        text += "\n| Refused | Code |\n|---|---|\n"
        for refusal in all_refusals:
            if refusal.recipe == recipe:
                text += f"| {refusal.what} | `{refusal.code}` |\n"
    return text


def as_cell(line: str) -> str:
    shown = line.replace("\t", " <tab> ").replace("|", "\\|")
    return shown if len(shown) <= 160 else f"{shown[:158]} ..."


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
