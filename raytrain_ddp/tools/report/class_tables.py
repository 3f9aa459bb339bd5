"""Tables of predictions: values by class, a confusion matrix, and the worst mistakes as
pictures."""

from __future__ import annotations

from html import escape

from raytrain_ddp.tools.display.formatting import format_number
from raytrain_ddp.tools.report.mistakes import Predictions
from raytrain_ddp.tools.report.tables import table

_MOST_CLASSES, _FEW_CLASSES = 24, 16  # in the matrix: all, or the worst of more
_MOST_PAIRS, _MOST_ROWS = 20, 20


def classes(found: Predictions) -> str:
    """All tables, as HTML."""
    right = sum(row[n] for n, row in enumerate(found.matrix))
    all_of = "all" if found.samples == found.rows else f"{found.samples:,} of"
    head = (
        f"<p>{right / found.samples:.2%} of {all_of} {found.rows:,} samples are correct, with "
        f"<code>{escape(found.checkpoint)}</code>.</p>"
    )
    few = len(found.class_names) <= _MOST_CLASSES
    beside = [_matrix(found), _by_class(found)] if few else [_by_class(found), _pairs(found)]
    parts = [head, '<div class="beside">', *beside, "</div>", "" if few else _matrix(found)]
    return "".join([*parts, _gallery(found)])


def _matrix(found: Predictions) -> str:
    """The matrix of all classes, or of those that are confused most."""
    matrix, names = found.matrix, found.class_names
    chosen = list(range(len(names)))
    note = ""
    if len(chosen) > _MOST_CLASSES:
        worst = [n for _, truth, guess in _confused(found) for n in (truth, guess)]
        chosen = sorted(list(dict.fromkeys(worst))[:_FEW_CLASSES])
        note = f"{len(chosen)} of {len(names)} classes, from the pairs that are confused most"
    most_wrong = max((matrix[i][j] for i in chosen for j in chosen if i != j), default=0)
    rows = []
    for truth in chosen:
        whole = sum(matrix[truth]) or 1
        cells = []
        for guess in chosen:
            count = matrix[truth][guess]
            is_right = truth == guess
            shade = count / whole if is_right else (count / most_wrong if most_wrong else 0.0)
            hover = f"{names[truth]} taken for {names[guess]}: {count} of {sum(matrix[truth])}"
            style = f' style="--s:{shade:.2f}"' if count else ""
            cells.append(
                f'<td class="{"right" if is_right else "wrong"}"{style} '
                f'title="{escape(hover, quote=True)}">{count or ""}</td>'
            )
        rows.append(f"<tr><th>{_name(names[truth])}</th>{''.join(cells)}</tr>")
    heads = "".join(f"<th><span>{_name(names[n])}</span></th>" for n in chosen)
    long = " long" if max((len(names[n]) for n in chosen), default=0) > 4 else ""
    caption = "Rows: true class; columns: predicted class" + (f"; {note}" if note else "")
    return (
        f'<div class="wide"><table class="matrix{long}"><caption>{escape(caption)}</caption>'
        f"<thead><tr><th></th>{heads}</tr></thead><tbody>{''.join(rows)}</tbody></table></div>"
    )


def _by_class(found: Predictions) -> str:
    matrix, rows = found.matrix, []
    for number, name in enumerate(found.class_names):
        right, support = matrix[number][number], sum(matrix[number])
        guessed = sum(row[number] for row in matrix)
        if support or guessed:
            recall = right / support if support else 0.0
            bar = f'<span class="bar" style="--s:{recall:.3f}">{recall:.1%}</span>'
            precision = f"{right / guessed:.1%}" if guessed else "-"
            rows.append((recall, (_name(name), str(support), bar if support else "-", precision)))
    cells = [row for _, row in sorted(rows, key=lambda pair: pair[0])]
    head = ("class, the worst first", ">samples", "recall", ">precision")
    first = table(head, cells[:_MOST_ROWS], "classes")
    if len(cells) <= _MOST_ROWS:
        return first
    rest = table(head, cells[_MOST_ROWS:], "classes")
    return f"<div>{first}<details><summary>all {len(cells)} classes</summary>{rest}</details></div>"


def _confused(found: Predictions) -> list[tuple[int, int, int]]:
    """(count, truth, guess) of all mistakes, the most frequent first."""
    pairs = [
        (count, truth, guess)
        for truth, row in enumerate(found.matrix)
        for guess, count in enumerate(row)
        if count and truth != guess
    ]
    return sorted(pairs, key=lambda pair: -pair[0])


def _pairs(found: Predictions) -> str:
    names = found.class_names
    rows = [
        (_name(names[truth]), _name(names[guess]), str(count), str(sum(found.matrix[truth])))
        for count, truth, guess in _confused(found)[:_MOST_PAIRS]
    ]
    return table(("true class", "predicted class", ">times", ">of"), rows)


def _gallery(found: Predictions) -> str:
    if not found.worst:
        return "<p class=note>No mistakes were found.</p>"
    cards = []
    for one in found.worst:
        place = one.where.rpartition("/")[2]  # the file without its folder, which is in the title
        hover = f"{one.where}; loss {format_number(one.loss)}"
        cards.append(
            f'<figure title="{escape(hover, quote=True)}">'
            + (f'<img src="{escape(one.picture, quote=True)}" alt="">' if one.picture else "")
            + f"<figcaption><b>{_name(one.truth)}</b><br>taken for <b>{_name(one.guess)}</b> "
            f"({one.sure:.0%} sure)<small>{escape(place)}</small></figcaption></figure>"
        )
    title = "<h3>The worst mistakes</h3><p class=note>Ordered by loss, the highest first.</p>"
    return f'{title}<div class="gallery">{"".join(cards)}</div>'


def _name(name: str) -> str:
    return escape(name if len(name) <= 28 else f"{name[:27]}…")
