from .average import average_weights as average_weights
from .format import Checkpoint as Checkpoint
from .gpt2 import load_gpt2 as load_gpt2
from .gpt2 import save_gpt2 as save_gpt2
from .store import Store as Store
