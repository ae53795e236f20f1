"""Read and rewrite program text: cells, loops, log calls, names. Pure: no clock, disk or environment."""
