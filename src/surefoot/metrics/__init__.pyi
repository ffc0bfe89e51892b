from .classification import Classified, accuracy, classification_scores, classified, perplexity, top_k_accuracy
from .multiple_choice import continuation_accuracy, multiple_choice_accuracy

__all__ = [
    "Classified",
    "accuracy",
    "classification_scores",
    "classified",
    "continuation_accuracy",
    "multiple_choice_accuracy",
    "perplexity",
    "top_k_accuracy",
]
