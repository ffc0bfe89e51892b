"""What ranks tell each other of being alive, and the end of a rank that waits for one which is not."""

from surefoot.heartbeat.beat import Beat
from surefoot.heartbeat.heart import MAILBOX, Heartbeat
from surefoot.heartbeat.last_lines import last_lines
from surefoot.heartbeat.unheard import Unheard

__all__ = ["MAILBOX", "Beat", "Heartbeat", "Unheard", "last_lines"]
