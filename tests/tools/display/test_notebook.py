"""In a notebook: an updated block, permanent lines, an interrupt, and the display of a result."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

from raytrain_ddp.tools.display.terminal import in_notebook

NOTEBOOK = Path(__file__).parents[3] / "examples" / "notebook.ipynb"
# The cell interrupts itself: the kernel's interrupt is a SIGINT.
INTERRUPTED = """
import os, signal
from raytrain_ddp import LogConfig, TrainConfig, fit_locally
from raytrain_ddp.tools.display.progress_display import Display

class Interrupting(Display):
    def handle(self, event):
        super().handle(event)
        if getattr(event, "step", 0) == 3:
            os.kill(os.getpid(), signal.SIGINT)

log = LogConfig(every_steps=1, tensorboard=False)
config = TrainConfig(name="stopped", storage="runs", epochs=1, log=log)
result = fit_locally(config, display=Interrupting())
(result.status, result.exit_status, result.step < result.total_steps, result.last_checkpoint[-22:])
"""


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """The cells of the example and one more, after execution."""
    book = nbformat.read(NOTEBOOK, as_version=4)  # type: ignore[no-untyped-call]
    assert all(not cell.get("outputs") for cell in book.cells)
    book.cells.append(nbformat.v4.new_code_cell(INTERRUPTED))  # type: ignore[no-untyped-call]
    client = NotebookClient(book, timeout=200, kernel_name="python3")
    folder = tmp_path_factory.mktemp("notebook")
    client.km = client.create_kernel_manager()
    client.km.kernel_spec.argv[0] = sys.executable
    client.execute(cwd=str(folder), env={**os.environ, "MPLBACKEND": "agg", "OMP_NUM_THREADS": "1"})
    return [cell for cell in book.cells if cell.cell_type == "code"]


def outputs(cell: Any, kind: str) -> list[Any]:
    return [each for each in cell.outputs if each.output_type == kind]


def test_permanent_lines_remain_and_the_block_is_removed(ran: list[Any]):
    text = "".join(each.text for each in outputs(ran[0], "stream"))
    assert "eval" in text
    assert "finished at step 16 of 16" in text
    (block,) = outputs(ran[0], "display_data")
    assert "<pre" in block.data["text/html"]
    assert "epoch" not in block.data["text/html"]


def test_an_interrupt_in_a_notebook_saves_a_checkpoint(ran: list[Any]):
    (ended,) = outputs(ran[-1], "execute_result")
    assert ended.data["text/plain"].startswith("('interrupted', 130, True, ")


def test_pytest_is_not_recognized_as_a_notebook():
    assert not in_notebook()
