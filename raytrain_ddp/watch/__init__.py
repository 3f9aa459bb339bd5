"""Shows all runs of a storage in a browser, live: an HTTP server of the standard library.

Does not use Ray, and changes nothing but by the button that stops a run. Wrong samples are found
by a process of its own, which imports torch, when a reader asks for them.

    live_log.py       reads what was added to a run's logs    http_server.py    who may ask for what
    watched_runs.py   all runs, as far as they are read       live_pages.py     what is shown
    stop_run.py       the stop of a run, with a checkpoint    watch.js, watch.css

The pages of runs are those of the report: `report.page`, with its style and panels.
"""
