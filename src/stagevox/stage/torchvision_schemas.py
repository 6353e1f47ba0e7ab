"""Make ``import torchvision`` work beside a CPU build of torch.

PyPI's torchvision is linked against CUDA. Beside CPU torch its compiled operators don't load; torchvision tolerates that, except
that it registers fake kernels for ``nms`` and ``qnms`` without asking, and fails with "operator torchvision::nms does not exist".
With the two schemas declared it imports, and the transforms that vLLM's vision models need are pure torch. The operators
themselves stay undefined: ``torchvision.ops.nms`` raises "Couldn't load custom C++ ops".

torch calls :func:`declare_missing_schemas` at the end of its own import, through its ``torch.backends`` entry points: vLLM
imports torchvision long before it loads plugins, and a spawned engine process before it runs any code of ours.
"""

from __future__ import annotations

from importlib.machinery import PathFinder
from importlib.util import find_spec
from typing import Any

_SCHEMAS = {
    "nms": "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms": "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
}

# A declaration lives as long as its Library object.
_libraries: list[Any] = []


def declare_missing_schemas() -> bool:
    """Declare the operator schemas that ``import torchvision`` needs, if its compiled operators can't load.

    Doesn't import torchvision. Does nothing under a CUDA build of torch, or when torchvision is absent or loads its own
    operators; calling it again is harmless.

    Returns:
        Whether this call declared anything.
    """
    import torch  # here, or importing this module first would have torch call into it half made

    if torch.version.cuda is not None or _compiled_operators_load():
        return False
    missing = {name: schema for name, schema in _SCHEMAS.items() if not hasattr(torch.ops.torchvision, name)}
    if not missing:
        return False
    library = torch.library.Library("torchvision", "FRAGMENT")
    for name, schema in missing.items():
        library.define(name + schema)
    _libraries.append(library)
    return True


def _compiled_operators_load() -> bool:
    """Whether there is nothing to mend: no torchvision, or one whose operators load (loading them twice is harmless)."""
    try:
        package = find_spec("torchvision")
    except ValueError:  # a stand-in that somebody put into sys.modules
        return True
    if package is None or not package.submodule_search_locations:
        return True
    extension = PathFinder.find_spec("_C", list(package.submodule_search_locations))
    if extension is None or extension.origin is None:
        return False
    import torch

    try:
        torch.ops.load_library(extension.origin)
    except OSError:
        return False
    return True
