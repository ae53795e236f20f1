"""What `self.log` of a LightningModule has gathered since the epoch began.

Lightning leaves this out of its own checkpoints, so the mean loss of an epoch that was interrupted
would be the mean of what came after, and a scheduler that watches it would do something else.
"""

from __future__ import annotations

from dataclasses import fields
from operator import attrgetter
from typing import Any

from lightning.pytorch.trainer.connectors.logger_connector.result import (
    _Metadata,
    _ResultMetric,
    _Sync,
)

_VALUES = (
    "value",
    "cumulated_batch_size",
    "_forward_cache",
    "_computed",
    "_update_count",
    "has_reset",
)


def read_results(results: Any) -> list[dict[str, Any]]:
    """Return the gathered values as plain data: no reference to the trainer goes with them."""
    found = []
    for key, metric in results.items():
        meta, sync = metric.meta, metric.meta.sync
        held = {name: getattr(metric, name) for name in _VALUES if hasattr(metric, name)}
        if not metric.is_tensor:
            held.pop("value")  # a metric of the module, which is kept with it
        found.append(
            {
                "key": key,
                "meta": {f.name: getattr(meta, f.name) for f in fields(meta) if f.name != "_sync"},
                "sync": {"_should": sync.should, "rank_zero_only": sync.rank_zero_only},
                "is_tensor": metric.is_tensor,
                "held": held,
            }
        )
    return found


def write_results(results: Any, saved: list[dict[str, Any]], trainer: Any) -> None:
    """Put back what `read_results` returned."""
    module = trainer.lightning_module
    results.clear()
    for one in saved:
        meta = _Metadata(**one["meta"])
        meta.sync = _Sync(fn=trainer.strategy.reduce, **one["sync"])
        metric = _ResultMetric(meta, one["is_tensor"])
        for name, value in one["held"].items():
            setattr(metric, name, value)
        if not one["is_tensor"]:
            metric.value = attrgetter(meta.metric_attribute)(module)
        results[one["key"]] = metric.to(module.device)
