"""Settings and presets of the GPT recipe. Imports no torch."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from surefoot.config.setting import default, number, ordered, setting
from surefoot.config.tree import AT_STEP, LEADS, MOST_USED, NEVER, PATH, STAYS, SWITCHES
from surefoot.recipes.optimizer_settings import RecipeSettings

_COUNT = number(min_value=0)


@dataclass(frozen=True, kw_only=True)
class Data:
    """The text and its tokenization."""

    path: str | None = field(default=None, metadata=PATH | MOST_USED)
    """A file of text, JSON lines, Parquet or Arrow, a directory of such files, or token shards.
    Default: the source of Python's standard library.
    """
    column: str = "text"
    """Key or column of the text in JSON lines, Parquet and Arrow."""
    read_as: Literal["text"] | None = None
    """text: read every file as plain text, also JSON, CSV, HTML and notebooks, which are refused
    otherwise."""
    tokenizer: str | None = field(default=None, metadata=PATH | NEVER)
    """bpe (trained on the text), bytes, characters, gpt2, or a tokenizer's file or directory.
    Default: the tokenizer of --init-from, or bpe."""
    end_token: str | None = field(default=None, metadata=NEVER)
    """Token between documents, for a tokenizer's file or directory. Default: the one that its files
    name, or a usual one such as </s>, or none."""
    vocab_size: int | None = field(default=None, metadata=NEVER)
    """Vocabulary size of a trained bpe tokenizer. Default: 2048."""
    documents: Literal["apart", "joined"] | None = field(default=None, metadata=NEVER)
    """apart: each document is read as if it stood alone in its window. joined: a token sees the
    documents before its own. Default: apart, if an end token stands between documents."""
    val_fraction: float = field(default=0.05, metadata=NEVER)
    """Fraction of the text for validation: whole documents, or the end of a single document."""
    cache: bool = field(default=True, metadata=AT_STEP)
    """Keep the trained tokenizer and the tokens of a long text in ~/.cache/surefoot/tokens, so that
    the next start reads them.
    """


@dataclass(frozen=True, kw_only=True)
class Model:
    """The shape of the network."""

    family: Literal["modern", "gpt2", "llama"] = field(default="modern", metadata=LEADS)
    """modern has rotary positions, RMS norms, normalized queries and keys, and no biases. gpt2 is
    as published. llama is LlamaForCausalLM of transformers, and exported as such. Another family
    drops the preset's activation, tie-embeddings, smear and n-grams.
    """
    layers: int = field(default=4, metadata=STAYS | MOST_USED)
    """Number of blocks."""
    heads: int = field(default=4, metadata=STAYS)
    """Attention heads per block."""
    width: int = field(default=128, metadata=STAYS | MOST_USED)
    """Embedding width, a multiple of twice the number of heads."""
    context: int = field(default=128, metadata=STAYS)
    """Context length in tokens."""
    dropout: float = field(default=0.0, metadata=STAYS | AT_STEP)
    """Dropout probability during training."""
    activation: Literal["relu2", "swiglu", "gelu"] | None = None
    """Activation inside an MLP. Default: relu2 (squared ReLU); gelu for gpt2, swiglu for llama."""
    tie_embeddings: bool | None = None
    """Use the embedding matrix as the output head. Default: only for gpt2."""
    smear: bool | int = False
    """modern: add learned shares of the embeddings of this many previous tokens (True: 1) to each
    token's embedding.
    """
    ngrams: int = field(default=1, metadata={SWITCHES: ("ngram_buckets",)})
    """modern: add embeddings of n-grams of up to this many tokens: 2, 3 or 4. 1 adds none and drops
    the preset's ngram-buckets.
    """
    ngram_buckets: int | None = None
    """Number of embeddings for each n-gram length; n-grams share embeddings if there are too few.
    Default: 32,768.
    """
    kv_heads: int | None = None
    """llama: heads of keys and values; each serves as many heads of queries. Default: as many as
    heads.
    """
    mlp_width: int | None = None
    """llama: hidden units of an MLP. Default: 8/3 of the width."""
    rope_theta: float | None = None
    """llama: base of the rotary positions; Llama 3 has 500,000. Default: 10,000."""
    norm_eps: float | None = None
    """llama: value added to the mean square in RMS norms; Llama 2 and 3 have 1e-5. Default: 1e-6.
    """


@ordered
@dataclass(kw_only=True)
class Config(RecipeSettings):
    """Train a GPT on text."""

    preset: (
        Literal[
            "tiny",
            "shakespeare",
            "small",
            "gpt2-124m",
            "gpt2-350m",
            "gpt2-774m",
            "gpt2-1558m",
            "modern-124m",
        ]
        | None
    ) = setting(
        None, observer=True, after="", group="what is trained", changes_at="never", most_used=True
    )
    """A complete configuration to start from. Files and flags override it. Commands start from
    tiny.
    """
    run_dir: str | Path | None = default("runs/gpt")
    length: str = default("550 steps")
    batch_size: int | str = default(16)
    evaluate_every: str = default("25%")
    data: Data = setting(factory=Data, identity=True, changes_at="epoch")
    model: Model = setting(factory=Model, identity=True, changes_at="never")
    val_tokens: int | None = setting(
        None,
        check=number(min_value=1),
        observer=True,
        after="check_state",
        group="evaluation",
    )
    """Validation tokens per evaluation, chosen once by the seed; val_all at the end of the run uses
    all tokens. Default: all tokens.
    """
    cloze_questions: int | None = setting(None, check=_COUNT, observer=True)
    """Number of questions with four continuations on the validation text; 0 disables them. Default:
    100 if the text is long enough.
    """
    multiple_choice: tuple[str, ...] | None = setting(None, observer=True)
    """Files of multiple-choice questions to evaluate, each as NAME=FILE, such as
    hellaswag=hellaswag_val.jsonl.
    """
    multiple_choice_questions: int = setting(500, check=number(min_value=1), observer=True)
    """Number of questions per file, the same at every evaluation.
    `surefoot evaluate RUN --questions NAME=FILE` evaluates all questions.
    """
    sample_count: int = setting(1, check=number(min_value=1), observer=True)
    """Number of samples shown at a time, each with its own seed."""
    sample_tokens: int = setting(200, check=_COUNT, observer=True)
    """Number of tokens per sample; 0 disables samples."""
    sample_prompt: str | None = setting(None, observer=True)
    """Prompt of the samples. Default: a line break, and "def " for the default text."""


def _published(
    layers: int, heads: int, width: int, *, lr: float, micro_batch_size: int
) -> dict[str, Any]:
    # sizes: Radford et al. 2019, table 2; training: Brown et al. 2020, appendix B
    return {
        "model.family": "gpt2",
        "model.layers": layers,
        "model.heads": heads,
        "model.width": width,
        "model.context": 1024,
        "data.tokenizer": "gpt2",
        "batch_size": 512,
        "micro_batch_size": micro_batch_size,
        "optimizer.lr": lr,
        "optimizer.betas": (0.9, 0.95),
        "schedule.warmup": "715 steps",
        "schedule.min_lr_ratio": 0.1,
        "length": "19073 steps",
        "evaluate_every": "250 steps",
        "cloze_questions": 200,
        "val_tokens": 10_000_000,
        "save_every": "15 min",
    }


BEST = "min val/loss"

PRESETS: dict[str, dict[str, Any]] = {
    "tiny": {
        "preset": "tiny",  # gpt.Config() is not this preset
        # docs/decisions/0052-muon-and-n-grams-in-the-first-run.md
        "model.heads": 2,
        "model.activation": "swiglu",
        "model.smear": True,
        "model.ngrams": 2,
        "model.ngram_buckets": 8192,
        "val_tokens": 32_768,
        "optimizer.name": "muon",
        "optimizer.lr": 0.014,
        "optimizer.adamw_lr": 0.017,
        "optimizer.momentum": 0.9,
        "optimizer.ns_steps": 4,
        "schedule.name": "linear",
        "schedule.warmup": "1%",
    },
    "shakespeare": {
        "data.tokenizer": "characters",
        "data.val_fraction": 0.1,
        "model.heads": 2,
        "model.context": 256,
        "model.activation": "swiglu",
        "model.smear": True,
        "length": "1700 steps",
        "batch_size": 8,
        "cloze_questions": 200,
        "clip": "off",
        "optimizer.name": "muon",
        "optimizer.lr": 0.015,
        "optimizer.adamw_lr": 0.012,
        "optimizer.momentum": 0.9,
        "optimizer.ns_steps": 4,
        "schedule.name": "linear",
        "schedule.warmup": "1%",
    },
    "small": {
        "data.vocab_size": 8192,
        "model.layers": 8,
        "model.heads": 8,
        "model.width": 512,
        "model.context": 512,
        "batch_size": 32,
        "micro_batch_size": 8,
        "length": "10000 steps",
        "optimizer.lr": 1e-3,
        "schedule.min_lr_ratio": 0.1,
        "evaluate_every": "5%",
        "cloze_questions": 200,
    },
    "gpt2-124m": _published(12, 12, 768, lr=6e-4, micro_batch_size=32),
    "gpt2-350m": _published(24, 16, 1024, lr=3e-4, micro_batch_size=16),
    "gpt2-774m": _published(36, 20, 1280, lr=2.5e-4, micro_batch_size=8),
    "gpt2-1558m": _published(48, 25, 1600, lr=2e-4, micro_batch_size=4)
    | {"activation_checkpointing": "blocks"},
    "modern-124m": _published(12, 12, 768, lr=1e-3, micro_batch_size=32)
    | {"model.family": "modern", "model.tie_embeddings": True},
}

_BILLIONS = "text or token shards, of billions of tokens"

MEANT_FOR = {
    "shakespeare": "a text of about a million characters, such as tiny-shakespeare",
    "gpt2-124m": _BILLIONS,
    "gpt2-350m": _BILLIONS,
    "gpt2-774m": _BILLIONS,
    "gpt2-1558m": _BILLIONS,
    "modern-124m": _BILLIONS,
}
