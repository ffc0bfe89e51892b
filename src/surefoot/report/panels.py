"""The public names of the panels. They are declared in `tracking/panels.py`, because a run writes panels and a report shows them."""

from surefoot.tracking.panels import ConfusionMatrix, Curves, Example, Examples, Image, ImageGrid, TextHeatmap
from surefoot.tracking.panels_file import Panels

__all__ = ["ConfusionMatrix", "Curves", "Example", "Examples", "Image", "ImageGrid", "Panels", "TextHeatmap"]
