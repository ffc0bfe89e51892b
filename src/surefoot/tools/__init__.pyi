from . import compare as compare
from . import diagnose as diagnose
from . import plan as plan
from . import profile as profile
from . import replay as replay
from . import report as report
from . import tune as tune
from . import verify as verify
