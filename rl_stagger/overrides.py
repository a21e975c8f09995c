"""From the command line's overrides to a plain tree: Hydra composes, and we explain what it would only refuse."""

from __future__ import annotations

import re
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Dict, Iterable, Iterator, List, Mapping, Optional, Sequence, Tuple

from rl_stagger.errors import ConfigError, nearest


def config_dir() -> Path:
    """The folder of the Hydra groups: beside the modules in a wheel, beside the package in a clone."""
    here = Path(__file__).resolve().parent
    return here / "configs" if (here / "configs").is_dir() else here.parent / "configs"


def compose(overrides: Sequence[str] = ()) -> Dict[str, Any]:
    """Hydra's composition as a plain dict. Raises ConfigError for unknown groups, options and keys."""
    from hydra import compose as hydra_compose
    from hydra.errors import HydraException
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    if isinstance(overrides, str):
        raise ConfigError(f"overrides={overrides!r}: expected a list of them, e.g. [{overrides!r}]")
    with hydra_configs():
        wanted = rewrite_overrides(overrides)
        explain_overrides(wanted, multirun=False)
        try:
            composed = hydra_compose("config", overrides=list(wanted))
            plain = OmegaConf.to_container(composed, resolve=True, throw_on_missing=True)
        except (HydraException, OmegaConfBaseException) as error:
            raise ConfigError(str(error).splitlines()[0]) from error
    assert isinstance(plain, dict)
    return name_rule({str(key): value for key, value in plain.items()}, wanted)


def name_rule(tree: Dict[str, Any], overrides: Sequence[str]) -> Dict[str, Any]:
    """A named reset rule of which a part was changed says so in its name: staggered,allocation=random."""
    changed = [
        override.lstrip("+")[len("reset.") :].replace("'", "")
        for override in overrides
        if override.lstrip("+").startswith("reset.") and not override.lstrip("+").startswith("reset.library.")
    ]
    if not changed or any(part.startswith("name=") for part in changed):
        return tree
    return {**tree, "reset": {**tree["reset"], "name": ",".join([tree["reset"]["name"], *changed])}}


@contextmanager
def hydra_configs() -> Iterator[None]:
    """Hydra looks into our groups; a Hydra app around us gets its own state back."""
    from hydra import initialize_config_dir
    from hydra.core.global_hydra import GlobalHydra

    outer = GlobalHydra.instance().hydra
    GlobalHydra.instance().clear()
    try:
        with initialize_config_dir(str(config_dir()), version_base="1.3"):
            yield
    finally:
        GlobalHydra.instance().hydra = outer


AS_WRITTEN = ("resume", "run_dir", "reset.library.path", "reset.density")
"""Their values may hold what Hydra's grammar reads otherwise: = , ( ) and blanks."""


ANY = "any"
"""configs/task/<simulator>/any.yaml: the settings for those of a simulator's tasks that have no file of their own."""


def rewrite_overrides(overrides: Sequence[str]) -> List[str]:
    """`task=module:Class` becomes the group option "custom" with that name; `task=<simulator>/<its task>` without a
    file of that name becomes "<simulator>/any" with that task_id."""
    rewritten: List[str] = []
    for override in overrides:
        key, _, value = override.partition("=")
        simulator = simulator_of_any(value) if key == "task" else None
        if key == "task" and re.fullmatch(r"[\w.]+:\w+", value):
            rewritten += ["task=custom", f"task.name='{value}'"]
        elif simulator is not None:
            task_id = value[len(simulator) + 1 :]
            rewritten += [f"task={simulator}/{ANY}", f"task.settings.task_id='{task_id}'", f"task.label='{value}'"]
        elif key.startswith("task.settings."):
            rewritten.append(f"++{override}")  # the task itself judges its settings, and names the nearest
        elif key in AS_WRITTEN and re.search(r"[^\w./~-]", value) and value[0] not in "'\"[":
            escaped = value.replace("\\", "\\\\").replace("'", "\\'")
            rewritten.append(f"{key}='{escaped}'")  # a path or an expression is no sweep and no function of Hydra's
        else:
            rewritten.append(override)
    return rewritten


def simulator_of_any(task: str) -> Optional[str]:
    """ "gym" for "gym/Acrobot-v1": a task without a file, of a simulator that has an any.yaml. None for others.

    A line `# task_id: <pattern>` in any.yaml (after Hydra's @package, which has to come first) says which names are
    meant; what does not match is a slip.
    """
    simulator, slash, task_id = task.partition("/")
    path = config_dir() / "task" / simulator / f"{ANY}.yaml"
    written_ids = re.fullmatch(r"\w[\w.+-]*(/\w[\w.+-]*)*", task_id)
    if not slash or task_id == ANY or not written_ids or not re.fullmatch(r"\w+", simulator) or not path.is_file():
        return None
    if (config_dir() / "task" / f"{task}.yaml").is_file():
        return None
    pattern = re.search(r"^# task_id: (\S+)", path.read_text(encoding="utf-8"), re.MULTILINE)
    return simulator if pattern is None or re.fullmatch(pattern[1], task_id) else None


def explain_overrides(overrides: Sequence[str], multirun: bool = True) -> None:
    """Raise ConfigError, with what would be right, for a group option or key that there is not.

    Looks at plain `key=value` overrides and at `--key value`; Hydra itself judges the rest (`+key`, `~key`, `hydra.*`,
    its own flags). `multirun`: whether several values for a key are a sweep.
    """
    groups = {path.name for path in config_dir().iterdir() if path.is_dir()} - {"hydra"}
    plain = list(_without_hydra_flags(overrides))
    # Hydra's own sweep functions, choice(...) and the like, are left to it.
    chosen = [o for o in plain if o.partition("=")[0] in groups and "=" in o and "(" not in o]
    for group, _, values in (o.partition("=") for o in chosen):
        options = group_options(group)
        for option in _sweep_values(values):
            if option not in options:
                raise ConfigError(f"{group}={option}: there is no such {group}; {nearest(option, options)}")
    first: List[str] = []
    for override in chosen:
        if not multirun and "," in override:
            raise ConfigError(f"{override}: a sweep over values needs -m")
        group, _, values = override.partition("=")
        first.append(f"{group}={next(_sweep_values(values))}")
    rest = [o for o in plain if o not in chosen and not o.startswith(("+", "~", "hydra"))]
    if not rest:
        return
    known = _known_keys(first)
    for i, override in enumerate(rest):
        key, equals, value = override.partition("=")
        follower = rest[i + 1] if i + 1 < len(rest) and not re.search("=|^-", rest[i + 1]) else ""
        if override.startswith("-"):
            raise ConfigError(_explain_dashes(override, follower, known))
        if not equals:
            raise ConfigError(_explain_bare_word(override, follower, groups, known))
        if key not in known:
            raise ConfigError(f"{override}: there is no key '{key}'; {_nearest_key(key, known)}")
        if not multirun and (first_of_sweep(override) != override or re.fullmatch(r"\(.*,.*\)", value)):
            written = f"'{key}=[{value.strip('()')}]'"
            listed = f"a list is written {written}, quoted; " if isinstance(known[key], list) else ""
            raise ConfigError(f"{override}: {listed}a sweep over values needs -m")


HYDRA_FLAGS = (
    "-h --help --hydra-help --version -r --run -m --multirun --resolve -sc --shell-completion".split(),
    "-c --cfg -p --package -cp --config-path -cn --config-name -cd --config-dir --experimental-rerun -i --info".split(),
)
"""Those that stand alone, and those that take a value."""


def _without_hydra_flags(arguments: Sequence[str]) -> Iterator[str]:
    alone, with_value = HYDRA_FLAGS
    value_follows = False
    for argument in arguments:
        if value_follows and "=" not in argument and not argument.startswith("-"):
            value_follows = False
            continue
        value_follows = argument in with_value
        if argument.partition("=")[0] not in (*alone, *with_value):
            yield argument


def _explain_dashes(flag: str, follower: str, known: Mapping[str, Any]) -> str:
    """`--iterations 3` and `--iterations=3` are iterations=3 here."""
    name, equals, value = flag.lstrip("-").partition("=")
    asked = f"{flag} {follower}".rstrip() if not equals else flag
    key = name.replace("-", "_")
    found = key if key in known else _other_name(key, known)
    if found is None:
        return f"{asked}: there is no option {flag.partition('=')[0]} and no key '{key}'; {_nearest_key(key, known)}"
    example = value or follower or ("latest" if found == "resume" else "...")
    return f"{asked}: settings are written without dashes: {found}={example}"


def _explain_bare_word(word: str, follower: str, groups: Iterable[str], known: Mapping[str, Any]) -> str:
    for group in sorted(groups):
        if word in group_options(group) or (group == "task" and re.fullmatch(r"[\w.]+:\w+", word)):
            return f"'{word}': settings are given as key=value: {group}={word}"
    if word in known:
        example = follower or ("latest" if word == "resume" else "1")
        return f"'{word}': settings are given as key=value, e.g. {word}={example}"
    other = _other_name(word, known)
    if other is not None:
        return f"'{word}': settings are given as key=value, e.g. {other}={follower or '...'}"
    example = f"iterations={word}" if word.isdigit() else "iterations=100"
    return f"'{word}': settings are given as key=value, e.g. {example}"


def group_options(group: str) -> List[str]:
    """What can stand behind `group=`: the names of its files."""
    folder = config_dir() / group
    return sorted(path.relative_to(folder).with_suffix("").as_posix() for path in folder.rglob("*.yaml"))


def first_of_sweep(override: str) -> str:
    """`seed=0` of `seed=0,1`; what is no sweep as it is."""
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    try:
        parsed = OverridesParser.create().parse_override(override)
        if not parsed.is_sweep_override():
            return override
        return f"{override.partition('=')[0]}={next(parsed.sweep_string_iterator())}"
    except (HydraException, StopIteration):
        return override  # Hydra says what is wrong with it


def _sweep_values(values: str) -> Iterator[str]:
    return (value.strip().strip("'\"") for value in values.split(","))


def _known_keys(groups: Sequence[str]) -> Dict[str, Any]:
    from hydra import compose as hydra_compose
    from omegaconf import OmegaConf

    plain = OmegaConf.to_container(hydra_compose("config", overrides=list(groups)), resolve=False)
    assert isinstance(plain, dict)
    return dict(_walk(plain))


def _walk(tree: Mapping[Any, Any], prefix: str = "") -> Iterator[Tuple[str, Any]]:
    for key, value in tree.items():
        path = f"{prefix}{key}"
        yield path, value
        if isinstance(value, Mapping):
            yield from _walk(value, path + ".")


def _nearest_key(key: str, known: Mapping[str, Any]) -> str:
    """Choices at the key's own depth; the same thing elsewhere in the tree, or by its other name, comes first."""
    parent, _, last = key.rpartition(".")
    other = _other_name(key, known)
    if other is not None:
        note = ALIAS_NOTES.get(last)
        return f"did you mean '{other}'?" + (f" ({note})" if note else "")
    siblings = [p.rpartition(".")[2] for p in known if p.rpartition(".")[0] == parent]
    if not siblings:
        return nearest(key, [path for path in known if "." not in path])
    return nearest(last, siblings)


def _other_name(key: str, known: Mapping[str, Any]) -> Optional[str]:
    """The known key that ends like this one, or that other libraries call so."""
    last = key.rpartition(".")[2]
    elsewhere = [path for path in known if path.rpartition(".")[2] == last]
    return elsewhere[0] if elsewhere else next((path for path in (ALIASES.get(last),) if path in known), None)


def _aliases(names: Mapping[str, str]) -> Dict[str, str]:
    return {alias: key for key, aliases in names.items() for alias in aliases.split()}


ALIASES = _aliases(
    {
        "task": "env env_id env_name task_name",
        "task.settings.horizon_steps": "horizon max_episode_length max_episode_steps episode_length time_limit",
        "reset": "init_at_random_ep_len",
        "num_envs": "n_envs nenvs num_environments num_actors",
        "rollout_steps": "num_steps_per_env num_steps n_steps nsteps horizon_length rollouts unroll_length",
        "iterations": "max_iterations num_iterations num_learning_iterations max_epochs total_timesteps timesteps",
        "device": "sim_device rl_device",
        "threads": "num_threads torch_threads",
        "run_dir": "log_dir",
        "run_name": "exp_name experiment_name",
        "resume": "load_run resume_path",
        "checkpoint.every_iters": "save_interval save_frequency",
        "algorithm.gamma": "discount discount_factor discounting",
        "algorithm.lam": "gae_lambda tau lambda",
        "algorithm.epochs": "num_learning_epochs learning_epochs mini_epochs n_epochs num_epochs update_epochs",
        "algorithm.minibatches": "num_mini_batches mini_batches num_minibatches nminibatches minibatch_size batch_size",
        "algorithm.clip": "clip_param clip_range clip_coef clip_ratio ratio_clip e_clip clipping_epsilon",
        "algorithm.value_loss": "use_clipped_value_loss clip_value clip_vloss clip_predicted_values",
        "algorithm.value_clip": "clip_range_vf",
        "algorithm.value_coef": "value_loss_coef value_loss_scale vf_coef critic_coef",
        "algorithm.entropy_coef": "ent_coef entropy_loss_scale entropy_cost",
        "algorithm.learning_rate": "lr",
        "algorithm.schedule": "lr_schedule learning_rate_scheduler anneal_lr",
        "algorithm.kl_target": "desired_kl kl_threshold",
        "algorithm.kl_stop": "target_kl",
        "algorithm.max_grad_norm": "grad_norm grad_norm_clip",
        "algorithm.reward_scale": "reward_shaper rewards_shaper_scale",
        "algorithm.bootstrap": "value_bootstrap time_limit_bootstrap",
        "model.actor_hidden": "actor_hidden_dims hidden_dims hidden_sizes net_arch units",
        "model.critic_hidden": "critic_hidden_dims",
        "model.init_std": "init_noise_std log_std_init",
        "model.normalize_obs": "normalize_input normalize_observations obs_normalization empirical_normalization",
    }
)
"""What rsl_rl, rl_games, skrl, Stable-Baselines3, CleanRL and brax call our settings."""

ALIAS_NOTES = {
    "init_at_random_ep_len": "reset=random_clock",
    "total_timesteps": "each takes num_envs * rollout_steps of them",
    "timesteps": "each takes rollout_steps of them",
    "minibatch_size": "how many there are, not how large",
    "batch_size": "how many there are, not how large",
    "log_std_init": "not its logarithm",
    "use_clipped_value_loss": "plain or clipped",
    "clip_value": "plain or clipped",
    "clip_vloss": "plain or clipped",
    "clip_predicted_values": "plain or clipped",
    "anneal_lr": "fixed, linear or adaptive_kl",
}
"""Where the same number would mean something else."""
