"""Shows all runs of a storage in a browser, live: an HTTP server of the standard library.

Does not use Ray or torch, and changes nothing but by the button that stops a run.

    live_log.py       reads what was added to a run's logs    http_server.py    who may ask for what
    watched_runs.py   all runs, as far as they are read       live_pages.py     what is shown
    run_commands.py   commands about a run, and its stop      watch.js, watch.css

The pages of runs are those of the report: `report.page`, with its style and panels.
"""
