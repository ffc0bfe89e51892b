from .classification import ClassificationReport as ClassificationReport
from .classification import accuracy as accuracy
from .classification import perplexity as perplexity
from .classification import top_k_accuracy as top_k_accuracy
from .contract import whole_split as whole_split
from .multiple_choice import continuation_accuracy as continuation_accuracy
from .multiple_choice import multiple_choice_accuracy as multiple_choice_accuracy
