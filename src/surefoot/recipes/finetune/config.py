"""Settings of the finetune recipe. Imports no torch."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from surefoot.config.setting import default, number, ordered, setting
from surefoot.config.tree import AT_STEP, MOST_USED, NEVER, PATH
from surefoot.recipes.optimizer_settings import RecipeSettings

_COUNT = number(min_value=0)
ALL_LINEAR = ("all-linear",)


@dataclass(frozen=True, kw_only=True)
class Data:
    """Conversations, and the tokens that the loss counts."""

    path: str | None = field(default=None, metadata=PATH | MOST_USED)
    """A file of conversations (JSON lines, a JSON array, or Parquet), or a directory of such files.
    Default: questions on Python's standard library.
    """
    val_path: str | None = field(default=None, metadata=PATH | AT_STEP)
    """A file or directory for validation. Default: a part of the training rows."""
    val_fraction: float = field(default=0.05, metadata=NEVER)
    """Fraction of the rows for validation, chosen by a hash of their first message. 0 evaluates
    nothing.
    """
    template: str | None = field(default=None, metadata=PATH | NEVER)
    """A file with a chat template in Jinja. Default: the tokenizer's own, or "User: ...",
    "Assistant: ..." on lines of their own.
    """
    max_tokens: int | None = None
    """Maximum number of tokens of a row. Default: the model's context, at most 1024."""
    on_long: Literal["cut", "skip", "error"] = "cut"
    """For longer rows: cut drops their end, and rows whose end is their only answer; skip drops
    such rows; error refuses them.
    """
    train_on: Literal["answers", "last"] = "answers"
    """Messages that the loss counts: all answers of the assistant, or only the last one. Prompts
    never count.
    """


@dataclass(frozen=True, kw_only=True)
class Lora:
    """Low-rank adapters of peft: https://arxiv.org/abs/2106.09685."""

    rank: int = 16
    """Rank of the adapters."""
    alpha: float | None = None
    """Scale of the adapters: their product is multiplied by alpha / rank. Default: twice the rank.
    """
    dropout: float = field(default=0.05, metadata=AT_STEP)
    """Dropout probability of the adapters' inputs."""
    target_modules: tuple[str, ...] = ALL_LINEAR
    """Names, or ends of names, of the adapted layers, such as q_proj v_proj. all-linear adapts all
    linear layers except the head.
    """


@ordered
@dataclass(kw_only=True)
class Config(RecipeSettings):
    """Fine-tune a language model of transformers on conversations."""

    preset: Literal["tiny", "instruct"] | None = setting(
        None, observer=True, after="", group="what is trained", changes_at="never", most_used=True
    )
    """A complete configuration to start from. Files and flags override it. Commands start from
    tiny.
    """
    run_dir: str | Path | None = default("runs/finetune")
    length: str = default("3 epochs")
    batch_size: int | str = default("2048 tokens")
    evaluate_every: str = default("25%")
    model: str | None = setting(None, observer=True, path=True, changes_at="never", most_used=True)
    """Directory of a model of transformers: config.json, .safetensors files and a tokenizer.
    Default: a small GPT, trained first.
    """
    method: Literal["lora", "full"] = setting(
        "lora", identity=True, changes_at="never", most_used=True
    )
    """lora trains adapters of low rank beside the frozen weights; full trains all weights."""
    lora: Lora = setting(factory=Lora, identity=True, changes_at="never")
    """The adapters of the method lora."""
    data: Data = setting(factory=Data, identity=True, changes_at="epoch")
    sample_tokens: int = setting(
        64, check=_COUNT, observer=True, after="check_state", group="evaluation"
    )
    """Maximum number of tokens of the answer that samples show; 0 disables samples."""


BEST = "min val/loss"

PRESETS: dict[str, dict[str, Any]] = {
    "tiny": {"preset": "tiny"},  # finetune.Config() names no preset
    "instruct": {  # of a model of billions of parameters on one GPU
        "data.max_tokens": 2048,
        "batch_size": "32768 tokens",
        "micro_batch_size": "4096 tokens",
        "activation_checkpointing": "blocks",
        "save_every": "15 min",
    },
}

MEANT_FOR = {"instruct": "conversations of your own, and the directory of a model (model)"}
