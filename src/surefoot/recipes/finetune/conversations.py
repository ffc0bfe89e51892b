"""Conversations from files, which are JSON lines, one JSON array, or Parquet; their split, and
their text by a chat template. Imports no torch.
"""

import json
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import surefoot as sf
from surefoot.config.extras import needed_for
from surefoot.config.paths import local_path
from surefoot.data.part_names import part_of
from surefoot.data.scan import ABOUT_DATA, JSON_LINES, PARQUET, LeftOut, Scan, kind_of, scan
from surefoot.data.table_sources import reading_tables
from surefoot.data.text_files import decode_utf8, not_json, open_unpacked
from surefoot.errors import Setting, first_line
from surefoot.memory import in_words
from surefoot.recipes.finetune.forms import (
    WRITE_ROWS,
    Conversation,
    Message,
    RowCounts,
    conversation_of,
    rows_in_words,
    with_arguments_as_texts,
    with_fields_of_before,
)
from surefoot.recipes.finetune.limited import (
    MEMORY_BYTES,
    SECONDS,
    OverLimitError,
    is_inside,
    limited,
    one_text,
)

_LONGEST_TEXT = 20_000_000  # characters of a conversation
SUFFIXES = (*JSON_LINES, ".json", *PARQUET)
_OF_DATASETS = {"dataset_info.json", "dataset_infos.json", "state.json"}
OTHER_PART = "its name is that of a part which is not read"
# Of these parts the first that is there is read. As in `datasets`, files without a part are for
# training only if none is named so.
_READ_AS = {"training": ("training", None), "val": ("val", "test", None)}
_FILES_SHOWN = 8  # with their forms
_TABLES = (".csv", ".tsv", ".xlsx", ".arrow", ".feather")
_MAGIC_OF_PARQUET = b"PAR1"


@dataclass
class Chats:
    """The conversations of a path, and what the header says of how they were read."""

    rows: list[Conversation] = field(default_factory=list)
    held_out: list[Conversation] = field(default_factory=list)  # of files for validation
    counts: dict[Path, RowCounts] = field(default_factory=dict)  # by file
    not_read: str = ""  # a line about files that were left out

    def __iter__(self) -> Iterator[Conversation]:
        return iter(self.rows)

    def lines(self) -> list[str]:
        """Return what the header of a run says: forms, keys that nothing uses, files left out."""
        total = RowCounts()
        for counts in self.counts.values():
            total.add(counts)
        lines = total.lines()
        if len(self.counts) > 1:
            lines.insert(0, f"{len(self.counts):,} files")
        if self.held_out:
            lines.append(f"{rows_in_words(len(self.held_out))} of these in files for validation")
        kinds = {frozenset(counts.forms) for counts in self.counts.values()}
        if len(kinds) > 1 and len(self.counts) <= _FILES_SHOWN:
            lines += [
                f"{file.name}: {', '.join(counts.forms)}" for file, counts in self.counts.items()
            ]
        if self.not_read:
            lines.append(self.not_read)
        return lines


def read_conversations(
    path: str,
    *,
    setting: str,
    part: str = "training",
    uses_all_fields: bool = True,
    reads_val: bool = False,
) -> Chats:
    """Read the rows of a file, or of the files of a directory, as conversations.

    A file has a JSON object per line, or is one JSON value (an array of rows, or a row), both plain
    or compressed, or is Parquet. If files of a directory are named as parts (`part_of`), those of
    `part` ("training" or "val") are read, and with `reads_val` those of the validation part are held
    out.
    Without `uses_all_fields`, rows keep the fields that runs used before `FIELDS_OF_CHATS`. Raises
    `DataError` with the place of a wrong row.
    """
    place = local_path(path, setting=setting)
    listed, val_files = _listed(place, setting, part, reads_val=reads_val)
    chats = Chats(not_read=listed.line())
    for file in listed.files:
        counts = RowCounts()
        rows = []
        for where, row in _rows(file, counts):
            used = row if uses_all_fields else with_fields_of_before(row)
            rows.append(conversation_of(used, where, counts))
        chats.counts[file] = counts
        if file in val_files:
            chats.held_out += rows
        else:
            chats.rows += rows
    if not chats.rows:
        raise sf.DataError(
            "chats-without-rows",
            problem=f"{place} has no row of a chat",
            reason=chats.not_read or "what is read holds no row",
            remedy=WRITE_ROWS,
            path=place,
        )
    return chats


def split_conversations(
    rows: Sequence[Conversation], *, val_fraction: float
) -> tuple[list[Conversation], list[Conversation]]:
    """Return training and validation rows. Rows with the same first user message are in the same
    part, by its hash.

    Raises `DataError` if no row is left for training.
    """
    different = {_prompt(row) for row in rows}
    prompts = sorted(different, key=lambda prompt: sha256(prompt.encode()).digest())
    count = 0
    if val_fraction:
        count = math.ceil(len(prompts) * val_fraction)  # at least one
    if count >= len(prompts):
        raise sf.DataError(
            "chats-without-training-rows",
            problem=f"the rows have {len(prompts)} different prompts, and all would be for"
            " validation",
            reason=f"data.val_fraction = {val_fraction}, rounded up to whole prompts",
            remedy=["add rows", ("evaluate nothing:", Setting("data.val_fraction", 0))],
            prompts=len(prompts),
        )
    prompts_held_out = set(prompts[:count])
    training = list[Conversation]()
    held_out = list[Conversation]()
    for row in rows:
        part = held_out if _prompt(row) in prompts_held_out else training
        part.append(row)
    return training, held_out


def _prompt(row: Conversation) -> str:
    """Return the first message of the user; "" without one."""
    for message in row.messages:
        if message["role"] == "user":
            return str(message["content"])
    return ""


def render(
    tokenizer: Any,
    messages: Sequence[Message],
    where: str,
    *,
    tools: list[Any] | None = None,
    prompts_answer: bool = False,
) -> str:
    """Return the text of messages by the tokenizer's chat template, with the prompt for an answer
    if `prompts_answer`. The template gets whole messages, and the definitions of `tools`.
    """
    return str(
        apply_template(
            tokenizer,
            messages,
            where,
            tools=tools,
            tokenize=False,
            add_generation_prompt=prompts_answer,
        )
    )


def _as_template_takes_arguments(tokenizer: Any, messages: Sequence[Message]) -> Sequence[Message]:
    """Return messages as the chat template takes the arguments of calls, which the data have as
    texts of JSON: most templates write objects as JSON, and others join or print a text.
    """
    as_texts, arguments = with_arguments_as_texts(messages)
    if not arguments:
        return messages
    try:
        text = str(tokenizer.apply_chat_template(messages, tokenize=False))
    except TypeError:  # it joins a text with an object
        return as_texts
    for argument in arguments:
        printed = str(dict(argument))
        if printed in text and printed != argument.text:
            return as_texts
    return messages


def apply_template(tokenizer: Any, messages: Sequence[Message], where: str, **options: Any) -> Any:
    """Return what `apply_chat_template` makes of messages, under limits. `options` are those of
    transformers.
    """
    if is_inside():
        return _apply(tokenizer, messages, where, **options)
    with suppress(ImportError):  # once here, and not in each process; the template is not read
        import jinja2.sandbox  # noqa: F401

    def apply(_: Any) -> Any:
        return _apply(tokenizer, messages, where, **options)

    return under_limits(apply, [None], [where])[0]


def _apply(tokenizer: Any, messages: Sequence[Message], where: str, **options: Any) -> Any:
    try:
        with one_text():
            messages_taken = _as_template_takes_arguments(tokenizer, messages)
            result = tokenizer.apply_chat_template(messages_taken, **options)
            if not isinstance(result, str):  # tokens and masks
                return {key: list(result[key]) for key in result}
            if len(result) > _LONGEST_TEXT:
                raise MemoryError
            return result
    except MemoryError:
        raise
    except Exception as problem:  # templates raise errors of Jinja, and their own
        roles = [message["role"] for message in messages]
        raise sf.DataError(
            "template-fails",
            problem=f"{where}: the chat template fails:"
            f" {first_line(problem) or type(problem).__name__}",
            reason=f"its messages have the roles {', '.join(roles)}",
            remedy=["change the row", Setting("data.template", "FILE")],
            where=where,
        ) from problem


def under_limits(
    function: Callable[[Any], Any], items: Sequence[Any], places: Sequence[str]
) -> list[Any]:
    """Return `function(item)` for each item, which renders chat templates; results are JSON.

    Raises `DataError` with the place of an item whose text takes too much time or memory.
    """
    try:
        return limited(function, items)
    except OverLimitError as problem:
        place = places[problem.index]
        limits = {
            "time": f"{SECONDS:g} s of computing",
            "memory": f"{in_words(MEMORY_BYTES)} of memory",
        }
        if problem.what not in limits:
            raise sf.DataError(
                "template-process-ended",
                problem=f"{place}: the process of the chat template ended by {problem.what}",
                reason="the system ended it, or a library in it crashed",
                remedy=["free memory", Setting("data.template", "FILE")],
                where=place,
                cause=problem.what,
            ) from None
        raise sf.DataError(
            "template-over-limit",
            problem=f"{place}: the chat template takes more than {limits[problem.what]}",
            reason="a template is a program of its author, and writes a text in milliseconds",
            remedy=Setting("data.template", "FILE"),
            where=place,
            limit=problem.what,
        ) from None


def _listed(place: Path, setting: str, part: str, *, reads_val: bool) -> tuple[Scan, set[Path]]:
    """Return the files to read, and which of them are for validation."""
    listed = scan(place, SUFFIXES)
    if listed.files == [place]:
        return listed, set()
    described = {file for file in listed.files if file.name in _OF_DATASETS}
    parts = dict[str | None, set[Path]]()
    for file in listed.files:
        if file not in described:
            parts.setdefault(part_of(file.relative_to(place)), set()).add(file)
    names = [name for name in _READ_AS[part] if name in parts]
    if parts and not names:
        raise sf.DataError(
            "chats-of-other-parts",
            problem=f"the files of {place} are named {' and '.join(map(str, parts))}",
            reason=f"{setting} reads files of another part from a directory",
            remedy=[("name the file that is meant:", Setting(setting, "FILE"))],
            path=place,
            parts=sorted(map(str, parts)),
        )
    files = parts[names[0]] if names else set[Path]()
    val_files = parts.get("val", set[Path]()) if reads_val else set[Path]()
    return _keep(listed, files | val_files, described), val_files


def _keep(listed: Scan, files: set[Path], described: set[Path]) -> Scan:
    kept = []
    left_out = [*listed.left_out]
    for file in listed.files:
        if file in files:
            kept.append(file)
        else:
            left_out.append(LeftOut(file, ABOUT_DATA if file in described else OTHER_PART))
    return replace(listed, files=kept, left_out=left_out)


def _rows(file: Path, counts: RowCounts) -> Iterator[tuple[str, Any]]:
    """Yield the place and the value of each row of a file."""
    if kind_of(file) in _TABLES:
        raise sf.DataError(
            "chats-in-another-kind-of-table",
            problem=f"{file}: conversations are not read from {kind_of(file)} files",
            reason="they are read from JSON lines, a JSON array, or Parquet",
            remedy="convert it: datasets.Dataset.from_csv, or load_from_disk, and to_json(FILE.jsonl)",
            path=file,
        )
    with open_unpacked(file) as opened:
        data = opened.read(len(_MAGIC_OF_PARQUET))
        is_parquet = data == _MAGIC_OF_PARQUET
        if not is_parquet:
            data += opened.read()
    if is_parquet:
        yield from _rows_of_parquet(file)
        return
    text = decode_utf8(data, str(file))
    if not text.strip():
        return
    if _is_one_value(text):
        value = _parsed(text, counts, file, first=1)
        rows = value if isinstance(value, list) else [value]
        for number, row in enumerate(rows):
            yield f"{file}, row {number}", row
        return
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            yield f"{file}, line {number}", _parsed(line, counts, file, first=number)


def _is_one_value(text: str) -> bool:
    """Return True for one array, or one object over several lines; False if each line is a row."""
    start = text.lstrip()
    first, _, others = start.partition("\n")
    if start.startswith("["):
        return not (_is_json(first) and others.strip())
    return not _is_json(first) and _is_json(text)


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


def _parsed(text: str, counts: RowCounts, file: Path, *, first: int) -> Any:
    """Return the value of a JSON text, which begins in the line `first` of a file."""
    try:
        return counts.parsed(text)
    except (ValueError, RecursionError) as problem:
        line = first + getattr(problem, "lineno", 1) - 1
        excerpt = text.split("\n")[line - first]
        raise not_json(f"{file}, line {line}", excerpt, problem, remedy=WRITE_ROWS) from problem


def _rows_of_parquet(file: Path) -> Iterator[tuple[str, Any]]:
    with needed_for(f"the Parquet file {file}", "pyarrow"):
        import pyarrow.parquet
    number = 0
    with reading_tables(file), pyarrow.parquet.ParquetFile(file) as opened:
        for batch in opened.iter_batches():
            for row in batch.to_pylist():
                yield f"{file}, row {number}", _without_nulls(row)
                number += 1


def _without_nulls(value: Any) -> Any:
    """Return a value of Arrow without the nulls that it writes for each absent field of a struct.
    A message keeps the null of its content.
    """
    if isinstance(value, list):
        return [_without_nulls(entry) for entry in value]
    if not isinstance(value, dict):
        return value
    entries = {}
    for key, entry in value.items():
        is_content = key == "content" and "role" in value
        if entry is not None or is_content:
            entries[key] = _without_nulls(entry)
    return entries
