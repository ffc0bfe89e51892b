"""Preparation of token shards from text in several processes, resumable after an interruption.

The shards do not depend on the number of processes. `prepare.json` stores the inputs, the settings,
and the end of each shard.
"""

import json
import os
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

from surefoot.config.paths import local_path, write_whole
from surefoot.data.text.shards import (
    INDEX,
    Shard,
    Tokens,
    TokenShards,
    already_there,
    cut_shards,
    is_damaged,
    without_tokens,
    write_index,
    write_shard,
)
from surefoot.errors import DataError, out_of_range
from surefoot.recipes.readers.text.documents import (
    DocumentFile,
    ReadAs,
    Unread,
    describe_parts,
    describe_rows,
    files_of,
    kinds,
    scan_documents,
)
from surefoot.recipes.readers.text.encode import (
    RefusedTextError,
    encode_batches,
    refuse_script_read_again,
)
from surefoot.tokenizers.bpe import BPETokenizer
from surefoot.tokenizers.tokenizer import Tokenizer

_NOTES = "prepare.json"
_TOKENIZER = "tokenizer.json"
# limits of a batch for one process
_CHARACTERS_AT_ONCE = 1 << 20
_DOCUMENTS_AT_ONCE = 1024
_PROGRESS_EVERY_S = 10.0


class Position(NamedTuple):
    """The start of a shard: the indices of file, document and token."""

    file: int
    document: int
    token: int


class PreparedShard(NamedTuple):
    """A shard, and the start of the next shard."""

    shard: Shard
    next: Position


def prepare_shards(
    directory: Path | str,
    inputs: Sequence[Path | str],
    *,
    tokenizer: Tokenizer,
    column: str = "text",
    read_as: ReadAs | None = None,
    processes: int | None = None,
    shard_tokens: int = 100_000_000,
    say: Callable[[str], None] | None = None,
) -> TokenShards:
    """Tokenize all documents in files and directories, and write the tokens as shards, with the end
    token after each document.

    A document is a text file, or a JSON line or row of a table with its text in `column`; empty
    documents are skipped. `read_as="text"` reads JSON, CSV, HTML and others as text, which are
    refused otherwise. `processes` is the number of encoding processes (None: one per core). A
    script must call this function below `if __name__ == "__main__":`. After an interruption, the
    same call resumes, replaces damaged shards, and writes the same bytes. `say` receives each line
    of progress. Raises `DataError` for unreadable or invalid text, for existing shards with other
    settings, and for files with a changed name, size or modification time. Raises `ConfigError` if
    `processes` or `shard_tokens` is below 1.

    >>> import tempfile
    >>> from surefoot.tokenizers import ByteTokenizer
    >>> root = Path(tempfile.mkdtemp())
    >>> _ = (root / "a.txt").write_text("ab")
    >>> shards = prepare_shards(
    ...     root / "shards", [root / "a.txt"], tokenizer=ByteTokenizer(), processes=1
    ... )
    >>> shards.arrays[0].tolist()
    [97, 98, 256]
    """
    directory = local_path(directory, setting="directory")
    if processes is None:
        processes = os.cpu_count() or 1
    for setting, value in (("processes", processes), ("shard_tokens", shard_tokens)):
        if value < 1:
            raise out_of_range(setting, value, "1 or more")
    if processes > 1:
        refuse_script_read_again()
    say = say or (lambda _: None)
    scans = [scan_documents(path, out=directory, read_as=read_as) for path in inputs]
    files = files_of(scans, read_as=read_as)
    tokenizer = _with_end_token_of_start(directory, tokenizer, say)
    settings: dict[str, Any] = {
        "tokenizer": sha256(tokenizer.to_json().encode()).hexdigest(),
        "column": column,
        "read_as": read_as,
        "shard_tokens": shard_tokens,
        "files": [[file.name, file.size, file.changed_ns] for file in files],
    }
    say(kinds(files))
    for listing in scans:
        left_out = listing.line()
        if left_out:
            say(left_out)
    parts = describe_parts(files)
    if parts:
        say(parts)
    prepared, is_done = _kept_shards(directory, settings, say)
    if is_done:
        return TokenShards.open(directory)
    with _writing(directory):
        directory.mkdir(parents=True, exist_ok=True)
        (directory / INDEX).unlink(missing_ok=True)
        write_whole(directory / _TOKENIZER, tokenizer.to_json().encode())
        _write_notes(directory, settings, prepared)
    begin = prepared[-1].next if prepared else Position(0, 0, 0)
    unread = Unread()
    documents = _encode(
        files, begin, tokenizer=tokenizer, column=column, processes=processes, unread=unread
    )
    documents = _with_progress(documents, files, say)
    for pieces, position, token in cut_shards(documents, shard_tokens, skip=begin.token):
        with _writing(directory):
            shard = write_shard(
                pieces, directory, number=len(prepared), vocab_size=tokenizer.vocab_size
            )
            prepared.append(PreparedShard(shard, position._replace(token=token)))
            _write_notes(directory, settings, prepared)
    if not prepared:
        raise without_tokens(directory)
    with _writing(directory):
        all_shards = [shard for shard, _ in prepared]
        shards = write_index(all_shards, directory, vocab_size=tokenizer.vocab_size)
    rows = describe_rows(unread, column=column)
    if rows:
        say(rows)
    say(f"{len(shards):,} tokens in {_shards(len(prepared))} in {directory}")
    return shards


def _kept_shards(
    directory: Path, settings: dict[str, Any], say: Callable[[str], None]
) -> tuple[list[PreparedShard], bool]:
    """Return the shards of an earlier call before the first damaged one, and whether they are all."""
    kept = list[PreparedShard]()
    for prepared in _read_notes(directory, settings, say):
        if is_damaged(directory, prepared.shard):
            name = directory / prepared.shard.name
            say(f"{name} is missing or damaged: preparing this and all later shards")
            return kept, False
        kept.append(prepared)
    tokens = f"{sum(prepared.shard.count for prepared in kept):,} tokens"
    is_done = (directory / INDEX).exists()
    if is_done:
        say(f"{directory} has all {tokens}, undamaged: nothing to do")
    elif kept:
        say(f"resuming after {_shards(len(kept))} with {tokens}")
    return kept, is_done


def _with_end_token_of_start(
    directory: Path, tokenizer: Tokenizer, say: Callable[[str], None]
) -> Tokenizer:
    """Return the tokenizer of shards that version 0.1.0 began, which knew one end token only."""
    file = directory / _TOKENIZER
    if not isinstance(tokenizer, BPETokenizer) or not file.is_file():
        return tokenizer
    of_0_1_0 = BPETokenizer(tokenizer.tokenizer)
    began_with = file.read_bytes()
    if tokenizer.to_json().encode() == began_with or of_0_1_0.to_json().encode() != began_with:
        return tokenizer
    say(
        f"{directory} was begun without the end token {tokenizer.end_token}, and goes on without it;"
        " another directory has it"
    )
    return of_0_1_0


def _encode(
    files: Sequence[DocumentFile],
    begin: Position,
    *,
    tokenizer: Tokenizer,
    column: str,
    processes: int,
    unread: Unread,
) -> Iterator[tuple[Position, Tokens]]:
    waiting: deque[list[Position]] = deque()  # the positions of each batch in the pool

    def batches() -> Iterator[list[str]]:
        texts: list[str] = []
        characters = 0
        for number, file in enumerate(files[begin.file :], start=begin.file):
            start = begin.document if number == begin.file else 0
            documents = file.documents(column=column, start=start, unread=unread)
            for document, text in enumerate(documents, start=start):
                if not texts:
                    waiting.append([])
                waiting[-1].append(Position(number, document, 0))
                texts.append(text)
                characters += len(text)
                if characters >= _CHARACTERS_AT_ONCE or len(texts) >= _DOCUMENTS_AT_ONCE:
                    yield texts
                    texts = []
                    characters = 0
        if texts:
            yield texts

    try:
        for tokens in encode_batches(batches(), tokenizer, processes=processes):
            yield from zip(waiting.popleft(), tokens, strict=True)
    except RefusedTextError as problem:
        file, document, _ = waiting[0][problem.index]
        place = f"{files[file].path}, document {document + 1} (the first is 1)"
        raise problem.why.inside(place) from problem


def _with_progress(
    documents: Iterator[tuple[Position, Tokens]],
    files: Sequence[DocumentFile],
    say: Callable[[str], None],
) -> Iterator[tuple[Position, Tokens]]:
    began = time.monotonic()
    last_line = began
    count = 0
    for number, (position, tokens) in enumerate(documents, start=1):
        count += len(tokens)
        now = time.monotonic()
        if now - last_line >= _PROGRESS_EVERY_S:
            last_line = now
            name = files[position.file].name
            say(
                f"file {position.file + 1} of {len(files)} ({name}): {count:,} tokens of"
                f" {number:,} documents, {count / (now - began):,.0f} tokens/s"
            )
        yield position, tokens


def _read_notes(
    directory: Path, settings: dict[str, Any], say: Callable[[str], None]
) -> list[PreparedShard]:
    path = directory / _NOTES
    if not path.is_file():
        if (directory / INDEX).exists() or any(directory.glob("shard-*.bin")):
            raise already_there(directory)
        return []
    try:
        notes = json.loads(path.read_bytes())
        before = dict(notes["settings"])
        prepared = []
        for entry in notes["shards"]:
            prepared.append(PreparedShard(Shard(**entry["shard"]), Position(*entry["next"])))
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as problem:
        raise DataError(
            "shard-notes-damaged",
            problem=f"{path} cannot be read: {problem}",
            remedy=f"delete {directory}, and start over",
            path=path,
        ) from problem
    changed = {name: now for name, now in settings.items() if before.get(name) != now}
    if not changed:
        return prepared
    anew = "delete this one first"
    if not (directory / INDEX).exists():
        anew = f"start over: delete {directory}, then run the same command"
        if not prepared:
            say(f"{directory} holds no shard yet: starting over")
            return []
        if list(changed) == ["files"] and _is_unread(before["files"], settings, prepared):
            say(f"{_describe_changes(before['files'], changed['files'])}: no shard is affected")
            return prepared
    lines = [_difference(name, before.get(name), now) for name, now in changed.items()]
    differences = "; ".join(lines)
    raise DataError(
        "shards-of-other-texts",
        problem=f"{directory} holds {_shards(len(prepared))} from other settings or texts:"
        f" {differences}",
        remedy=f"choose another directory, or {anew}",
        path=directory,
        changed=[*changed],
    )


def _is_unread(
    before: Sequence[Any], settings: Mapping[str, Any], prepared: Sequence[PreparedShard]
) -> bool:
    """Return True if only files differ that no complete shard has tokens of."""
    read = prepared[-1].next.file + 1
    are_full = all(shard.count == settings["shard_tokens"] for shard, _ in prepared)
    return are_full and before[:read] == settings["files"][:read]


def _shards(count: int) -> str:
    return "1 shard" if count == 1 else f"{count:,} shards"


def _difference(name: str, before: Any, now: Any) -> str:
    if name == "files" and isinstance(before, list):
        return _describe_changes(before, now)
    if name == "tokenizer":
        return "another tokenizer encoded them"
    return f"{name} was {before!r}, now {now!r}"


def _describe_changes(before: Sequence[Any], now: Sequence[Any]) -> str:
    sizes = {name: size for name, size, *_ in before}
    new = [file for file in now if file not in before]
    gone = [file for file in before if file not in now]
    for name, size, _ in new:
        if sizes.get(name) == size:
            return (
                f"{name} was rewritten with the same size (if it is a copy, keep its time: cp -p)"
            )
        if name in sizes:
            return f"{name} has changed, from {sizes[name]:,} to {size:,} bytes"
    which = "in another order"
    if new or gone:
        name, *_ = (new or gone)[0]
        which = f"for example {name}"
    return f"{len(before)} files before, {len(now)} now, {which}"


def _write_notes(
    directory: Path, settings: dict[str, Any], prepared: Sequence[PreparedShard]
) -> None:
    shards = [{"shard": vars(shard), "next": position} for shard, position in prepared]
    notes = {"format_version": 1, "settings": settings, "shards": shards}
    write_whole(directory / _NOTES, json.dumps(notes, indent=1).encode())


@contextmanager
def _writing(directory: Path) -> Iterator[None]:
    try:
        yield
    except OSError as problem:
        raise DataError(
            "shards-not-written",
            problem=f"cannot write into {directory}: {problem.strerror or problem}",
            remedy="the same command continues",
            path=directory,
        ) from problem
