"""Where records go: lines of JSON (the truth), TensorBoard, and the console."""

from surefoot.sinks.console import Console, Screen, screen
from surefoot.sinks.jsonl import JsonLines
from surefoot.sinks.rank_log import RankLog
from surefoot.sinks.streaming import parse_record, records, streamed
from surefoot.sinks.tensorboard import TensorBoard

__all__ = ["Console", "JsonLines", "RankLog", "Screen", "TensorBoard", "parse_record", "records", "screen", "streamed"]
