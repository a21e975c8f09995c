"""The settings: one truth in files and dataclasses, and whatever cannot work stops by name."""

import dataclasses
import inspect
import re
from pathlib import Path

import pytest
import yaml
from helpers.toy_envs_runner import RESETS

from rl_stagger.algorithms.ppo import PPOConfig
from rl_stagger.config import (
    CheckpointConfig,
    Config,
    LoggingConfig,
    TaskConfig,
    build_config,
    from_tree,
    load_config,
    to_tree,
)
from rl_stagger.envs.registry import _load, make_env, native_task_names, task_names
from rl_stagger.errors import ConfigError
from rl_stagger.help import train_help
from rl_stagger.models.actor_critic import ModelConfig
from rl_stagger.overrides import (
    ALIAS_NOTES,
    ALIASES,
    _walk,
    compose,
    config_dir,
    explain_overrides,
    hydra_configs,
    rewrite_overrides,
)
from rl_stagger.resets.adaptive import AdaptiveConfig
from rl_stagger.resets.config import LibraryConfig, ResetConfig

CONFIGS = config_dir()
TASK_FILES = sorted(
    p.relative_to(CONFIGS / "task").with_suffix("").as_posix() for p in (CONFIGS / "task").rglob("*.yaml")
)
RESET_FILES = sorted(p.stem for p in (CONFIGS / "reset").glob("*.yaml"))
NATIVE = [name for name in TASK_FILES if "/" not in name and name != "custom"]


def test_a_changed_reset_rule_says_so_in_its_name():
    assert load_config(["reset=staggered"]).reset.name == "staggered"
    name = load_config(["reset=staggered", "reset.allocation=random", "reset.num_groups=4"]).reset.name
    assert name == "staggered,allocation=random,num_groups=4"
    assert load_config(["reset.allocation=random", "reset.name=mine"]).reset.name == "mine"


def content(name):
    return yaml.safe_load((CONFIGS / f"{name}.yaml").read_text(encoding="utf-8"))


def field_names(cls):
    return {f.name for f in dataclasses.fields(cls)}


# -- files and dataclasses do not drift -----------------------------------------------------------------------------
@pytest.mark.parametrize(
    "file, cls", [("algorithm/ppo", PPOConfig), ("model/mlp", ModelConfig), ("reset/staggered", ResetConfig)]
)
def test_the_default_of_each_group_is_the_dataclass(file, cls):
    tree = content(file)
    assert tree.keys() == field_names(cls)
    assert from_tree(cls, tree, "") == cls()


def test_the_top_level_is_the_dataclass():
    tree = content("config")
    groups = {"task", "reset", "algorithm", "model"}
    assert tree.keys() - {"defaults", "hydra"} == field_names(Config) - groups
    for name, cls in (("checkpoint", CheckpointConfig), ("logging", LoggingConfig)):
        assert tree[name].keys() == field_names(cls)
    own = {key: value for key, value in tree.items() if key not in ("defaults", "hydra")}
    assert from_tree(Config, {**own, "task": {"name": "x"}}, "") == Config(TaskConfig("x"))
    chosen = {key: value for entry in tree["defaults"] if isinstance(entry, dict) for key, value in entry.items()}
    assert {key: chosen[key] for key in groups} == {
        "reset": "staggered", "algorithm": "ppo", "model": "mlp", "task": "skill_chain",
    }  # fmt: skip


@pytest.mark.parametrize("name", RESET_FILES)
def test_every_reset_file_is_whole_and_valid(name):
    tree = compose([f"reset={name}"])["reset"]
    assert tree.keys() == field_names(ResetConfig), "every key is there to be overridden"
    for part, cls in (("adaptive", AdaptiveConfig), ("library", LibraryConfig)):
        assert tree[part].keys() == field_names(cls)
    assert tree["name"] == name
    config = from_tree(ResetConfig, tree, "")
    assert config.check() == []
    assert config == ResetConfig(name=name, **RESETS[name]), "what the tests call by this name"


def test_the_tests_know_every_reset_file():
    assert sorted(RESETS) == RESET_FILES


@pytest.mark.parametrize("name", NATIVE)
def test_a_task_file_gives_every_setting_of_its_task(name):
    tree = content(f"task/{name}")
    parameters = inspect.signature(_load(name)).parameters
    own = {key: p.default for key, p in parameters.items() if key not in ("num_envs", "device", "seed")}
    assert tree["task"] == {"name": name, "settings": own}
    assert {"num_envs", "rollout_steps"} <= tree.keys(), "sizes that suit the task"


def test_the_registry_and_the_task_files_name_the_same_tasks():
    assert native_task_names() == NATIVE
    simulators = {name.split("/")[0] for name in TASK_FILES if "/" in name}
    assert {*NATIVE, *simulators} == set(task_names())


@pytest.mark.parametrize("task", [name for name in TASK_FILES if name != "custom" and not name.endswith("/any")])
def test_every_task_goes_with_every_reset(task):
    for reset in RESET_FILES if task in NATIVE else ["staggered"]:
        config = load_config([f"task={task}", f"reset={reset}"])
        assert config.reset == from_tree(ResetConfig, compose([f"reset={reset}"])["reset"], "")
        file = content(f"task/{task}")
        assert (config.num_envs, config.rollout_steps) == (file["num_envs"], file["rollout_steps"])
        for key, value in file.get("algorithm", {}).items():
            assert getattr(config.algorithm, key) == value, "the task file comes after the algorithm"
        horizon = config.task.settings.get("horizon_steps")
        assert horizon is None or horizon > config.rollout_steps, "there is something to stagger"


@pytest.mark.parametrize("task", NATIVE)
def test_every_native_task_can_be_made_from_its_file(task):
    config = load_config([f"task={task}"])
    env = make_env(config.task.name, 2, "cpu", 0, **config.task.settings)
    assert env.spec.horizon_steps == config.task.settings["horizon_steps"]


# -- the command line wins ------------------------------------------------------------------------------------------
def test_overrides_come_last():
    config = load_config(
        ["task=legged_bench", "num_envs=8", "reset.num_groups=3", "algorithm.gamma=0.5", "model.actor_hidden=[32,16]"]
    )
    assert (config.num_envs, config.reset.num_groups, config.algorithm.gamma) == (8, 3, 0.5)
    assert config.model.actor_hidden == (32, 16)
    assert config.model.critic_hidden == (128, 128, 128), "the task's, where nothing was said"


@pytest.mark.parametrize(
    "override, read",
    [
        ("algorithm.learning_rate=1e-3", lambda c: c.algorithm.learning_rate),
        ("algorithm.learning_rate=1E-3", lambda c: c.algorithm.learning_rate),
        ("algorithm.learning_rate='1e-3'", lambda c: c.algorithm.learning_rate),
        ("algorithm.learning_rate=.001", lambda c: c.algorithm.learning_rate),
    ],
)
def test_every_way_to_write_a_thousandth(override, read):
    value = read(load_config([override]))
    assert (type(value), value) == (float, 0.001)


def test_numbers_are_what_the_field_says():
    config = load_config(["algorithm.reward_scale=2", "iterations=1e2", "task.settings.gating=1"])
    assert (type(config.algorithm.reward_scale), config.algorithm.reward_scale) == (float, 2.0)
    assert (type(config.iterations), config.iterations) == (int, 100)


@pytest.mark.parametrize("off", ["off", "'off'", "false"])
def test_off_is_a_word(off):
    config = load_config([f"logging.console={off}", "compile=off"])
    assert (config.logging.console, config.compile) == ("off", "off")


def test_null_and_lists():
    config = load_config(["algorithm.kl_stop=null", "run_dir=null", "model.actor_hidden=[]"])
    assert (config.algorithm.kl_stop, config.run_dir, config.model.actor_hidden) == (None, None, ())
    assert load_config(["algorithm.kl_stop=0.05"]).algorithm.kl_stop == 0.05


def test_a_task_of_somebody_else():
    config = load_config(["task=my.module:Robot", "task.settings.mass_kg=3.5", "num_envs=4"])
    assert config.task == TaskConfig("my.module:Robot", {"mass_kg": 3.5})
    assert rewrite_overrides(["task=a.b:C"]) == ["task=custom", "task.name='a.b:C'"]


def test_a_simulators_task_without_a_file():
    config = load_config(["task=gym/Acrobot-v1", "num_envs=4"])
    assert (config.task.name, config.task.label) == ("gym", "gym/Acrobot-v1")
    assert config.task.settings["task_id"] == "Acrobot-v1"
    with_slash = rewrite_overrides(["task=gym/ALE/Pong-v5"])
    assert with_slash == ["task=gym/any", "task.settings.task_id='ALE/Pong-v5'", "task.label='gym/ALE/Pong-v5'"]
    assert rewrite_overrides(["task=gym/CartPole-v1"]) == ["task=gym/CartPole-v1"], "it has a file"
    for slip in ("task=gyn/Acrobot-v1", "task=gym/", "task=gym/../x", "task=gym/a,b", "task=gym/any", "task=any"):
        assert rewrite_overrides([slip]) == [slip]


@pytest.mark.parametrize("name", [name for name in TASK_FILES if name.endswith("/any")])
def test_any_leaves_only_the_tasks_name_open(name):
    tree = content(f"task/{name}")
    assert tree["task"]["label"] == tree["task"]["settings"]["task_id"] == "???"
    assert tree["task"]["name"] in task_names()
    with pytest.raises(ConfigError, match=r"task_id|label"):
        load_config([f"task={name}"])


def test_the_library_takes_the_command_lines_task_names(monkeypatch):
    import rl_stagger.envs.registry as registry

    seen = {}
    monkeypatch.setattr(registry, "_load", lambda task: seen.update(task=task) or (lambda **settings: settings))
    for name, task_id in (("gym/CartPole-v1", "CartPole-v1"), ("gym/Acrobot-v1", "Acrobot-v1")):
        monkeypatch.setattr(registry, "VecEnv", dict)
        with pytest.raises(ConfigError, match="has no attribute"):
            make_env(name, 2, horizon_steps=7)
        settings = registry._from_file(name, {"horizon_steps": 7})[1]
        assert seen["task"] == "gym"
        assert (settings["task_id"], settings["horizon_steps"]) == (task_id, 7)
    with pytest.raises(ConfigError, match=r"task 'gym/' is unknown; .*gym/CartPole-v1"):
        make_env("gym/", 2)


EXPERIMENTS = sorted(path.stem for path in (config_dir() / "experiment").glob("*.yaml"))


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_an_experiment_counts_over_its_tasks_file_and_under_the_command_line(name):
    file = content(f"experiment/{name}")
    task = next(entry["override /task"] for entry in file["defaults"] if "override /task" in entry)
    config = load_config([f"experiment={name}"])
    assert config.task.label == task
    assert config.num_envs == file["num_envs"]
    assert list(config.model.actor_hidden) == file["model"]["actor_hidden"]
    changed = load_config([f"experiment={name}", "num_envs=8", "reset=synchronous", "task=pendulum"])
    assert (changed.num_envs, changed.reset.name, changed.task.name) == (8, "synchronous", "pendulum")
    assert changed.rollout_steps == file["rollout_steps"]
    help_text = train_help([f"experiment={name}"])
    assert f"{name}*" in help_text
    assert f"task={task} " in help_text


def test_an_experiment_that_there_is_not():
    with pytest.raises(ConfigError, match=f"did you mean '{EXPERIMENTS[0]}'"):
        load_config([f"experiment={EXPERIMENTS[0]}s"])


# -- what cannot work -----------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "overrides, match",
    [
        # unknown names
        (["num_env=3"], r"num_env=3: there is no key 'num_env'; did you mean 'num_envs'\?"),
        (["algorithm.gama=0.9"], r"no key 'algorithm.gama'; did you mean 'gamma'\?"),
        (["learning_rate=1e-4"], r"no key 'learning_rate'; did you mean 'algorithm.learning_rate'\?"),
        (["algorithm.num_envs=4"], r"no key 'algorithm.num_envs'; did you mean 'num_envs'\?"),
        (["task=skil_chain"], r"task=skil_chain: there is no such task; did you mean 'skill_chain'\?"),
        (["task=mjlab/cartpole"], r"there is no such task; did you mean 'mjlab/cartpole_"),
        (["reset=stagered"], r"reset=stagered: there is no such reset; did you mean 'staggered'\?"),
        (["algorithm=sac"], r"algorithm=sac: there is no such algorithm; Valid: ppo"),
        (["model=lstm"], r"model=lstm: there is no such model; .*mlp"),
        (["num_envs"], r"'num_envs': settings are given as key=value, e.g. num_envs=1"),
        # options
        (["algorithm.schedule=adaptive"], r"algorithm.schedule=adaptive: did you mean 'adaptive_kl'\?"),
        (["model.activation=rellu"], r"model.activation=rellu: did you mean 'relu'\?"),
        (["reset.bring_up=warm"], r"reset.bring_up=warm: .*warmup"),
        (["compile=on"], r"compile=on: .*Valid: off"),
        (["precision=float16"], r"precision=float16: did you mean 'float32'\?"),
        # types
        (["num_envs=many"], r"num_envs='many': expected a whole number"),
        (["num_envs=1.5"], r"num_envs=1.5: expected a whole number"),
        (["num_envs=true"], r"num_envs=True: expected a whole number"),
        (["num_envs=null"], r"num_envs=None: expected a whole number"),
        (["algorithm.gamma=high"], r"algorithm.gamma='high': expected a number"),
        (["algorithm.gamma=nan"], r"algorithm.gamma=nan: expected a number"),
        (["algorithm.gamma=true"], r"algorithm.gamma=True: expected a number"),
        (["logging.tensorboard=1"], r"logging.tensorboard=1: expected true or false"),
        (["run_name=3"], r"run_name=3: expected text"),
        (["model.actor_hidden=64"], r"model.actor_hidden=64: expected a list like \[64,64\]"),
        (["model.actor_hidden=[64,x]"], r"model.actor_hidden\[1\]='x': expected a whole number"),
        # sizes
        (["num_envs=0"], r"num_envs=0: at least 1"),
        (["rollout_steps=-1"], r"rollout_steps=-1: at least 1"),
        (["iterations=0"], r"iterations=0: at least 1"),
        (["threads=0"], r"threads=0: at least 1"),
        (["seed=-1"], r"seed=-1: between 0 and 2\^32 - 1"),
        (["checkpoint.keep_last=0"], r"checkpoint.keep_last=0: at least 1"),
        (["algorithm.minibatches=0"], r"algorithm.minibatches=0: at least 1"),
        (
            ["num_envs=1", "rollout_steps=3"],
            r"algorithm.minibatches=4: num_envs \* rollout_steps = 3 rows make at most 1",
        ),
        (["algorithm.gamma=1.5"], r"algorithm.gamma=1.5: between 0 and 1"),
        (["algorithm.learning_rate=0.5"], r"algorithm.learning_rate=0.5: between learning_rate_min=1e-05"),
        (["model.init_std=0"], r"model.init_std=0.0: at least std_floor = 0.01"),
        (["model.actor_hidden=[0]"], r"model.actor_hidden=\(0,\): every layer needs at least 1 unit"),
        (["reset.num_groups=0"], r"reset.num_groups=0: at least 1"),
        (["run_name='a/b'"], r"run_name=a/b: letters, digits"),
    ],
)
def test_what_cannot_work_is_named_with_what_would(overrides, match):
    with pytest.raises(ConfigError, match=match):
        load_config(overrides)


@pytest.mark.parametrize(
    "override, key",
    [
        ("lr=1e-3", "algorithm.learning_rate"),
        ("algorithm.lr=1e-3", "algorithm.learning_rate"),
        ("num_steps_per_env=24", "rollout_steps"),
        ("mini_epochs=4", "algorithm.epochs"),
        ("algorithm.clip_range=0.2", "algorithm.clip"),
        ("tau=0.95", "algorithm.lam"),
        ("horizon=100", "task.settings.horizon_steps"),
        ("model.actor_hidden_dims=[8]", "model.actor_hidden"),
    ],
)
def test_names_of_other_libraries(override, key):
    with pytest.raises(ConfigError, match=rf"there is no key .*; did you mean '{re.escape(key)}'\?"):
        load_config([override])


def test_every_alias_leads_to_a_setting_and_hides_none():
    known = dict(_walk(compose([])))
    assert set(ALIASES.values()) <= known.keys()
    assert not ALIASES.keys() & {path.rpartition(".")[2] for path in known}
    assert ALIAS_NOTES.keys() <= ALIASES.keys()


def test_an_alias_of_what_the_task_does_not_have_is_not_offered():
    with pytest.raises(ConfigError, match=r"no key 'horizon'; (?!.*horizon_steps)"):
        load_config(["task=a:B", "horizon=100"])


@pytest.mark.parametrize(
    "arguments, multirun, match",
    [
        (["--iterations", "3"], False, "--iterations 3: settings are written without dashes: iterations=3$"),
        (["--iterations=3"], False, "--iterations=3: settings are written without dashes: iterations=3$"),
        (["--num-envs=64"], False, "without dashes: num_envs=64$"),
        (["--lr", "1e-3"], False, "without dashes: algorithm.learning_rate=1e-3$"),
        (["--resume"], False, "without dashes: resume=latest$"),
        (["--headles", "seed=1"], False, "--headles: there is no option --headles and no key 'headles'"),
        (["iterations", "3"], False, "'iterations': settings are given as key=value, e.g. iterations=3$"),
        (["3"], False, "'3': settings are given as key=value, e.g. iterations=3$"),
        (["pendulum"], False, "'pendulum': settings are given as key=value: task=pendulum$"),
        (["seed=0,1"], False, "^seed=0,1: a sweep over values needs -m$"),
        (["task=pendulum,skill_chain"], False, "^task=pendulum,skill_chain: a sweep over values needs -m$"),
        (
            ["model.actor_hidden=256,128"],
            False,
            r"a list is written 'model.actor_hidden=\[256,128\]', quoted; a sweep over values needs -m$",
        ),
        (["model.actor_hidden=(256,128)"], False, r"a list is written 'model.actor_hidden=\[256,128\]', quoted"),
        (["-m", "seed=0,1", "nu_envs=3,4"], True, "no key 'nu_envs'"),
    ],
)
def test_what_was_typed_and_what_was_meant(arguments, multirun, match):
    with hydra_configs(), pytest.raises(ConfigError, match=match):
        explain_overrides(arguments, multirun=multirun)


@pytest.mark.parametrize(
    "arguments, multirun",
    [
        (["-m", "seed=0,1", "model.actor_hidden=[8],[16]", "task=pendulum,skill_chain"], True),
        (["--cfg", "job", "seed=1"], False),
        (["--cfg=job", "model.actor_hidden=[8,8]", "run_dir='a,b'", "hydra.sweep.dir=x", "+new=1,2"], False),
    ],
)
def test_what_is_left_to_hydra(arguments, multirun):
    with hydra_configs():
        explain_overrides(arguments, multirun=multirun)


def test_a_setting_that_the_task_does_not_have_is_judged_by_the_task():
    config = load_config(["task=skill_chain", "task.settings.num_stage=3"])
    with pytest.raises(
        ConfigError, match=r"task 'skill_chain' has no setting 'num_stage' \(value 3\); did you mean 'num_stages'"
    ):
        make_env(config.task.name, 2, "cpu", 0, **config.task.settings)


def test_trees_are_judged_like_overrides():
    with pytest.raises(ConfigError, match="task is missing"):
        build_config({})
    with pytest.raises(ConfigError, match=r"task.nam='x': there is no such setting; did you mean 'name'"):
        build_config({"task": {"nam": "x"}})
    with pytest.raises(ConfigError, match="algorithm=3: expected a group of settings"):
        build_config({"task": {"name": "x"}, "algorithm": 3})
    with pytest.raises(ConfigError, match=r"task.settings=3: expected a group of settings"):
        build_config({"task": {"name": "x", "settings": 3}})


# -- round trips ----------------------------------------------------------------------------------------------------
EVERYTHING = [
    "task=point_reach", "reset=staggered_block", "reset.num_groups=7", "algorithm.kl_stop=0.3",
    "model.actor_hidden=[5]", "checkpoint.every_iters=9", "logging.console=off", "seed=4294967295",
    "run_dir=/tmp/x", "run_name=a-b",
]  # fmt: skip


def test_tree_and_config_are_the_same_thing():
    config = load_config(EVERYTHING)
    assert from_tree(Config, to_tree(config), "") == config
    through_a_file = yaml.safe_load(yaml.safe_dump(to_tree(dataclasses.replace(config, model=ModelConfig()))["task"]))
    assert through_a_file == to_tree(config)["task"]


def test_the_file_that_a_run_writes_gives_the_config_back(tmp_path):
    from rl_stagger.run_dir import write_start

    config = load_config(EVERYTHING)
    write_start(tmp_path, config, [])
    assert build_config(yaml.safe_load((tmp_path / "config.yaml").read_text(encoding="utf-8"))) == config


def test_a_tree_is_a_copy():
    config = load_config([])
    to_tree(config)["task"]["settings"]["num_stages"] = 1
    assert config.task.settings["num_stages"] == 20
    tree = compose([])
    built = build_config(tree)
    tree["task"]["settings"]["num_stages"] = 1
    assert built.task.settings["num_stages"] == 20


def test_configs_are_found_from_anywhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert load_config(["seed=3"]).seed == 3
    assert Path(config_dir()).is_absolute()


@pytest.mark.parametrize(
    "given, path, value",
    [
        ("resume=runs/a/density,density=1,2,4_seed0", ("resume",), "runs/a/density,density=1,2,4_seed0"),
        ("resume='runs/a b'", ("resume",), "runs/a b"),
        ("resume=latest", ("resume",), "latest"),
        ("run_dir=/tmp/it's (mine)", ("run_dir",), "/tmp/it's (mine)"),
        ("reset.library.path=runs/x,y=1", ("reset", "library", "path"), "runs/x,y=1"),
        ("reset.density=exp(-3*u)", ("reset", "density"), "exp(-3*u)"),
        ("reset.density=[1,2,4]", ("reset", "density"), [1, 2, 4]),
        ("reset.density='1 + 3 * u'", ("reset", "density"), "1 + 3 * u"),
    ],
)
def test_paths_and_expressions_are_taken_as_they_are_written(given, path, value):
    tree = compose(["reset=density", given])
    for key in path:
        tree = tree[key]
    assert tree == value


def test_a_rules_name_holds_no_path():
    tree = compose(["reset=snapshot", "reset.library.path=runs/skill_chain/x", "reset.num_groups=4"])
    assert tree["reset"]["name"] == "snapshot,num_groups=4"
