"""Bridges to other tools: import runs from and export runs to other trackers; an MCP server for coding agents."""
