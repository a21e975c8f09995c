"""The actor-critic: observation groups in, actions and values out. Normalisers belong to it, so that what is saved or
exported is the whole policy."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Callable, Dict, Iterable, List, Literal, NamedTuple, Optional, Sequence, Tuple

import torch
from torch import Tensor, nn

from rl_stagger.envs.base import EnvSpec, Obs
from rl_stagger.models.cnn import CNNConfig, ImageEncoder
from rl_stagger.models.distributions import make_head
from rl_stagger.models.normalizer import IdentityNormalizer, RunningNormalizer

ACTIVATIONS: Dict[str, Callable[[], nn.Module]] = {
    "elu": nn.ELU,
    "relu": nn.ReLU,
    "tanh": nn.Tanh,
    "silu": nn.SiLU,
    "gelu": nn.GELU,
}


@dataclass(frozen=True)
class ModelConfig:
    """Multi-layer perceptrons for actor and critic; before them, where the task has images, a convolutional network."""

    actor_hidden: Tuple[int, ...] = (64, 64)
    """Units of each hidden layer of the actor; of the trunk where `shared_trunk`."""
    critic_hidden: Tuple[int, ...] = (64, 64)
    """Units of each hidden layer of the critic; not used where `shared_trunk`."""
    activation: Literal["elu", "relu", "tanh", "silu", "gelu"] = "tanh"
    shared_trunk: bool = False
    """One trunk for actor and critic, which must then see the same observation."""
    init: Literal["orthogonal", "default"] = "orthogonal"
    """orthogonal: gain sqrt(2) in hidden layers, 0.01 for the action, 1 for the value. default: torch's own."""
    distribution: Literal["gaussian", "tanh_gaussian"] = "gaussian"
    """For Box actions. tanh_gaussian needs finite bounds. Discrete actions are categorical in any case."""
    init_std: float = 1.0
    """Standard deviation of the first policy, in action units (before the squash for tanh_gaussian)."""
    std_floor: float = 0.01
    """The standard deviation never falls below this."""
    std_form: Literal["log", "direct"] = "log"
    """What is learned: the logarithm of the standard deviation, or itself."""
    normalize_obs: bool = True
    """Normalise observations by running moments, frozen during an iteration."""
    obs_clip: float = 10.0
    """Normalised observations are clipped to +-obs_clip."""
    normalize_value: bool = False
    """The critic's output is in units of the targets' running moments (PopArt, van Hasselt et al. 2016, 1602.07714)."""
    name: Literal["mlp", "cnn"] = "mlp"
    """cnn: for tasks with images, observation groups (C, H, W)."""
    cnn: CNNConfig = field(default_factory=CNNConfig)
    """name=cnn: what reads the images; actor and critic share it where they see the same image."""

    def check(self) -> List[Tuple[str, object, str]]:
        """(field, value, what is right) of every setting that cannot work."""
        faults: List[Tuple[str, object, str]] = []
        for name in ("actor_hidden", "critic_hidden"):
            if any(units < 1 for units in getattr(self, name)):
                faults.append((name, getattr(self, name), "every layer needs at least 1 unit"))
        if self.std_floor <= 0:
            faults.append(("std_floor", self.std_floor, "above 0, e.g. 0.01"))
        if self.init_std < self.std_floor:
            faults.append(("init_std", self.init_std, f"at least std_floor = {self.std_floor}"))
        if self.obs_clip <= 0:
            faults.append(("obs_clip", self.obs_clip, "above 0, e.g. 10"))
        return faults + [(f"cnn.{name}", value, right) for name, value, right in self.cnn.check()]


class Act(NamedTuple):
    """What the policy did. [N, ...]."""

    raw: Tensor
    """Stored; what `log_prob` is of."""
    env_action: Tensor
    """What the environment gets: clipped or squashed."""
    log_prob: Tensor
    params: Tensor
    """[N, P] distribution parameters."""


class Evaluation(NamedTuple):
    """The current policy and critic on stored rows. [B, ...]."""

    params: Tensor
    scale: Tensor
    log_prob: Tensor
    entropy: Tensor
    value: Tensor
    """In the critic's own units: normalised where `normalize_value`."""


def mlp(
    sizes: Sequence[int], activation: str, init: str, gain_out: Optional[float], activate_last: bool = False
) -> nn.Sequential:
    """Linear layers of `sizes` with activations between them (and after the last, if asked)."""
    layers: List[nn.Module] = []
    pairs = list(zip(sizes[:-1], sizes[1:]))
    for index, (fan_in, fan_out) in enumerate(pairs):
        linear = nn.Linear(fan_in, fan_out)
        last = index == len(pairs) - 1
        if init == "orthogonal":
            nn.init.orthogonal_(linear.weight, gain_out if last and gain_out is not None else math.sqrt(2.0))
            nn.init.zeros_(linear.bias)
        layers.append(linear)
        if not last or activate_last:
            layers.append(ACTIVATIONS[activation]())
    return nn.Sequential(*layers)


class ActorCritic(nn.Module):
    """The actor reads the groups `spec.actor_groups`, the critic `spec.critic_groups`: vectors, and what the
    convolutional network makes of images, beside each other in the order of `spec.obs_shapes`."""

    def __init__(self, spec: EnvSpec, config: ModelConfig, phase_l2: float = 0.0) -> None:
        """`phase_l2`: weight of `phase_penalty` in the loss. ValueError for a model that does not fit the task."""
        super().__init__()
        self.phase_l2 = phase_l2
        self.actor_groups, self.critic_groups = spec.actor_groups, spec.critic_groups
        if config.shared_trunk and self.actor_groups != self.critic_groups:
            raise ValueError("model.shared_trunk=true: actor and critic see different observations here; use false")
        self.head = make_head(spec.action, config.distribution, config.init_std, config.std_floor, config.std_form)
        read = {*self.actor_groups, *self.critic_groups}
        self.obs_shapes = {name: shape for name, shape in spec.obs_shapes.items() if name in read}
        self.images = _images(spec, config, self.obs_shapes)
        """The groups that go through the convolutional network."""
        self.encoders = nn.ModuleDict(
            {
                _key(name): ImageEncoder(name, spec.obs_shapes[name], config.cnn, config.init == "orthogonal")  # type: ignore[arg-type]
                for name in self.images
            }
        )
        self.normalizers = nn.ModuleDict(
            {
                _key(name): RunningNormalizer(shape, config.obs_clip)
                if config.normalize_obs and name not in self.images
                else IdentityNormalizer()
                for name, shape in self.obs_shapes.items()
            }
        )
        self.value_normalizer = RunningNormalizer((), float("inf")) if config.normalize_value else IdentityNormalizer()
        size_of = {
            name: config.cnn.features if name in self.images else math.prod(shape)
            for name, shape in self.obs_shapes.items()
        }
        actor_in, critic_in = (sum(size_of[name] for name in part) for part in (self.actor_groups, self.critic_groups))
        self.phase_places = _phase_places(spec, size_of)
        """Where the numbers that encode the phase stand in what the critic reads."""
        act, init = config.activation, config.init
        self.activation = act
        if config.shared_trunk and config.actor_hidden:
            self.trunk: nn.Module = mlp((actor_in, *config.actor_hidden), act, init, None, activate_last=True)
            actor_sizes: Tuple[int, ...] = (config.actor_hidden[-1], self.head.num_params)
            critic_sizes: Tuple[int, ...] = (config.actor_hidden[-1], 1)
        else:
            self.trunk = nn.Identity()
            actor_sizes = (actor_in, *config.actor_hidden, self.head.num_params)
            critic_sizes = (critic_in, *config.critic_hidden, 1)
        self.actor = mlp(actor_sizes, act, init, 0.01)
        self.critic = mlp(critic_sizes, act, init, 1.0)

    # -- the seam ------------------------------------------------------------------------------------------------
    def normalize(self, obs: Obs) -> Obs:
        """Every group that the nets read, normalised and flat: [..., *shape] -> [..., O]; images as they are."""
        return {name: self.normalize_group(name, obs[name]) for name in self.obs_shapes}

    def normalize_group(self, name: str, x: Tensor) -> Tensor:
        """One group, [..., *shape] -> [..., O]; an image as it is."""
        if name in self.images:
            return x
        shape = self.obs_shapes[name]
        x = self.normalizers[_key(name)](x.to(torch.float32))
        return x if len(shape) == 1 else x.reshape((*x.shape[: x.dim() - len(shape)], math.prod(shape)))

    def act(self, obs: Obs, generator: Optional[torch.Generator] = None) -> Act:
        """Sample an action for raw observations [N, ...]."""
        params = self.params(self.normalize(obs))
        scale = self.head.scale()
        raw = self.head.sample(params, scale, self.head.noise(params, generator))
        return Act(raw, self.head.to_env(raw), self.head.log_prob(params, scale, raw), params)

    def act_mode(self, obs: Obs) -> Tensor:
        """The deterministic action as the environment gets it, for raw observations [N, ...]."""
        return self.head.to_env(self.head.mode(self.params(self.normalize(obs))))

    def params(self, normalized: Obs) -> Tensor:
        """Distribution parameters [..., P] on observations that `normalize` gave."""
        return self.actor(self.trunk(self._beside(normalized, self.actor_groups)))

    def critic_output(self, normalized: Obs) -> Tensor:
        """[...], in the critic's own units, on observations that `normalize` gave. Needs only the critic's groups."""
        return self.critic(self.trunk(self._beside(normalized, self.critic_groups))).squeeze(-1)

    def outputs(self, normalized: Obs) -> Tuple[Tensor, Tensor]:
        """(`params` [B, P], `critic_output` [B]) in one pass: what both nets read is encoded once."""
        seen = self._beside(normalized, self.actor_groups)
        hidden = self.trunk(seen)
        if self.actor_groups != self.critic_groups:
            seen = self._beside(normalized, self.critic_groups)
        return self.actor(hidden), self.critic(hidden if self.shares_trunk else seen).squeeze(-1)

    def evaluate(self, normalized: Obs, raw: Tensor) -> Evaluation:
        """Distribution and value on observations that `normalize` gave, for stored raw actions. [B, ...]."""
        (params, value), scale = self.outputs(normalized), self.head.scale()
        return Evaluation(
            params, scale, self.head.log_prob(params, scale, raw), self.head.entropy(params, scale), value
        )

    def value(self, obs: Obs, normalized: bool = False) -> Tensor:
        """V [...] in reward units; of raw observations unless `normalized`. Needs only the critic's groups."""
        if not normalized:
            obs = {name: self.normalize_group(name, obs[name]) for name in self.critic_groups}
        return self.denormalize_value(self.critic_output(obs))

    # -- penalties -----------------------------------------------------------------------------------------------
    def penalties(self) -> Dict[str, Tuple[float, Tensor]]:
        """Metric name -> (weight in the loss, penalty) of those in use."""
        if not self.phase_l2:
            return {}
        return {"critic/phase_penalty": (self.phase_l2, self.phase_penalty())}

    def phase_penalty(self) -> Tensor:
        """Sum of the squared weights by which the critic's first layer (the trunk's, where shared) reads the phase's
        columns; scalar, 0 where there are none."""
        weight = next((self.trunk if self.shares_trunk else self.critic).parameters())
        return sum((weight[:, place].square().sum() for place in self.phase_places), weight.new_zeros(()))

    # -- values' units -------------------------------------------------------------------------------------------
    def normalize_value(self, value: Tensor) -> Tensor:
        """Reward units -> the critic's own units."""
        return self.value_normalizer(value)

    def denormalize_value(self, value: Tensor) -> Tensor:
        if isinstance(self.value_normalizer, RunningNormalizer):
            return value * self.value_normalizer.std() + self.value_normalizer.mean
        return value

    # -- between iterations --------------------------------------------------------------------------------------
    @torch.no_grad()
    def update_normalizers(self, obs: Obs, target: Tensor, valid: Tensor) -> None:
        """Merge one iteration's raw observations [B, *shape] and value targets [B], in the critic's units, where
        `valid` [B].

        The critic's last layer is rescaled so that its values in reward units stay what they were.
        """
        for name in self.obs_shapes:
            if name not in self.images:
                self.normalizers[_key(name)].update(obs[name].to(torch.float32), valid)  # type: ignore[operator]
        if isinstance(self.value_normalizer, RunningNormalizer):
            old_mean, old_std = self.value_normalizer.mean.clone(), self.value_normalizer.std()
            self.value_normalizer.update(self.denormalize_value(target), valid)
            new_mean, new_std = self.value_normalizer.mean, self.value_normalizer.std()
            last = self.critic[-1]
            assert isinstance(last, nn.Linear)
            last.weight.mul_(old_std / new_std)
            last.bias.mul_(old_std / new_std).add_((old_mean - new_mean) / new_std)

    def parameter_groups(self) -> List[List[nn.Parameter]]:
        """[actor's, critic's] parameters; what both use counts with the actor."""
        own_images = [name for name in self.images if name not in self.actor_groups]
        critic = [*self.critic.parameters()]
        critic += [p for name in own_images for p in self.encoders[_key(name)].parameters()]
        ids = {id(p) for p in critic}
        return [[p for p in self.parameters() if id(p) not in ids], critic]

    @property
    def shares_trunk(self) -> bool:
        return not isinstance(self.trunk, nn.Identity)

    def _beside(self, normalized: Obs, groups: Tuple[str, ...]) -> Tensor:
        """What the nets read of `groups`, [..., O]: images encoded, vectors as they are."""
        parts = [
            self.encoders[_key(name)](normalized[name]) if name in self.images else normalized[name] for name in groups
        ]
        return parts[0] if len(parts) == 1 else torch.cat(parts, -1)


def _key(group: str) -> str:
    """A group's name as torch lets a module be called."""
    return group.replace(".", "_")


def _images(spec: EnvSpec, config: ModelConfig, groups: Iterable[str]) -> Tuple[str, ...]:
    """Those of `groups` that the convolutional network reads. ValueError where model and task do not go together."""
    images = tuple(name for name in groups if len(spec.obs_shapes[name]) == 3)
    if config.name == "cnn":
        if not images:
            shapes = ", ".join(f"'{name}' {list(spec.obs_shapes[name])}" for name in groups)
            raise ValueError(
                f"model=cnn: none of what the nets read here is an image (C, H, W): {shapes}; use model=mlp"
            )
        return images
    for name in images:
        if spec.obs_dtype(name) == torch.uint8:
            shape = list(spec.obs_shapes[name])
            raise ValueError(f"model=mlp: the observation group '{name}' is an image {shape}; use model=cnn")
    return ()


def _phase_places(spec: EnvSpec, size_of: Dict[str, int]) -> List[slice]:
    """Of each group's last `phase_columns` numbers, in the row that the critic reads."""
    places, end = [], 0
    for name in spec.critic_groups:
        end += size_of[name]
        columns = spec.phase_columns.get(name, 0)
        if columns:
            places.append(slice(end - columns, end))
    return places
