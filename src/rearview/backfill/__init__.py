"""Fill missing values of past runs: find them, plan segments, replay the segments, report."""
