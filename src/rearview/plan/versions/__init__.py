"""Merge many versions into one execution tree, and choose the order of its replay."""
