"""Name the modules and parameters of a wrapped net as the plain net does.

DDP(compile(net)): "module._orig_mod.blocks.0.w"        -->        "blocks.0.w"
"""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Collection, Mapping
from typing import Any

from torch import nn

Names = Callable[[str], str] | Mapping[str, Any] | None

# The attribute in which each wrapper keeps the wrapped module, by the name of its class.
_INNER_BY_WRAPPER = {
    "DistributedDataParallel": "module",
    "DataParallel": "module",
    "FullyShardedDataParallel": "_fsdp_wrapped_module",
    "OptimizedModule": "_orig_mod",
    "CheckpointWrapper": "_checkpoint_wrapped_module",
    "OffloadWrapper": "_checkpoint_wrapped_module",
}


class CanonicalNames:
    """The plain net's names of the modules, parameters and buffers of a net that may be wrapped.

    Attributes:
        modules: each module that is called, by its name; of a wrapper and its module, the inner one.
        params, buffers: each tensor, by its first name.
        aliases: the other names of tied parameters, each with the first.
        unseen: the names of compiled modules, whose insides no hook sees.
        shard_dims: the dimension along which this rank has a part of a plain parameter, by name.
        shard_group: the ranks that have the parts.

    Args:
        net: the net, or the part of it that this rank has.
        names: a function from a name here to the plain net's; or a table of prefixes, {"blocks.0": "blocks.6"}, or of
            fused projections, {"attn.qkv": ("attn.q", "attn.k", "attn.v")}, which parameters alone follow.
        shards, group: the dimension of plain parts by patterns of names, and the ranks that have them.
    """

    def __init__(
        self, net: nn.Module, names: Names = None, shards: Mapping[str, int] | None = None, group: Any = None
    ) -> None:
        self.modules = dict[str, nn.Module]()
        self.params, self.buffers = dict[str, nn.Parameter](), dict[str, Any]()
        self.aliases, self.unseen = dict[str, str](), list[str]()
        self.fused = dict[str, list[str]]()
        self._names = names
        self._first_name = dict[int, str]()
        self._walk(net, "", is_visible=True)
        self.shard_group, self.shard_dims = group, dict[str, int]()
        for pattern, dim in (shards or {}).items():
            matches = fnmatch.filter(self.params, pattern)
            if not matches:
                raise ValueError(f"shards= has {pattern!r}, which fits no parameter.")
            self.shard_dims |= dict.fromkeys(matches, dim)

    def rename(self, name: str) -> str:
        """Return a name as the plain net has it."""
        if callable(self._names):
            return self._names(name)
        for prefix, target in (self._names or {}).items():
            if isinstance(target, str) and (name == prefix or name.startswith(f"{prefix}.")):
                return target + name[len(prefix) :]
        return name

    def matching_modules(self, patterns: Collection[str]) -> dict[str, nn.Module]:
        """Return the net and the modules that fit a pattern, but those with a part of a plain parameter."""
        matches = {"", *(name for pattern in patterns for name in fnmatch.filter(self.modules, pattern))}
        # Their inputs and outputs are parts too, which the reference has whole.
        split_modules = {name.rpartition(".")[0] for name in self.shard_dims}
        return {name: self.modules[name] for name in self.modules if name in matches - split_modules}

    def _walk(self, module: nn.Module, path: str, is_visible: bool) -> None:
        # FSDP2 gives a module a class of another name, whose base is the module's own.
        inner_name = next(
            (_INNER_BY_WRAPPER[base.__name__] for base in type(module).__mro__ if base.__name__ in _INNER_BY_WRAPPER),
            "",
        )
        name = self.rename(path)
        # A module that torch.compile wraps or has compiled in place runs no hooks that are set later.
        is_compiled = inner_name == "_orig_mod" or getattr(module, "_compiled_call_impl", None) is not None
        if is_visible and (not inner_name or inner_name == "_orig_mod"):
            self.modules[name] = module
        if is_visible and is_compiled:
            self.unseen.append(name)
            if inner_name != "_orig_mod":
                self.modules.pop(name)
        for key, param in module.named_parameters(recurse=False):
            self._add_param(f"{path}.{key}" if path else key, param)
        for key, buffer in module.named_buffers(recurse=False):
            self.buffers[self.rename(f"{path}.{key}" if path else key)] = buffer
        for key, child in module.named_children():
            child_path = path if key == inner_name else f"{path}.{key}" if path else key
            self._walk(child, child_path, is_visible and not is_compiled)

    def _add_param(self, path: str, param: nn.Parameter) -> None:
        name = self.rename(path)
        targets = self._names.get(path.rpartition(".")[0]) if isinstance(self._names, Mapping) else None
        if targets is not None and not isinstance(targets, str):
            self.fused[name] = [f"{target}.{path.rpartition('.')[2]}" for target in targets]
        if id(param) in self._first_name:
            self.aliases[name] = self._first_name[id(param)]
            return
        self._first_name[id(param)] = name
        self.params[name] = param
