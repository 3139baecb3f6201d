"""The look-ups that a model makes of a batch, learned from one step."""

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import reduce
from typing import Any

import torch
from torch import Tensor, nn

from memhier.recsys.embedding.module import TableModule

__all__ = ["trace_ids"]

_PLAIN = (type(None), bool, int, float, str, torch.dtype)

Get = Callable[[Any], Any]


def trace_ids(model: nn.Module, batch: Any, step: Callable[[Any], Any] | None = None) -> Get:
    """Make one step, and return the `ids` of :func:`lookahead` for batches like this one.

    The step runs in ``eval()`` and without gradients, so it trains nothing and gives no id a row. Each argument of a
    look-up has to be a part of the batch as it is: an item, an attribute, or a dict, list or tuple of such; or the same
    for all batches. Later batches have to have their parts at the same places.

    Parameters
    ----------
    model
        As of :func:`lookahead`.
    batch
        A batch of the loader.
    step
        Called with the batch; by default ``model(batch)``.

    Raises
    ------
    ValueError
        For a model that makes no look-up, or one of ids that are no part of the batch, or equal to several parts: write
        `ids` yourself then.

    Examples
    --------
    >>> import tempfile
    >>> import torch
    >>> from memhier.recsys import EmbeddingBag, lookahead, trace_ids
    >>> batches = [{"items": torch.tensor([[1, 2]])}, {"items": torch.tensor([[2, 3]])}]
    >>> with EmbeddingBag(10, 4, dram="32MiB", path=tempfile.mkdtemp()) as bag:
    ...     ids = trace_ids(bag, batches[0], lambda batch: bag(batch["items"]))
    ...     for batch in lookahead(batches, bag, ids=ids):
    ...         bag(batch["items"]).sum().backward()
    """
    modules = {name: module for name, module in model.named_modules() if isinstance(module, TableModule)}
    parts, calls = [*_parts(batch)], dict[str, list[tuple[Get, ...]]]()

    def note(name: str, module: nn.Module, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
        given = inspect.signature(module.forward).bind(*arguments, **options)
        given.apply_defaults()
        calls.setdefault(name, []).append(
            tuple(_place(parts, value, f"{name or 'model'}: {key}") for key, value in given.arguments.items())
        )

    with _watched(model, modules, note), torch.no_grad():
        model(batch) if step is None else step(batch)
    silent = sorted({*modules} - {*calls})
    if silent or not modules:
        raise ValueError(f"model: no look-up of {silent[0]!r} in this step" if silent else "model: has no tables")

    def ids(batch: Any) -> Any:
        found = {name: [tuple(get(batch) for get in call) for call in calls[name]] for name in modules}
        return found if len(found) > 1 else next(iter(found.values()))

    return ids


@contextmanager
def _watched(model: nn.Module, modules: Mapping[str, nn.Module], note: Callable[..., None]) -> Iterator[None]:
    """Have the arguments of all look-ups noted, with the model in evaluation."""

    def hook(name: str) -> Callable[..., None]:
        return lambda module, arguments, options: note(name, module, arguments, options)

    hooks = [module.register_forward_pre_hook(hook(name), with_kwargs=True) for name, module in modules.items()]
    trained = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for handle in hooks:
            handle.remove()
        for module in trained:
            module.training = True


def _parts(batch: Any) -> Iterator[tuple[list[Get], Any]]:
    """Yield the parts of a batch, itself the first, each with the steps that lead there."""
    waiting: list[tuple[list[Get], Any]] = [([], batch)]
    seen = set[int]()
    while waiting:
        steps, part = waiting.pop(0)
        yield steps, part
        if isinstance(part, (Tensor, *_PLAIN)) or id(part) in seen:
            continue
        seen.add(id(part))
        if isinstance(part, Mapping):
            waiting += [([*steps, _item(key)], value) for key, value in part.items()]
        elif isinstance(part, list | tuple):
            waiting += [([*steps, _item(number)], value) for number, value in enumerate(part)]
        else:
            waiting += [([*steps, _attribute(name)], value) for name, value in getattr(part, "__dict__", {}).items()]


def _item(key: Any) -> Get:
    return lambda whole: whole[key]


def _attribute(name: str) -> Get:
    return lambda whole: getattr(whole, name)


def _place(parts: list[tuple[list[Get], Any]], value: Any, asked: str) -> Get:
    """Return a function that finds an argument in a batch."""
    if isinstance(value, _PLAIN):
        return lambda batch: value
    same = [steps for steps, part in parts if part is value]
    if not same and isinstance(value, Tensor):
        same = [steps for steps, part in parts if isinstance(part, Tensor) and _equal(part, value)]
    if len(same) > 1:
        raise ValueError(f"{asked}: equals {len(same)} parts of the batch; write `ids` yourself")
    if same:
        return lambda batch: reduce(lambda whole, get: get(whole), same[0], batch)
    if isinstance(value, Mapping):
        named = {key: _place(parts, each, f"{asked}[{key!r}]") for key, each in value.items()}
        return lambda batch: {key: get(batch) for key, get in named.items()}
    if isinstance(value, list | tuple):
        each_of = [_place(parts, each, f"{asked}[{number}]") for number, each in enumerate(value)]
        make = getattr(value, "_make", type(value))  # of a named tuple, or of a list or tuple
        return lambda batch: make(get(batch) for get in each_of)
    raise ValueError(f"{asked}: {type(value).__name__} is no part of the batch; write `ids` yourself")


def _equal(part: Tensor, value: Tensor) -> bool:
    """Whether a part has the values that were asked for, on whatever device."""
    if any(one.is_nested or one.is_meta or one.layout != torch.strided for one in (part, value)):
        return False
    return part.dtype == value.dtype and part.shape == value.shape and torch.equal(part.cpu(), value.cpu())
