"""Loads the weights of a checkpoint into a model."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn

from raytrain_ddp.checkpoint.snapshot import decode_tensors
from raytrain_ddp.checkpoint.store import Checkpoint
from raytrain_ddp.checkpoint.tensor_places import view_tensors
from raytrain_ddp.errors import ConfigError
from raytrain_ddp.training.gradients.buffer_sync import own_memory
from raytrain_ddp.training.state.shared_checkpoint import TensorCheckpoint


def load_model(model: nn.Module, checkpoint: Checkpoint) -> None:
    """Loads the weights of `checkpoint` into `model`.

    Raises:
        ConfigError: the model has other tensors.
    """
    own_memory(model)
    fill(model, tensors_of(checkpoint, "model.safetensors"))


def fill(model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Copies `tensors` into `model`. Raises ConfigError if these are not all that it has."""
    try:
        model.load_state_dict(tensors)
    except RuntimeError as error:
        first, *more = str(error).splitlines()[1:] or [str(error)]
        others = f" (and {len(more)} more)" if more else ""
        raise ConfigError(
            "the model is not the one of the checkpoint, so its code has changed: "
            f"{first.strip().rstrip('.')}{others}. Restore the code, or train the new model under "
            "another --name."
        ) from error


def tensors_of(checkpoint: Checkpoint, filename: str) -> dict[str, Tensor]:
    """Those of a file, in the memory that it was read into."""
    if isinstance(checkpoint, TensorCheckpoint):
        return checkpoint.tensors(filename)
    data = checkpoint.view(filename)
    return decode_tensors(data) if data.readonly else view_tensors(data)
