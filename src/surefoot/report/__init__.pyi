from .panels import ConfusionMatrix, Curves, Example, Examples, Image, ImageGrid, Panels, TextHeatmap
from .task_panels import classification_panels, confusion_panel, encode_png, examples_by_score, tinted_by_loss
from .write import write_page

__all__ = [
    "ConfusionMatrix",
    "Curves",
    "Example",
    "Examples",
    "Image",
    "ImageGrid",
    "Panels",
    "TextHeatmap",
    "classification_panels",
    "confusion_panel",
    "encode_png",
    "examples_by_score",
    "tinted_by_loss",
    "write_page",
]
