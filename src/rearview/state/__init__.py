"""Live objects of the program: functions to capture, restore and compare their state."""
