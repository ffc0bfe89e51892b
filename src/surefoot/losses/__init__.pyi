from .coupled import whole_batch as whole_batch
from .dense import cross_entropy as cross_entropy
from .dense import linear_cross_entropy as linear_cross_entropy
from .dense import linear_cross_entropy_with_scores as linear_cross_entropy_with_scores
from .mixing import MixedBatch as MixedBatch
from .mixing import mixup as mixup
from .mixing import mixup_cross_entropy as mixup_cross_entropy
from .model_loss import of_model as of_model
