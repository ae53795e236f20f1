"""The page: a server on loopback that shows the runs of a project in a browser.

`server` has the routes, and `guard` checks each request before them. `run_index` keeps the facts and
summaries of all runs up to date; `live` tells open pages about changes. `rows` answers the table of
runs, `series` the charts, `logged_media` images and other values, `screens` the other screens.
`replays` prices and starts backfills, and `snapshot` writes the page to a file.
"""
