"""Where records go: lines of JSON (the truth), TensorBoard, and the console."""

from surefoot.sinks.console import Console, Screen, screen
from surefoot.sinks.jsonl import JsonLines, records
from surefoot.sinks.rank_log import RankLog
from surefoot.sinks.streaming import streamed
from surefoot.sinks.tensorboard import TensorBoard

__all__ = ["Console", "JsonLines", "RankLog", "Screen", "TensorBoard", "records", "screen", "streamed"]
