"""Runs scenarios on emulated GPUs, each rank in a process forked from this one.

Importing torch takes seconds: it is done once. Reads one JSON object a line: the scenario's name,
its number of ranks and of GPUs, its arguments; answers with a line, the results of the ranks.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import traceback
import warnings
from datetime import timedelta
from importlib import import_module
from pathlib import Path
from typing import Any

import emulated
import torch.distributed as dist
from processes import PRELOADED

DEADLINE_S = 250  # on a machine that does much else, too


def main() -> None:
    for name in PRELOADED:
        import_module(name)
    import scenarios

    emulated.install()
    pipe = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what scenarios print is no answer
    for line in sys.stdin:
        request = json.loads(line)
        folder = Path(request["folder"])
        function = getattr(scenarios, request["scenario"])
        answers = [folder / f"{request['number']}-{rank}.json" for rank in range(request["ranks"])]
        ranks = [_fork(rank, function, request, answer) for rank, answer in enumerate(answers)]
        statuses = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in ranks]
        found = [json.loads(a.read_text()) if a.exists() else None for a in answers]
        pipe.write(json.dumps([statuses, found]) + "\n")
        pipe.flush()
    pipe.close()


def _fork(rank: int, function: Any, request: dict[str, Any], answer: Path) -> int:
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        signal.alarm(DEADLINE_S)
        os.environ["EMULATED_GPUS"] = str(request["gpus"])
        warnings.simplefilter("error")
        size, folder = request["ranks"], Path(request["folder"])
        if size > 1 and request["backend"]:
            dist.init_process_group(
                request["backend"],
                store=dist.FileStore(str(folder / f"store-{request['number']}"), size),
                rank=rank,
                world_size=size,
                timeout=timedelta(seconds=120),
            )
        try:
            result = function(rank, size, folder, **request["given"])
        except Exception as error:
            result = {"error": str(error), "text": traceback.format_exc()}
        answer.write_text(json.dumps({"result": result, **emulated.report()}))
        status = 0
        if dist.is_initialized():
            dist.barrier()
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


if __name__ == "__main__":
    main()
