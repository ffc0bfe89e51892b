from .profile import measure as measure
from .result import Profile as Profile
