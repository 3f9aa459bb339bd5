"""Shows all runs of a storage in a browser, live: an HTTP server of the standard library.

Does not use Ray, and changes nothing but by the button that stops a run. Wrong samples are found
by a process of its own, which imports torch, when a reader asks for them.
"""
