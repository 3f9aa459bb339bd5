"""What was seen of a run, or of several, in one HTML file: `report.write_report`.

No Ray; torch only where a checkpoint is asked for its mistakes (mistakes.py).

    reading.py    a run's folder              lives.py    its starts, on one axis of time
    story.py      what happened, in words     scale.py    axes, round ticks, fewer points
    plot.py       a panel of SVG              curves.py   those over the steps
    clocks.py     those over the time         ranks.py    who was slow
    phases.py     names of the phases         tables.py   checkpoints, config, ...
    mistakes.py   what a checkpoint gets wrong (loads torch); classes.py shows it
    page.py       all of it as one file, with style.css and hover.js
"""
