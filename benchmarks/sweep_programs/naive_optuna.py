"""Contender "optuna": the loop by hand in an objective; two processes share a study.

With threads (n_jobs), the trials would share Python's global lock.
"""

from __future__ import annotations

import argparse
import multiprocessing
import time
from pathlib import Path

PROCESSES = 2


def work(args: argparse.Namespace) -> None:
    import optuna
    import torch
    from digits_by_hand import train

    torch.set_num_threads(1)
    study = optuna.load_study(study_name="sweep", storage=f"sqlite:///{args.storage}/study.db")

    def objective(trial: optuna.Trial) -> float:
        Path(args.stamps, f"{time.time_ns()}").touch()
        lr = trial.suggest_float("lr", 1e-3, 1, log=True)
        dropout = trial.suggest_float("dropout", 0, 0.5)
        best = 0.0
        for epoch, top1 in enumerate(train(lr, dropout, args.epochs)):
            torch.save({"epoch": epoch}, Path(args.storage, f"trial-{trial.number}.pt"))
            best = max(best, top1)
        return best

    study.optimize(objective, n_trials=args.trials // PROCESSES)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trials", type=int, required=True)
    parser.add_argument("--epochs", type=int, required=True)
    parser.add_argument("--stamps", required=True)
    parser.add_argument("--storage", required=True)
    args = parser.parse_args()
    import optuna

    optuna.create_study(
        study_name="sweep", storage=f"sqlite:///{args.storage}/study.db", direction="maximize"
    )
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=work, args=(args,)) for _ in range(PROCESSES)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    if any(process.exitcode for process in processes):
        raise SystemExit("a process failed")


if __name__ == "__main__":
    main()
