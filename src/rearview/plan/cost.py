"""Predict the seconds of a replay, with an interval; the real seconds of earlier replays correct the prediction."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from rearview.model import Segment
from rearview.plan.facts import CheckpointFacts, Machine, RunFacts

DEFAULT_READ = 500.0
"""Assumed reading speed in MB/s, if nothing was measured."""
DEFAULT_RESTORE = 0.006
"""Assumed seconds of a restore without the reading, if nothing was measured."""
ERROR_MEASURED = 0.15
"""Relative error of predictions for a run that was recorded on another machine."""
ERROR_UNMEASURED = 0.5
"""Relative error of such predictions if one of the two machines was never measured."""
INTERVAL_DEVIATIONS = 1.96
"""Standard deviations between a prediction and either end of its interval."""


@dataclass(frozen=True, slots=True)
class Prediction:
    """Predicted seconds, with an interval that contains the real value 19 times out of 20.

    >>> (Prediction(3.0, 1.0) + Prediction(4.0, 1.0)).seconds
    7.0
    """

    seconds: float
    variance: float = 0.0
    """Variance of errors that differ between segments, and so average out over many of them."""
    share: float = 0.0
    """Relative error that all segments have in common, for example because the machine is another one."""

    def __add__(self, other: Prediction) -> Prediction:
        total = self.seconds + other.seconds
        common = self.seconds * self.share + other.seconds * other.share
        return Prediction(
            total, self.variance + other.variance, common / total if total > 0 else 0.0
        )

    def times(self, factor: float, *, share: float = 0.0) -> Prediction:
        """Return the prediction times a factor, whose own relative error `share` makes the interval wider."""
        total_share = math.hypot(self.share, share)
        return Prediction(self.seconds * factor, self.variance * factor**2, total_share)

    @property
    def half_width(self) -> float:
        """Half of the width of the interval."""
        return INTERVAL_DEVIATIONS * math.sqrt(self.variance + (self.share * self.seconds) ** 2)

    @property
    def low(self) -> float:
        """Lower end of the interval."""
        return max(0.0, self.seconds - self.half_width)

    @property
    def high(self) -> float:
        """Upper end of the interval."""
        return self.seconds + self.half_width


RECENT = 15
"""Most recent replays whose seconds count; the machine may have changed since earlier replays."""
UNCONFIRMED = 0.2
"""Largest logarithm by which a single replay corrects predictions; two replays may correct by more."""
JITTER = 0.25
"""Seconds by which the time of a process varies by chance. Shorter replays hardly correct predictions."""
NORMAL = 1.4826
"""Standard deviation over median absolute deviation, of normally distributed values."""


@dataclass(frozen=True, slots=True)
class CostCorrection:
    """How much longer recent replays took than predicted, as logarithms of ratios, oldest first.

    The median of the logarithms counts, because one odd measurement hardly changes it. If there is only one
    measurement, `UNCONFIRMED` bounds its effect.
    """

    logs: tuple[float, ...] = ()

    def with_ratio(self, ratio: float) -> CostCorrection:
        """Return the correction after one more replay, with the `ratio` of real to predicted seconds."""
        value = math.log(min(max(ratio, 0.01), 100.0))
        return CostCorrection((*self.logs, value)[-RECENT:])

    @property
    def count(self) -> int:
        """Number of remembered replays."""
        return len(self.logs)

    @property
    def typical(self) -> float:
        """The median of the logarithms and of one 0, which stands for a correct prediction.

        >>> CostCorrection((0.7,)).typical, CostCorrection((0.7, 0.7, 3.0)).typical
        (0.2, 0.7)
        """
        if len(self.logs) == 1:
            return max(-UNCONFIRMED, min(UNCONFIRMED, self.logs[0]))
        return _median((0.0, *self.logs))

    @property
    def spread(self) -> float:
        """Typical distance of the logarithms from their median, as a standard deviation; robust against outliers."""
        around = self.typical
        return NORMAL * _median(abs(each - around) for each in self.logs)


def _median(values: Iterable[float]) -> float:
    """Return the median of `values`, or 0 if there are none.

    Importing the module `statistics` would take longer than making a plan.
    """
    ordered = sorted(values)
    middle = len(ordered) // 2
    if len(ordered) % 2:
        return ordered[middle]
    return sum(ordered[middle - 1 : middle + 1]) / 2


@dataclass(frozen=True, slots=True)
class CostCorrections:
    """Corrections that were learned from replays of one version and operator, of one operator, and of all runs.

    The more replays a version has had, the more its own correction counts.
    """

    by: Mapping[str, CostCorrection] = field(default_factory=dict)
    """The key is "version operator", "operator", or an empty text for all replays."""
    trust: float = 1.0
    """Weight of the more general correction, as a number of replays."""
    prior: float = 0.1
    """Expected relative error of predictions before the first replay."""

    def factor(self, version: str, operator: str) -> tuple[float, float]:
        """Return (factor that corrects a prediction, relative error of the corrected prediction)."""
        mean, spread = 0.0, self.prior
        for key in ("", operator, f"{version} {operator}"):
            correction = self.by.get(key)
            if correction is None or not correction.count:
                continue
            weight = correction.count / (correction.count + self.trust)
            mean = (1 - weight) * mean + weight * correction.typical
            spread = math.sqrt((1 - weight) * spread**2 + weight * correction.spread**2)
        return math.exp(mean), spread

    def unknown(self, version: str, operator: str) -> float:
        """Return which fraction of the uncertainty is left after the replays of a version; 1 if there were none.

        >>> CostCorrections().unknown("v", "DP")
        1.0
        """
        correction = self.by.get(f"{version} {operator}", CostCorrection())
        return self.trust / (correction.count + self.trust)


def refine(corrections: CostCorrections, predicted: Segment, real: float) -> CostCorrections:
    """Return the corrections after a replay of the segment `predicted` that took `real` seconds.

    `predicted.seconds` is the prediction that was made with `corrections`.

    >>> from rearview.model import Operator
    >>> segment = Segment("r", "v", Operator.INNER, seconds=10.0)
    >>> corrections = CostCorrections()
    >>> for _ in range(5):
    ...     again = replace(segment, seconds=10.0 * corrections.factor("v", "DPi")[0])
    ...     corrections = refine(corrections, again, 20.0)
    >>> round(corrections.factor("v", "DPi")[0], 1)
    2.0
    """
    if predicted.seconds <= 0 or real <= 0:
        return corrections
    operator = str(predicted.operator)
    factor, _ = corrections.factor(predicted.version, operator)
    ratio = (real + JITTER) / (predicted.seconds / factor + JITTER)
    by = dict(corrections.by)
    for key in ("", operator, f"{predicted.version} {operator}"):
        by[key] = by.get(key, CostCorrection()).with_ratio(ratio)
    return replace(corrections, by=by)


@dataclass(frozen=True, slots=True)
class Speed:
    """Ratios that convert measurements of the recording machine to the machine that replays."""

    compute: float = 1.0
    """Seconds of computing on the machine that replays, per second on the machine that recorded."""
    reading: float = 1.0
    """Like `compute`, for seconds of reading."""
    read: float = DEFAULT_READ
    """Reading speed of the machine that replays, in MB/s."""
    share: float = 0.0
    """Relative error of predictions that use these ratios."""


def speed(recorded: Machine | None, replaying: Machine | None) -> Speed:
    """Return the ratios between two machines; 1 with a larger error if they cannot be compared.

    >>> old, new = Machine("a", {"numpy": 2.0}, 100.0), Machine("b", {"numpy": 1.0}, 400.0)
    >>> speed(old, new)
    Speed(compute=0.5, reading=0.25, read=400.0, share=0.15)
    """
    if replaying is None:
        return Speed()
    read = replaying.read or DEFAULT_READ
    if recorded is not None and recorded.name == replaying.name:
        return Speed(read=read)
    common_kernels = (
        [] if recorded is None else [name for name in recorded.kernels if name in replaying.kernels]
    )
    if recorded is None or not common_kernels:
        return Speed(read=read, share=ERROR_UNMEASURED)
    ratios = [math.log(replaying.kernels[name] / recorded.kernels[name]) for name in common_kernels]
    mean = sum(ratios) / len(ratios)
    # if the ratios of the measured kernels differ much, the ratio of another computation may differ as much
    largest_difference = max(abs(ratio - mean) for ratio in ratios)
    reading = recorded.read / read if recorded.read else 1.0
    return Speed(math.exp(mean), reading, read, max(ERROR_MEASURED, largest_difference))


class CostModel:
    """Predictions for one run on one machine."""

    def __init__(
        self,
        facts: RunFacts,
        *,
        machine: Machine | None = None,
        corrections: CostCorrections | None = None,
    ) -> None:
        self.facts = facts
        self.speed = speed(facts.machine, machine)
        self.corrections = corrections or CostCorrections()
        measured = [c for c in facts.checkpoints if c.restore is not None]
        size = sum(c.nbytes for c in measured)
        self._each, self._per_byte = DEFAULT_RESTORE, 1e-6 / self.speed.read
        if measured and size:
            self._each = 0.0
            self._per_byte = sum(c.restore or 0.0 for c in measured) / size * self.speed.reading

    def startup(self) -> Prediction:
        """Predict interpreter start, imports and set-up."""
        seconds = (self.facts.start + self.facts.setup) * self.speed.compute
        return Prediction(seconds, (0.05 * seconds) ** 2, self.speed.share)

    def restore(self, checkpoint: CheckpointFacts) -> float:
        """Predict the seconds to load and restore a checkpoint."""
        if checkpoint.restore is not None:
            return checkpoint.restore * self.speed.reading
        return self._each + checkpoint.nbytes * self._per_byte

    def corrected(self, raw: Prediction, operator: str) -> Prediction:
        """Return the prediction `raw`, corrected by what earlier replays really took.

        With each replay of this version on this machine, the error of the ratio between the machines counts less.
        """
        version = self.facts.version
        factor, share = self.corrections.factor(version, operator)
        remaining_error = raw.share * self.corrections.unknown(version, operator)
        return Prediction(raw.seconds, raw.variance, remaining_error).times(factor, share=share)
