"""The corpus of a GPT run: its tokenizer, training tokens and validation tokens."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import surefoot as sf
from surefoot.config.behavior import END_TOKENS, KINDS_OF_TEXT
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

TOKENIZER = "tokenizer.json"  # in the run's directory
_MIN_VOCABULARY = 257  # the bytes and an end token
_VOCABULARY = 2048
_GPT2_VOCABULARY = 50_257
_CHARACTERS = 320  # shown of a text
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

    @property
    def in_words(self) -> list[str]:
        return [
            "; ".join([self.about[0], self.not_read] if self.not_read else [self.about[0]]),
            self.about[1],
            f"{len(self.train):,} tokens for training, {len(self.val):,} for validation;"
            f" {self.tokenizer.vocab_size:,} in the vocabulary",
        ]

    @property
    def longest_held_out(self) -> Any:
        held_out = self.val
        return max(
            held_out.arrays if isinstance(held_out, sf.data.TokenShards) else [held_out], key=len
        )


def targets_per_byte(windows: Any, tokenizer: Any, *, rows: int = 1024) -> float:
    """Return the target tokens of `EvalWindows` per byte of text, which converts nats per token to
    bits per byte.
    """
    import numpy as np

    target_count = byte_count = 0
    for ids in np.array_split(np.arange(len(windows)), -(-len(windows) // rows)):
        targets = windows.gather(ids, ids)[1].numpy()
        targets = targets[targets >= 0]
        target_count += targets.size
        byte_count += int(tokenizer.byte_counts[targets].sum())
    return target_count / max(1, byte_count)


def corpus(
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
    name = data.tokenizer
    path = None if data.path is None else local_path(data.path, setting="data.path")
    is_newer = behavior is None or behavior >= KINDS_OF_TEXT
    tokenizer = None if saved is None else saved_tokenizer(saved)
    if tokenizer is None and name is None and init is not None:
        tokenizer = _of_weights(local_path(init, setting="init_from"), vocab_size=data.vocab_size)
    if path is not None:
        if (path / "tokens.json").is_file():
            return _of_shards(path, data, tokenizer)
        _refuse_unfinished_shards(path)
        token_files = None
        if is_newer and data.read_as is None:
            token_files = find_token_files(path, name)
        if token_files is not None:
            return _of_token_files(token_files, data, tokenizer, init=init)
    from surefoot.data.text.token_cache import TextCache  # imports numpy

    read = _read_text(path, data, is_newer=is_newer)
    documents = read.texts
    training, held_out = sf.data.split_documents(documents, val_fraction=data.val_fraction)
    split = _describe_split(documents, held_out, has_rows=read.has_rows)
    if max_characters is not None and sum(map(len, training)) > max_characters:
        split += f"; the first {max_characters:,} characters of each part are encoded here"
        training = _beginning(training, max_characters)
        held_out = _beginning(held_out, max_characters)
    text = TextCache(training, held_out, enabled=data.cache)
    facts: list[str | None] = []
    match name:
        case None | "bpe":
            size = _VOCABULARY if data.vocab_size is None else data.vocab_size
            if tokenizer is None:
                tokenizer = text.trained_tokenizer(vocab_size=size)
                facts.append(describe_long_words(training, tokenizer.tokenizer.pre_tokenizer))
            chosen = (
                f"bpe, {size} tokens"
                if init is None or name
                else f"the tokenizer of init_from, or bpe, {size} tokens"
            )
        case "characters":
            tokenizer = tokenizer or sf.tokenizers.CharacterTokenizer.from_text(
                "".join(documents.values())
            )
            chosen = name
        case "bytes":
            tokenizer, chosen = tokenizer or sf.tokenizers.ByteTokenizer(), name
        case _:
            tokenizer, chosen = _of_file(name, tokenizer, data, behavior=behavior)
    origin = (
        "text of Python's standard library (data.path is not set)"
        if path is None
        else f"text of {path}"
    )
    encoded = text.encoded(tokenizer)
    origin += "" if text.directory is None else f", with tokens kept in {text.directory}"
    facts.append(describe_end_token(tokenizer, name))
    first_line = "; ".join([origin, *(fact for fact in facts if fact)])
    return Corpus(*encoded, tokenizer, chosen, about=(first_line, split), not_read=read.not_read)


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
    is_there = (user_cache(name) if name == "gpt2" else Path(name)).exists()
    if saved is None or is_there:
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
    return {
        "bpe": data.vocab_size or _VOCABULARY,
        "bytes": _MIN_VOCABULARY,
        "gpt2": _GPT2_VOCABULARY,
    }.get(data.tokenizer or "bpe")


def saved_tokenizer_path(out: str | Path | None) -> Path | None:
    """Return the tokenizer file of the run in `out`; None if no run has started there."""
    if out is None or not any(Path(out).glob("checkpoints/step-*")):
        return None
    return Path(out) / TOKENIZER


def refuse_foreign_vocabulary(data: Data) -> None:
    """Raise `ConfigError` if a vocabulary size is too small, or is set for a tokenizer that has its
    own size.
    """
    tokenizer, vocab_size = data.tokenizer or "bpe", data.vocab_size
    if vocab_size is not None and tokenizer != "bpe":
        why = f"the tokenizer {tokenizer!r} has its own size"
        raise vocab_size_without_effect(vocab_size, why, Setting("data.tokenizer", "bpe"))
    if vocab_size is not None:
        number(min_value=_MIN_VOCABULARY)(vocab_size, setting="data.vocab_size")


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
    """Return the beginning of a text in lines of 92 characters."""
    beginning = text if len(text) <= _CHARACTERS else f"{text[:_CHARACTERS]} ..."
    return "\n".join(beginning[start : start + 92] for start in range(0, len(beginning), 92))


def beside(weights: Path) -> Path | None:
    """Return the tokenizer file of a run, or of a checkpoint or weights file in it; None if the
    file does not exist.
    """
    folder = weights if weights.is_dir() else weights.parent
    folders = [folder, folder.parent.parent] if folder.parent.name == "checkpoints" else [folder]
    return next((folder / TOKENIZER for folder in folders if (folder / TOKENIZER).is_file()), None)


def _of_weights(weights: Path, *, vocab_size: int | None) -> Any:
    file = beside(weights)
    if file is not None and vocab_size is not None:
        why = f"the weights of init_from have their own tokenizer, {file}"
        raise vocab_size_without_effect(vocab_size, why, Setting("data.tokenizer", "bpe"))
    return None if file is None else sf.tokenizers.load(file)


def _describe_split(
    documents: Mapping[str, str], held_out: Sequence[str], *, has_rows: bool
) -> str:
    characters = sum(map(len, documents.values()))
    noun = "document" if has_rows else "file"
    files = f"{len(documents):,} {noun}{'s' * (len(documents) != 1)}, {characters:,} characters"
    which = f"the end of the {noun}"
    if len(documents) > 1:
        which = f"{len(held_out):,} whole {noun}{'s' * (len(held_out) != 1)}"
    return f"{files}; {sum(map(len, held_out)) / characters:.1%} of them for validation: {which}"


def named_tokenizer(name: str, *, end_token: str | None = None) -> Any:
    """Return the tokenizer called bytes or gpt2, or load one from a file or directory, with another
    end token if one is named. Raises `DataError` if its files are missing.
    """
    refuse_end_token_without_file(name, end_token)
    if name == "bytes":
        return sf.tokenizers.ByteTokenizer()
    if name != "gpt2":
        return sf.tokenizers.load(name, end_token=end_token)
    if not (directory := user_cache(name)).is_dir():
        raise sf.DataError(
            "gpt2-tokenizer-missing",
            problem=f"GPT-2's tokenizer is not at {directory}",
            remedy="put its encoder.json and vocab.bpe there, or name their directory instead of"
            " gpt2",
            path=directory,
        )
    return sf.tokenizers.load(directory, end_token=end_token)


def _of_shards(path: Path, data: Data, tokenizer: Any) -> Corpus:
    shards, name = sf.data.TokenShards.open(path), data.tokenizer
    checked, count = shards.refuse_damaged(), len(shards.shards)
    if checked < count:
        note(
            f"note: {checked:,} of the {count:,} token shards in {path} were compared with their hashes;"
            " to compare all, repeat the same surefoot data prepare"
        )
    file = path / TOKENIZER  # written by `surefoot data prepare`
    own = sf.tokenizers.load(file) if file.is_file() else None
    tokenizer = tokenizer or own if name is None else tokenizer
    if name in ("bpe", "characters") or (name is None and tokenizer is None):
        raise _tokens_without_tokenizer(path)
    if data.vocab_size is not None:
        raise vocab_size_without_effect(data.vocab_size, f"{path} holds tokens already")
    tokenizer = tokenizer or named_tokenizer(str(name), end_token=data.end_token)
    if own is not None and data.end_token is None and _differ_in_end_token(tokenizer, own):
        tokenizer = own  # the shards have its end tokens
    if own is not None and tokenizer.to_json() != own.to_json():
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
    facts = [
        f"{count:,} token shard{'s' * (count != 1)} of {path}",
        describe_end_token(tokenizer, name),
    ]
    return Corpus(
        training,
        held_out,
        tokenizer,
        chosen=name or "the tokenizer of init_from, or of the shards",
        about=(
            "; ".join(fact for fact in facts if fact),
            f"{len(held_out) / len(shards):.1%} of the tokens for validation: the last ones",
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
    tokenizer = tokenizer or named_tokenizer(str(name), end_token=data.end_token)
    training, held_out, facts = read_token_files(
        files, vocab_size=tokenizer.vocab_size, val_fraction=data.val_fraction
    )
    count = len(training.shards)
    first_line = [
        f"{count:,} token file{'s' * (count != 1)} of {files.path}",
        *facts,
        describe_end_token(tokenizer, name),
    ]
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
            "; ".join(fact for fact in first_line if fact),
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
