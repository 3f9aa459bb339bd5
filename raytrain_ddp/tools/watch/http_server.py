"""The HTTP server: who may ask for what, and the answers.

Only names of runs that are known are looked up; no path of a request reaches a file system. A
request must name this machine as its host, or else another site's name could lead to it (DNS
rebinding). Whoever has shown the token, in a link that is opened once, has it in a cookie.
"""

from __future__ import annotations

import ipaddress
import secrets
import socket
from collections.abc import Callable
from contextlib import suppress
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.resources import files
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

from raytrain_ddp.errors import ConfigError, PreflightError, first_line, first_names
from raytrain_ddp.tools.report.predictions import Predictor
from raytrain_ddp.tools.watch import live_pages
from raytrain_ddp.tools.watch.watched_runs import WatchedRuns, stop_run

_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; img-src data:; "
    "connect-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
)
_STATIC = {
    "/style.css": ("report", "style.css", "text/css"),
    "/hover.js": ("report", "hover.js", "text/javascript"),
    "/watch.css": ("watch", "watch.css", "text/css"),
    "/watch.js": ("watch", "watch.js", "text/javascript"),
}
_PATIENCE_S = 30.0  # for a browser that does not send its request, or does not read the answer
_MOST_COMPARED = 12
_MOST_DRAWN = 32  # pages in memory

Content = tuple[str, str, Callable[[], str]]  # title, version, what makes the content


class WatchServer(ThreadingHTTPServer):
    """Listens on `host` and `port` (0: a free one); raises ConfigError if it cannot."""

    daemon_threads = True

    def __init__(self, runs: WatchedRuns, host: str, port: int, links: list[tuple[str, str]]):
        self.runs, self.links = runs, links
        self.token, self.nonce = secrets.token_urlsafe(24), secrets.token_hex(4)
        self.rows: dict[str, live_pages.Row] = {}
        self.predictor = Predictor()
        self.drawn: dict[str, tuple[str, str]] = {}
        try:
            self.address_family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
            super().__init__((host, port), _Handler)
        except (OSError, OverflowError, UnicodeError) as error:
            why = getattr(error, "strerror", None) or first_line(error)
            hint = "give another --port (0: any that is free)" if port else "give another --host"
            raise ConfigError(f"cannot listen on {host} port {port}: {why}: {hint}.") from None
        self.cookie = f"raytrain-watch-{self.server_address[1]}"  # cookies know no ports
        address = ipaddress.ip_address(str(self.server_address[0]).partition("%")[0])
        self.is_private = address.is_loopback
        own = (host, "localhost", socket.gethostname(), socket.getfqdn())
        self.names = {name.lower() for name in own}
        shown = host if not address.is_unspecified else socket.gethostname()
        shown = f"[{shown}]" if ":" in shown else shown
        self.url = f"http://{shown}:{self.server_address[1]}/?token={self.token}"

    def is_own_name(self, host: str) -> bool:
        """Whether it is an address or a name of this machine; with or without a port."""
        name = ""
        with suppress(ValueError):
            name = urlsplit(f"//{host}").hostname or ""
            ipaddress.ip_address(name.partition("%")[0])
            return True  # no name that someone else's DNS could answer for
        return name in self.names

    def server_close(self) -> None:
        super().server_close()
        self.predictor.close()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A browser that has closed its connection is no error."""


class _Handler(BaseHTTPRequestHandler):
    server: WatchServer
    protocol_version, server_version, sys_version = "HTTP/1.1", "raytrain_ddp", ""
    timeout = _PATIENCE_S

    def do_GET(self) -> None:
        if not self._may_ask():
            return
        try:
            url = urlsplit(self.path)
        except ValueError as error:
            self._refuse(HTTPStatus.BAD_REQUEST, str(error))
            return
        query = parse_qs(url.query)
        if self._shows_token(query.get("token", [""])[0]):
            cookie = f"{self.server.cookie}={self.server.token}; HttpOnly; SameSite=Strict; Path=/"
            there = {"Location": "/" + url.path.lstrip("/"), "Set-Cookie": cookie}
            self._answer(HTTPStatus.SEE_OTHER, "", **there)
        elif not (self._has_token() or self.server.is_private):
            self._refuse(HTTPStatus.FORBIDDEN, "Open the link that watch printed, with its token.")
        elif url.path in _STATIC:
            folder, name, kind = _STATIC[url.path]
            text = (files("raytrain_ddp.tools") / folder / name).read_text(encoding="utf-8")
            self._answer(HTTPStatus.OK, text, kind)
        else:
            try:
                self._page(url.path, query)
            except Exception as error:  # a storage out of order, or files that nobody foresaw
                text = f"{type(error).__name__}: {first_line(error)}"
                self._refuse(HTTPStatus.INTERNAL_SERVER_ERROR, text)

    def do_POST(self) -> None:
        """``/stop/NAME``, ``/predict/NAME``: from our own page, in a browser that has the token."""
        self.close_connection = True  # a body, if there is one, is not read
        if not self._may_ask():
            return
        origin = self.headers.get("Origin", "").partition("://")[2]
        _, action, name = (*self.path.split("/", 2), "", "")[:3]
        is_own = origin == self.headers.get("Host") and self.headers.get("X-Confirm") == action
        act = {"stop": stop_run, "predict": self.server.predictor.start}.get(action)
        run = self.server.runs.runs.get(unquote(name))
        if not (is_own and self._has_token()):
            self._refuse(HTTPStatus.FORBIDDEN, "Open the link that watch printed, with its token.")
        elif run is None or run.history is None or act is None:
            self._refuse(HTTPStatus.NOT_FOUND, "There is no such run.")
        else:
            try:
                self._answer(HTTPStatus.OK, act(run.history), "text/plain")
            except (PreflightError, OSError) as error:
                self._answer(HTTPStatus.CONFLICT, str(error), "text/plain")

    def _may_ask(self) -> bool:
        if self.server.is_own_name(self.headers.get("Host", "")):
            return True
        text = "This machine has another name: open the page by its IP address."
        self._refuse(HTTPStatus.MISDIRECTED_REQUEST, text)
        return False

    def _shows_token(self, token: str) -> bool:
        return secrets.compare_digest(token.encode(), self.server.token.encode())

    def _has_token(self) -> bool:
        cookies = self.headers.get("Cookie", "").replace(" ", "").split(";")
        return any(self._shows_token(c.removeprefix(f"{self.server.cookie}=")) for c in cookies)

    def _page(self, path: str, query: dict[str, list[str]]) -> None:
        found = self._content(path, query)
        if found is None:
            self._refuse(HTTPStatus.NOT_FOUND, "There is no such page or run.")
            return
        title, version, make = found
        version = f"{self.server.nonce}.{version}"
        is_update = "update" in query
        if is_update and query["update"] == [version]:
            self._answer(HTTPStatus.NO_CONTENT, "")
            return
        key = f"{path} {query.get('run')} {self._has_token()}"
        drawn = self.server.drawn.get(key)
        if drawn is None or drawn[0] != version:
            drawn = version, make()
            self.server.drawn[key] = drawn
            for old in [*self.server.drawn][:-_MOST_DRAWN]:
                self.server.drawn.pop(old, None)
        if is_update:
            self._answer(HTTPStatus.OK, drawn[1], **{"X-Version": version})
        else:
            where, links = str(self.server.runs.storage), self.server.links
            self._answer(HTTPStatus.OK, live_pages.shell(title, drawn[1], version, where, links))

    def _content(self, path: str, query: dict[str, list[str]]) -> Content | None:
        runs = self.server.runs
        if path == "/":
            version = f"{runs.version}.{runs.is_complete}"
            return f"runs: {runs.storage}", version, self._list
        if path.startswith("/run/"):
            run = runs.page(unquote(path.removeprefix("/run/")))
            if run is None or run.history is None:
                return None
            history, may_act = run.history, self._has_token()
            number, html = self.server.predictor.found.get(run.name, (0, None))
            version = f"{run.version}.{may_act}.{number}"
            return run.name, version, lambda: live_pages.run_content(history, may_act, html)
        if path == "/compare":
            names = list(dict.fromkeys(query.get("run", [])))
            known = [name for name in names if name in runs.runs]
            unknown = [name for name in names if name not in known]
            shown = known[:_MOST_COMPARED]
            found = [run for name in shown if (run := runs.page(name)) is not None]
            histories = [run.history for run in found if run.history is not None]
            version = ".".join(str(n) for n in (len(known), *(run.version for run in found)))
            note = f"There is no run {first_names(unknown, 3)}. " if unknown else ""
            if len(known) > len(shown):
                note += f"The first {len(shown)} of {len(known)} runs; report shows all of them."
            return "compare", version, lambda: live_pages.runs_content(histories, note)
        return None

    def _list(self) -> str:
        """Only rows of runs with something new are drawn anew."""
        runs, rows = self.server.runs, {}
        for run in [*runs.runs.values()]:
            old = self.server.rows.get(run.name)
            if old is not None and old.version == run.version:
                rows[run.name] = old
            elif run.history is not None:
                rows[run.name] = live_pages.Row(run.history, run.version)
        self.server.rows = rows
        return live_pages.list_content(rows.values(), runs.trouble, runs.is_complete)

    def _refuse(self, status: HTTPStatus, text: str) -> None:
        content = live_pages.message(status.phrase, text)
        self._answer(status, live_pages.shell(status.phrase, content, "", "", []))

    def _answer(
        self, status: HTTPStatus, text: str, kind: str = "text/html", **headers: str
    ) -> None:
        data = text.encode("utf-8", errors="replace")
        fixed = {
            "Content-Security-Policy": _POLICY,
            "X-Content-Type-Options": "nosniff",
            "Referrer-Policy": "no-referrer",
            "Cross-Origin-Resource-Policy": "same-origin",
            "Cache-Control": "no-store",
        }
        if status != HTTPStatus.NO_CONTENT:
            fixed |= {"Content-Type": f"{kind}; charset=utf-8", "Content-Length": str(len(data))}
        with suppress(OSError):  # the browser has gone
            self.send_response(status)
            for name, value in {**fixed, **headers}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        """Requests are not printed; they would hide what is."""
