"""surefoot trains PyTorch models without losing its footing. The public names, resolved when they are first used."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from surefoot import beam, checkpoint, data, generate, losses, models, scaling
    from surefoot.checkpoint.gpt2 import load_gpt2, save_gpt2
    from surefoot.classification import Classified, classification_scores, classified, top_k_accuracy
    from surefoot.config.strategy import ddp, fsdp
    from surefoot.data.augmentation import Augmentation
    from surefoot.data.bpe import BpeTokenizer
    from surefoot.data.choices import Choices, Question, choice_accuracy, continuation_accuracy
    from surefoot.data.cloze import cloze
    from surefoot.data.image_sets import ImageSets, load_images
    from surefoot.data.images import ImageFiles, Images, picture_as_input
    from surefoot.data.mixture import Mixture
    from surefoot.data.multiple_choice import load_questions
    from surefoot.data.pairs import Pairs
    from surefoot.data.parallel import Parallel, held_out_pairs, load_pairs
    from surefoot.data.phrases import phrases
    from surefoot.data.prepare import prepare_shards
    from surefoot.data.subwords import SubwordTokenizer
    from surefoot.data.text import (
        encode_documents,
        held_out_documents,
        held_out_split,
        load_documents,
        stdlib_documents,
    )
    from surefoot.data.tokenizers import ByteTokenizer, CharacterTokenizer, load_tokenizer, tokenizer_from_json
    from surefoot.data.tokens import HeldOut, TokenShards, Windows, write_shards
    from surefoot.diagnosis import Finding, diagnose
    from surefoot.errors import CheckpointError, ConfigError, DataError, DivergedError, RankLostError, SurefootError
    from surefoot.evaluate import Split, accuracy, perplexity
    from surefoot.exporting import Exported, export
    from surefoot.judging import split_scores
    from surefoot.loop import Step, forward_backward, update
    from surefoot.losses import cross_entropy, linear_cross_entropy
    from surefoot.means import Mean
    from surefoot.mixing import Mixed, mixed, mixed_cross_entropy
    from surefoot.optimizers.rates import Rates, frozen, layer_decay, width_scaling
    from surefoot.optimizers.specs import (
        adafactor,
        adam,
        adamw,
        adamw8bit,
        lion,
        muon,
        nadam,
        radam,
        schedule_free,
        sgd,
    )
    from surefoot.panels import (
        ConfusionMatrix,
        Curves,
        Example,
        Examples,
        Panels,
        Picture,
        Pictures,
        TintedText,
        read_panels,
    )
    from surefoot.plateau import Plateau
    from surefoot.profiling.profile import Profile, profile
    from surefoot.replay.replaying import replayed
    from surefoot.reporting.writing import report
    from surefoot.run import Run
    from surefoot.schedules import (
        constant,
        exponential,
        inverse_sqrt,
        join,
        linear,
        one_cycle,
        polynomial,
        step_decay,
        warm_restarts,
        warmup_cosine,
        warmup_stable_decay,
    )
    from surefoot.showing import classification_panels, confusion_panel, examples_by_score, picture_png, tinted_by_loss
    from surefoot.snapshot import load_weights
    from surefoot.stopping import EarlyStopping
    from surefoot.tune.find_batch import find_batch
    from surefoot.tune.find_lr import find_lr
    from surefoot.tune.schedule_pictures import schedule_picture
    from surefoot.verifying.whole import verify

__all__ = [
    "Augmentation",
    "BpeTokenizer",
    "ByteTokenizer",
    "CharacterTokenizer",
    "CheckpointError",
    "Choices",
    "Classified",
    "ConfigError",
    "ConfusionMatrix",
    "Curves",
    "DataError",
    "DivergedError",
    "EarlyStopping",
    "Example",
    "Examples",
    "Exported",
    "Finding",
    "HeldOut",
    "ImageFiles",
    "ImageSets",
    "Images",
    "Mean",
    "Mixed",
    "Mixture",
    "Pairs",
    "Panels",
    "Parallel",
    "Picture",
    "Pictures",
    "Plateau",
    "Profile",
    "Question",
    "RankLostError",
    "Rates",
    "Run",
    "Split",
    "Step",
    "SubwordTokenizer",
    "SurefootError",
    "TintedText",
    "TokenShards",
    "Windows",
    "accuracy",
    "adafactor",
    "adam",
    "adamw",
    "adamw8bit",
    "beam",
    "checkpoint",
    "choice_accuracy",
    "classification_panels",
    "classification_scores",
    "classified",
    "cloze",
    "confusion_panel",
    "constant",
    "continuation_accuracy",
    "cross_entropy",
    "data",
    "ddp",
    "diagnose",
    "encode_documents",
    "examples_by_score",
    "exponential",
    "export",
    "find_batch",
    "find_lr",
    "forward_backward",
    "frozen",
    "fsdp",
    "generate",
    "held_out_documents",
    "held_out_pairs",
    "held_out_split",
    "inverse_sqrt",
    "join",
    "layer_decay",
    "linear",
    "linear_cross_entropy",
    "lion",
    "load_documents",
    "load_gpt2",
    "load_images",
    "load_pairs",
    "load_questions",
    "load_tokenizer",
    "load_weights",
    "losses",
    "mixed",
    "mixed_cross_entropy",
    "models",
    "muon",
    "nadam",
    "one_cycle",
    "perplexity",
    "phrases",
    "picture_as_input",
    "picture_png",
    "polynomial",
    "prepare_shards",
    "profile",
    "radam",
    "read_panels",
    "replayed",
    "report",
    "save_gpt2",
    "scaling",
    "schedule_free",
    "schedule_picture",
    "sgd",
    "split_scores",
    "stdlib_documents",
    "step_decay",
    "tinted_by_loss",
    "tokenizer_from_json",
    "top_k_accuracy",
    "update",
    "verify",
    "warm_restarts",
    "warmup_cosine",
    "warmup_stable_decay",
    "width_scaling",
    "write_shards",
]

_HOME = {
    "errors": ("CheckpointError", "ConfigError", "DataError", "DivergedError", "RankLostError", "SurefootError"),
    "checkpoint.gpt2": ("load_gpt2", "save_gpt2"),
    "config.strategy": ("ddp", "fsdp"),
    "classification": ("Classified", "classification_scores", "classified", "top_k_accuracy"),
    "data.augmentation": ("Augmentation",),
    "data.image_sets": ("ImageSets", "load_images"),
    "data.images": ("ImageFiles", "Images", "picture_as_input"),
    "data.mixture": ("Mixture",),
    "data.bpe": ("BpeTokenizer",),
    "data.pairs": ("Pairs",),
    "data.parallel": ("Parallel", "held_out_pairs", "load_pairs"),
    "data.phrases": ("phrases",),
    "data.subwords": ("SubwordTokenizer",),
    "data.choices": ("Choices", "Question", "choice_accuracy", "continuation_accuracy"),
    "data.cloze": ("cloze",),
    "data.multiple_choice": ("load_questions",),
    "data.prepare": ("prepare_shards",),
    "data.text": (
        "encode_documents",
        "held_out_documents",
        "held_out_split",
        "load_documents",
        "stdlib_documents",
    ),
    "data.tokenizers": ("ByteTokenizer", "CharacterTokenizer", "load_tokenizer", "tokenizer_from_json"),
    "data.tokens": ("HeldOut", "TokenShards", "Windows", "write_shards"),
    "diagnosis": ("Finding", "diagnose"),
    "exporting": ("Exported", "export"),
    "evaluate": ("Split", "accuracy", "perplexity"),
    "judging": ("split_scores",),
    "loop": ("Step", "forward_backward", "update"),
    "losses": ("cross_entropy", "linear_cross_entropy"),
    "means": ("Mean",),
    "mixing": ("Mixed", "mixed", "mixed_cross_entropy"),
    "optimizers.rates": ("Rates", "frozen", "layer_decay", "width_scaling"),
    "optimizers.specs": (
        "adafactor",
        "adam",
        "adamw",
        "adamw8bit",
        "lion",
        "muon",
        "nadam",
        "radam",
        "schedule_free",
        "sgd",
    ),
    "panels": (
        "ConfusionMatrix",
        "Curves",
        "Example",
        "Examples",
        "Panels",
        "Picture",
        "Pictures",
        "TintedText",
        "read_panels",
    ),
    "showing": (
        "classification_panels",
        "confusion_panel",
        "examples_by_score",
        "picture_png",
        "tinted_by_loss",
    ),
    "plateau": ("Plateau",),
    "reporting.writing": ("report",),
    "replay.replaying": ("replayed",),
    "run": ("Run",),
    "schedules": (
        "constant",
        "exponential",
        "inverse_sqrt",
        "join",
        "linear",
        "one_cycle",
        "polynomial",
        "step_decay",
        "warm_restarts",
        "warmup_cosine",
        "warmup_stable_decay",
    ),
    "profiling.profile": ("Profile", "profile"),
    "snapshot": ("load_weights",),
    "stopping": ("EarlyStopping",),
    "tune.find_batch": ("find_batch",),
    "tune.find_lr": ("find_lr",),
    "tune.schedule_pictures": ("schedule_picture",),
    "verifying.whole": ("verify",),
}
_ROOMS = ("beam", "checkpoint", "data", "generate", "losses", "models", "scaling")


def __getattr__(name: str) -> Any:
    """Import a public name where it lives; PEP 562."""
    if name in _ROOMS:
        return import_module(f"surefoot.{name}")
    for home, names in _HOME.items():
        if name in names:
            return getattr(import_module(f"surefoot.{home}"), name)
    raise AttributeError(f"module 'surefoot' has no attribute {name!r}")
