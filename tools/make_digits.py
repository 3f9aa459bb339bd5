"""Build the digits data that ship with the package: two Parquet files of 8x8 handwritten digits.

    python tools/make_digits.py [--out FOLDER]

Source: scikit-learn's ``load_digits()``, which is the test part of "Optical Recognition of
Handwritten Digits" (UCI Machine Learning Repository, CC BY 4.0): 1,797 images with 17 gray levels,
0..16. See ``raytrain_ddp/data/digits/LICENSE.md``. Needs scikit-learn, pillow and pyarrow.

The files have the layout that Hugging Face ``datasets`` writes: ``image`` is a struct of PNG bytes
and a path, ``label`` is an int64, and the schema metadata name the features. The number in a path
is the image's index in ``load_digits()``. With the same library versions the bytes are the same
every time.
"""

from __future__ import annotations

import argparse
import io
import json
from collections import Counter
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

OUT = Path(__file__).resolve().parents[1] / "raytrain_ddp" / "data" / "digits"
TEST_ROWS = 360
SPLIT_SEED = 0
ROW_GROUP = 128
PER_CLASS = {  # what the split above gives, class 0 to class 9
    "train": [142, 146, 142, 146, 145, 145, 145, 143, 139, 144],
    "test": [36, 36, 35, 37, 36, 37, 36, 36, 35, 36],
}

FEATURES = {
    "image": {"_type": "Image"},
    "label": {"names": [str(digit) for digit in range(10)], "_type": "ClassLabel"},
}
SCHEMA = pa.schema(
    [
        ("image", pa.struct([("bytes", pa.binary()), ("path", pa.string())])),
        ("label", pa.int64()),
    ],
    metadata={"huggingface": json.dumps({"info": {"features": FEATURES}})},
)


def to_gray(counts: np.ndarray) -> np.ndarray:
    """Counts 0..16 as 8-bit gray levels 0..255."""
    return np.rint(counts * 255 / 16).astype(np.uint8)


def to_png(gray: np.ndarray) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(gray).save(buffer, format="PNG", optimize=True)
    return buffer.getvalue()


def split_rows(labels: np.ndarray) -> dict[str, np.ndarray]:
    """Indices of both splits: stratified, and shuffled, as the source is ordered by writer."""
    train, test = train_test_split(
        np.arange(len(labels)),
        test_size=TEST_ROWS,
        stratify=labels,
        shuffle=True,
        random_state=SPLIT_SEED,
    )
    return {"train": train, "test": test}


def to_table(images: np.ndarray, labels: np.ndarray, rows: np.ndarray) -> pa.Table:
    cells = [{"bytes": to_png(images[row]), "path": f"digit-{row:05d}.png"} for row in rows]
    columns = [
        pa.array(cells, type=SCHEMA.field("image").type),
        pa.array(labels[rows], type=pa.int64()),
    ]
    return pa.Table.from_arrays(columns, schema=SCHEMA)


def encode(table: pa.Table, compression: str) -> bytes:
    sink = pa.BufferOutputStream()
    pq.write_table(
        table,
        sink,
        row_group_size=ROW_GROUP,
        compression=compression,
        use_dictionary=["label"],  # every image and every path is different
        write_page_checksum=True,
    )
    return sink.getvalue().to_pybytes()


def build() -> dict[str, bytes]:
    """File name to file content, with whichever compression is smaller over both files."""
    digits = load_digits()
    images, labels = to_gray(digits.images), digits.target
    tables = {name: to_table(images, labels, rows) for name, rows in split_rows(labels).items()}
    candidates = [
        {
            f"{name}-00000-of-00001.parquet": encode(table, compression)
            for name, table in tables.items()
        }
        for compression in ("none", "zstd")
    ]
    return min(candidates, key=lambda files: sum(map(len, files.values())))


def check(folder: Path) -> None:
    """Read both files back: class counts, no image in both splits, pixels as in the source."""
    source = to_gray(load_digits().images)
    seen: set[str] = set()
    for name, per_class in PER_CLASS.items():
        table = pq.read_table(
            folder / f"{name}-00000-of-00001.parquet", page_checksum_verification=True
        )
        counts = Counter(table["label"].to_pylist())
        assert [counts[digit] for digit in range(10)] == per_class, (name, counts)
        for cell in table["image"].to_pylist():
            assert cell["path"] not in seen, cell["path"]
            seen.add(cell["path"])
            with Image.open(io.BytesIO(cell["bytes"])) as image:
                assert image.mode == "L", (cell["path"], image.mode)
                assert np.array_equal(np.asarray(image), source[int(cell["path"][6:11])]), cell[
                    "path"
                ]
    assert len(seen) == len(source), len(seen)


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Build the digits dataset that ships with the package."
    )
    parser.add_argument(
        "--out", type=Path, default=OUT, help="folder to write to (default: the package's)"
    )
    folder = parser.parse_args().out
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in build().items():
        (folder / name).write_bytes(content)
        print(f"{name}: {len(content):,} bytes")
    check(folder)


if __name__ == "__main__":
    main()
