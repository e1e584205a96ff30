"""What all readers of drafts are strict about: exactly the tensors a config asks for, by file, name and shape."""

from collections.abc import Callable, Mapping
from typing import Protocol

from oxidize.runtime.errors import CheckpointError, UnsupportedModelError

REMEDY = "correct the config or fetch the draft again"  # where a checkpoint contradicts itself
OTHER_DRAFT = "use a draft of this very target"


class Shaped(Protocol):
    """What of a tensor can be checked before it is read."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Dimensions, outermost first."""
        ...


def check_tensors(
    where: object,
    tensors: Mapping[str, Shaped],
    shapes: Mapping[str, tuple[int, ...]],
    what: str,
    otherwise: str = "",
    called: Callable[[str], str] = str,
) -> None:
    """Exactly the tensors of `shapes`, each of its shape; errors name the file, the tensor and its shapes.

    where: what a tensor is missing from. what: the kind of draft, in words. otherwise: what else than another
    checkpoint helps. called: the name that a missing tensor would have in the file.
    """
    for name, shape in shapes.items():
        found = tensors.get(name)
        if found is None:
            raise CheckpointError(
                f"{where} has no tensor {called(name)}, expected shape {list(shape)}; it is incomplete, fetch it "
                f"again{otherwise}"
            )
        if found.shape != shape:
            raise CheckpointError(
                f"{tensor_label(found, name, where)} has shape {list(found.shape)}, expected {list(shape)}; config and "
                f"weights do not belong together, fetch both again{otherwise}"
            )
    for name, found in tensors.items():
        if name not in shapes:
            raise UnsupportedModelError(
                f"{tensor_label(found, name, where)} {list(found.shape)} is not part of {what} as its config describes "
                f"it, and this version does not know what it is for; use one without it{otherwise}"
            )


def tensor_label(tensor: object, name: str, where: object) -> str:
    """File and tensor, by the name it has there; `name` and `where` are for tensors that do not know."""
    stored = getattr(tensor, "tensor", tensor)  # readers wrap tensors to reshape them
    known = getattr(getattr(stored, "place", stored), "name", name)
    return f"{getattr(stored, 'path', where)}: tensor {known}"
