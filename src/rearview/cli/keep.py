"""Commands that look after the store: verify, gc."""

from __future__ import annotations

import click

from rearview.cli import show
from rearview.cli.formats import plural, size
from rearview.cli.options import Size, asked, json_option
from rearview.cli.progress import waiting
