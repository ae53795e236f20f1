"""Which runs begin alike, so that their replays can share a start, and what that spares."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from rearview.execute.leading import leading
from rearview.execute.replays import script_of
from rearview.model import Run
from rearview.model.run import is_notebook


@dataclass(frozen=True, slots=True)
class Lead:
    """How the replays of a run begin. Those of two runs with the same lead can share it."""

    imports: tuple[str, ...] = ()
    hash_seed: str = ""
    threads: tuple[tuple[str, str], ...] = ()


def lead_of(run: Run, files: Mapping[str, bytes], home: str) -> Lead | None:
    """Return how replays of a run begin that execute `files`; None if they can share nothing.

    `home` is where the project was when it ran.
    """
    facts = run.facts
    if not facts.get("watched", True) or is_notebook(str(facts.get("target", ""))):
        return None
    module = bool(facts.get("module"))
    entry = str(facts.get("target", "")) if module else script_of(run, home)
    found = leading(files, entry, module=module, ran=facts.get("end", {}).get("files"))
    threads = tuple(sorted(facts.get("threads", {}).items()))
    return Lead(found, str(facts.get("hash_seed")), threads)


def waited(run: Run, lead: Lead) -> float:
    """Return how many seconds a run waited for the imports that its replays can share."""
    modules = [f"{statement.split()[1]}." for statement in lead.imports]
    took: Mapping[str, float] = run.facts.get("end", {}).get("imports", {})
    return sum(
        each for name, each in took.items() if any(one.startswith(f"{name}.") for one in modules)
    )


def following(leads: Mapping[str, Lead | None]) -> set[str]:
    """Return the runs that begin like one before them.

    >>> same = Lead(("import torch",))
    >>> following({"a": same, "b": None, "c": same, "d": Lead(("import numpy",))})
    {'c'}
    """
    seen: set[Lead] = set()
    found: set[str] = set()
    for run, lead in leads.items():
        if lead in seen:
            found.add(run)
        elif lead is not None:
            seen.add(lead)
    return found
