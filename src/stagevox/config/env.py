"""Environment variables that a process with engines in it needs, set before torch and vLLM are imported.

An operator's own values win.

``OMP_NUM_THREADS=1``
    torch reads it once, when it is imported. Small models on few cores spend more time handing work to threads than doing it.
``NUMBA_NUM_THREADS=1``
    vLLM's n-gram drafter compiles with numba, whose first parallel loop sets OpenMP's thread count for the whole process: every
    engine in it then runs on all cores, and on a busy machine its steps take ten times as long.
``ONEDNN_PRIMITIVE_CACHE_CAPACITY``
    oneDNN keeps the code it generates for each shape; its 1024 let the vocoder of the packaged voice grow from 0.7 to more than
    1.1 GiB in 1,000 requests. With 64 it stands still at 0.73 GiB. A vocoder of many convolutions needs more, or it compiles
    them anew for every chunk: those of the Qwen families take twice as long with 64 as with the 512 that they ask for.
    A stage's own process keeps what the stage asks for, one process for all stages 512.
``VLLM_ENABLE_V1_MULTIPROCESSING=0``
    The engines live in this process, where a driver steps them.
``VLLM_LOGGING_LEVEL=ERROR``, ``TORCH_CPP_LOG_LEVEL=ERROR``
    vLLM and torch tell of every start at length; ``INFO`` brings that back.
"""

from __future__ import annotations

import logging
import os
import warnings

INLINE_DEFAULTS = {
    "OMP_NUM_THREADS": "1",
    "NUMBA_NUM_THREADS": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "TORCH_CPP_LOG_LEVEL": "ERROR",
}


FEW_KERNELS = 64
MANY_KERNELS = 512
"""Kernels that oneDNN keeps, about 0.4 MB each for a convolution."""


def prepare_inline_process(kernels: int = MANY_KERNELS) -> None:
    """Set what is not set."""
    for name, value in {**INLINE_DEFAULTS, "ONEDNN_PRIMITIVE_CACHE_CAPACITY": str(kernels)}.items():
        os.environ.setdefault(name, value)


def hush_libraries() -> None:
    """Keep what libraries tell their developers at import off a terminal; for commands, not for a program that imports us."""
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"vllm\.")
    logging.getLogger("torch._library.triton").setLevel(logging.ERROR)
