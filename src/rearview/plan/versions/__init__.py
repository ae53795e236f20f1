"""Many versions as one execution tree, and the order in which to replay it."""
