"""Labels of a run: the name, tags and notes that the user gives it after it was recorded.

Each label is a line of the run's append-only `events.jsonl`. Labels are data: nothing in a store is run to
read or write them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from rearview.errors import UsageError
from rearview.model.wording import printable

NAME, TAG, UNTAG, NOTE = "name", "tag", "untag", "note"
"""Kinds of events that label a run."""
LONGEST = 100
"""Most characters of a name or tag."""
LONGEST_NOTE = 10_000
"""Most characters of one note."""
_WORDS = ("latest", "worktree")
"""Words that commands understand as a run or a source."""
_ID = re.compile(r"\d{8}-\d{6}-[0-9a-f]{4}")


class Labels(NamedTuple):
    """Name, tags and notes of a run."""

    name: str = ""
    tags: tuple[str, ...] = ()
    note: str = ""


def labels_of(events: Iterable[Mapping[str, Any]]) -> Labels:
    """Return the labels that result from the events of a run.

    >>> labels_of([{"event": "tag", "tags": ["a", "b"]}, {"event": "untag", "tags": ["a"]}])
    Labels(name='', tags=('b',), note='')
    """
    name, tags, notes = "", dict[str, None](), list[str]()
    for event in events:
        kind = event.get("event")
        if kind == NAME:
            name = str(event.get("name", ""))
        elif kind == TAG:
            tags |= dict.fromkeys(map(str, event.get("tags", ())))
        elif kind == UNTAG:
            for tag in event.get("tags", ()):
                tags.pop(str(tag), None)
        elif kind == NOTE:
            text = event.get("text")
            notes = [*notes, str(text)] if text is not None else []
    return Labels(name, tuple(tags), "\n".join(notes))


def check_name(text: str) -> str:
    """Return a name without surrounding spaces; raise if it could not be used to find a run."""
    name = _checked(text, "name")
    if name in _WORDS or _ID.fullmatch(name) or name.startswith("-"):
        raise UsageError(
            f"{name!r} cannot be the name of a run: commands take it for something else. Choose a "
            "name that is no id, does not begin with a dash, and is not `latest` or `worktree`.",
            slug="bad-label",
        )
    return name


def check_tag(text: str) -> str:
    """Return a tag without surrounding spaces; raise if it would be ambiguous in a list of tags."""
    tag = _checked(text, "tag")
    if "," in tag:
        raise UsageError(
            f"The tag {tag!r} has a comma, which separates tags where they are shown. Give two tags: "
            "`rearview tag RUN a b`.",
            slug="bad-label",
        )
    return tag


def check_note(text: str) -> str:
    """Return a note without surrounding spaces; raise if it is empty or very long."""
    note = text.strip()
    if not note or len(note) > LONGEST_NOTE:
        what = "is empty" if not note else f"has {len(note):,} characters"
        raise UsageError(
            f"The note {what}. Write 1 to {LONGEST_NOTE:,} characters: "
            '`rearview note RUN "diverged after the warm-up"`.',
            slug="bad-label",
        )
    return note


def _checked(text: str, what: str) -> str:
    label = text.strip()
    if not label:
        why = "is empty"
    elif printable(label, line=True) != label:
        why = "has control characters"
    elif len(label) > LONGEST:
        why = f"has {len(label):,} characters"
    else:
        return label
    raise UsageError(
        f"The {what} {printable(label[:LONGEST], line=True)!r} {why}. Give a {what} of 1 to "
        f"{LONGEST} visible characters, such as `baseline`.",
        slug="bad-label",
    )
