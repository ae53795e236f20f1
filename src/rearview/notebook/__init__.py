"""Notebooks: audit and packages."""
