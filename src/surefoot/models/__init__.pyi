from .gpt import GPT as GPT
from .gpt_layers import GPTConfig as GPTConfig
from .resnet import ResNet as ResNet
from .seq2seq import Seq2Seq as Seq2Seq
from .seq2seq_layers import Seq2SeqConfig as Seq2SeqConfig
from .simple_cnn import SimpleCNN as SimpleCNN
from .transformers_documents import document_arguments as document_arguments
from .transformers_documents import keeps_documents_apart as keeps_documents_apart
