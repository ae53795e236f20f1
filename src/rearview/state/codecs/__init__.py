"""One file per kind of object: how it is walked, read and written."""
