"""`python -m rearview.energy.htcondor_cron`: print ClassAd attributes that say whether power is green at a node.

HTCondor runs this command as a STARTD_CRON job; docs/green.md has the configuration.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from rearview.energy.grid import open_source
from rearview.energy.schedule import Rule, decide


def classad(source: str, rule: Rule, *, url: str = "", cache: Path | None = None) -> str:
    """Return the ClassAd attributes, one per line, then the line `-`, after which HTCondor publishes the attributes.

    `source` is a text for `open_source`; `url` replaces the address of its service, if not empty.
    """
    options = {"cache": cache, **({"url": url} if url else {})}
    outlook = open_source(source, **options).outlook()
    now = time.time()
    sample = outlook.at(now)
    start = decide(outlook, now, rule, running=False)
    continuing = decide(outlook, now, rule, running=True)
    lines = {
        "GreenStart": str(start.run),
        "GreenContinue": str(continuing.run),
        "GreenReason": '"' + start.reason.replace('"', "'") + '"',
        "GreenKnown": str(sample is not None),
    }
    if sample is not None and sample.share is not None:
        lines["GreenShare"] = f"{sample.share:.1f}"
    if sample is not None and sample.intensity is not None:
        lines["GreenGrams"] = f"{sample.intensity:.1f}"
    return "".join(f"{name} = {value}\n" for name, value in lines.items()) + "-\n"


def main(arguments: Sequence[str] | None = None) -> int:
    """Read the command line and print the attributes; the exit code is always 0."""
    parser = argparse.ArgumentParser(
        prog="python -m rearview.energy.htcondor_cron", description=__doc__
    )
    parser.add_argument("--source", default="energy-charts:de")
    parser.add_argument("--url", default="", help="ask another address")
    parser.add_argument("--share", type=float, default=None, help="least renewable share, percent")
    parser.add_argument("--cache", type=Path, default=None, help="file to keep the answer in")
    options = parser.parse_args(arguments)
    sys.stdout.write(
        classad(options.source, Rule(share=options.share), url=options.url, cache=options.cache)
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
