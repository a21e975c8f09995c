"""`rl-stagger train --help`: how to call it, and every setting with its comment and the value in force."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Collection, Dict, Iterator, List, Match, Optional, Sequence, Tuple

from rl_stagger.overrides import compose, config_dir, first_of_sweep, group_options, rewrite_overrides

USAGE = """\
usage: rl-stagger train [key=value ...]                      train once
       rl-stagger train -m key=a,b [key=value ...]           sweep: a run for each combination, one table at the end
       rl-stagger train resume=latest [iterations=600 ...]   go on with the newest run, or with resume=<run folder>

Later ones win: configs/config.yaml, the files of reset, algorithm and model, the task's file (it sets sizes and PPO
settings that suit the task), the experiment's (it picks the task as well), the command line. Settings inside a group
are written with a dot: algorithm.gamma=0.98. Lists are quoted for the shell's sake: 'model.actor_hidden=[256,256]'.
Hydra's own options: --hydra-help.
"""

GROUPS = ("task", "reset", "algorithm", "model")
COMMENT_COLUMN = 40
"""Comments begin here at the latest, unless their own setting is longer."""
SETTING = re.compile(
    r"(?P<indent> *)(?!#)(?P<key>[\w.]+):(?: +(?P<value>\"[^\"]*\"|'[^']*'|[^#]*?))? *(?:# *(?P<note>.*))?$"
)


def train_help(overrides: Sequence[str] = ()) -> str:
    """What `rl-stagger train --help` prints; values are those that a run with `overrides` would have.

    Of a sweep's values the first counts. Raises ConfigError for what is unknown.
    """
    given = [first_of_sweep(override) for override in rewrite_overrides(overrides)]
    if "task=custom" in given and not any(override.startswith("task.name=") for override in given):
        given.append("task.name='module:Class'")
    tree, chosen = compose(given), _chosen(given)
    by_user = {override.lstrip("+~").partition("=")[0] for override in given} - set(GROUPS)

    parts = [USAGE, _choices(chosen)]
    shown = " ".join(f"{group}={'module:Class' if chosen[group] == 'custom' else chosen[group]}" for group in GROUPS)
    parts.append(f"Settings with {shown}:\n")
    parts.append(_section(config_dir() / "config.yaml", "", tree, by_user, leave_out=("defaults", "hydra")))
    for group in ("reset", "algorithm", "model"):
        path = config_dir() / group / f"{chosen[group]}.yaml"
        parts.append(_section(_whole_file(path), group, tree, by_user, variant=path))
    # The rest of a task file is shown where it acts: as the values of the other sections.
    parts.append(_section(config_dir() / "task" / f"{chosen['task']}.yaml", "task", tree, by_user))
    return "\n".join(parts)


def _chosen(overrides: Sequence[str]) -> Dict[str, str]:
    """The option of each group."""
    defaults = _read(config_dir() / "config.yaml")["defaults"]
    chosen = {group: str(option) for entry in defaults if isinstance(entry, dict) for group, option in entry.items()}
    given = {key: value.strip("'\"") for key, _, value in (override.partition("=") for override in overrides)}

    def take_over(path: Path) -> None:
        for entry in _read(path).get("defaults", []) if path.is_file() else []:
            chosen.update({group.replace("override /", ""): option for group, option in entry.items()})

    if "experiment" in given:
        take_over(config_dir() / "experiment" / f"{given['experiment']}.yaml")
    take_over(config_dir() / "task" / f"{given.get('task', chosen['task'])}.yaml")
    chosen.update(given)
    return {group: chosen[group] for group in (*GROUPS, "experiment")}


def _choices(chosen: Dict[str, str]) -> str:
    lines = ["Choices, * those taken here:"]
    for group in (*GROUPS, "experiment"):
        options = [option for option in group_options(group) if option != "custom"]
        names = [f"{option}*" if option == chosen[group] else option for option in options]
        if group == "task":
            names.append("module:Class" + "*" * (chosen[group] == "custom"))
        line = f"  {group + '=':<11}"
        for name in names:
            if len(line) + len(name) > 116:
                lines.append(line.rstrip())
                line = " " * 13
            line += f"{name}  "
        lines.append(line.rstrip())
    return "\n".join(lines) + "\n"


# -- a file's settings ----------------------------------------------------------------------------------------------
Line = Tuple[str, Optional[str]]
"""A setting and its comment; what is printed as it is has None."""


def _whole_file(path: Path) -> Path:
    """The file with all settings of a group: `path` itself, or the one beside it that it builds upon."""
    base = next((entry for entry in _read(path).get("defaults", []) if entry != "_self_"), None)
    return path if base is None else path.with_name(f"{base}.yaml")


def _section(
    path: Path,
    group: str,
    tree: Dict[str, Any],
    by_user: Collection[str],
    leave_out: Collection[str] = (),
    variant: Optional[Path] = None,
) -> str:
    """The text of a file, comments kept, with the values of `tree`. `variant`: the file that was chosen, where that one
    builds upon this one."""
    defaults = _read(path)
    varied = {} if variant is None or variant == path else _read(variant)
    # A task file holds whole paths, of which those of the other groups are shown there.
    prefix = [] if group in ("", "task") else [group]
    own = {"task"} if group == "task" else defaults.keys() - leave_out
    lines: List[Line] = [(f"{group}:", None)] if prefix else []
    margin = "  " * len(prefix)
    shown = bool(group)  # config.yaml begins with a manual of its own, which is above
    parents: List[Tuple[int, str]] = []
    for text in path.read_text(encoding="utf-8").splitlines():
        match = SETTING.match(text)
        if match is None:
            if shown and "@package" not in text:
                lines.append((margin + text if text else "", None))
            continue
        indent, key = len(match["indent"]), match["key"]
        while parents and parents[-1][0] >= indent:
            parents.pop()
        parents.append((indent, key))
        shown = parents[0][1] in own
        if shown:
            local = [name for _, name in parents]
            default, value = _at(defaults, local), _at(tree, [*prefix, *local])
            origin = "" if variant is None or local[0] not in varied else f"{group}={variant.stem}"
            lines.append(_line(margin, match, default, value, ".".join(prefix + local), by_user, origin))
    if group == "task":
        while lines[-1] == ("", None):
            lines.pop()
        lines += _new_settings(defaults, tree)
    return _aligned(lines)


def _line(
    margin: str, match: Match[str], default: Any, value: Any, path: str, by_user: Collection[str], variant: str = ""
) -> Line:
    left, written = f"{margin}{match['indent']}{match['key']}:", match["value"]
    notes = [match["note"]] if match["note"] else []
    if written:
        left += f" {written if value == default else as_text(value)}"
        if value != default:
            notes.append(f"[{_origin(path, by_user, variant)}{'' if written == '???' else f'; default {written}'}]")
    return left, "  ".join(notes) or None


def _origin(path: str, by_user: Collection[str], variant: str) -> str:
    """Who moved a setting away from its file's value."""
    said = any(path == key or path.startswith(f"{key}.") or key.startswith(f"{path}.") for key in by_user)
    return "from your command line" if said else f"set by {variant or 'the task'}"


def _new_settings(defaults: Dict[str, Any], tree: Dict[str, Any]) -> Iterator[Line]:
    """Settings of the task that only the command line names."""
    known = defaults["task"]["settings"]
    if not known:
        return  # they were shown as a whole
    for key, value in tree["task"].get("settings", {}).items():
        if key not in known:
            yield f"    {key}: {as_text(value)}", "[from your command line]"


def _aligned(lines: Sequence[Line]) -> str:
    widths = [len(left) for left, note in lines if note and len(left) < COMMENT_COLUMN]
    width = max(widths, default=0)
    text = "\n".join(left if note is None else f"{left:<{width}}  # {note}" for left, note in lines)
    return text.strip("\n") + "\n"


def as_text(value: Any) -> str:
    """A value as it is written on the command line and in YAML.

    >>> as_text([None, True, {"a": 1e-05}])
    '[null, true, {a: 1e-05}]'
    """
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(as_text(item) for item in value)}]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {as_text(item)}" for key, item in value.items()) + "}"
    return str(value)


def _read(path: Path) -> Dict[str, Any]:
    from omegaconf import OmegaConf

    tree = OmegaConf.to_container(OmegaConf.load(path), resolve=False)
    assert isinstance(tree, dict)
    return {str(key): value for key, value in tree.items()}


def _at(tree: Any, keys: Sequence[str]) -> Any:
    for key in keys:
        tree = tree.get(key) if isinstance(tree, dict) else None
    return tree
