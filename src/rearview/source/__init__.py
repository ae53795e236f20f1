"""Program text in, program text out. Pure: no clock, disk or environment."""
