"""What ranks tell each other of being alive, and the end of a rank that waits for one which is not."""

from surefoot.heartbeat.beat import Beat
from surefoot.heartbeat.broken import Lines
from surefoot.heartbeat.heart import MAILBOX, MEETING, NONCE, Heartbeat
from surefoot.heartbeat.last_lines import last_lines
from surefoot.heartbeat.unheard import Unheard

__all__ = ["MAILBOX", "MEETING", "NONCE", "Beat", "Heartbeat", "Lines", "Unheard", "last_lines"]
