"""Many versions as one execution tree: build it, replay it, compare it, pack it for others."""
