"""Propagation: one statement of the newest source, in every past version.

`carry` answers for two texts; `through` for whole projects and a chain of versions.
"""

from rearview.source.carry import Carried, carry
from rearview.source.through import HandPlace, Outcome, Placed, Statement, through

__all__ = ["Carried", "HandPlace", "Outcome", "Placed", "Statement", "carry", "through"]
