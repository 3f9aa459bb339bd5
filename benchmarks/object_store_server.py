"""An object store with the S3 protocol, as far as Arrow uses it for a file: each request waits, and
each connection has so much bandwidth. Used by object_store.py, a process of its own."""

from __future__ import annotations

import argparse
import re
import time
import uuid
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Lock
from urllib.parse import parse_qs, urlsplit

PIECE = 2**18


class Store:
    """The objects, and how many requests there were, now and at once."""

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self.uploads: dict[str, dict[int, bytes]] = {}
        self.lock, self.now, self.most, self.count = Lock(), 0, 0, 0


STORE = Store()


class Handler(BaseHTTPRequestHandler):
    """Answers the requests of one connection, one after another."""

    protocol_version = "HTTP/1.1"
    delay_s, bytes_per_s = 0.03, 40e6

    def log_message(self, *_: object) -> None: ...

    def do_HEAD(self) -> None:
        self._begin()
        found = STORE.objects.get(self._path())
        self._answer(200 if found is not None else 404, size=len(found or b""))

    def do_GET(self) -> None:
        if self.path == "/-/counts":
            text = f"{STORE.count} {STORE.most}".encode()
            STORE.count = STORE.most = 0
            self._answer(200, text, slow=False)
            return
        self._begin()
        query = parse_qs(urlsplit(self.path).query)
        if "list-type" in query:
            self._answer(200, self._listing(query.get("prefix", [""])[0]))
            return
        found = STORE.objects.get(self._path())
        if found is None:
            self._answer(404)
            return
        part = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        first, last = (int(part[1]), int(part[2])) if part else (0, len(found) - 1)
        shown = memoryview(found)[first : last + 1]
        self._answer(206, shown, {"Content-Range": f"bytes {first}-{last}/{len(found)}"})

    def do_PUT(self) -> None:
        self._begin()
        size, done, pieces = int(self.headers["Content-Length"]), 0, []
        started = time.monotonic()
        while done < size:
            pieces.append(self.rfile.read(min(PIECE, size - done)))
            done += len(pieces[-1])
            self._pace(started, done)
        content, query = b"".join(pieces), parse_qs(urlsplit(self.path).query)
        if "uploadId" in query:
            STORE.uploads[query["uploadId"][0]][int(query["partNumber"][0])] = content
        else:
            STORE.objects[self._path()] = content
        self._answer(200, headers={"ETag": '"e"'})

    def do_DELETE(self) -> None:
        self._begin()
        STORE.objects.pop(self._path(), None)
        self._answer(204)

    def do_POST(self) -> None:
        self._begin()
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0)).decode()
        query = parse_qs(urlsplit(self.path).query, keep_blank_values=True)
        if "delete" in query:
            for key in re.findall(r"<Key>(.*?)</Key>", body):
                STORE.objects.pop(f"{self._path()}/{key}", None)
            text = "<DeleteResult></DeleteResult>"
        elif "uploads" in query:
            name = uuid.uuid4().hex
            STORE.uploads[name] = {}
            tag = "InitiateMultipartUploadResult"
            text = f"<{tag}><UploadId>{name}</UploadId></{tag}>"
        else:
            parts = STORE.uploads.pop(query["uploadId"][0])
            STORE.objects[self._path()] = b"".join(parts[n] for n in sorted(parts))
            text = '<CompleteMultipartUploadResult><ETag>"e"</ETag></CompleteMultipartUploadResult>'
        self._answer(200, text.encode())

    def _listing(self, prefix: str) -> bytes:
        """All that begins with `prefix`; Arrow sorts out what lies deeper than it asked for."""
        bucket, date = self._path().rstrip("/") + "/", "2026-01-01T00:00:00.000Z"
        found = [(n.removeprefix(bucket), len(o)) for n, o in sorted(STORE.objects.items())]
        entries = "".join(
            f"<Contents><Key>{name}</Key><LastModified>{date}</LastModified><Size>{size}</Size>"
            "</Contents>"
            for name, size in found
            if name.startswith(prefix)
        )
        tag, more = "ListBucketResult", "<IsTruncated>false</IsTruncated>"
        return f"<{tag}>{more}<KeyCount>{len(found)}</KeyCount>{entries}</{tag}>".encode()

    def _path(self) -> str:
        return urlsplit(self.path).path

    def _begin(self) -> None:
        with STORE.lock:
            STORE.count += 1
            STORE.now += 1
            STORE.most = max(STORE.most, STORE.now)
        time.sleep(self.delay_s)

    def _answer(
        self,
        status: int,
        content: bytes | memoryview = b"",
        headers: dict[str, str] | None = None,
        size: int | None = None,
        slow: bool = True,
    ) -> None:
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(content) if size is None else size))
        self.end_headers()
        started = time.monotonic()
        for start in range(0, len(content), PIECE):
            self.wfile.write(content[start : start + PIECE])
            self._pace(started, start + PIECE)
        if slow:
            with STORE.lock:
                STORE.now -= 1

    def _pace(self, started: float, done: int) -> None:
        time.sleep(max(0.0, started + done / self.bytes_per_s - time.monotonic()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("delay_ms", type=float)
    parser.add_argument("mb_per_s", type=float, help="of each connection")
    args = parser.parse_args()
    Handler.delay_s, Handler.bytes_per_s = args.delay_ms / 1e3, args.mb_per_s * 1e6
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    print(server.server_port, flush=True)
    server.serve_forever()


if __name__ == "__main__":
    main()
