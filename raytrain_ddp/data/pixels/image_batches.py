"""Makes batches of images: decodes, crops, resizes and augments on the host, as uint8.

Operations that are cheap for whole batches (flip, normalize, erase, mix) run on the device: see
gpu_augment.py. All random choices come from the sample's own `Draws`.
"""

from __future__ import annotations

import logging
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from raytrain_ddp.config.sections import AugmentConfig, DataConfig
from raytrain_ddp.data.loading.sources import Batch, Data, ImageSource
from raytrain_ddp.data.order.sample_rng import Draws
from raytrain_ddp.data.pixels.auto_augment import apply_policy, policy_draws
from raytrain_ddp.data.pixels.cropping import CENTER_SHARE, crop_draws, place_image
from raytrain_ddp.data.pixels.decoding import EncodedImage, open_encoded_image, reason_for
from raytrain_ddp.data.pixels.gpu_augment import ERASE_DRAWS, erase_boxes, partners_of
from raytrain_ddp.errors import DataError, printable

_log = logging.getLogger("raytrain_ddp")
_CROP, _FLIP, _POLICY, _ERASE = range(4)  # streams of random numbers
_GROWS_BY = 32  # pixels

OnBad = Callable[[int, str], None]


def image_data(
    source: ImageSource,
    config: DataConfig,
    augment: AugmentConfig | None,
    classes: int,
    on_bad: OnBad | None = None,
) -> Data:
    """Batches of {"image": uint8 (n, 3, height, width), channels last; "label": int64 (n,), or
    float32 (n, targets)}; also {"flip": bool (n,)}, {"erase": (n, 4)}, {"partner": int64 (n,)}
    where `augment` asks for them.

    Depending on `config.bad_records`, a bad record is an error or is omitted from its batch.

    Args:
        augment: None for evaluation, which uses the center of each image.
        on_bad: called with the row of a bad record, which is omitted, and why it is bad; instead of
            what `config.bad_records` says. Only without `augment`.
    """
    if augment is None:
        config = replace(
            config, image_size=config.eval_size or config.image_size, start_size=0, grow_epochs=0
        )
        plain, share = AugmentConfig(crop="none"), config.eval_crop
        return Data(source, _Collate(source, config, plain, classes, share, on_bad))
    return Data(source, _Collate(source, config, augment, classes))


def _stacked(labels: Sequence[Any]) -> torch.Tensor:
    if labels and isinstance(labels[0], np.ndarray):
        return torch.from_numpy(np.stack(labels))
    return torch.tensor(labels, dtype=torch.int64)


def device_augmentation(
    augment: AugmentConfig, draws: Draws, size: tuple[int, int]
) -> dict[str, torch.Tensor]:
    """The operations that the device applies to a batch: "flip", "erase" and "partner", see above.

    Args:
        size: height and width of the images.
    """
    made: dict[str, torch.Tensor] = {}
    if augment.flip:
        made["flip"] = torch.from_numpy(draws.uniform(1, _FLIP)[:, 0] < 0.5)
    if augment.erase:
        made["erase"] = erase_boxes(size, augment.erase, draws.uniform(ERASE_DRAWS, _ERASE))
    if augment.mixup or augment.cutmix:
        made["partner"] = partners_of(draws.rows)
    return made


def side_in(config: DataConfig, epoch: int) -> int:
    """The side of the square images in an epoch, in pixels; 0: as stored."""
    if epoch >= config.grow_epochs:
        return config.image_size
    grown = (config.image_size - config.start_size) * epoch // config.grow_epochs
    return config.start_size + grown // _GROWS_BY * _GROWS_BY


_Bytes = npt.NDArray[np.uint8]


class BatchMemory:
    """Memory of batches, used again as soon as no tensor refers to it: fresh memory costs a page
    fault per 4 KiB. Several threads may use it; a copy in another process begins empty."""

    def __init__(self) -> None:
        self._free: deque[_Bytes] = deque()

    def __reduce__(self) -> tuple[Any, ...]:
        return BatchMemory, ()

    def empty(self, images: int, height: int, width: int) -> Tensor:
        """Uninitialized uint8 (images, 3, height, width), channels last."""
        shape = images, height, width, 3
        size = prod(shape)
        memory = self._taken(size)
        part = memory[:size]  # alive as long as any tensor refers to it
        weakref.finalize(part, self._free.append, memory).atexit = False
        return torch.from_numpy(part).view(shape).permute(0, 3, 1, 2)

    def _taken(self, size: int) -> _Bytes:
        """Free memory of this size or larger; drops what is too small by now."""
        try:
            while len(memory := self._free.pop()) < size:
                pass
        except IndexError:
            return np.empty(size, np.uint8)
        return memory


@dataclass(eq=False, repr=False)
class _Collate:
    source: ImageSource
    config: DataConfig
    augment: AugmentConfig
    classes: int
    share: float = CENTER_SHARE
    on_bad: OnBad | None = None
    _reported: set[int] = field(default_factory=set, init=False)  # rows already reported
    _memory: BatchMemory = field(default_factory=BatchMemory, init=False)

    def __call__(self, records: Sequence[tuple[Any, Any]], draws: Draws) -> Batch:
        crops = draws.uniform(crop_draws(self.augment), _CROP).tolist()
        policies = draws.uniform(policy_draws(self.augment), _POLICY).tolist()
        images = torch.empty((0, 3, 1, 1), dtype=torch.uint8)
        outs: Sequence[torch.Tensor] = ()  # of one image each
        kept: list[int] = []
        size = (1, 1)
        for place, picture in self._pictures(records, draws.rows.tolist()):
            own = self._size(picture, draws.epoch)
            if not outs:
                images, size = self._memory.empty(len(records), *own), own
                outs = images.split(1)
            elif own != size:
                sizes = f"{size} and {own}"
                flag = "--image-size" if self.on_bad else "--data.image-size"
                raise DataError(f"images of unequal size, {sizes}: set {flag}.")
            out = outs[len(kept)]
            try:
                scaling, mode = self.config.jpeg_scaling, self.config.interpolation
                place_image(out, picture, self.augment, crops[place], scaling, mode, self.share)
            except Exception as error:  # decoders raise any type
                self._refuse(int(draws.rows[place]), error)
                continue
            if policies[place]:
                out[0] = apply_policy(out[0], self.augment, policies[place])
            kept.append(place)
        labels = _stacked([records[place][1] for place in kept])
        made = device_augmentation(self.augment, draws.of(kept), size)
        return {"image": images[: len(kept)], "label": labels, **made}

    def _pictures(
        self, records: Sequence[tuple[Any, Any]], rows: list[int]
    ) -> Iterator[tuple[int, EncodedImage]]:
        """(place, opened picture) of each record that can be opened; one for all repeats of a
        row."""
        before, picture, once = -1, None, len(set(rows)) == len(rows)
        for place, (row, (image, label)) in enumerate(zip(rows, records, strict=True)):
            if isinstance(label, int) and not 0 <= label < self.classes:
                where = self.source.where(row)
                raise DataError(
                    f"{where}: label {label} is not in the range 0 to {self.classes - 1}."
                )
            try:
                if row != before or picture is None:
                    picture = open_encoded_image(image, self.config.exif_orientation, once)
            except Exception as error:
                self._refuse(row, error)
                picture = None
            else:
                yield place, picture
            before = row

    def _size(self, picture: EncodedImage, epoch: int) -> tuple[int, int]:
        """(height, width) of the model's input."""
        side = side_in(self.config, epoch)
        if side or self.augment.crop == "random":
            return side or picture.width, side or picture.width
        return picture.height, picture.width

    def _refuse(self, row: int, reason: Exception) -> None:
        if self.on_bad is not None:
            self.on_bad(row, reason_for(reason))
            return
        line = f"{self.source.where(row)}: not a readable image: {reason_for(reason)}"
        if self.config.bad_records == "error":
            remedy = "Repair or remove it, or set --data.bad-records skip."
            raise DataError(f"{line}. {remedy}") from None
        if row not in self._reported:
            self._reported.add(row)
            _log.warning("skipped %s", printable(line))
