"""All that an mjlab environment carries from one step to the next, found by walking its managers, terms and entities.

Rows are [N, ...] tensors: one environment's share each. Shared is what all rows have together: numbers and texts inside
terms and their configs (command ranges, reward weights: what curricula move) and tensors of other shapes.
"""

# pyright: reportMissingImports=false

from __future__ import annotations

import dataclasses
import types
from typing import Any, Dict, Iterator, List, NamedTuple

import torch
from torch import Tensor

from rl_stagger.envs.base import expand_mask
from rl_stagger.errors import nearest

_PHYSICS = "qpos qvel act qacc_warmstart time ctrl mocap_pos mocap_quat qfrc_applied xfrc_applied eq_active".split()
_MANAGERS = ("action", "command", "observation", "reward", "metrics", "termination", "event")
_CACHES = ("_cached_data", "_obs_buffer")
"""Last sensor readings and observations: mjlab computes them again whenever they matter."""
_BUFFERS = ("CircularBuffer", "DelayBuffer")
_PLAIN = (bool, int, float, str, type(None))


class Part(NamedTuple):
    """One thing that somebody owns."""

    name: str
    """Dotted path from a root."""
    value: Any
    owner: Any
    """The dict, list, tuple or object that holds it, under `key`."""
    key: Any


class MjlabState:
    """Reads and writes the state of one `ManagerBasedRlEnv`, in place: MuJoCo-Warp shares the memory."""

    def __init__(self, env: Any) -> None:
        """To be made before the first reset: what has moved since then is what `shared` gives."""
        self._env = env
        self._curriculum = env.curriculum_manager  # taken out of the env during an evaluation
        self._first_numbers = {part.name: part.value for part in self._numbers()}
        self._first_tensors = {part.name: (part.value, part.value._version) for part in self._shared_tensors()}

    # -- rows ----------------------------------------------------------------------------------------------------
    def rows(self, identity: bool = False) -> Dict[str, Any]:
        """Name -> live [N, ...] of all that an episode carries; `identity`: what its row carries as well."""
        env, sim = self._env, self._env.sim
        rows: Dict[str, Any] = {"elapsed_steps": env.episode_length_buf}
        present = [name for name in _PHYSICS if getattr(sim.wp_data, name).size > 0]  # mjlab cannot wrap empty ones
        rows.update({f"physics.{name}": getattr(sim.data, name) for name in present})
        roots = {**self._managers(), "sensor": self._sensors(), "entity": self._entity_buffers()}
        if identity:
            rows.update({f"model.{name}": getattr(sim.model, name) for name in sorted(sim.expanded_fields)})
            roots["entity"] = {name: vars(entity) for name, entity in env.scene.entities.items()}
            roots["terrain"] = vars(env.scene.terrain) if env.scene.terrain is not None else {}
        rows.update({part.name: part.value for part in owned(roots) if self._is_row(part.value)})
        return rows

    def copy_rows(self, identity: bool = False) -> Dict[str, Tensor]:
        return {name: value[:].clone() for name, value in self.rows(identity).items()}

    def write_rows(self, new: Dict[str, Tensor], mask: Tensor) -> None:
        """Write the rows of `mask` [N] of every array in `new`. ValueError for a name that this task does not have."""
        live = self.rows()
        if not new.keys() <= live.keys():
            live = self.rows(identity=True)
        for name, value in new.items():
            if name not in live:
                raise ValueError(f"state has '{name}', which this task does not; {nearest(name, live)}")
            target = live[name]
            target[:] = torch.where(expand_mask(mask, target), value.to(target.device, target.dtype), target[:])

    def _is_row(self, value: Any) -> bool:
        return isinstance(value, Tensor) and value.dim() > 0 and value.shape[0] == self._env.num_envs

    # -- shared --------------------------------------------------------------------------------------------------
    def shared(self) -> Dict[str, Any]:
        """Steps so far, and the numbers and tensors that have moved since the beginning."""
        first = self._first_numbers
        numbers = {p.name: p.value for p in self._numbers() if p.name not in first or first[p.name] != p.value}
        tensors = {p.name: p.value.clone() for p in self._shared_tensors() if self._has_moved(p)}
        counter = int(self._env.common_step_counter)
        return {"common_step_counter": counter, "numbers": numbers, "tensors": tensors}

    def load_shared(self, state: Dict[str, Any]) -> None:
        """Take over `shared`'s value. Names that this environment does not have (yet) are left out."""
        self._env.common_step_counter = int(state["common_step_counter"])
        for part in list(self._numbers()):
            value = state["numbers"].get(part.name, self._first_numbers.get(part.name, part.value))
            if value != part.value:
                _put(part, value)
        for part in list(self._shared_tensors()):
            value = state["tensors"].get(part.name)
            if value is None:
                continue
            if value.shape == part.value.shape:
                part.value.copy_(value)
            elif not isinstance(part.owner, tuple):
                _put(part, value.to(part.value.device, part.value.dtype))

    def _has_moved(self, part: Part) -> bool:
        tensor, version = self._first_tensors.get(part.name, (None, 0))
        return part.value is not tensor or part.value._version != version

    def _numbers(self) -> Iterator[Part]:
        for part in owned({**self._managers(), "curriculum": self._curriculum}):
            if _is_plain(part.value) and not isinstance(part.owner, tuple) and not _is_frozen(part.owner):
                yield part

    def _shared_tensors(self) -> Iterator[Part]:
        for part in owned({**self._managers(), "curriculum": self._curriculum}):
            if isinstance(part.value, Tensor) and not self._is_row(part.value):
                yield part

    # -- where to look -------------------------------------------------------------------------------------------
    def _managers(self) -> Dict[str, Any]:
        return {name: getattr(self._env, f"{name}_manager") for name in _MANAGERS}

    def _sensors(self) -> Dict[str, Any]:
        """All but the ray casters: they carry nothing over, and `sim.sense()` fills them from the physics."""
        from mjlab.sensor import RayCastSensor

        return {name: s for name, s in self._env.scene.sensors.items() if not isinstance(s, RayCastSensor)}

    def _entity_buffers(self) -> Dict[str, Any]:
        """Histories and delays of actuators, under the names that they have with `identity`."""
        found: Dict[str, Any] = {}
        for name, entity in self._env.scene.entities.items():
            parts = owned({name: vars(entity)})
            found.update({p.name: p.value for p in parts if type(p.value).__name__ in _BUFFERS})
        return {name: value for name, value in found.items() if name.rpartition(".")[0] not in found}


def owned(roots: Dict[str, Any]) -> Iterator[Part]:
    """All that `roots` own; the env, entities and the simulator's arrays are not theirs."""
    from mjlab.entity import Entity
    from mjlab.envs import ManagerBasedRlEnv
    from mjlab.sim.sim_data import TorchArray

    foreign = (ManagerBasedRlEnv, Entity, TorchArray, types.FunctionType, types.MethodType, type)
    seen = set()
    todo: List[Part] = [Part(name, value, roots, name) for name, value in roots.items()]
    while todo:
        part = todo.pop()
        value = part.value
        yield part
        parts: Dict[Any, Any] = {}
        if isinstance(value, (dict, list, tuple)):
            if not _is_plain(value):
                parts = value if isinstance(value, dict) else dict(enumerate(value))
        elif isinstance(value, foreign) or id(value) in seen:
            continue
        elif type(value).__name__ == "CircularBuffer":
            parts = _history(value)
        elif type(value).__module__.startswith("mjlab") or hasattr(value, "_env"):  # a user's own terms have _env
            seen.add(id(value))
            parts = {key: part for key, part in vars(value).items() if key not in _CACHES}
        todo.extend(Part(f"{part.name}.{key}", inner, value, key) for key, inner in parts.items())


def _history(buffer: Any) -> Dict[str, Tensor]:
    """The frames of a CircularBuffer as rows [N, L, ...], oldest first, and how many each row has seen.

    mjlab keeps [L, N, ...] behind one write pointer for all rows. Turned so that the pointer stands at the end, the
    same history can be read and written row by row.
    """
    if buffer._buffer is None:
        return {"_num_pushes": buffer._num_pushes}
    last = buffer._max_len - 1
    if buffer._pointer != last:
        buffer._buffer, buffer._pointer = torch.roll(buffer._buffer, last - buffer._pointer, 0), last
    return {"frames": buffer._buffer.transpose(0, 1), "_num_pushes": buffer._num_pushes}


def _is_plain(value: Any) -> bool:
    """A number, text or None, or a list or tuple of them: what a term's config holds."""
    if type(value) in (list, tuple):
        return all(type(x) in _PLAIN for x in value)
    return type(value) in _PLAIN


def _is_frozen(owner: Any) -> bool:
    kind: Any = type(owner)
    return dataclasses.is_dataclass(owner) and kind.__dataclass_params__.frozen


def _put(part: Part, value: Any) -> None:
    if isinstance(part.owner, (dict, list)):
        part.owner[part.key] = value
    else:
        setattr(part.owner, part.key, value)
