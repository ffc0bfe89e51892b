"""What ranks tell each other of being alive, and the end of a rank that waits for one which is not."""

from surefoot.heartbeat.beat import Beat
from surefoot.heartbeat.heart import Heartbeat

__all__ = ["Beat", "Heartbeat"]
