"""What the commands print: tables, charts, progress."""
