"""Errors that several recipes share."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from surefoot.data.scan import unreadable
from surefoot.errors import (
    CheckpointError,
    Command,
    ConfigError,
    DataError,
    Remedy,
    Setting,
    error_as_json,
    first_line,
)


@contextmanager
def reading_run_file(path: Path, *, content: str) -> Iterator[None]:
    """Read a file that the recipe wrote into the run's directory. Raises `CheckpointError` if the
    file is missing, or if the block fails to read it.
    """
    if not path.is_file():
        raise CheckpointError(
            "run-file-missing",
            problem=f"{path} is missing: it has {content}",
            remedy=[
                "restore it",
                ("if another recipe wrote the run, choose another", Setting("run_dir")),
            ],
            path=path,
        )
    try:
        yield
    except (ConfigError, DataError, OSError, ValueError) as problem:
        raise CheckpointError(
            "run-file-damaged",
            problem=f"{path} is damaged",
            reason=first_line(problem),
            path=path,
            cause=error_as_json(problem),
        ) from problem


def vocab_size_without_effect(vocab_size: int, why: str, *remedies: Remedy) -> ConfigError:
    """Return the error for a vocabulary size where no tokenizer is trained on the text."""
    return ConfigError(
        "vocab-size-without-effect",
        problem=f"data.vocab_size = {vocab_size} is for a tokenizer trained on the text, and {why}",
        remedy=[Setting("data.vocab_size", None), *remedies],
        setting="data.vocab_size",
        value=vocab_size,
    )


def nothing_to_predict(what: str, *, example: str) -> ConfigError:
    """Return the error for a call of predict without input."""
    return ConfigError(
        "predict-without-input",
        problem=f"predict needs {what}",
        remedy=Command(f"surefoot predict RUN {example}"),
    )


def impossible_shape(problem: ValueError) -> ConfigError:
    """Return the error for settings of a model that exclude each other."""
    return ConfigError("model-shape-impossible", problem=f"model: {problem}", setting="model")


def read_inputs(path: Path) -> bytes:
    """Read the file of inputs of predict. Raises `DataError` if it cannot be read."""
    try:
        return path.read_bytes()
    except OSError as problem:
        raise unreadable(path, problem) from problem


def refuse_beyond_context(setting: str, tokens: int, *, context: int) -> None:
    """Raise `ConfigError` if a setting asks for more tokens than the model has positions."""
    if tokens > context:
        raise ConfigError(
            "tokens-exceed-context",
            problem=f"{setting} = {tokens} is more than the model's context of {context} tokens",
            remedy=Setting(setting, context),
            setting=setting,
            value=tokens,
            context=context,
        )
