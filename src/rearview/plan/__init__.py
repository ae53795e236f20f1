"""Plan replays: facts about runs in, a plan of segments out. Pure: it reads no clock, disk or environment."""
