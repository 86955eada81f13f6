"""The optimizer of `overlap="step"`: each rank updates its own shares, and whole states go in and out.

`ShardedOptimizer` stands for a plain optimizer: the same parameter groups (a learning-rate schedule acts on them as
ever), the same format of state_dict, so that a checkpoint may be resumed in either mode and on any number of ranks.
What differs: `step` returns at once while updates and gathers go on behind it, and state_dict is collective.

Acting on flat shares is right only for optimizers that treat each element by itself. `ELEMENTWISE` lists those of
torch; others are refused by name, unless the caller vouches for them.
"""

from __future__ import annotations

import io
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

from exitwave.ingest.errors import UsageError
from exitwave.train.allreduce.shards import GroupShards, Piece, Share

__all__ = [
    "ELEMENTWISE",
    "ShardedOptimizer",
    "ShareStates",
    "check_optimizer",
    "describe_optimizer",
    "mark_unscaled",
    "whole_optimizer",
]

ELEMENTWISE = ("SGD", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "Adagrad", "Adadelta", "ASGD", "Rprop")


_PER_TENSOR = ("step", "mu", "eta", "mu_product")  # states of theirs that are one number a tensor


def check_optimizer(
    optimizer: torch.optim.Optimizer, parameters: Mapping[str, nn.Parameter], *, elementwise: bool
) -> list[int]:
    """The number of the optimizer's parameter group of each of `parameters`, in their order.

    Raises `UsageError` for an optimizer that is not element-wise and for parameters that only one of both knows.
    """
    kind = type(optimizer)
    if not elementwise and not (kind.__module__.startswith("torch.optim") and kind.__name__ in ELEMENTWISE):
        raise UsageError(
            f"overlap='step' updates each rank's share of the parameters as flat vectors, which is right only for "
            f"element-wise optimizers ({', '.join(ELEMENTWISE)}); {kind.__name__} is not known as one. Use "
            "overlap='backward', or wrap(optimizer, elementwise=True) if it treats every element by itself"
        )
    group_of: dict[int, int] = {}
    for number, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            group_of[id(parameter)] = number
    names = {id(parameter): name for name, parameter in parameters.items()}
    for name, parameter in parameters.items():
        if id(parameter) not in group_of:
            raise UsageError(f"{name} requires a gradient but is not in the optimizer: add it, or freeze it")
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.requires_grad and id(parameter) not in names:
                raise UsageError(
                    f"the optimizer holds a parameter {tuple(parameter.shape)} that the wrapped module does not have"
                )
    return [group_of[id(parameter)] for parameter in parameters.values()]


def describe_optimizer(optimizer: torch.optim.Optimizer, param_groups: Sequence[int]) -> dict[str, str]:
    """What ranks must agree on, readable."""
    settings = {
        f"optimizer parameter group {i}": ", ".join(f"{k}={v}" for k, v in sorted(group.items()) if k != "params")
        for i, group in enumerate(optimizer.param_groups)
    }
    return {"optimizer": type(optimizer).__name__, **settings, "parameters by group": str(list(param_groups))}


def mark_unscaled(scaler: Any, optimizer: torch.optim.Optimizer, found_inf: torch.Tensor) -> None:
    """Tell a `GradScaler` that the optimizer's gradients are unscaled, and whether some were not finite.

    It keeps this for itself (as FSDP's own scaler, we reach in): `step` reads it to skip, `update` to lower the scale.
    """
    from torch.amp.grad_scaler import OptState

    scaler._check_scale_growth_tracker("unscale_")
    state = scaler._per_optimizer_states[id(optimizer)]
    if state["stage"] is not OptState.READY:
        raise UsageError("unscale_ was already called for this optimizer since the last update")
    state["found_inf_per_device"] = {found_inf.device: found_inf}
    state["stage"] = OptState.UNSCALED


class ShareStates:
    """Updates shares by a copy of the plain optimizer that holds their state."""

    def __init__(self, plain: torch.optim.Optimizer) -> None:
        self._inner = object.__new__(type(plain))
        self._inner.__dict__.update({k: v for k, v in plain.__dict__.items() if k != "step"})  # schedulers patch `step`
        for hooks in ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"):
            self._inner.__dict__[hooks] = OrderedDict()
        self._inner.state = defaultdict(dict)

    def update(self, shards: GroupShards, shares: Sequence[Share], hyper: Sequence[Mapping[str, Any]]) -> None:
        """One optimizer step of `shares` with the settings `hyper` (one for each parameter group)."""
        by_group: dict[int, list[nn.Parameter]] = {}
        for share in shares:
            share.parameter.grad = share.gradient
            by_group.setdefault(share.param_group, []).append(share.parameter)
        self._inner.param_groups = [{**hyper[number], "params": params} for number, params in by_group.items()]
        if by_group:
            self._inner.step()

    def split(self, shards: GroupShards, share: Share) -> list[Share]:
        """A share becomes one for each of its tensors; so does its state."""
        state = self._inner.state.pop(share.parameter, {})
        parts = shards.split(share)
        for part in parts:
            begin = part.begin - share.begin
            cut = {k: _part(v, share.parameter, begin, part.parameter.numel()) for k, v in state.items()}
            if cut:
                self._inner.state[part.parameter] = cut
        return parts

    def put(self, share: Share, state: dict[str, Any]) -> None:
        self._inner.state[share.parameter] = state

    def get(self, share: Share) -> dict[str, Any]:
        found: dict[str, Any] = self._inner.state.get(share.parameter, {})
        return found

    def clear(self) -> None:
        self._inner.state.clear()


def _part(value: Any, whole: torch.Tensor, begin: int, count: int) -> Any:
    if isinstance(value, torch.Tensor) and value.shape == whole.shape:
        return value[begin : begin + count].clone()
    return value.clone() if isinstance(value, torch.Tensor) else value


# ------------------------------------------------------------------------------------------ whole states, in and out


def pack_states(shards: GroupShards, states: ShareStates) -> bytes:
    """This rank's states of one group, as bytes that `whole_states` reads."""
    rows = [
        {"pieces": [(p.member, p.start, p.stop) for p in share.pieces], "state": states.get(share)}
        for share in shards.shares
    ]
    buffer = io.BytesIO()
    torch.save(rows, buffer)
    return buffer.getvalue()


def whole_states(shards: GroupShards, packed: Sequence[bytes]) -> dict[int, dict[str, Any]]:
    """member -> its state, put together from all ranks' `pack_states`."""
    flat: dict[int, dict[str, Any]] = {}
    for one in packed:
        for row in torch.load(io.BytesIO(one), weights_only=True):
            count = sum(stop - start for _, start, stop in row["pieces"])
            begin = 0
            for member, start, stop in row["pieces"]:
                like = shards.members[member]
                into = flat.setdefault(member, {})
                for key, value in row["state"].items():
                    if isinstance(value, torch.Tensor) and value.shape == (count,) and key not in _PER_TENSOR:
                        whole = into.setdefault(key, value.new_zeros(like.numel()))
                        whole[start:stop] = value[begin : begin + stop - start]
                    else:
                        into[key] = value.clone() if isinstance(value, torch.Tensor) else value
                begin += stop - start
    return {member: {k: _shape_state(v, shards.members[member]) for k, v in s.items()} for member, s in flat.items()}


def _shape_state(value: Any, like: torch.Tensor) -> Any:
    if isinstance(value, torch.Tensor) and value.ndim == 1 and value.numel() == like.numel():
        return value.as_strided(like.shape, torch.empty_like(like, device="meta").stride())
    return value


def cut_states(shards: GroupShards, states: ShareStates, plain: Mapping[Any, dict[str, Any]]) -> None:
    """Take this rank's shares of the whole states `plain` (parameter -> state); shares of unlike tensors are split."""
    for share in list(shards.shares):
        wholes = [plain.get(shards.members[piece.member], {}) for piece in share.pieces]
        if not any(wholes):
            continue
        parts = [share] if _alike(wholes, share.pieces, shards) else states.split(shards, share)
        for part in parts:
            pairs = [(plain.get(shards.members[p.member], {}), p) for p in part.pieces]
            state: dict[str, Any] = {}
            for key in pairs[0][0]:
                values = [_cut(key, whole[key], shards.members[piece.member], piece) for whole, piece in pairs]
                is_flat = isinstance(values[0], torch.Tensor) and values[0].ndim == 1
                state[key] = torch.cat(values) if is_flat else values[0]
            if state:
                states.put(part, state)


def _alike(wholes: Sequence[Mapping[str, Any]], pieces: Sequence[Piece], shards: GroupShards) -> bool:
    """Whether tensors may share one state: the same keys, and the same value of what is not per element."""
    if len({tuple(whole) for whole in wholes}) > 1:
        return False
    for key in wholes[0]:
        scalars = [
            w[key].item() if isinstance(w[key], torch.Tensor) else w[key]
            for w, piece in zip(wholes, pieces, strict=True)
            if not _is_per_element(key, w[key], shards.members[piece.member])
        ]
        if scalars and (len(scalars) < len(wholes) or len(set(scalars)) > 1):
            return False
    return True


def _is_per_element(key: str, value: Any, parameter: torch.Tensor) -> bool:
    return isinstance(value, torch.Tensor) and value.shape == parameter.shape and key not in _PER_TENSOR


def _cut(key: str, value: Any, parameter: torch.Tensor, piece: Piece) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    if not _is_per_element(key, value, parameter):
        return value.clone()
    flat = torch.empty(parameter.numel(), dtype=value.dtype, device=value.device)
    flat.as_strided(parameter.shape, torch.empty_like(parameter, device="meta").stride()).copy_(value)
    return flat[piece.start : piece.stop]


class ShardedOptimizer(torch.optim.Optimizer):
    """See the module's text. Made by `GroupedAllreduce.wrap`.

    `load_state_dict` and `state_dict` are called by every rank; `state_dict` waits for what is under way.
    """

    def __init__(
        self,
        plain: torch.optim.Optimizer,
        *,
        step: Callable[[], None],
        discard: Callable[[], None],
        collect: Callable[[], dict[nn.Parameter, dict[str, Any]]],
        deal_out: Callable[[Mapping[Any, dict[str, Any]]], None],
    ) -> None:
        super().__init__(plain.param_groups, plain.defaults)
        self.param_groups = plain.param_groups
        self._plain = plain
        self._begin_step, self._discard, self._collect, self._deal_out = step, discard, collect, deal_out

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update this rank's shares and gather the parameters, behind what follows. Returns at once.

        A `closure` (forward and backward) is called once, first, as element-wise optimizers do.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._begin_step()
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget gradients; a reduction that no `step` followed is dropped."""
        self._discard()
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.grad = None

    def state_dict(self) -> dict[str, Any]:
        """The plain optimizer's, whole, on every rank."""
        with self.whole() as plain:
            return plain.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """What `state_dict` of this or the plain optimizer gave, on any number of ranks."""
        self._plain.load_state_dict(state_dict)
        self.param_groups = self._plain.param_groups
        self._deal_out(self._plain.state)
        self._plain.state = defaultdict(dict)

    def whole(self) -> _Whole:
        """A context: the plain optimizer, holding the whole state while it lasts (every rank enters it)."""
        return _Whole(self._plain, self._collect)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        if hasattr(self, "_plain"):
            raise UsageError("overlap='step': parameters cannot be added to a wrapped optimizer; wrap it afterwards")
        super().add_param_group(param_group)


def whole_optimizer(optimizer: torch.optim.Optimizer) -> AbstractContextManager[torch.optim.Optimizer]:
    """A context: a plain optimizer that holds the whole state, of a sharded one (every rank enters it) or of any."""
    return optimizer.whole() if isinstance(optimizer, ShardedOptimizer) else nullcontext(optimizer)


class _Whole:
    def __init__(self, plain: torch.optim.Optimizer, collect: Callable[[], dict[nn.Parameter, dict[str, Any]]]) -> None:
        self._plain, self._collect = plain, collect

    def __enter__(self) -> torch.optim.Optimizer:
        self._plain.state = defaultdict(dict)
        for parameter, state in self._collect().items():
            self._plain.state[parameter] = state
        return self._plain

    def __exit__(self, *exception: object) -> None:
        self._plain.state = defaultdict(dict)
