"""Set before torch and vLLM are imported, as the command line does."""

from stagevox.config.env import prepare_inline_process

prepare_inline_process()
