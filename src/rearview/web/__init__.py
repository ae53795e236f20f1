"""The page: a server on loopback that shows the runs of a project in a browser.

`server` guards and routes, `index` keeps what is known of all runs, `rows` and `series` answer
questions about it with DuckDB, `details` describes one run or version, `replays` prices and fills
cells, `snapshot` writes the page to a file.
"""
