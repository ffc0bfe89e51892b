"""Settings and presets of the translation recipe. Imports no torch."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from surefoot.config.setting import default, number, ordered, setting
from surefoot.config.tree import AT_STEP, MOST_USED, NEVER, PATH
from surefoot.recipes.optimizer_settings import FRACTION, Optimizer, RecipeSettings, Schedule

_ONE_OR_MORE = number(min_value=1)
_FROM_ZERO = number(min_value=0, kind=int | float)


@dataclass(frozen=True, kw_only=True)
class Data:
    """Sentence pairs and their tokenization."""

    path: str | None = field(default=None, metadata=PATH | MOST_USED)
    """A directory with train.en and train.de (and val and test), or a .tsv or .jsonl file. Default:
    phrases from CLDR.
    """
    source: str = field(default="en", metadata=MOST_USED | NEVER)
    """Source language as in the file names; for phrases a locale such as en or pt_BR."""
    target: str = field(default="de", metadata=MOST_USED | NEVER)
    """Target language."""
    phrase_count: int = 24_000
    """Number of phrases if no path is set."""
    val_fraction: float = field(default=0.03, metadata=NEVER)
    """Fraction of the pairs held out for validation by a hash of the source, unless a validation
    file exists.
    """
    tokenizer: Literal["bpe", "unigram"] = field(default="bpe", metadata=NEVER)
    """Subword tokenizer, trained on the training text: byte pairs or a unigram model."""
    vocab_size: int | None = field(default=None, metadata=NEVER)
    """Number of subwords. Default: 1024, or the number in --init-from."""
    shared_vocab: bool = field(default=True, metadata=NEVER)
    """Use one vocabulary and one embedding for both languages."""
    max_source_tokens: int = 128
    """Leave out training pairs with more source tokens."""
    max_target_tokens: int = 128
    """Leave out training pairs with more target tokens."""
    on_empty: Literal["error", "skip"] = "error"
    """For pairs with an empty side: error refuses them; skip leaves them out and counts them."""


@dataclass(frozen=True, kw_only=True)
class Model:
    """The shape of the network."""

    encoder_layers: int = 2
    """Number of encoder blocks."""
    decoder_layers: int = 2
    """Number of decoder blocks."""
    heads: int = 4
    """Attention heads per block."""
    width: int = 128
    """Embedding width, a multiple of the number of heads."""
    mlp_width: int = 512
    """Hidden width of an MLP."""
    context: int = 512
    """Maximum length of source and of target, in tokens."""
    dropout: float = field(default=0.0, metadata=AT_STEP)
    """Dropout probability of the embeddings and of each sublayer's output."""
    attention_dropout: float = field(default=0.0, metadata=AT_STEP)
    """Dropout probability of attention weights. Slow on a CPU."""
    activation_dropout: float = field(default=0.0, metadata=AT_STEP)
    """Dropout probability inside an MLP."""
    norm_placement: Literal["pre", "post"] = "pre"
    """pre normalizes before each sublayer, which is easier to train; post normalizes after it, as
    first published.
    """
    norm: Literal["layer", "rms"] = "layer"
    """layer is layer normalization with a bias; rms is RMS normalization."""
    qk_norm: bool = False
    """Apply RMS normalization to the queries and keys of each head."""
    positions: Literal["sinusoidal", "learned", "rotary"] = "sinusoidal"
    """Position encoding. sinusoidal suits lengths that are rare in training; rotary turns queries
    and keys of self-attention.
    """
    activation: Literal["relu", "gelu", "relu2"] = "relu"
    """Activation inside an MLP; relu2 is ReLU squared."""
    zero_init_residual: bool = False
    """Initialize the output of each residual branch at zero; for --model.norm-placement pre."""
    tie_embeddings: bool = True
    """Use the target's embedding matrix as the output head."""


@ordered
@dataclass(kw_only=True)
class Config(RecipeSettings):
    """Train a translator."""

    preset: Literal["tiny", "multi30k", "multi30k-fast", "base", "big"] | None = setting(
        None, observer=True, after="", group="what is trained", changes_at="never", most_used=True
    )
    """A complete configuration to start from. Files and flags override it. Commands start from
    tiny.
    """
    run_dir: str | Path | None = default("runs/translation")
    length: str = default("900 steps")
    batch_size: int | str = default("2048 tokens")
    evaluate_every: str = default("25%")
    ema: float | None = default(0.99)
    data: Data = setting(factory=Data, identity=True, changes_at="epoch")
    model: Model = setting(factory=Model, identity=True, changes_at="never")
    optimizer: Optimizer = default(Optimizer())
    """By default adamw has betas (0.9, 0.98), as in Vaswani et al. 2017, and no weight decay."""
    schedule: Schedule = default(Schedule(name="inverse_sqrt", warmup="10%"))
    label_smoothing: float = setting(
        0.1,
        check=FRACTION,
        identity=True,
        after="check_state",
        group="optimization",
        changes_at="step",
    )
    """Share of the target probability spread over all tokens in training. Metrics use no smoothing.
    """
    best: Literal["bleu", "loss"] = setting("bleu", observer=True, after="evaluate_at_start")
    """Validation metric that selects the best checkpoint."""
    beam_size: int = setting(
        5, check=_ONE_OR_MORE, observer=True, after="label_smoothing", group="evaluation"
    )
    """Beam size to translate the test split; 1 is greedy search."""
    val_beam_size: int = setting(1, check=_ONE_OR_MORE, observer=True)
    """Beam size to translate the validation split during training. Greedy search is several times
    faster.
    """
    length_penalty: float = setting(1.0, check=_FROM_ZERO, observer=True)
    """Length penalty of the beam search. 0 prefers short translations; larger values prefer longer
    ones.
    """
    val_pairs: int | None = setting(None, check=_ONE_OR_MORE, observer=True)
    """Number of validation pairs evaluated during training. Default: all."""


PRESETS: dict[str, dict[str, Any]] = {
    "tiny": {"preset": "tiny"},  # translation.Config() names no preset
    # the best shape for small data in Wu et al. 2021 (https://arxiv.org/abs/2105.14462), with a
    # wider MLP
    "multi30k": {
        "data.vocab_size": 5000,
        "model.encoder_layers": 4,
        "model.decoder_layers": 4,
        "model.dropout": 0.25,
        "model.activation": "relu2",
        "batch_size": "4096 tokens",
        "length": "3000 steps",
        "evaluate_every": "10%",
        "optimizer.name": "muon",
        "optimizer.lr": 1e-2,
        "optimizer.weight_decay": 0.01,
        "schedule.name": "linear",
        "schedule.warmup": "5%",
        "ema": None,  # the learning rate falls to zero
    },
    "base": {
        "data.vocab_size": 37_000,
        "model.encoder_layers": 6,
        "model.decoder_layers": 6,
        "model.heads": 8,
        "model.width": 512,
        "model.mlp_width": 2048,
        "model.dropout": 0.1,
        "model.norm_placement": "post",
        "batch_size": "25000 tokens",
        "length": "100000 steps",
        "evaluate_every": "2000 steps",
        "save_every": "15 min",
        "ema": None,  # instead, score the mean of the last checkpoints: --checkpoint "average 5"
        "keep_last": 5,
        "optimizer.lr": 7e-4,
        "schedule.warmup": "4000 steps",
        "beam_size": 4,
        "length_penalty": 0.6,
    },
}

_LARGE = "a directory with train.en and train.de, or a .tsv or .jsonl file, of millions of pairs"

_MULTI30K = "the directory of Multi30k (train.en, train.de, val.en, val.de ...)"

MEANT_FOR = {"multi30k": _MULTI30K, "multi30k-fast": _MULTI30K, "base": _LARGE, "big": _LARGE}

# too few epochs to overfit
PRESETS["multi30k-fast"] = PRESETS["multi30k"] | {
    "model.dropout": 0.0,
    "model.activation": "relu",
    "batch_size": "2048 tokens",
    "length": "300 steps",
    "evaluate_every": "50%",
    "best": "loss",
    "label_smoothing": 0.0,
    "optimizer.lr": 2e-2,
}

PRESETS["big"] = PRESETS["base"] | {
    "model.heads": 16,
    "model.width": 1024,
    "model.mlp_width": 4096,
    "model.dropout": 0.3,
    "length": "300000 steps",
    "optimizer.lr": 5e-4,
}
