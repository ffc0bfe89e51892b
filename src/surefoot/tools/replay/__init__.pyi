from .replay import Replay as Replay
