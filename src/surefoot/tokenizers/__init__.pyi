from .bpe import BPETokenizer, from_json, load
from .subwords import SubwordTokenizer
from .tokenizer import ByteTokenizer, CharacterTokenizer

__all__ = ["BPETokenizer", "ByteTokenizer", "CharacterTokenizer", "SubwordTokenizer", "from_json", "load"]
