"""Run the segments of a plan, as processes of this machine or on a Ray cluster."""
