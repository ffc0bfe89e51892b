"""What ranks tell each other of being alive, and the end of a rank that waits for one which is not."""

from surefoot.heartbeat.beat import Beat
from surefoot.heartbeat.heart import MAILBOX, Heartbeat, Unheard

__all__ = ["MAILBOX", "Beat", "Heartbeat", "Unheard"]
