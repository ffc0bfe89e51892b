from . import checkpoint, data, generate, losses, models, plan, profile, report, tune
from .checkpoint.gpt2 import load_gpt2, save_gpt2
from .config.parallel import ddp, fsdp
from .data.images.augmentation import Augmentation
from .data.images.dataset import ImageFiles, Images, picture_as_input
from .data.images.load import ImageSets, load_images
from .data.mixture import Mixture
from .data.text.files import encode_documents, held_out_documents, held_out_split, load_documents, stdlib_documents
from .data.text.multiple_choice import Choices, Question, choice_accuracy, cloze, continuation_accuracy
from .data.text.prepare_shards import prepare_shards
from .data.text.question_files import load_questions
from .data.text.shards import TokenShards, write_shards
from .data.text.windows import HeldOut, Windows
from .data.translation.files import Parallel, held_out_pairs, load_pairs
from .data.translation.pairs import Pairs
from .data.translation.phrases import phrases
from .errors import CheckpointError, ConfigError, DataError, DivergedError, RankLostError, SurefootError
from .losses.dense import cross_entropy, linear_cross_entropy
from .losses.mixing import Mixed, mixed, mixed_cross_entropy
from .mean import Mean
from .metrics.classification import (
    Classified,
    accuracy,
    classification_scores,
    classified,
    perplexity,
    top_k_accuracy,
)
from .optim.lr_multipliers import Rates, frozen, layer_decay, width_scaling
from .optim.optimizers import adafactor, adam, adamw, adamw8bit, lion, muon, nadam, radam, schedule_free, sgd
from .report.task_panels import classification_panels, confusion_panel, examples_by_score, picture_png, tinted_by_loss
from .run.run import Run
from .saved_run import SavedRun, load
from .schedules.lr_schedule import (
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
from .tokenizers.bpe import BpeTokenizer
from .tokenizers.files import load_tokenizer, tokenizer_from_json
from .tokenizers.subwords import SubwordTokenizer
from .tokenizers.tokenizer import ByteTokenizer, CharacterTokenizer
from .tracking.panels import ConfusionMatrix, Curves, Example, Examples, Panels, Picture, Pictures, TintedText
from .train.evaluate import Split
from .train.loop import Step, forward_backward, update
from .train.patience import EarlyStopping, Plateau
from .train.scorer import split_scores

__version__: str

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
    "Question",
    "RankLostError",
    "Rates",
    "Run",
    "SavedRun",
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
    "encode_documents",
    "examples_by_score",
    "exponential",
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
    "load",
    "load_documents",
    "load_gpt2",
    "load_images",
    "load_pairs",
    "load_questions",
    "load_tokenizer",
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
    "plan",
    "polynomial",
    "prepare_shards",
    "profile",
    "radam",
    "report",
    "save_gpt2",
    "schedule_free",
    "sgd",
    "split_scores",
    "stdlib_documents",
    "step_decay",
    "tinted_by_loss",
    "tokenizer_from_json",
    "top_k_accuracy",
    "tune",
    "update",
    "warm_restarts",
    "warmup_cosine",
    "warmup_stable_decay",
    "width_scaling",
    "write_shards",
]
