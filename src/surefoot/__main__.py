"""The entry point of `python -m surefoot`, for launchers: torchrun --nproc-per-node 8 -m surefoot
train gpt.
"""

import sys

from surefoot.cli.main import main
from surefoot.distributed.environment import tie_to_launcher

if __name__ == "__main__":
    sys.argv[0] = "surefoot"  # the program name in records and messages
    tie_to_launcher()
    main()
