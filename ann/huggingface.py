"""The decoder in a model of transformers; the same as :mod:`memhier.ann.decoder.module.huggingface`."""

from memhier.lazy import extra_for

with extra_for(__name__):
    from memhier.ann.decoder.module.huggingface import AcceleratedHead, accelerate, rescore, undo

__all__ = ["AcceleratedHead", "accelerate", "rescore", "undo"]
