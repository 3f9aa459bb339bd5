"""The live block of a run below a cell of a notebook."""

from __future__ import annotations

import io
import sys
import threading
from collections.abc import Callable
from typing import Any

from rich.console import Console
from rich.text import Text

WIDTH = 100  # characters; a cell's output is usually wide enough
_EVERY_S = 0.5
_PAGE = "<pre style='line-height:1.3;white-space:pre;margin:0'>{code}</pre>"


def in_notebook() -> bool:
    """Whether this process is the kernel of a notebook (Jupyter, VS Code, Colab)."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return shell is not None and getattr(shell, "kernel", None) is not None


def notebook_console() -> Console:
    """For lasting lines, which notebooks show with the colors of a terminal."""
    return Console(file=sys.stdout, force_terminal=True, force_jupyter=False, width=WIDTH)


class NotebookBlock:
    """Shows a block, and again what it has become; takes the place of rich's Live there.

    Args:
        block: what is shown now; called by a thread.
    """

    def __init__(self, block: Callable[[], Text]) -> None:
        self._block = block
        self._handle: Any = None
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        from IPython.display import display

        self._handle = display(self._shown(), display_id=True)
        self._stopped.clear()
        self._thread = threading.Thread(target=self._follow, name="notebook", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Leaves nothing of the block."""
        if self._thread is not None:
            self._stopped.set()
            self._thread.join()
            self._thread = None
            self._update(as_html(Text("")))

    def refresh(self) -> None:
        self._update(self._shown())

    def _follow(self) -> None:
        while not self._stopped.wait(_EVERY_S):
            self.refresh()

    def _shown(self) -> Any:
        return as_html(self._block())

    def _update(self, page: Any) -> None:
        if self._handle is not None:
            self._handle.update(page)


def as_html(text: Text) -> Any:
    """A text with its colors, as IPython displays it."""
    from IPython.display import HTML

    console = Console(record=True, file=io.StringIO(), width=WIDTH, force_jupyter=False)
    console.print(text, end="")
    return HTML(console.export_html(inline_styles=True, code_format=_PAGE))
