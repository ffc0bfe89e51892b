"""Conversations from files, which are JSON lines, one JSON array, or Parquet; their split, and
their text by a chat template. Imports no torch.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import surefoot as sf
from surefoot.config.extras import needed_for
from surefoot.config.paths import local_path
from surefoot.data.scan import ABOUT_DATA, JSON_LINES, PARQUET, LeftOut, Scan, scan
from surefoot.data.text.documents import reading_tables
from surefoot.data.text.files import decode_utf8, open_unpacked
from surefoot.errors import Setting, first_line
from surefoot.recipes.finetune.forms import (
    WRITE_ROWS,
    Conversation,
    Message,
    RowCounts,
    conversation_of,
    with_fields_of_before,
)

SUFFIXES = (*JSON_LINES, ".json", *PARQUET)
_OF_DATASETS = {"dataset_info.json", "dataset_infos.json", "state.json"}
_MAGIC_OF_PARQUET = b"PAR1"


@dataclass
class Chats:
    """The conversations of a path, and what the header says of how they were read."""

    rows: list[Conversation] = field(default_factory=list)
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
        if len({frozenset(counts.forms) for counts in self.counts.values()}) > 1:
            lines += [
                f"{file.name}: {', '.join(counts.forms)}" for file, counts in self.counts.items()
            ]
        if self.not_read:
            lines.append(self.not_read)
        return lines


def read_conversations(path: str, *, setting: str, uses_all_fields: bool = True) -> Chats:
    """Read the rows of a file, or of all files of a directory, as conversations.

    A file has a JSON object per line, or is one JSON array, both plain or compressed, or is
    Parquet. Without `uses_all_fields`, rows keep the fields that runs used before
    `FIELDS_OF_CHATS`. Raises `DataError` with the place of a wrong row.
    """
    place = local_path(path, setting=setting)
    listed = _listed(place)
    chats = Chats(not_read=listed.line())
    for file in listed.files:
        counts = RowCounts()
        for where, row in _rows(file, counts):
            used = row if uses_all_fields else with_fields_of_before(row)
            chats.rows.append(conversation_of(used, where, counts))
        chats.counts[file] = counts
    if not chats.rows:
        raise sf.DataError(
            "chats-without-rows",
            problem=f"{place} has no row of a chat",
            reason=chats.not_read or "the file is empty",
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
    prompts = sorted(
        {_prompt(row) for row in rows}, key=lambda prompt: sha256(prompt.encode()).digest()
    )
    count = -(-len(prompts) * val_fraction // 1) if val_fraction else 0  # rounded up: at least one
    if count >= len(prompts):
        raise sf.DataError(
            "chats-without-training-rows",
            problem=f"the rows have {len(prompts)} different prompts, and all would be for"
            " validation",
            reason=f"data.val_fraction = {val_fraction}, rounded up to whole prompts",
            remedy=["add rows", ("evaluate nothing:", Setting("data.val_fraction", 0))],
            prompts=len(prompts),
        )
    held_out = set(prompts[: int(count)])
    return [row for row in rows if _prompt(row) not in held_out], [
        row for row in rows if _prompt(row) in held_out
    ]


def _prompt(row: Conversation) -> str:
    return next((message["content"] for message in row.messages if message["role"] == "user"), "")


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
    try:
        return str(
            tokenizer.apply_chat_template(
                messages, tools=tools, tokenize=False, add_generation_prompt=prompts_answer
            )
        )
    except Exception as problem:  # templates raise errors of Jinja, and their own
        raise sf.DataError(
            f"{where}: the chat template fails: {first_line(problem) or type(problem).__name__}\n"
            f"  its messages have the roles {', '.join(message['role'] for message in messages)}\n"
            "  change the row, or use another template: --data.template FILE"
        ) from problem


def _listed(place: Path) -> Scan:
    listed = scan(place, SUFFIXES)
    described = [file for file in listed.files if file.name in _OF_DATASETS]
    if not place.is_dir() or not described:
        return listed
    return replace(
        listed,
        files=[file for file in listed.files if file not in described],
        left_out=[*listed.left_out, *(LeftOut(file, ABOUT_DATA) for file in described)],
    )


def _rows(file: Path, counts: RowCounts) -> Iterator[tuple[str, Any]]:
    """Yield the place and the value of each row of a file."""
    with open_unpacked(file) as opened:
        data = opened.read()
    if data.startswith(_MAGIC_OF_PARQUET):
        yield from _rows_of_parquet(file)
        return
    text = decode_utf8(data, str(file))
    if text.lstrip().startswith("["):
        whole = _parsed(text, counts, where=str(file))
        for number, row in enumerate(whole):
            yield f"{file}, row {number}", row
        return
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            where = f"{file}, line {number}"
            yield where, _parsed(line, counts, where=where)


def _parsed(text: str, counts: RowCounts, *, where: str) -> Any:
    try:
        return counts.parsed(text)
    except (ValueError, RecursionError) as problem:
        raise sf.DataError(
            "row-not-json",
            problem=f"{where}: {text[:60]!r} is not JSON",
            reason=first_line(problem),
            remedy=WRITE_ROWS,
            where=where,
        ) from problem


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
    kept = {}
    for key, entry in value.items():
        if entry is not None or (key == "content" and "role" in value):
            kept[key] = _without_nulls(entry)
    return kept
