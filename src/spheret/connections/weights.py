"""Roles of parameters, for optimizers and for the weight constraints of a scheme.

A module may define two methods, each about the parameters that it owns directly. ``parameter_roles()`` returns {name:
ParameterRole}: whether an optimizer decays the parameter, and the factor on its learning rate. ``stream_axes()``
returns {name: axis}: the axis of a weight matrix that has the width of the residual stream, 1 for a matrix that reads
the stream and 0 for one that writes it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

Kind = Literal["", "qkv", "mlp-out"]
"""Weight matrices with a learning rate of their own: the projection to queries, keys and values, and the MLP's last."""


class ParameterRole(NamedTuple):
    """Whether an optimizer decays a parameter, the factor on its learning rate, and the kind of matrix that it is."""

    decay: bool
    lr_scale: float = 1.0
    kind: Kind = ""


# PyTorch's own modules have no parameter_roles(), so their roles are defined here.
_DECAYED = (nn.Linear, nn.Embedding)
_NORMS = (nn.LayerNorm, nn.RMSNorm)


def parameter_roles(model: nn.Module) -> dict[str, ParameterRole]:
    """The role of every parameter of ``model``, by its qualified name. A shared parameter appears once.

    ``Linear`` and ``Embedding`` weights are decayed. Biases and the parameters of norms are not.

    Raises:
        ValueError: a parameter without a role.
    """
    roles: dict[str, ParameterRole] = {}
    seen: set[nn.Parameter] = set()
    for prefix, module in model.named_modules():
        answers = _answers(module)
        for name, parameter in module.named_parameters(recurse=False):
            if parameter in seen:  # a tied weight must not enter the optimizer twice
                continue
            seen.add(parameter)
            qualified = f"{prefix}.{name}" if prefix else name
            if name not in answers:
                raise ValueError(
                    f"no optimizer role for parameter {qualified!r}: give {type(module).__name__} a method "
                    "parameter_roles() that names it"
                )
            roles[qualified] = answers[name]
    return roles


def _answers(module: nn.Module) -> dict[str, ParameterRole]:
    method = getattr(module, "parameter_roles", None)
    if callable(method):
        answers: dict[str, ParameterRole] = method()
        return answers
    if isinstance(module, (*_DECAYED, *_NORMS)):
        weight = ParameterRole(decay=isinstance(module, _DECAYED), kind=getattr(module, "kind", ""))
        return {"weight": weight, "bias": ParameterRole(decay=False)}
    return {}


def matrices(model: nn.Module) -> Iterator[tuple[nn.Parameter, int]]:
    """Every weight matrix of ``model`` that reads or writes the residual stream, with the axis of the stream."""
    for module in model.modules():
        method = getattr(module, "stream_axes", None)
        for name, axis in method().items() if callable(method) else ():
            yield module.get_parameter(name), axis


@torch.no_grad()
def normalise(weight: Tensor, axis: int) -> None:
    """Divide ``weight`` in place by its norms along ``axis``. A zero row or column stays zero."""
    norms = _norms(weight, axis)
    weight.copy_(weight / norms.clamp_min(torch.finfo(norms.dtype).tiny))


@torch.no_grad()
def bound(weight: Tensor, axis: int) -> None:
    """Scale rows or columns of ``weight`` whose norm along ``axis`` is above 1 back to norm 1, in place."""
    weight.copy_(weight / _norms(weight, axis).clamp_min(1.0))


def _norms(weight: Tensor, axis: int) -> Tensor:
    # Norms of bfloat16 weights are summed in float32: with 8 bits, a sum over 1,000 entries stops growing.
    dtype = torch.promote_types(weight.dtype, torch.float32)
    return torch.linalg.vector_norm(weight, dim=axis, keepdim=True, dtype=dtype)
