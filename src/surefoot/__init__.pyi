from . import beam, checkpoint, data, generate, losses, models, profile, report, tune
from .checkpoint.gpt2 import load_gpt2, save_gpt2
from .classification import Classified, classification_scores, classified, top_k_accuracy
from .config.strategy import ddp, fsdp
from .data.augmentation import Augmentation
from .data.bpe import BpeTokenizer
from .data.choices import Choices, Question, choice_accuracy, continuation_accuracy
from .data.cloze import cloze
from .data.image_sets import ImageSets, load_images
from .data.images import ImageFiles, Images, picture_as_input
from .data.mixture import Mixture
from .data.multiple_choice import load_questions
from .data.pairs import Pairs
from .data.parallel import Parallel, held_out_pairs, load_pairs
from .data.phrases import phrases
from .data.prepare import prepare_shards
from .data.subwords import SubwordTokenizer
from .data.text import encode_documents, held_out_documents, held_out_split, load_documents, stdlib_documents
from .data.tokenizers import ByteTokenizer, CharacterTokenizer, load_tokenizer, tokenizer_from_json
from .data.tokens import HeldOut, TokenShards, Windows, write_shards
from .errors import CheckpointError, ConfigError, DataError, DivergedError, RankLostError, SurefootError
from .evaluate import Split, accuracy, perplexity
from .judging import split_scores
from .loop import Step, forward_backward, update
from .losses import cross_entropy, linear_cross_entropy
from .means import Mean
from .mixing import Mixed, mixed, mixed_cross_entropy
from .optim.lr_multipliers import Rates, frozen, layer_decay, width_scaling
from .optim.specs import adafactor, adam, adamw, adamw8bit, lion, muon, nadam, radam, schedule_free, sgd
from .panels import ConfusionMatrix, Curves, Example, Examples, Panels, Picture, Pictures, TintedText
from .plateau import Plateau
from .run import Run
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
from .showing import classification_panels, confusion_panel, examples_by_score, picture_png, tinted_by_loss
from .stopping import EarlyStopping
from .tune.schedule_pictures import schedule_picture

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
    "polynomial",
    "prepare_shards",
    "profile",
    "radam",
    "report",
    "save_gpt2",
    "schedule_free",
    "schedule_picture",
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
