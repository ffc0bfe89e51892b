"""Where records go: lines of JSON (the truth), TensorBoard, and the console."""

from surefoot.sinks.console import Console
from surefoot.sinks.jsonl import JsonLines, records
from surefoot.sinks.record import Record, Sink
from surefoot.sinks.tensorboard import TensorBoard

__all__ = ["Console", "JsonLines", "Record", "Sink", "TensorBoard", "records"]
