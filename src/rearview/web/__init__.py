"""The page: a server on loopback that shows the runs of a project in a browser.

`guard` checks each request, and `server` has the routes. `run_index` keeps the facts and summaries of all runs up
to date; `live` tells the pages open in browsers which runs changed. `rows` answers requests for the table of runs,
`series` for charts, `logged_media` for images and other values, `screens` for the other screens. `replays` estimates
the cost of backfills and starts backfills, and `snapshot` writes the page to a file.
"""
