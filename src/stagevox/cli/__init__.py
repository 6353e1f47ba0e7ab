"""The command line. Its modules import torch and vLLM only once all they can check without them is checked."""
