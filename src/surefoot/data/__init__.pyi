from .images.augmentation import Augmentation
from .images.dataset import ImageArrays, ImageFiles, read_image
from .images.load import ImageDatasets, load_images
from .mixture import Mixture
from .text.files import encode_documents, load_documents, split_documents, split_sequence, stdlib_documents
from .text.multiple_choice import MultipleChoice, Question, cloze_questions
from .text.prepare_shards import prepare_shards
from .text.question_files import load_questions
from .text.shards import TokenShards, write_shards
from .text.windows import EvalWindows, TrainWindows
from .translation.files import ParallelText, load_pairs, split_pairs
from .translation.pairs import TokenPairs
from .translation.phrases import cldr_phrases

__all__ = [
    "Augmentation",
    "EvalWindows",
    "ImageArrays",
    "ImageDatasets",
    "ImageFiles",
    "Mixture",
    "MultipleChoice",
    "ParallelText",
    "Question",
    "TokenPairs",
    "TokenShards",
    "TrainWindows",
    "cldr_phrases",
    "cloze_questions",
    "encode_documents",
    "load_documents",
    "load_images",
    "load_pairs",
    "load_questions",
    "prepare_shards",
    "read_image",
    "split_documents",
    "split_pairs",
    "split_sequence",
    "stdlib_documents",
    "write_shards",
]
