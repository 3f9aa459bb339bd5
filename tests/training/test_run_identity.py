"""What a checkpoint records about the user's code."""

from __future__ import annotations

from pathlib import Path

from processes import run_cli

NET = """
from torch import nn

def net(classes):
    return nn.Sequential(nn.Flatten(), nn.Linear(192, classes))
"""


def test_code_that_has_changed_is_noted_on_a_resume(tmp_path: Path):
    (tmp_path / "changed_net.py").write_text(NET)
    train = ("--local", "--model.name", "changed_net.py:net", "--name", "own", "--steps")
    texts = []
    for steps in range(1, 4):
        answer = run_cli("fit", *train, str(steps), cwd=tmp_path, warm=True)
        assert answer.status == 0, answer.err
        texts.append(answer.out + answer.err)
        if steps == 2:
            (tmp_path / "changed_net.py").write_text(NET + "# edited\n")
    noted = ["the code of changed_net has changed since step-" in text for text in texts]
    assert noted == [False, False, True]
