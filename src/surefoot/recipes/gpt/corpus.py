"""The corpus of a GPT run: its tokenizer, training tokens and validation tokens."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import surefoot as sf
from surefoot.config.behavior import DOCUMENTS_APART, END_TOKENS, KINDS_OF_TEXT
from surefoot.config.extras import refuse_missing
from surefoot.config.paths import local_path, read_regular, user_cache
from surefoot.config.setting import number
from surefoot.errors import Command, Setting
from surefoot.recipes.gpt.config import Data
from surefoot.recipes.optimizer_settings import note
from surefoot.recipes.readers.text.corpora import texts_as_before
from surefoot.recipes.readers.text.documents import Documents, read_documents, scan_documents
from surefoot.recipes.readers.text.token_files import TOKEN_FILE, TokenFiles, find_token_files
from surefoot.recipes.shared_errors import reading_run_file, vocab_size_without_effect
from surefoot.tokenizers.long_words import describe_long_words
from surefoot.tracking.run_reader import started_run

TOKENIZER = "tokenizer.json"  # in the run's directory
_MIN_VOCABULARY = 257  # the bytes and an end token
_VOCABULARY = 2048
_GPT2_VOCABULARY = 50_257
_CHARACTERS = 320  # shown of a text
_WIDTH = 92  # characters of a line
_LARGEST_BYTES = 200_000_000  # of a tokenizer's file; the largest known one has 33 MB


@dataclass(frozen=True)
class Corpus:
    """Tokens for training and validation, and their tokenizer."""

    train: Any
    val: Any
    tokenizer: Any
    chosen: str  # tokenizer settings, which a resume compares
    about: tuple[str, str]
    """The name and size of the text, and its validation part."""
    not_read: str = ""
    """One line about what is in the path and not read."""
    end_token: int | None = None
    """The token by which documents are kept apart. None: a window is one text."""

    @property
    def in_words(self) -> list[str]:
        text, validation = self.about
        if self.not_read:
            text = f"{text}; {self.not_read}"
        documents = "joined" if self.end_token is None else "apart"
        return [
            text,
            validation,
            f"{len(self.train):,} tokens for training, {len(self.val):,} for validation;"
            f" {self.tokenizer.vocab_size:,} in the vocabulary; documents {documents}",
        ]

    @property
    def longest_held_out(self) -> Any:
        if isinstance(self.val, sf.data.TokenShards):
            return max(self.val.arrays, key=len)
        return self.val


def targets_per_byte(windows: Any, tokenizer: Any, *, rows: int = 1024) -> float:
    """Return the target tokens of `EvalWindows` per byte of text, which converts nats per token to
    bits per byte.
    """
    import numpy as np

    target_count = 0
    byte_count = 0
    for first in range(0, len(windows), rows):
        ids = np.arange(first, min(first + rows, len(windows)))
        _, targets_BT, *_ = windows.gather(ids, ids)
        targets = targets_BT.numpy()
        targets = targets[targets >= 0]
        target_count += targets.size
        byte_count += int(tokenizer.byte_counts[targets].sum())
    return target_count / max(1, byte_count)


def read_corpus(
    data: Data,
    *,
    saved: Path | None = None,
    init: str | Path | None = None,
    behavior: int | None = None,
    max_characters: int | None = None,
) -> Corpus:
    """Return the text at `data.path` in tokens. The path None is Python's standard library; token
    shards are used unchanged. `saved` is the tokenizer that the run wrote at its start; a resume
    must use it. `init` is the initial weights, whose tokenizer is used if the settings name none.
    `behavior` is that of the run (default: the newest). `max_characters` of the training text and
    of the validation text are encoded, or all.
    """
    corpus = _read_tokens(
        data, saved=saved, init=init, behavior=behavior, max_characters=max_characters
    )
    end_token = _end_of_documents(data, corpus.tokenizer, behavior=behavior)
    return replace(corpus, end_token=end_token)


def _end_of_documents(data: Data, tokenizer: Any, *, behavior: int | None) -> int | None:
    if data.documents == "apart" and tokenizer.eos_id is None:
        raise sf.ConfigError(
            "documents-without-end-token",
            problem="data.documents = apart, and the tokenizer has no end token between documents",
            remedy=[
                Setting("data.documents", "joined"),
                ("name the token of a tokenizer's file:", Setting("data.end_token")),
            ],
            setting="data.documents",
            value=data.documents,
        )
    is_newer = behavior is None or behavior >= DOCUMENTS_APART
    if data.documents == "joined" or (data.documents is None and not is_newer):
        return None
    end_token: int | None = tokenizer.eos_id
    return end_token


def _read_tokens(
    data: Data,
    *,
    saved: Path | None,
    init: str | Path | None,
    behavior: int | None,
    max_characters: int | None,
) -> Corpus:
    path = None if data.path is None else local_path(data.path, setting="data.path")
    is_newer = behavior is None or behavior >= KINDS_OF_TEXT
    tokenizer = None if saved is None else saved_tokenizer(saved)
    if tokenizer is None and data.tokenizer is None and init is not None:
        tokenizer = _of_weights(local_path(init, setting="init_from"), vocab_size=data.vocab_size)
    if path is not None:
        if (path / "tokens.json").is_file():
            return _of_shards(path, data, tokenizer)
        _refuse_unfinished_shards(path)
        token_files = None
        if is_newer and data.read_as is None:
            token_files = find_token_files(path, data.tokenizer)
        if token_files is not None:
            return _of_token_files(token_files, data, tokenizer, init=init)
    read = _read_text(path, data, is_newer=is_newer)
    return _of_text(
        read,
        path,
        data,
        tokenizer,
        init=init,
        behavior=behavior,
        max_characters=max_characters,
    )


def _of_text(
    read: Documents,
    path: Path | None,
    data: Data,
    tokenizer: Any,
    *,
    init: str | Path | None,
    behavior: int | None,
    max_characters: int | None,
) -> Corpus:
    """Return the corpus of documents. Without a tokenizer, it is made as `data.tokenizer` says."""
    from surefoot.data.text.token_cache import TextCache  # imports numpy

    name = data.tokenizer
    documents = read.texts
    training, held_out = sf.data.split_documents(documents, val_fraction=data.val_fraction)
    split = _describe_split(documents, held_out, has_rows=read.has_rows)
    if max_characters is not None and sum(map(len, training)) > max_characters:
        split += f"; the first {max_characters:,} characters of each part are encoded here"
        training = _beginning(training, max_characters)
        held_out = _beginning(held_out, max_characters)
    text = TextCache(training, held_out, enabled=data.cache)
    long_words = None
    match name:
        case None | "bpe":
            size = _VOCABULARY if data.vocab_size is None else data.vocab_size
            if tokenizer is None:
                tokenizer = text.trained_tokenizer(vocab_size=size)
                long_words = describe_long_words(training, tokenizer.tokenizer.pre_tokenizer)
            chosen = f"bpe, {size} tokens"
            if name is None and init is not None:
                chosen = f"the tokenizer of init_from, or {chosen}"
        case "characters":
            if tokenizer is None:
                whole_text = "".join(documents.values())
                tokenizer = sf.tokenizers.CharacterTokenizer.from_text(whole_text)
            chosen = name
        case "bytes":
            if tokenizer is None:
                tokenizer = sf.tokenizers.ByteTokenizer()
            chosen = name
        case _:
            tokenizer, chosen = _of_file(name, tokenizer, data, behavior=behavior)
    train_tokens, val_tokens = text.encoded(tokenizer)
    origin = "text of Python's standard library (data.path is not set)"
    if path is not None:
        origin = f"text of {path}"
    if text.directory is not None:
        origin += f", with tokens kept in {text.directory}"
    first_line = _joined(origin, long_words, describe_end_token(tokenizer, name))
    return Corpus(
        train_tokens,
        val_tokens,
        tokenizer,
        chosen,
        about=(first_line, split),
        not_read=read.not_read,
    )


def _joined(*facts: str | None) -> str:
    return "; ".join(fact for fact in facts if fact)


def _beginning(documents: Sequence[str], characters: int) -> list[str]:
    """Return the first documents up to a number of characters; the last of them may be cut.

    >>> _beginning(["one", "two", "three"], 5)
    ['one', 'tw']
    """
    taken = []
    for document in documents:
        if characters <= 0:
            break
        taken.append(document[:characters])
        characters -= len(document)
    return taken


def _refuse_unfinished_shards(path: Path) -> None:
    if (path / "prepare.json").is_file() or any(path.glob("shard-*.bin")):
        raise sf.DataError(
            "token-shards-unfinished",
            problem=f"{path} holds unfinished token shards: it has no tokens.json, which is written"
            " last",
            remedy="continue with the same surefoot data prepare; if the shards were copied, copy"
            " all files",
            path=path,
        )


def _read_text(path: Path | None, data: Data, *, is_newer: bool) -> Documents:
    if path is None:
        return Documents(sf.data.stdlib_documents(), "")
    if not is_newer:
        return Documents(texts_as_before(path), "")
    found = scan_documents(path, read_as=data.read_as)
    return read_documents(found, column=data.column, read_as=data.read_as)


def _of_file(name: str, saved: Any, data: Data, *, behavior: int | None) -> tuple[Any, str]:
    """Return the tokenizer of a run and a text that identifies the one in the file or directory
    `name`. A resume reads it too, to detect another tokenizer there.
    """
    named = saved
    path = user_cache(name) if name == "gpt2" else Path(name)
    if saved is None or path.exists():
        named = named_tokenizer(name, end_token=data.end_token)
    is_older = behavior is not None and behavior < END_TOKENS
    if is_older and isinstance(named, sf.tokenizers.BPETokenizer):
        named = sf.tokenizers.BPETokenizer(named.tokenizer)  # <|endoftext|> or none
    digest = sha256(named.to_json().encode()).hexdigest()
    return saved or named, f"{named.vocab_size} tokens, {digest[:16]}"


def describe_end_token(tokenizer: Any, name: str | None) -> str | None:
    """Return a line about the token between documents of a tokenizer that was loaded, or of one
    that has no such token; None: it is the usual one of a tokenizer of ours.

    >>> describe_end_token(sf.tokenizers.CharacterTokenizer("ab"), "characters")
    'no end token between documents'
    """
    is_loaded = name not in (None, "bpe", "bytes", "characters")
    if tokenizer.eos_id is None:
        cure = " (--data.end-token TOKEN names one)" if is_loaded else ""
        return f"no end token between documents{cure}"
    if is_loaded and isinstance(tokenizer, sf.tokenizers.BPETokenizer):
        return f"end token {tokenizer.end_token}"
    return None


def promised_vocabulary(data: Data) -> int | None:
    """Return the vocabulary size that the settings determine, or None if a file must be read.

    >>> (
    ...     promised_vocabulary(Data(tokenizer="gpt2")),
    ...     promised_vocabulary(Data(path="a/", tokenizer="a/")),
    ... )
    (50257, None)
    """
    path = None if data.path is None else Path(data.path)
    if data.tokenizer is None and path is not None:
        holds_tokens = path.is_file() and path.suffix.lower() == TOKEN_FILE
        if holds_tokens or not path.is_file():
            return None  # a directory may hold shards, which have tokens already
    sizes = {
        "bpe": data.vocab_size or _VOCABULARY,
        "bytes": _MIN_VOCABULARY,
        "gpt2": _GPT2_VOCABULARY,
    }
    return sizes.get(data.tokenizer or "bpe")


def saved_tokenizer_path(run_dir: str | Path | None) -> Path | None:
    """Return the tokenizer file of the run in a directory; None if no run has started there."""
    run = started_run(run_dir)
    return None if run is None else run / TOKENIZER


def refuse_foreign_vocabulary(data: Data) -> None:
    """Raise `ConfigError` if a vocabulary size is too small, or is set for a tokenizer that has its
    own size.
    """
    if data.vocab_size is None:
        return
    tokenizer = data.tokenizer or "bpe"
    if tokenizer != "bpe":
        why = f"the tokenizer {tokenizer!r} has its own size"
        raise vocab_size_without_effect(data.vocab_size, why, Setting("data.tokenizer", "bpe"))
    number(min_value=_MIN_VOCABULARY)(data.vocab_size, setting="data.vocab_size")


def refuse_end_token_without_file(tokenizer: str | None, end_token: str | None) -> None:
    """Raise `ConfigError` if an end token is named for a tokenizer that is not read from a file."""
    if end_token is not None and tokenizer in (None, "bpe", "bytes", "characters"):
        raise sf.ConfigError(
            "end-token-without-file",
            problem=f"end_token = {end_token!r} is for a tokenizer's file or directory, and the"
            f" tokenizer is {tokenizer or 'not named'}",
            remedy=[
                ("leave out", Setting("data.end_token")),
                ("name the file:", Setting("data.tokenizer")),
            ],
            setting="data.end_token",
            value=end_token,
        )


def refuse_missing_library(data: Data, *, init: str | Path | None) -> None:
    """Raise `ConfigError` if the settings alone show that the run needs the library `tokenizers`,
    and it is not installed.
    """
    is_trained_here = (
        data.tokenizer is None
        and init is None
        and not (Path(data.path or "") / "tokens.json").is_file()
    )
    if is_trained_here or data.tokenizer in ("bpe", "gpt2"):
        refuse_missing(
            f"data.tokenizer = {data.tokenizer or 'bpe'}",
            "tokenizers",
            instead=Setting("data.tokenizer", "bytes"),
        )


def saved_tokenizer(path: Path) -> Any:
    """Load the tokenizer of a run. Raises `CheckpointError` if its file is missing or damaged."""
    with reading_run_file(path, content="the text of the run's tokens"):
        return sf.tokenizers.from_json(read_regular(path, limit=_LARGEST_BYTES).decode())


def first_lines(text: str) -> str:
    """Return the beginning of a text in lines of up to 92 characters."""
    beginning = text if len(text) <= _CHARACTERS else f"{text[:_CHARACTERS]} ..."
    return "\n".join(
        beginning[start : start + _WIDTH] for start in range(0, len(beginning), _WIDTH)
    )


def beside(weights: Path) -> Path | None:
    """Return the tokenizer file of a run, or of a checkpoint or weights file in it; None if the
    file does not exist.
    """
    folder = weights if weights.is_dir() else weights.parent
    candidates = [folder / TOKENIZER]
    if folder.parent.name == "checkpoints":
        candidates.append(folder.parent.parent / TOKENIZER)
    for file in candidates:
        if file.is_file():
            return file
    return None


def _of_weights(weights: Path, *, vocab_size: int | None) -> Any:
    file = beside(weights)
    if file is None:
        return None
    if vocab_size is not None:
        why = f"the weights of init_from have their own tokenizer, {file}"
        raise vocab_size_without_effect(vocab_size, why, Setting("data.tokenizer", "bpe"))
    return sf.tokenizers.load(file)


def _describe_split(
    documents: Mapping[str, str], held_out: Sequence[str], *, has_rows: bool
) -> str:
    characters = sum(map(len, documents.values()))
    share = sum(map(len, held_out)) / characters
    noun = "document" if has_rows else "file"
    files = f"{_counted(len(documents), noun)}, {characters:,} characters"
    which = f"the end of the {noun}"
    if len(documents) > 1:
        which = _counted(len(held_out), f"whole {noun}")
    return f"{files}; {share:.1%} of them for validation: {which}"


def _counted(count: int, noun: str) -> str:
    """Return a number of things in words.

    >>> _counted(1, "file"), _counted(2000, "file")
    ('1 file', '2,000 files')
    """
    plural = "" if count == 1 else "s"
    return f"{count:,} {noun}{plural}"


def named_tokenizer(name: str, *, end_token: str | None = None) -> Any:
    """Return the tokenizer called bytes or gpt2, or load one from a file or directory, with another
    end token if one is named. Raises `DataError` if its files are missing.
    """
    refuse_end_token_without_file(name, end_token)
    if name == "bytes":
        return sf.tokenizers.ByteTokenizer()
    if name != "gpt2":
        return sf.tokenizers.load(name, end_token=end_token)
    directory = user_cache(name)
    if not directory.is_dir():
        raise sf.DataError(
            "gpt2-tokenizer-missing",
            problem=f"GPT-2's tokenizer is not at {directory}",
            remedy="put its encoder.json and vocab.bpe there, or name their directory instead of"
            " gpt2",
            path=directory,
        )
    return sf.tokenizers.load(directory, end_token=end_token)


def _of_shards(path: Path, data: Data, tokenizer: Any) -> Corpus:
    name = data.tokenizer
    shards = sf.data.TokenShards.open(path)
    count = len(shards.shards)
    checked = shards.refuse_damaged()
    if checked < count:
        note(
            f"note: {checked:,} of the {count:,} token shards in {path} were compared with their hashes;"
            " to compare all, repeat the same surefoot data prepare"
        )
    file = path / TOKENIZER  # written by `surefoot data prepare`
    of_shards = sf.tokenizers.load(file) if file.is_file() else None
    if tokenizer is None and name is None:
        tokenizer = of_shards
    if name in ("bpe", "characters") or (name is None and tokenizer is None):
        raise _tokens_without_tokenizer(path)
    if data.vocab_size is not None:
        raise vocab_size_without_effect(data.vocab_size, f"{path} holds tokens already")
    if tokenizer is None:
        tokenizer = named_tokenizer(str(name), end_token=data.end_token)
    if (
        of_shards is not None
        and data.end_token is None
        and _differ_in_end_token(tokenizer, of_shards)
    ):
        tokenizer = of_shards  # the shards have its end tokens
    if of_shards is not None and tokenizer.to_json() != of_shards.to_json():
        other = "the tokenizer of the weights" if name is None else f"data.tokenizer = {name}"
        raise sf.ConfigError(
            "tokenizer-of-other-shards",
            problem=f"{path} holds tokens of the tokenizer {file}; {other} is another",
            reason="to use the other tokenizer, write other shards",
            remedy=[
                Setting("data.tokenizer", str(path)),
                Command("surefoot data prepare OUT INPUT... --tokenizer NAME"),
            ],
            setting="data.tokenizer",
            value=name,
            path=path,
        )
    if tokenizer.vocab_size < shards.vocab_size:
        raise sf.ConfigError(
            "vocabulary-of-shards-larger",
            problem=f"{path} has a vocabulary of {shards.vocab_size} tokens,"
            f" data.tokenizer = {name} of {tokenizer.vocab_size}",
            setting="data.tokenizer",
            value=name,
            path=path,
        )
    training, held_out = shards.divided(data.val_fraction)
    about_shards = f"{_counted(count, 'token shard')} of {path}"
    share = len(held_out) / len(shards)
    return Corpus(
        training,
        held_out,
        tokenizer,
        chosen=name or "the tokenizer of init_from, or of the shards",
        about=(
            _joined(about_shards, describe_end_token(tokenizer, name)),
            f"{share:.1%} of the tokens for validation: the last ones",
        ),
    )


def _of_token_files(
    files: TokenFiles, data: Data, tokenizer: Any, *, init: str | Path | None
) -> Corpus:
    """Return the corpus of token files that another project wrote, such as llm.c or nanoGPT."""
    from surefoot.recipes.readers.text.token_files import read_token_files

    name = data.tokenizer
    if name is None and files.is_gpt2 and (tokenizer is None or init is None):
        name = "gpt2"  # as the header of these files says
    if tokenizer is None and name is None:
        raise _tokens_without_tokenizer(files.path)
    if data.vocab_size is not None:
        raise vocab_size_without_effect(data.vocab_size, f"{files.path} holds tokens already")
    if tokenizer is None:
        tokenizer = named_tokenizer(str(name), end_token=data.end_token)
    training, held_out, facts = read_token_files(
        files, vocab_size=tokenizer.vocab_size, val_fraction=data.val_fraction
    )
    about_files = f"{_counted(len(training.shards), 'token file')} of {files.path}"
    share = len(held_out) / (len(training) + len(held_out))
    which = "the last ones"
    if files.validation:
        which = ", ".join(file.path.name for file in files.validation[:3])
    return Corpus(
        training,
        held_out,
        tokenizer,
        chosen=name or "the tokenizer of init_from",
        about=(
            _joined(about_files, *facts, describe_end_token(tokenizer, name)),
            f"{share:.1%} of the tokens for validation: {which}",
        ),
        not_read=files.not_read,
    )


def _tokens_without_tokenizer(path: Path) -> sf.ConfigError:
    return sf.ConfigError(
        "token-files-without-tokenizer",
        problem=f"{path} holds tokens, and no tokenizer is named that made them",
        remedy=("name it (gpt2, bytes, or a file):", Setting("data.tokenizer")),
        setting="data.tokenizer",
        path=path,
    )


def _differ_in_end_token(one: Any, other: Any) -> bool:
    """Return True for two tokenizers that encode every text alike and end it differently."""
    kind = sf.tokenizers.BPETokenizer
    if not isinstance(one, kind) or not isinstance(other, kind):
        return False
    is_same = kind(one.tokenizer).to_json() == kind(other.tokenizer).to_json()
    return is_same and one.eos_id != other.eos_id
