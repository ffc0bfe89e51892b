"""The public names of the panels. They belong to `tracking`, because runs write panels."""

from surefoot.tracking.panels import (
    ConfusionMatrix,
    Curves,
    Example,
    Examples,
    Image,
    ImageGrid,
    TextHeatmap,
)
from surefoot.tracking.panels_file import Panels
from surefoot.tracking.task_panels import classification_panels, encode_png

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
    "encode_png",
]
