"""The public names of the panels. `tracking/panels.py` declares the panels, because runs also write
them.
"""

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

__all__ = [
    "ConfusionMatrix",
    "Curves",
    "Example",
    "Examples",
    "Image",
    "ImageGrid",
    "Panels",
    "TextHeatmap",
]
