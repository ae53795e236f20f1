"""Settings as module globals and a dataclass."""
from dataclasses import dataclass, field


@dataclass
class Config:
    epochs: int = 3
    hidden: int = 8
    history: list = field(default_factory=list)


current = Config()
step = 0
