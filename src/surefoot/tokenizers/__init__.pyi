from .bpe import BPETokenizer as BPETokenizer
from .bpe import from_json as from_json
from .bpe import load as load
from .subwords import SubwordTokenizer as SubwordTokenizer
from .tokenizer import ByteTokenizer as ByteTokenizer
from .tokenizer import CharacterTokenizer as CharacterTokenizer
