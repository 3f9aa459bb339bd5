"""What was seen of a run, or of several, in one HTML file: `report.write_report`.

No Ray; torch only where a checkpoint is asked for its mistakes (mistakes.py).

    reading.py    a run's folder              lives.py    its starts, on one axis of time
    story.py      what happened, in words     scale.py    axes, round ticks, fewer points
    plot.py       a panel of SVG              panels.py   the panels of a run
    tables.py     checkpoints, config, ...    page.py     all of it as one file
    mistakes.py   per class, and what was wrong (loads torch)
"""
