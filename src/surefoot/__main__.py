"""`python -m surefoot ...`, as launchers start it: torchrun --nproc-per-node 8 -m surefoot train gpt."""

import sys

from surefoot.cli.main import main
from surefoot.distributed.environment import tie_to_launcher

if __name__ == "__main__":
    sys.argv[0] = "surefoot"  # as the records and messages call it
    tie_to_launcher()
    main()
