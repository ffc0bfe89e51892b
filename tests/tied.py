"""Commands that end when the process of the test ends, even if that gets SIGKILL: no daemon is
left.
"""

from __future__ import annotations

import os
import signal
import sys

_TIE = """
import ctypes, os, sys
parent, number, *command = sys.argv[1:]
ctypes.CDLL(None).prctl(1, int(number))  # PR_SET_PDEATHSIG, which `exec` keeps
if os.getppid() == int(parent):
    os.execvp(command[0], command)
"""


def tied(command: list[str], number: signal.Signals = signal.SIGKILL) -> list[str]:
    """A command whose process gets a signal when this process ends. On other systems than Linux,
    the command as it is.
    """
    if sys.platform != "linux":
        return command
    return [sys.executable, "-I", "-S", "-c", _TIE, str(os.getpid()), str(int(number)), *command]
