from .profile import measure
from .result import Profile

__all__ = ["Profile", "measure"]
