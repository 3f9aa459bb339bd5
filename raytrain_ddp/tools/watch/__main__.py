"""``raytrain watch [STORAGE]``: all runs of a storage, live, in a browser."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from raytrain_ddp.command_line import Command, run_command
from raytrain_ddp.command_line.flags import positional


@dataclass(frozen=True)
class WatchArgs:
    """Show all runs of a storage in a browser, live: state, progress, curves, events.

    It reads what runs write. The printed link contains a token; the page can stop runs of this
    machine and user, with a checkpoint, only where that link was opened.
    """

    storage: str = field(default="runs", metadata=positional("STORAGE"))
    """Folder or URI that holds runs, or a single run."""
    host: str = "127.0.0.1"
    """Address to listen on. All but loopback can be reached from other machines, unencrypted,
    and require the token. 0.0.0.0: all addresses of this machine."""
    port: int = 8275
    """Port to listen on. 0: any that is free."""
    open: bool = False
    """Open the page in a browser."""
    grafana: str | None = field(default=None, metadata={"metavar": "URL"})
    """Address of a Grafana, to link to from the page."""


COMMAND = Command("watch", WatchArgs, "[STORAGE] [--FLAG VALUE ...]")


def main(argv: Sequence[str]) -> int:
    """Returns the exit status; serves until it is interrupted."""
    args = COMMAND.parse(argv)
    from raytrain_ddp.errors import ConfigError
    from raytrain_ddp.tools.watch.http_server import WatchServer
    from raytrain_ddp.tools.watch.watched_runs import WatchedRuns

    if not 0 <= args.port <= 65535:
        raise ConfigError(f"port = {args.port}: must be from 0 to 65535.")
    if args.grafana is not None and not re.fullmatch(r"https?://[^/?#:\s]\S*", args.grafana):
        raise ConfigError(f"grafana = {args.grafana!r}: must be an http:// or https:// address.")
    links = [("Grafana", args.grafana)] if args.grafana else []
    runs = WatchedRuns(args.storage)
    server = WatchServer(runs, args.host, args.port, links)
    runs.watch()
    print(f"{runs.storage}: {server.url}", "Ctrl-C ends this.", sep="\n", flush=True)
    if args.open:
        import webbrowser

        webbrowser.open(server.url)
    try:
        server.serve_forever()
    except KeyboardInterrupt:
        return 0
    finally:
        runs.close()
        server.server_close()
    return 0


if __name__ == "__main__":
    run_command(main)
