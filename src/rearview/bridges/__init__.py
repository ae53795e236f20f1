"""Bridges to the loggers and trackers people already use: background writers, import, export, MCP."""
