"""JPEGs of ImageNet's size, made once, and the same bytes in each form that a loader reads.

    python benchmarks/data_images.py build/bench-data/3000 3000

An image is noise whose amplitude falls with the spatial frequency, as that of photographs does; the
slope is such that quality 90 gives about 96 KB. All forms but the ImageFolder hold the images in
one and the same shuffled order. What is whole is left alone; a form that cannot be written, for
want of its package, say, is written by the next run that can.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import random
import shutil
import sys
import tarfile
import time
from collections.abc import Callable, Iterator, Mapping
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image

CLASSES = 10
QUALITY = 90
SLOPE = 1.27
SHAPES = ((375, 500), (375, 500), (375, 500), (500, 375), (333, 500), (500, 400), (480, 640))
SHARD_ROWS = 500


def make(folder: Path, count: int) -> None:
    """Writes the images and all forms below `folder`, where they lack."""
    images = folder / "images"
    once(images, lambda place: make_images(place, count))
    for name, write in FORMS.items():
        try:
            once(folder / name, lambda place, write=write: write(images, place))  # type: ignore[misc]
        except Exception as error:  # its loader will fail, and be named in the report
            print(f"{folder / name}: {type(error).__name__}: {error}", file=sys.stderr, flush=True)


def once(place: Path, write: Callable[[Path], None]) -> None:
    """`place` is there whole or not at all."""
    if place.exists():
        return
    part = place.with_name(f".{place.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    began = time.monotonic()
    write(part)
    part.rename(place)
    size = sum(file.stat().st_size for file in place.rglob("*") if file.is_file())
    print(f"{place}: {size / 1e6:.0f} MB in {time.monotonic() - began:.1f} s", flush=True)


def make_images(place: Path, count: int) -> None:
    for label in range(CLASSES):
        (place / f"class_{label}").mkdir()
    with get_context("fork").Pool(len(os.sched_getaffinity(0))) as pool:  # no threads yet
        pool.starmap(make_image, ((place, number) for number in range(count)), chunksize=50)


def make_image(place: Path, number: int) -> None:
    height, width = SHAPES[number % len(SHAPES)]
    draws = np.random.default_rng(number)
    frequency = np.hypot(np.fft.fftfreq(height)[:, None], np.fft.rfftfreq(width)[None])
    frequency[0, 0] = np.inf
    spectrum = draws.standard_normal((3, *frequency.shape, 2)).view(np.complex128)[..., 0]
    spectrum = 0.35 * spectrum + 0.65 * spectrum.mean(0)  # colours of one place are alike
    pixels = np.fft.irfft2(spectrum * frequency**-SLOPE, s=(height, width))
    pixels = 115 + 55 * (pixels - pixels.mean()) / pixels.std()
    image = Image.fromarray(pixels.clip(0, 255).astype(np.uint8).transpose(1, 2, 0).copy())
    image.save(place / f"class_{number % CLASSES}" / f"{number:06}.jpg", quality=QUALITY)


def records(images: Path) -> Iterator[tuple[str, bytes, int]]:
    """(file name, JPEG, label) in a shuffled order, always the same."""
    files = sorted(images.glob("*/*.jpg"), key=lambda file: file.name)
    random.Random(0).shuffle(files)
    for file in files:
        yield file.name, file.read_bytes(), int(file.parent.name.removeprefix("class_"))


def shards(images: Path) -> Iterator[list[tuple[str, bytes, int]]]:
    rows = list(records(images))
    for start in range(0, len(rows), SHARD_ROWS):
        yield rows[start : start + SHARD_ROWS]


def parquet(images: Path, place: Path, group: int, **options: Any) -> None:
    """Files of `datasets`' schema: image: struct<bytes, path>, label with class names."""
    names = [f"class_{label}" for label in range(CLASSES)]
    features = {"image": {"_type": "Image"}, "label": {"names": names, "_type": "ClassLabel"}}
    schema = pa.schema(
        [
            ("image", pa.struct([("bytes", pa.binary()), ("path", pa.string())])),
            ("label", pa.int64()),
        ],
        metadata={"huggingface": json.dumps({"info": {"features": features}})},
    )
    for number, rows in enumerate(shards(images)):
        images_of = [{"bytes": encoded, "path": name} for name, encoded, _ in rows]
        columns = {"image": images_of, "label": [label for *_, label in rows]}
        table = pa.table(columns, schema=schema)
        path = place / f"train-{number:05}.parquet"
        pq.write_table(table, path, row_group_size=group, **options)


def as_datasets_writes(images: Path, place: Path) -> None:
    """Snappy, dictionaries, no checksums, row groups of 100."""
    parquet(images, place, 100)


def as_converted(images: Path, place: Path) -> None:
    """What reads fastest: row groups of 128, neither compression nor dictionaries; checksums."""
    options = {"compression": "none", "use_dictionary": False, "write_page_checksum": True}
    parquet(images, place, 128, **options)


def webdataset(images: Path, place: Path) -> None:
    for number, rows in enumerate(shards(images)):
        with tarfile.open(place / f"{number:05}.tar", "w") as tar:
            for name, encoded, label in rows:
                for suffix, content in (("jpg", encoded), ("cls", str(label).encode())):
                    entry = tarfile.TarInfo(f"{name.removesuffix('.jpg')}.{suffix}")
                    entry.size = len(content)
                    tar.addfile(entry, io.BytesIO(content))


def list_of_paths(images: Path, place: Path) -> None:
    rows = [f"../images/class_{label}/{name},{label}" for name, _, label in records(images)]
    (place / "list.csv").write_text("\n".join(["image,label", *rows]) + "\n")


def small(images: Path, place: Path) -> None:
    """An ImageFolder with shorter sides of 256."""
    for file in images.glob("*/*.jpg"):
        (place / file.parent.name).mkdir(exist_ok=True)
        with Image.open(file) as image:
            share = 256 / min(image.size)
            size = round(image.width * share), round(image.height * share)
            resized = image.resize(size, Image.Resampling.BICUBIC)
        resized.save(place / file.parent.name / file.name, quality=QUALITY)


def mds(images: Path, place: Path) -> None:
    from streaming import MDSWriter

    with MDSWriter(out=str(place), columns={"image": "bytes", "label": "int"}) as writer:
        for _, encoded, label in records(images):
            writer.write({"image": encoded, "label": label})


def litdata(images: Path, place: Path) -> None:
    import litdata

    litdata.optimize(
        fn=same,
        inputs=[{"image": encoded, "label": label} for _, encoded, label in records(images)],
        output_dir=str(place),
        chunk_bytes="64MB",
        num_workers=1,
        keep_data_ordered=True,
        verbose=False,
    )


def same(record: Mapping[str, Any]) -> Mapping[str, Any]:
    return record


def arrow(images: Path, place: Path) -> None:
    """What `datasets` makes of its Parquet files on the first load."""
    import datasets

    files = sorted(str(file) for file in (place.parent / "parquet-hf").glob("*.parquet"))
    found = datasets.Dataset.from_parquet(files, cache_dir=str(place / "cache"))
    found.save_to_disk(str(place / "train"))
    shutil.rmtree(place / "cache")


FORMS: dict[str, Callable[[Path, Path], None]] = {
    "parquet-hf": as_datasets_writes,
    "parquet": as_converted,
    "webdataset": webdataset,
    "list": list_of_paths,
    "small": small,
    "mds": mds,
    "litdata": litdata,
    "arrow": arrow,
}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("count", type=int)
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    make(args.folder.resolve(), args.count)
    return 0


if __name__ == "__main__":
    sys.exit(main())
