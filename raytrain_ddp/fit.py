"""``python -m raytrain_ddp.fit [RECIPE] [flags]``: train."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

from raytrain_ddp.command_line import FIT, parse_fit, run_command
from raytrain_ddp.config.effects import under_torchrun
from raytrain_ddp.config.recipe import default_name, described, dumps

COMMAND = FIT


def main(argv: Sequence[str]) -> int:
    """Returns the exit status."""
    args = parse_fit(argv)
    if args.describe or args.print_config:
        print(described(args.recipe) if args.describe else dumps(args.config), end="")
        return 0
    if args.emit:
        from raytrain_ddp.driver.cluster_files import emit

        text, notes = emit(args.config, args.emit, args.recipe)
        print(text, end="")
        for note in notes:
            print(f"note: {note}", file=sys.stderr)
        return 0
    if args.find_micro_batch:
        from raytrain_ddp.driver.preflight import check
        from raytrain_ddp.ray_backend.placement import choose_layout, local_resources

        config = check(args.config)
        workers = choose_layout(config, local_resources()).most
        from raytrain_ddp.training.start.fitting_batch import find_micro_batch

        print(find_micro_batch(config, workers))
        return 0
    name = default_name(args.recipe)
    if args.dry_run:
        from raytrain_ddp.driver.dry_run import dry_run

        print(dry_run(args.config, name, args.resume_from, args.local))
        return 0
    from raytrain_ddp.driver.fit_driver import fit, fit_locally

    options: dict[str, Any] = {"resume_from": args.resume_from, "default_name": name}
    if args.local or under_torchrun():
        return fit_locally(args.config, **options).exit_status
    return fit(args.config, address=args.address, dashboard=args.dashboard, **options).exit_status


class _CallableModule(ModuleType):
    """Lets ``raytrain_ddp.fit(config)`` work also where this module hides the function `fit`."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        from raytrain_ddp.driver.fit_driver import fit

        return fit(*args, **kwargs)


sys.modules[__name__].__class__ = _CallableModule

if __name__ == "__main__":
    run_command(main)
