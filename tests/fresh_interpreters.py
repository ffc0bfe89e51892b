"""What importing may not change: code for an interpreter that has imported nothing yet."""

EVERYTHING = """
import json, logging, os, random, signal, sys, threading, warnings

def everything():
    handlers = {int(number): repr(signal.getsignal(number)) for number in signal.valid_signals()}
    return {
        "environment": dict(os.environ),
        "directory": os.getcwd(),
        "signals": handlers,
        "logging": [repr(logging.root.handlers), logging.root.level, sorted(logging.root.manager.loggerDict)],
        "threads": len(threading.enumerate()),
        "warnings": repr(warnings.filters),
        "hooks": [repr(sys.excepthook), repr(sys.stdout), repr(sys.stderr)],
        "random": repr(random.getstate()),
    }

def changed_since(before):
    after = everything()
    return {key: [before[key], after[key]] for key in before if before[key] != after[key]}
"""
