"""Read and rewrite program text: its cells, loops, log calls, names and statements. Pure: no clock, disk or environment."""
