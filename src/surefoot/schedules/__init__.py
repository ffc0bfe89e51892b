"""Learning-rate schedules: pure functions that map a step to a factor on each group's base learning
rate.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
