"""The pages: a list of runs, a run, several runs. Their content alone is what an update needs."""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterable, Sequence
from contextlib import suppress
from datetime import datetime, timezone
from functools import cached_property
from html import escape
from urllib.parse import quote

from raytrain_ddp.checkpoint.run_folder import CONFIG_FILE
from raytrain_ddp.config.recipe import from_dict, parse
from raytrain_ddp.driver.config_flags import command_of_run
from raytrain_ddp.errors import RaytrainError
from raytrain_ddp.tools.display.axes import sampled, smoothed, thinned
from raytrain_ddp.tools.display.formatting import plural
from raytrain_ddp.tools.report.history import RunHistory
from raytrain_ddp.tools.report.page import sections_of_run, sections_of_runs
from raytrain_ddp.tools.report.svg_panel import sparkline
from raytrain_ddp.tools.watch.watched_runs import can_stop

_STATES = ("running", "failed", "interrupted", "gone", "finished")  # in the order of the list
_SPARK_POINTS = 100


def shell(
    title: str, content: str, version: str, where: str, links: Sequence[tuple[str, str]]
) -> str:
    """A whole page. `links`: (text, address) beside the name of the storage."""
    others = "".join(
        f'<a href="{escape(address, quote=True)}">{escape(text)}</a>' for text, address in links
    )
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title>"
        '<link rel="icon" href="data:,"><link rel="stylesheet" href="/style.css">'
        '<link rel="stylesheet" href="/watch.css"></head><body>'
        f'<nav><a href="/"><b>all runs</b></a><code>{escape(where)}</code>{others}'
        '<span id="live" role="status">live</span></nav>'
        f'<main data-version="{escape(version, quote=True)}">{content}</main>'
        '<script src="/hover.js"></script><script src="/watch.js"></script></body></html>\n'
    )


class Row:
    """A run in the list, drawn once for each of its versions."""

    def __init__(self, history: RunHistory, version: int) -> None:
        self.history, self.version = history, version

    @property
    def rank(self) -> tuple[bool, float, str]:
        """Running ones first, then those that something happened to last."""
        files, is_running = self.history.files, self.history.state == "running"
        walls = [wall for _, _, wall in files.events[-5:] if math.isfinite(wall)]
        return not is_running, -max(walls, default=0.0), files.name

    @cached_property
    def html(self) -> str:
        """A <tr>."""
        history, files = self.history, self.history.files
        name = escape(files.name, quote=True)
        total = files.total_steps or 0
        done = min(1.0, files.last_step / total) if total else 0.0
        done = 1.0 if history.state == "finished" else done
        text = history.cause if history.state == "failed" else history.summary
        last = history.happenings[-1] if history.happenings else None
        event = f"{escape(_short(last.text))}<br>{_ago(last.wall)}" if last else ""
        return (
            f'<tr><td><input type="checkbox" name="run" value="{name}" '
            f'aria-label="compare {name}"></td>'
            f'<td><a href="/run/{quote(files.name)}">{name}</a><br>'
            f'<small class="{history.state}">{history.state}</small></td>'
            f'<td><div class="progress {history.state}"><i style="width:{100 * done:.1f}%"></i>'
            f"</div><small>{escape(_short(text))}</small></td>"
            f"<td>{_spark(history)}</td><td>{escape(files.best_summary or '-')}<br>"
            f"<small>{escape(history.speed)}</small></td><td><small>{event}</small></td></tr>"
        )


def list_content(rows: Iterable[Row], trouble: str, is_complete: bool) -> str:
    """The list of all runs."""
    ordered = sorted(rows, key=lambda row: row.rank)
    states = [row.history.state for row in ordered]
    counts = ", ".join(f"{states.count(s)} {s}" for s in _STATES if s in states)
    head = f"<header><h1>{plural(len(ordered), 'run')}</h1><p>{counts}</p></header>"
    if trouble:
        head += message("Not everything can be read", trouble)
    if not ordered:
        text = "There is no run here yet: the first one will appear." if is_complete else "Reading."
        return head + ("" if trouble else f"<p>{text}</p>")
    more = "" if is_complete else "<p class=note>More runs are being read.</p>"
    names = ("", "run", "progress", "loss", "best", "last event")
    heads = "".join(f"<th>{name}</th>" for name in names)
    body = "".join(row.html for row in ordered)
    return (
        f'{head}{more}<form action="/compare"><p><input type="search" id="filter" '
        'placeholder="names that contain" aria-label="names that contain"> '
        "<button>Compare the ticked runs</button></p>"
        f'<table class="watch"><thead><tr>{heads}</tr></thead><tbody>{body}</tbody></table></form>'
    )


def run_content(history: RunHistory, may_act: bool, predictions: str | None) -> str:
    """A run: what the report shows of it, and its commands.

    Args:
        may_act: whether this browser showed the token.
        predictions: HTML; "" while they are made; None if nobody asked for them.
    """
    rows = "".join(
        f"<tr><td>{escape(what)}</td><td><code>{escape(line)}</code></td>"
        "<td><button type=button class=copy>Copy</button></td></tr>"
        for what, line in commands_of(history)
    )
    stop = predict = ""
    if may_act and can_stop(history.files.owner):
        stop = _button("stop", history, "Stop with a checkpoint")
    if may_act and history.files.kept and predictions != "":
        text = "Show wrong samples" if predictions is None else "Evaluate again"
        predict = _button("predict", history, text)
    if predictions == "":
        predict = "<p class=note>The best checkpoint is being evaluated.</p>"
    table = f'<div class="wide"><table class="facts commands"><tbody>{rows}</tbody></table></div>'
    return (
        f"{sections_of_run(history, (predictions or '') + predict)}"
        f"<section><h2>Commands</h2>{table}{stop}</section>"
        "<p class=note>Of a long log, the lowest and highest loss of each stretch are shown; "
        "<code>report</code> reads all of it.</p>"
    )


def commands_of(history: RunHistory) -> list[tuple[str, str]]:
    """(what it is for, command) of the commands that made a run, continue it and use it."""
    files, found = history.files, []
    word = shlex.quote(files.place.address)
    with suppress(RaytrainError, OSError, ValueError):  # of another version, or damaged
        text = files.place.read(CONFIG_FILE).decode("utf-8", errors="replace")
        found.append(("made it", command_of_run(from_dict(parse(text)))))
    if files.place.is_local and history.state != "finished":
        found.append(("continues it", f"python -m raytrain_ddp.fit {word}/{CONFIG_FILE}"))
    if history.state == "running":
        found.append(("is it making progress?", f"raytrain doctor --run {word}"))
    if files.kept:
        found.append(("evaluates it", f"python -m raytrain_ddp.evaluate {word}"))
        out = "--out predictions.parquet"
        found.append(("predicts", f"raytrain predict {word} {out}"))
    found.append(("this page as a file", f"raytrain report {word}"))
    if files.owner is not None:
        stop = f"kill -TERM {files.owner.pid}"
        here = "" if files.owner.is_here() else f", on {files.owner.host}"
        found.append((f"stops it with a checkpoint{here}", stop))
    return found


def runs_content(histories: Sequence[RunHistory], note: str) -> str:
    """Several runs over each other, below what is not shown of them."""
    if len(histories) < 2:
        return message("Nothing to compare", f"{note}Tick two runs or more in the list.")
    head = f"<p class=note>{escape(note)}</p>" if note else ""
    return head + sections_of_runs(histories)


def message(title: str, text: str) -> str:
    """What is wrong."""
    return f'<div class="wrong-box"><b>{escape(title)}</b><br>{escape(text)}</div>'


def _button(action: str, history: RunHistory, text: str) -> str:
    address = escape(f"/{action}/{quote(history.files.name)}", quote=True)
    return f'<p><button type=button class={action} data-address="{address}">{text}</button></p>'


def _spark(history: RunHistory) -> str:
    """The loss: smoothed, and of the evaluations."""
    train, evals = history.files.train, history.files.evals
    points = [(float(r.step), r.loss) for r in train if math.isfinite(r.loss)]
    calm = smoothed([y for _, y in points], len(points) // 40 + 1)
    line = sampled([(x, y) for (x, _), y in zip(points, calm, strict=True)], _SPARK_POINTS)
    tested = [(float(r.step), r.metrics["loss"]) for r in evals if "loss" in r.metrics]
    return sparkline([line, thinned(tested, _SPARK_POINTS)])


def _ago(wall: float) -> str:
    """A time that watch.js turns into an age."""
    if not math.isfinite(wall):
        return ""
    moment = datetime.fromtimestamp(wall, timezone.utc)
    return f'<time datetime="{moment.isoformat()}">{moment:%m-%d %H:%M:%S} UTC</time>'


def _short(text: str) -> str:
    first = text.partition("\n")[0]
    return first if len(first) <= 160 else f"{first[:159]}…"
