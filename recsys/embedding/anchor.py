"""The anchor: an empty parameter that stands for the rows of tables in a model.

Rows are no parameters, so only their own optimizer knows them. The anchor brings torch's habits to them, or makes these
fail aloud. The rows take gradients if it does. While rows have gradients, it has one that refuses to be clipped or
unscaled, because the caller means those of the rows as well.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim.optimizer import register_optimizer_step_pre_hook

__all__ = ["Anchor", "refuse_scaled_losses"]

_REFUSED = frozenset({
    "norm", "vector_norm", "linalg_vector_norm", "_foreach_norm", "abs", "max", "min", "isfinite", "isnan", "isinf",
    "mul_", "div_", "_foreach_mul_", "_foreach_div_", "nan_to_num_", "copy_",
    "clamp_", "clip_", "clamp_min_", "clamp_max_",
    "_foreach_clamp_min_", "_foreach_clamp_max_", "_amp_foreach_non_finite_check_and_unscale_",
})  # fmt: skip


class Anchor(nn.Parameter):
    """An empty parameter in place of rows.

    Attributes
    ----------
    stepping
        Called before an optimizer that has this parameter takes a step; None does nothing.
    is_applied_at_once
        Whether a backward pass applies the gradients of the rows, so that no call can unscale them before.
    """

    stepping: Callable[[], None] | None = None
    is_applied_at_once = False

    def __new__(cls) -> "Anchor":
        """Make one that takes gradients."""
        return super().__new__(cls, torch.empty(0), requires_grad=True)

    def mark(self, refusal: str) -> None:
        """Note that rows have gradients; a call that reads this parameter's gradient raises `refusal`."""
        if not isinstance(self.grad, _Mark) or self.grad.is_zero:
            self.grad: Tensor | None = _Mark.of(refusal, self.device)

    def move(self, device: torch.device) -> None:
        """Lie on a device, where code that asks a model's first parameter for its device looks for it."""
        mark, self.grad = self.grad, None
        self.data = torch.empty(0, device=device)
        if isinstance(mark, _Mark) and not mark.is_zero:
            self.mark(mark.refusal)

    @property
    def is_marked(self) -> bool:
        """Whether rows have gradients, which were not set to None or zero since."""
        return self.grad is not None and not (isinstance(self.grad, _Mark) and self.grad.is_zero)


class _Mark(torch.Tensor):
    """An empty gradient: optimizers find no value in it, and calls that read or change its values raise."""

    refusal: str
    is_zero: bool

    @classmethod
    def of(cls, refusal: str, device: torch.device) -> "_Mark":
        mark = torch.empty(0, device=device).as_subclass(cls)
        mark.refusal, mark.is_zero = refusal, False
        return mark

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = getattr(func, "__name__", "")
        marks = [one for part in args for one in (part if isinstance(part, list | tuple) else [part])]
        marks = [one for one in marks if isinstance(one, _Mark)]
        # `copy_` and the like are refused only if they change the mark itself.
        if name in _REFUSED and marks and (marks[0] is args[0] or isinstance(args[0], list | tuple)):
            raise RuntimeError(marks[0].refusal)
        if name in ("zero_", "_foreach_zero_"):
            for mark in marks:
                mark.is_zero = True
        # The result is a plain tensor, unless it is another name of the mark.
        with torch._C.DisableTorchFunctionSubclass():
            found = func(*args, **(kwargs or {}))
        if name == "detach" or func == torch.Tensor.data.__get__:  # type: ignore[attr-defined]
            return cls.of(marks[0].refusal, found.device)
        return found


def _before_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    parameters = [one for group in optimizer.param_groups for one in group["params"]]
    for anchor in parameters:
        if not isinstance(anchor, Anchor) or anchor.stepping is None or getattr(optimizer, "steps_rows", False):
            continue
        if all(isinstance(one, Anchor) for one in parameters):
            raise RuntimeError(
                f"{type(optimizer).__name__} has only the parameter that stands for the rows of tables, updated by "
                "their module's own optimizer: give the tables optimizer= instead; it is module.optimizer then"
            )
        anchor.stepping()


register_optimizer_step_pre_hook(_before_step)


@functools.cache
def refuse_scaled_losses() -> None:
    """Let every GradScaler refuse losses whose backward pass would apply scaled gradients to rows.

    Gradients and later steps of optimizers do not show that a loss was scaled, so `scale` itself checks.
    """
    scale = GradScaler.scale

    @functools.wraps(scale)
    def checked(scaler: GradScaler, outputs: Any) -> Any:
        scaled = scale(scaler, outputs)
        if scaler.is_enabled():
            losses = [scaled] if isinstance(scaled, Tensor) else scaled if isinstance(scaled, list | tuple) else []
            _check_unscaled([loss.grad_fn for loss in losses if isinstance(loss, Tensor)])
        return scaled

    GradScaler.scale = checked  # type: ignore[assignment, method-assign]


def _check_unscaled(nodes: list[Any]) -> None:
    """Raise RuntimeError if autograd's graph leads to rows whose gradients are applied at once."""
    seen = set(nodes)
    while nodes:
        node = nodes.pop()
        if node is None:
            continue
        anchor = getattr(node, "variable", None)
        if isinstance(anchor, Anchor) and anchor.is_applied_at_once:
            raise RuntimeError(
                "GradScaler.scale(): the loss comes from rows of tables with update='backward', whose backward pass "
                "would apply the scaled gradients; open the tables with update='step', and call "
                "scale_gradients(1 / scaler.get_scale()) of their module before module.optimizer.step()"
            )
        found = [other for other, _ in node.next_functions if other not in seen]
        seen.update(found)
        nodes += found
