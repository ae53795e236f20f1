"""Fill missing values: find the past runs that lack them, plan segments, replay the segments, report."""
