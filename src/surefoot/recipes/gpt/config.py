"""The settings of a GPT trained on text, and its presets. Imports no torch."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from surefoot.config.setting import default, ordered, setting
from surefoot.config.train_settings import number
from surefoot.recipes.optimizer_settings import RecipeSettings

_COUNT = number("how many, or 0 for none", least=0)


@dataclass(frozen=True, kw_only=True)
class Data:
    """The text and how it becomes numbers."""

    path: str | None = None
    """A text file, a directory of them, or of token shards; absent: the source of Python's standard library."""
    tokenizer: str | None = None
    """bpe (trained on the text), bytes, characters, gpt2, or a tokenizer's file or directory; absent: that of --init, or bpe."""
    vocab_size: int | None = None
    """bpe: how many different tokens; absent: 2048."""
    val_fraction: float = 0.05
    """How much of the text is scored and not trained on: whole documents, or the end of a single one."""


@dataclass(frozen=True, kw_only=True)
class Model:
    """The shape of the network."""

    family: Literal["modern", "gpt2"] = "modern"
    """modern: rotary positions, RMS norms, normalised queries and keys, no biases; gpt2: as published."""
    layers: int = 4
    """Number of blocks."""
    heads: int = 4
    """Attention heads a block."""
    width: int = 128
    """Channels between blocks; a multiple of twice the heads."""
    context: int = 128
    """How many tokens the model sees at once."""
    dropout: float = 0.0
    """Fraction of units dropped while training."""
    activation: Literal["relu2", "swiglu", "gelu"] | None = None
    """Between the layers of an MLP; absent: relu2 (squared ReLU), and gelu for gpt2."""
    tie_embeddings: bool | None = None
    """Whether the head is the embedding; absent: only for gpt2."""
    smear: bool = False
    """modern: whether each token's vector takes in a learned share of the embedding of the token before."""
    ngrams: int = 1
    """modern: how many tokens in a row have a vector together, beside their own: 2, 3 or 4 at most; 1: none."""
    ngram_buckets: int | None = None
    """Vectors of each length, which n-grams share where there are more of them; absent: 32,768."""


@ordered
@dataclass(kw_only=True)
class Config(RecipeSettings):
    """Train a GPT on text."""

    preset: (
        Literal["tiny", "shakespeare", "small", "gpt2-124m", "gpt2-350m", "gpt2-774m", "gpt2-1558m", "modern-124m"]
        | None
    ) = setting(None, observer=True, after="")
    """A complete configuration to start from; tiny is the default. Files and flags change it."""
    out: str | Path | None = default("runs/gpt")
    length: str = default("2500 steps")
    batch_size: int | str = default(8)
    evaluate_every: str = default("25%")
    data: Data = setting(factory=Data, identity=True)
    model: Model = setting(factory=Model, identity=True)
    val_tokens: int | None = setting(
        None, check=number("a number of tokens, 1 or more", least=1), observer=True, after="check_state"
    )
    """Number of held-out tokens to evaluate while training: a part that the seed chooses once. At the end all of them are
    evaluated, as the split val_all. Default: all, every time."""
    cloze_questions: int | None = setting(None, check=_COUNT, observer=True)
    """Questions of which of four pieces of held-out text really follows; 0 asks none. Absent: 200, where there is text for them."""
    multiple_choice: tuple[str, ...] | None = setting(None, observer=True)
    """Files of multiple-choice questions to score too, each as NAME=FILE: hellaswag=hellaswag_val.jsonl."""
    multiple_choice_questions: int = setting(500, check=number("how many of a file, 1 or more", least=1), observer=True)
    """How many of each such file, the same at every evaluation; `surefoot evaluate RUN --on NAME=FILE` asks all."""
    sample_count: int = setting(1, check=number("a number of samples, 1 or more", least=1), observer=True)
    """Number of samples that are shown at a time; each is drawn anew."""
    sample_tokens: int = setting(200, check=_COUNT, observer=True)
    """How many tokens a sample has; 0 shows none."""
    sample_prompt: str | None = setting(None, observer=True)
    """What a sample goes on from; absent: a line end, and "def " for the default text."""


def _published(layers: int, heads: int, width: int, *, lr: float, micro_batch_size: int) -> dict[str, Any]:
    """GPT-2 in one of its sizes (Radford et al. 2019, table 2), trained as is usual today (Brown et al. 2020, appendix B)."""
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
        "val_tokens": 10_000_000,
        "save_every": "15 min",
    }


BEST = "min held-out/loss"

PRESETS: dict[str, dict[str, Any]] = {
    "tiny": {},
    "shakespeare": {
        "data.tokenizer": "characters",
        "data.val_fraction": 0.1,
        "model.heads": 2,
        "model.context": 256,
        "model.activation": "swiglu",
        "model.smear": True,
        "length": "1700 steps",
        "precision": "bf16",  # as in the published figures (docs/decisions/0042-auto-reads-a-table.md)
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
    },
    "gpt2-124m": _published(12, 12, 768, lr=6e-4, micro_batch_size=32),
    "gpt2-350m": _published(24, 16, 1024, lr=3e-4, micro_batch_size=16),
    "gpt2-774m": _published(36, 20, 1280, lr=2.5e-4, micro_batch_size=8),
    "gpt2-1558m": _published(48, 25, 1600, lr=2e-4, micro_batch_size=4) | {"activation_checkpointing": "blocks"},
    "modern-124m": _published(12, 12, 768, lr=1e-3, micro_batch_size=32)
    | {"model.family": "modern", "model.tie_embeddings": True},
}

MEANT_FOR = {
    name: "text or token shards, of billions of tokens: --data.path PATH" for name in PRESETS if name.endswith("m")
} | {
    "shakespeare": "a text of about a million characters, such as tiny-shakespeare: --data.path FILE",
}
