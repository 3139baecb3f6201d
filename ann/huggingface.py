"""The decoder in a model of transformers; the same as :mod:`memhier.ann.decoder.module.huggingface`."""

try:
    from memhier.ann.decoder.module.huggingface import AcceleratedHead, accelerate, rescore, undo
except ModuleNotFoundError as _error:
    if _error.name != "torch":
        raise
    raise ImportError("memhier.ann.huggingface needs PyTorch: pip install 'memhier[torch]'") from _error

__all__ = ["AcceleratedHead", "accelerate", "rescore", "undo"]
