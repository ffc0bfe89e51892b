from .classification import Classified as Classified
from .classification import accuracy as accuracy
from .classification import classification_scores as classification_scores
from .classification import classified as classified
from .classification import perplexity as perplexity
from .classification import top_k_accuracy as top_k_accuracy
from .multiple_choice import continuation_accuracy as continuation_accuracy
from .multiple_choice import multiple_choice_accuracy as multiple_choice_accuracy
