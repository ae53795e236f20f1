"""Facts in, plan out. Pure: no clock, disk or environment."""
