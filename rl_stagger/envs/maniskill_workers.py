"""Environments joined along N: parts in this process, and parts in worker processes that run at the same time.

ManiSkill's CPU physics has one environment to a batch. A worker process holds several of them and steps them one after
the other; as many workers as processors are the fastest. Done environments are reset in the worker and in the same
step, so final observations are exact and there are no dummy steps.
"""

from __future__ import annotations

import dataclasses
import multiprocessing
import os
import pickle
import signal
import traceback
from contextlib import suppress
from typing import Any, Callable, Dict, List, Mapping, Optional, Sequence, Tuple, Union

import torch
from torch import Tensor

from rl_stagger.envs.base import Capability, Obs, Step, VecEnv, check_action, check_mask
from rl_stagger.errors import SimulatorError

_STOP_S = 5.0
"""How long a worker may take to close before it is ended."""


def make_workers(
    num_envs: int,
    device: torch.device,
    seed: int,
    num_workers: Optional[int],
    settings: Mapping[str, Any],
    endings: Mapping[str, str],
) -> VecEnv:
    """N of ManiSkill's CPU environments in `num_workers` processes, row for row the same whatever their number."""
    from rl_stagger.envs.maniskill import row_seeds

    seeds = row_seeds(seed, num_envs)
    if num_workers is None:
        num_workers = os.cpu_count() or 1
    if num_workers == 0:
        return JoinedEnvs([LocalPart(env) for env in _singles(seeds, settings, endings)], device)
    parts = [
        RemotePart(_joined_singles, (list(share), dict(settings), dict(endings)), f"environments {first} to {last}")
        for share, first, last in _shares(seeds, min(num_workers, num_envs))
    ]
    return JoinedEnvs(parts, device)


def _shares(seeds: Sequence[int], count: int) -> List[Tuple[Sequence[int], int, int]]:
    """`seeds` cut into `count` runs of nearly the same length, each with its first and last row."""
    bounds = [len(seeds) * i // count for i in range(count + 1)]
    return [(seeds[a:b], a, b - 1) for a, b in zip(bounds, bounds[1:])]


def _singles(seeds: Sequence[int], settings: Mapping[str, Any], endings: Mapping[str, str]) -> List[VecEnv]:
    from rl_stagger.envs.maniskill import ManiSkillEnv
    from rl_stagger.envs.maniskill_make import make_host

    return [ManiSkillEnv(make_host(1, settings), "cpu", [seed], **endings) for seed in seeds]


def _joined_singles(seeds: Sequence[int], settings: Mapping[str, Any], endings: Mapping[str, str]) -> VecEnv:
    return JoinedEnvs([LocalPart(env) for env in _singles(seeds, settings, endings)], torch.device("cpu"))


class WorkerDied(SimulatorError):
    """A worker process ended by itself or was ended."""


class LocalPart:
    """An environment in this process, asked like one in another."""

    def __init__(self, env: VecEnv) -> None:
        self.env = env
        self._asked: Tuple[str, Tuple[Any, ...]] = ("", ())

    def ask(self, method: str, *arguments: Any) -> None:
        self._asked = (method, arguments)

    def answer(self) -> Any:
        method, arguments = self._asked
        return call(self.env, method, arguments)

    def stop(self) -> None:
        self.env.close()


class RemotePart:
    """An environment in a process of its own, which `build(*arguments)` makes there. `what` names its rows."""

    def __init__(self, build: Callable[..., VecEnv], arguments: Tuple[Any, ...], what: str) -> None:
        context = multiprocessing.get_context("spawn")  # a fork would share torch's threads and a GPU's state
        self._what = what
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_work, args=(theirs, build, arguments), daemon=True)
        self._process.start()
        theirs.close()  # so that its end is seen here when the worker dies
        self.ask("describe")

    def ask(self, method: str, *arguments: Any) -> None:
        try:
            self._pipe.send((method, _packed(arguments)))
        except OSError as error:
            raise self._died() from error

    def answer(self) -> Any:
        try:
            kind, answer = self._pipe.recv()
        except (EOFError, OSError) as error:
            raise self._died() from error
        if kind == "raised":
            error, text = answer
            raise error from RuntimeError(f"in the worker process with {self._what}:\n{text}")
        return _unpacked(answer)

    def stop(self) -> None:
        with suppress(OSError):  # a broken pipe is one
            self._pipe.send(("close", ()))
        self._process.join(_STOP_S)
        for end in (self._process.terminate, self._process.kill):
            if self._process.is_alive():
                end()
                self._process.join(_STOP_S)
        self._pipe.close()

    def _died(self) -> WorkerDied:
        self._process.join(_STOP_S)
        code = self._process.exitcode
        how = f"signal {-code}" if code is not None and code < 0 else f"exit code {code}"
        hint = " (out of memory? fewer num_envs or num_workers need less)" if code == -signal.SIGKILL else ""
        return WorkerDied(f"the worker process with {self._what} has ended, {how}{hint}; its output is above")


Part = Union[LocalPart, RemotePart]


class JoinedEnvs(VecEnv):
    """Environments of the same kind as one, their rows in the order of `parts`. All parts work at the same time."""

    def __init__(self, parts: Sequence[Part], device: torch.device) -> None:
        self._parts, self.device, self._closed = list(parts), device, False
        for part in self._parts:
            if isinstance(part, LocalPart):
                part.ask("describe")
        try:
            described = self._answers()
        except BaseException:
            self.close()
            raise
        self._sizes = [size for size, _, _ in described]
        self.num_envs = sum(self._sizes)
        self.spec, self.capabilities = described[0][1], described[0][2]

    # -- the contract, part by part ------------------------------------------------------------------------------
    @property
    def elapsed_steps(self) -> Tensor:
        return self._joined(self._all("elapsed_steps"))

    def reset(self, env_mask: Optional[Tensor] = None) -> Obs:
        return self._joined(self._all("reset", *self._split(self._mask(env_mask))))

    def step(self, action: Tensor) -> Step:
        check_action(action, self.spec.action, self.num_envs)
        return Step(**self._joined(self._all("step", *self._split(action.detach().cpu()))))

    def set_manual_reset(self, manual: bool) -> None:
        if manual and Capability.MANUAL_RESET not in self.capabilities:
            raise self.lacks(Capability.MANUAL_RESET)
        self._all("set_manual_reset", *[(manual,)] * len(self._parts))

    def set_elapsed_steps(self, steps: Tensor, env_mask: Optional[Tensor] = None) -> None:
        self._all("set_elapsed_steps", *self._split(steps.cpu(), self._mask(env_mask)))

    def seed(self, seed: int) -> None:
        from rl_stagger.envs.maniskill import row_seeds

        self.seed_rows(row_seeds(seed, self.num_envs))

    def seed_rows(self, seeds: Sequence[int]) -> None:
        self._all("seed_rows", *self._split(list(seeds)))

    def get_state(self, env_mask: Optional[Tensor] = None) -> Dict[str, Tensor]:
        if Capability.SET_STATE not in self.capabilities:
            raise self.lacks(Capability.SET_STATE)
        return self._joined(self._all("get_state", *self._split(self._mask(env_mask))))

    def set_state(self, state: Dict[str, Tensor], env_mask: Optional[Tensor] = None) -> Obs:
        if Capability.SET_STATE not in self.capabilities:
            raise self.lacks(Capability.SET_STATE)
        mask = self._mask(env_mask)
        shares = self._split(mask, *[x.cpu() for x in state.values()])
        rows = [(dict(zip(state, values)), own) for own, *values in shares]
        return self._joined(self._all("set_state", *rows))

    def render(self, env_index: int = 0) -> Any:
        if Capability.RENDER not in self.capabilities:
            raise self.lacks(Capability.RENDER)
        for part, size in zip(self._parts, self._sizes):
            if env_index < size:
                part.ask("render", env_index)
                return part.answer()
            env_index -= size
        raise IndexError(f"env_index is {env_index} beyond the last of {self.num_envs} environments")

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            for part in self._parts:
                part.stop()

    def _all(self, method: str, *arguments: Tuple[Any, ...]) -> List[Any]:
        """Every part's answer to `method`, given its own of `arguments`."""
        if self._closed:
            raise RuntimeError(f"{method}: this environment is closed")
        try:
            for part, own in zip(self._parts, arguments or [()] * len(self._parts)):
                part.ask(method, *own)
            return self._answers()
        except (WorkerDied, KeyboardInterrupt):
            self.close()  # an answer that nobody took would be read as that to the next question
            raise

    def _answers(self) -> List[Any]:
        """Of all parts. Raises what the first one raised, after the others have answered too."""
        answers: List[Any] = []
        raised: List[Exception] = []
        for part in self._parts:
            try:
                answers.append(part.answer())
            except WorkerDied:
                raise
            except Exception as error:
                raised.append(error)
        if raised:
            raise raised[0]
        return answers

    def _mask(self, env_mask: Optional[Tensor]) -> Tensor:
        return check_mask(env_mask, self.num_envs, self.device).cpu()

    def _split(self, *rows: Any) -> List[Tuple[Any, ...]]:
        """[N, ...] each -> for every part the tuple of its rows."""
        ends = [sum(self._sizes[: i + 1]) for i in range(len(self._sizes))]
        return [tuple(x[end - size : end] for x in rows) for size, end in zip(self._sizes, ends)]

    def _joined(self, answers: List[Any]) -> Any:
        """Trees with tensors [n, ...] -> one with [N, ...] on our device, of what all of them have."""
        first = answers[0]
        if isinstance(first, dict):
            names = [key for key in first if all(key in answer for answer in answers)]
            return {key: self._joined([answer[key] for answer in answers]) for key in names}
        return torch.cat(answers).to(self.device)


# -- in the worker ----------------------------------------------------------------------------------------------------
def call(env: VecEnv, method: str, arguments: Tuple[Any, ...]) -> Any:
    """What `env` answers, in dicts, lists and tensors."""
    if method == "describe":
        return env.num_envs, env.spec, env.capabilities
    if method == "elapsed_steps":
        return env.elapsed_steps
    answer = getattr(env, method)(*arguments)
    if isinstance(answer, Step):
        return {field.name: getattr(answer, field.name) for field in dataclasses.fields(answer)}
    return answer


def _work(pipe: Any, build: Callable[..., VecEnv], arguments: Tuple[Any, ...]) -> None:
    """Answer what comes through `pipe` until "close" or the end of the process at its other end."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all of a terminal's processes; ours asks for the end
    torch.set_num_threads(1)
    env: Optional[VecEnv] = None
    try:
        try:
            env = build(*arguments)
        except Exception as error:
            pipe.recv()
            pipe.send(("raised", _portable(error)))
            return
        while True:
            method, packed = pipe.recv()
            if method == "close":
                return
            try:
                pipe.send(("answer", _packed(call(env, method, _unpacked(packed)))))
            except Exception as error:
                pipe.send(("raised", _portable(error)))
    except (EOFError, OSError):
        pass  # whoever asks has ended
    finally:
        if env is not None:
            env.close()
        pipe.close()


def _portable(error: Exception) -> Tuple[Exception, str]:
    """(`error`, or one that can be sent, and its traceback)."""
    text = traceback.format_exc()
    try:
        if isinstance(pickle.loads(pickle.dumps(error)), type(error)):
            return error, text
    except Exception:
        pass
    return RuntimeError(f"{type(error).__name__}: {error}"), text


class _Array:
    """A tensor on its way: torch would hand each one over as shared memory, a file descriptor apiece."""

    def __init__(self, x: Tensor) -> None:
        self.array = x.detach().cpu().numpy()


def _packed(tree: Any) -> Any:
    if isinstance(tree, Tensor):
        return _Array(tree)
    if isinstance(tree, dict):
        return {key: _packed(value) for key, value in tree.items()}
    return tuple(_packed(value) for value in tree) if isinstance(tree, tuple) else tree


def _unpacked(tree: Any) -> Any:
    if isinstance(tree, _Array):
        return torch.from_numpy(tree.array)
    if isinstance(tree, dict):
        return {key: _unpacked(value) for key, value in tree.items()}
    return tuple(_unpacked(value) for value in tree) if isinstance(tree, tuple) else tree
