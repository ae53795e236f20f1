"""Predict the seconds of a replay, with an interval of likely values, and learn from the seconds of earlier replays."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from rearview.model import Segment
from rearview.plan.facts import CheckpointFacts, Machine, RunFacts

DEFAULT_READ = 500.0
"""Assumed reading speed of a disk in MB/s, if it was not measured."""
DEFAULT_RESTORE = 0.006
"""Assumed seconds to restore a checkpoint, without reading its bytes, if no restore was measured."""
ERROR_MEASURED = 0.15
"""Least relative error of predictions for a run that was recorded on another machine, if both were measured."""
ERROR_UNMEASURED = 0.5
"""Relative error of predictions for a run that was recorded on another machine, if the two cannot be compared."""
INTERVAL_DEVIATIONS = 1.96
"""Number of standard deviations between a prediction and either end of its interval."""


@dataclass(frozen=True, slots=True)
class Prediction:
    """Predicted seconds, with an interval that contains the real value 19 times out of 20.

    >>> (Prediction(3.0, 1.0) + Prediction(4.0, 1.0)).seconds
    7.0
    """

    seconds: float
    variance: float = 0.0
    """Variance of the errors that are independent in each segment, so that they average out over many segments."""
    share: float = 0.0
    """Relative error that all segments have in common, for example because they run on another machine."""

    def __add__(self, other: Prediction) -> Prediction:
        total = self.seconds + other.seconds
        common = self.seconds * self.share + other.seconds * other.share
        return Prediction(
            total, self.variance + other.variance, common / total if total > 0 else 0.0
        )

    def times(self, factor: float, *, share: float = 0.0) -> Prediction:
        """Return the prediction multiplied by `factor`, whose relative error `share` widens the interval."""
        total_share = math.hypot(self.share, share)
        return Prediction(self.seconds * factor, self.variance * factor**2, total_share)

    @property
    def half_width(self) -> float:
        """Half the width of the interval in seconds."""
        return INTERVAL_DEVIATIONS * math.sqrt(self.variance + (self.share * self.seconds) ** 2)

    @property
    def low(self) -> float:
        """Lower end of the interval in seconds."""
        return max(0.0, self.seconds - self.half_width)

    @property
    def high(self) -> float:
        """Upper end of the interval in seconds."""
        return self.seconds + self.half_width


RECENT = 15
"""Number of most recent replays whose seconds count; the machine may have changed since older replays."""
UNCONFIRMED = 0.2
"""Largest absolute logarithm of the correction after a single replay; after two replays, it may be larger."""
JITTER = 0.25
"""Seconds by which the time of a process varies randomly; replays that take less time hardly correct predictions."""
NORMAL = 1.4826
"""Standard deviation divided by median absolute deviation, for normally distributed values."""


@dataclass(frozen=True, slots=True)
class CostCorrection:
    """A correction of predicted seconds, from the ratios of real to predicted seconds of recent replays.

    The median of the logarithms of these ratios is used, because one odd measurement hardly changes it. If there is
    only one measurement, `UNCONFIRMED` limits its effect.
    """

    logs: tuple[float, ...] = ()
    """Logarithm of the ratio of each replay, oldest first."""

    def with_ratio(self, ratio: float) -> CostCorrection:
        """Return the correction after one more replay, whose real seconds were `ratio` times the predicted seconds."""
        value = math.log(min(max(ratio, 0.01), 100.0))
        return CostCorrection((*self.logs, value)[-RECENT:])

    @property
    def count(self) -> int:
        """Number of replays in `logs`."""
        return len(self.logs)

    @property
    def typical(self) -> float:
        """The logarithm of the factor that corrects predictions: the median of `logs` with one 0 (no correction) added.

        If `logs` has only one item, that item is used, limited by `UNCONFIRMED`.

        >>> CostCorrection((0.7,)).typical, CostCorrection((0.7, 0.7, 3.0)).typical
        (0.2, 0.7)
        """
        if len(self.logs) == 1:
            return max(-UNCONFIRMED, min(UNCONFIRMED, self.logs[0]))
        return _median((0.0, *self.logs))

    @property
    def spread(self) -> float:
        """Estimated standard deviation of `logs` around `typical`, which few outliers hardly change."""
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
    """Corrections of predicted seconds: for all replays, for each operator, and for each version with an operator.

    The more replays with one version and operator there were, the more the correction for these two counts.
    """

    by: Mapping[str, CostCorrection] = field(default_factory=dict)
    """Key -> correction. The key is "version operator", "operator", or an empty text for all replays."""
    trust: float = 1.0
    """Number of replays after which a specific correction counts as much as the more general one."""
    prior: float = 0.1
    """Assumed relative error of predictions before the first replay."""

    def factor(self, version: str, operator: str) -> tuple[float, float]:
        """Return (factor by which predicted seconds must be multiplied, relative error of the product)."""
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
        """Return the fraction of the uncertainty that is left after the replays with this version and operator.

        It is 1 if there were none, and decreases with each replay.

        >>> CostCorrections().unknown("v", "DP")
        1.0
        """
        correction = self.by.get(f"{version} {operator}", CostCorrection())
        return self.trust / (correction.count + self.trust)


def refine(corrections: CostCorrections, predicted: Segment, real: float) -> CostCorrections:
    """Return `corrections`, updated after a replay of the segment `predicted` took `real` seconds.

    `predicted.seconds` must have been predicted with `corrections`.

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
    """Ratios that convert seconds on the machine that recorded a run to seconds on the machine that replays."""

    compute: float = 1.0
    """Seconds of computing on the machine that replays, per second on the machine that recorded."""
    reading: float = 1.0
    """Seconds of reading on the machine that replays, per second on the machine that recorded."""
    read: float = DEFAULT_READ
    """Reading speed of the machine that replays, in MB/s."""
    share: float = 0.0
    """Relative error of predictions that use these ratios."""


def speed(recorded: Machine | None, replaying: Machine | None) -> Speed:
    """Return the ratios between the machine that `recorded` a run and the machine that is `replaying` it.

    If the machines cannot be compared, the ratios are 1 and the error is large.

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
    """Predicts the seconds of replays of one run on one machine."""

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
        """Predict the seconds from the start of a process until the program enters its outermost loop."""
        seconds = (self.facts.start + self.facts.setup) * self.speed.compute
        return Prediction(seconds, (0.05 * seconds) ** 2, self.speed.share)

    def restore(self, checkpoint: CheckpointFacts) -> float:
        """Return the predicted seconds to load and restore `checkpoint`."""
        if checkpoint.restore is not None:
            return checkpoint.restore * self.speed.reading
        return self._each + checkpoint.nbytes * self._per_byte

    def corrected(self, raw: Prediction, operator: str) -> Prediction:
        """Return the prediction `raw`, corrected by the real seconds of earlier replays with `operator`.

        With each replay of the run's version with `operator`, the error of the ratio between the machines counts less.
        """
        version = self.facts.version
        factor, share = self.corrections.factor(version, operator)
        remaining_error = raw.share * self.corrections.unknown(version, operator)
        return Prediction(raw.seconds, raw.variance, remaining_error).times(factor, share=share)
