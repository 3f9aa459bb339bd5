"""Reads the weights that a model starts from: of torchvision, timm, the Hub, a file or a run."""

from __future__ import annotations

import fcntl
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from raytrain_ddp.config.sections import ModelConfig
from raytrain_ddp.errors import CheckpointError, ConfigError, PreflightError
from raytrain_ddp.tasks.model_zoo import TIMM, arguments, timm_name

if TYPE_CHECKING:
    from torch import Tensor

FILES = (".safetensors", ".pth", ".pt", ".bin")
HUB = "hf-hub:"  # timm's prefix of a repository of the Hugging Face Hub


def weights_field(config: ModelConfig) -> str:
    """The field that names the weights, with its value."""
    if config.weights is None:
        return f"model.name = {config.name!r}"
    return f"model.weights = {config.weights!r}"


def needed_arguments(config: ModelConfig) -> dict[str, Any]:
    """What torchvision's builders themselves set with these weights."""
    if config.name.startswith(TIMM):
        return {}
    from torchvision.models import get_model_weights

    wanted = get_model_weights(config.name)[config.weights]
    if config.name in ("googlenet", "inception_v3"):
        return {"transform_input": True}
    if config.name.startswith("vit_"):
        return {"image_size": wanted.meta["min_size"][0]}
    return {"input_size": wanted.meta["min_size"]} if config.name.startswith("maxvit") else {}


def pretrained_state(config: ModelConfig) -> Mapping[str, Tensor]:
    """The state of the pretrained model of torchvision or timm, with its own head."""
    import torch

    make: Callable[[], Any]
    if config.name.startswith(TIMM):
        import timm

        model, tag = timm_name(config.name)
        tag = tag or (config.weights or "").replace("DEFAULT", "")
        full = ".".join(filter(None, (model, tag)))
        if not timm.is_model_pretrained(full):
            raise ConfigError(f"{weights_field(config)}: timm has no pretrained weights of {full}.")
        place = f"timm's {full}"
        remedy = "Or download its weights elsewhere, and set model.weights to that file."
        make = lambda: timm.create_model(full, pretrained=True, **arguments(config))  # noqa: E731
    else:
        from torchvision.models import get_model, get_model_weights

        wanted = get_model_weights(config.name)[config.weights]
        folder, file = f"{torch.hub.get_dir()}/checkpoints", wanted.url.rpartition("/")[2]
        place, remedy = wanted.url, f"Put {file} into {folder}."
        make = lambda: get_model(config.name, weights=wanted, progress=False)  # noqa: E731
    with _downloads(weights_field(config), place, remedy):
        return make().state_dict()  # type: ignore[no-any-return]


def _from_hub(weights: str) -> Mapping[str, Tensor]:
    from timm.models import load_state_dict_from_hf

    remedy = "Or download its weights elsewhere, and set model.weights to that file."
    with _downloads(f"model.weights = {weights!r}", weights, remedy):
        return load_state_dict_from_hf(weights.removeprefix(HUB), weights_only=True)  # type: ignore[no-any-return]


@contextmanager
def _downloads(given: str, place: str, remedy: str) -> Iterator[None]:
    """Raises PreflightError if what is called in this context fails."""
    import torch

    try:
        with _one_per_node(Path(torch.hub.get_dir()) / "checkpoints"):
            yield
    except Exception as error:  # of the network, as the Hub's libraries raise many kinds
        reason = " ".join(str(error).split())
        raise PreflightError(
            f"{given}: {place} cannot be downloaded ({reason}). {remedy}"
        ) from error


@contextmanager
def _one_per_node(folder: Path) -> Iterator[None]:
    """The first process of a node downloads, and the others find its files."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = (folder / ".raytrain.lock").open("w")
    except OSError:  # read-only: then there is nothing to download
        yield
        return
    with lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def stored_state(weights: str) -> tuple[Mapping[str, Tensor], Sequence[str]]:
    """Tensors of a file or a run, and the class names if these are known. Nothing in it is run:
    what needs more than tensors is refused."""
    from torch import Tensor

    if weights.startswith(HUB):
        return _from_hub(weights), ()
    if not weights.endswith(FILES):
        from raytrain_ddp.checkpoint.run_folder import (
            NoCheckpointError,
            find_checkpoint,
            recorded_classes,
        )

        try:
            found = find_checkpoint(weights)
            return found.tensors("model.safetensors"), recorded_classes(found)
        except NoCheckpointError as error:
            raise ConfigError(f"model.weights = {weights!r}: {error}") from None
        except CheckpointError as error:
            raise CheckpointError(f"model.weights = {weights!r}: {error}") from None
    from timm.models import load_state_dict  # also of timm's and torchvision's own training

    try:
        if zipfile.is_zipfile(weights):  # torch does not compare the checksums that it writes
            with zipfile.ZipFile(weights) as parts:
                if damaged := parts.testzip():
                    raise ValueError(f"{damaged} in it is damaged")
        state = load_state_dict(weights, weights_only=True)
    except Exception as error:  # a damaged file raises many kinds
        reason = " ".join(str(error).split()) or type(error).__name__
        for end in (" No automatic unsafe", " This is an internal"):  # its advice, its cause
            reason = reason.partition(end)[0]
        reason = reason.rstrip(".")
        raise ConfigError(f"model.weights = {weights!r}: it cannot be read: {reason}.") from error
    tensors = {key: value for key, value in state.items() if isinstance(value, Tensor)}
    if len(tensors) < len(state):
        other = next(key for key in state if key not in tensors)
        raise ConfigError(
            f"model.weights = {weights!r}: its {other!r} is not a tensor: save model.state_dict()."
        )
    return tensors, ()
