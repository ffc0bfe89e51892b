"""Files of multiple-choice questions as splits, for language models. Imports torch only when
used.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import surefoot as sf
from surefoot.config.paths import local_path
from surefoot.recipes.optimizer_settings import note

_LOGITS_AT_ONCE = 1 << 28  # 1 GiB of float32
_MAX_QUESTIONS = 16  # per batch


def named_files(
    files: Sequence[str], *, taken: Sequence[str] = (), setting: str = "multiple_choice"
) -> dict[str, Path]:
    """Return the files of ["NAME=FILE", ...] by name, by default the file name up to the first dot.
    Raises `ConfigError` for a name that occurs twice, is in `taken`, or cannot name a split.

    >>> [*named_files(["hellaswag=data/val.jsonl", "arc_easy.jsonl.gz"])]
    ['hellaswag', 'arc_easy']
    """
    paths: dict[str, Path] = {}
    for text in files:
        name, equals, file = text.partition("=")
        if not equals:
            file = text
            name = Path(file).name.partition(".")[0]
        if not name or not file or "/" in name:
            raise sf.ConfigError(
                "split-without-name",
                problem=f"{setting}: {text!r} does not name a split and its file",
                remedy="write NAME=FILE, such as hellaswag=hellaswag_val.jsonl",
                setting=setting,
                value=text,
            )
        if name in paths or name in taken:
            raise sf.ConfigError(
                "split-named-twice",
                problem=f"{setting}: two splits are called {name!r}",
                remedy="choose another name, NAME=FILE",
                setting=setting,
                value=name,
            )
        paths[name] = local_path(file, setting=setting)
    return paths


def question_split(
    name: str, path: Path, *, tokenizer: Any, context: int, number: int | None = None, seed: int = 0
) -> Any:
    """Return a file of questions as a `Split` for a `models.GPT`: all questions, or `number` chosen
    by the seed.
    """
    questions = sf.data.load_questions(path, tokenizer, number=number, seed=seed)
    dataset = sf.data.MultipleChoice(questions, context=context, byte_counts=tokenizer.byte_counts)
    if dataset.shortened:
        note(
            f"note: {name}: {dataset.shortened:,} of {len(dataset):,} questions are longer than the context of {context}"
            " tokens: their contexts are truncated"
        )
    metrics = sf.metrics.multiple_choice_accuracy
    derived = {}
    if dataset.choices == 1:  # the context is continued, as in LAMBADA
        metrics = sf.metrics.continuation_accuracy
        derived = {"perplexity": sf.metrics.perplexity}
    return sf.Split(
        dataset,
        metrics=metrics,
        predict=predict_endings,
        batch_size=questions_at_once(dataset, vocab_size=tokenizer.vocab_size),
        loss=False,
        derived=derived,
    )


def questions_at_once(dataset: Any, *, vocab_size: int) -> int:
    """Return the number of questions per batch so that the logits fit into memory. The number does
    not affect metrics.
    """
    logits_per_question = int(dataset.max_targets * vocab_size)
    return max(1, min(_MAX_QUESTIONS, _LOGITS_AT_ONCE // logits_per_question))


def predict_endings(model: Any, batch: Any) -> tuple[Any, Any]:
    """Return the logits of a `models.GPT` for the tokens of the endings only, and their targets."""
    from surefoot.metrics.multiple_choice import eagerly  # imports torch

    tokens_RT, targets = batch
    with eagerly():
        logits_EV = model(
            tokens_RT,
            loss=lambda hidden_RTC, head_VC: (
                hidden_RTC.flatten(0, 1).index_select(0, targets.positions) @ head_VC.T
            ),
        )
    return logits_EV, targets
