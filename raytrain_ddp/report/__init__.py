"""Reports what is known of one or several runs in one HTML file: `write.write_report`.

Does not use Ray; imports torch only to evaluate a checkpoint (mistakes.py).

    run_files.py     reads a run's folder         timeline.py      its starts on one time axis
    history.py       what happened, as text       tables.py        checkpoints, config, ...
    time_panels.py   panels over time             rank_panels.py   panels per rank
    step_phases.py   names of the phases          svg_panel.py     a panel as SVG
    mistakes.py      a checkpoint's mistakes (imports torch); class_tables.py shows them
    predictions.py   the same, also in a process of its own
    run_commands.py  commands to make, continue and use a run
    page.py          the HTML file, with style.css and hover.js

The panels over the steps are those of curves.png: `display.curves`.
"""
