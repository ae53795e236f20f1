"""What the text of a program shows before it runs: its loops, what trains, obstacles, places for probes (pure)."""
