from .profile import Profile, measure

__all__ = ["Profile", "measure"]
