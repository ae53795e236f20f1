"""A replay inside the user's process: skip, restore, run, prove; guard probes; share the set-up of segments."""
