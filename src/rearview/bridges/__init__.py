"""Bridges to other tools: import from and export to other trackers, and a server of tools for coding agents (MCP)."""
