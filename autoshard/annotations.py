"""A plan's shardings as source text, to be pasted into a program that does without autoshard."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from jax.sharding import NamedSharding

from autoshard.errors import InputError
from autoshard.execute import Placement
from autoshard.plan import Plan, spec
from autoshard.plan_parts import BoundaryPlan

_WIDTH = 92
_STEP = re.compile(r"\['([^']*)'\]|\[\"([^\"]*)\"\]|\[([^\]]*)\]|\.(\w+)")


def partition_specs_text(plan: Plan) -> str:
    """Python source that gives the plan's ``PartitionSpec`` for every argument and result.

    A plan that knows the caller's trees (one made or checked in this process), all of whose
    containers can be written down, gives the trees ``in_specs``, ``out_specs`` and, if the call
    has keywords, ``keyword_specs``, as ``jax.jit`` takes them under ``jax.set_mesh(mesh)``. Any
    other plan gives the table ``SPECS`` by name and the function ``specs_of(name, tree)``, which
    makes the tree for one argument, or for ``result``.
    """
    head = "from jax.sharding import PartitionSpec as P\n"
    if plan.placement is not None:
        imports: dict[str, None] = {}
        text = _trees(plan.placement, imports)
        if text is not None:
            return "\n".join((*imports, head, text))
    return f"{head}{_table(plan)}"


def _trees(placement: Placement, imports: dict[str, None]) -> str | None:
    """The trees of specs as assignments; None if one of them cannot be written down."""
    trees = {"in_specs": placement.in_shardings, "out_specs": placement.out_shardings}
    if placement.keyword_shardings:
        trees["keyword_specs"] = placement.keyword_shardings
    lines = []
    for name, tree in trees.items():
        text = _literal(tree, imports, 0)
        if text is None:
            return None
        lines.append(f"{name} = {text}\n")
    return "\n".join(lines)


def _literal(tree: Any, imports: dict[str, None], depth: int) -> str | None:
    """A tree of shardings as an expression; None if it has a container of another kind."""
    if tree is None:
        return "None"
    if isinstance(tree, NamedSharding):
        return "P(" + ", ".join(map(repr, tree.spec)) + ")"
    kind = type(tree)
    if kind is dict:
        opening, closing, items = "{", "}", [(f"{key!r}: ", tree[key]) for key in tree]
        if not all(isinstance(key, str | int) for key in tree):
            return None
    elif kind in (list, tuple):
        opening, closing = ("[", "]") if kind is list else ("(", ")")
        items = [("", value) for value in tree]
    elif isinstance(tree, tuple) and hasattr(tree, "_fields"):
        if getattr(sys.modules.get(kind.__module__), kind.__qualname__, None) is not kind:
            return None
        if kind.__module__ != "__main__":
            imports[f"from {kind.__module__} import {kind.__qualname__}"] = None
        opening, closing = f"{kind.__qualname__}(", ")"
        items = [(f"{field}=", getattr(tree, field)) for field in tree._fields]
    else:
        return None
    parts = []
    for label, value in items:
        text = _literal(value, imports, depth + 1)
        if text is None:
            return None
        parts.append(label + text)
    short = (
        opening + ", ".join(parts) + ("," if kind is tuple and len(parts) == 1 else "") + closing
    )
    if len(short) + 4 * depth <= _WIDTH and "\n" not in short:
        return short
    inner = "".join(f"{'    ' * (depth + 1)}{part},\n" for part in parts)
    return f"{opening}\n{inner}{'    ' * depth}{closing}"


def _table(plan: Plan) -> str:
    rows = (*plan.arguments, *plan.results)
    tops = list(dict.fromkeys(_top(a.name) for a in plan.arguments))
    listed = "".join(f"    {row.name!r}: {spec(row.sharding)},\n" for row in rows)
    usage = ", ".join(f'specs_of("{top}", {top})' for top in tops)
    return f"""from jax.tree_util import keystr, tree_map_with_path

SPECS = {{
{listed}}}


def specs_of(name, tree):
    \"\"\"The tree of specs for one argument, or for "result"; None where there is no array.\"\"\"
    return tree_map_with_path(lambda path, leaf: SPECS.get(name + keystr(path)), tree)


# in_specs = ({usage})
# out_specs = specs_of("result", jax.eval_shape(function, ...))
"""


def _top(name: str) -> str:
    """The argument that a leaf belongs to."""
    return re.split(r"[\[.]", name, maxsplit=1)[0] or name


def flax_rules_text(plan: Plan, argument: str | None = None) -> str:
    """Python source that gives flax's logical axes of every parameter, and the rules for them.

    It defines ``LOGICAL_AXES`` (by path, e.g. ``Dense_0/kernel``: what
    ``nn.with_logical_partitioning`` takes), ``RULES`` (what ``nn.logical_axis_rules`` takes) and
    ``partitioned(params)``, which gives parameters that are there already the same metadata.

    Args:
        plan: The plan.
        argument: The parameters, e.g. ``state.params``; None: what is called ``params``, else the
            first argument.

    Raises:
        InputError: No argument is called so.
    """
    if not isinstance(argument, str | None):
        raise InputError(
            f"the parameters are named by a {type(argument).__name__}",
            fix="give their name as the plan prints it, e.g. 'state.params'",
        )
    prefix, rows = _parameters(plan, argument)
    axes: dict[str, tuple[str | None, ...]] = {}
    rules: dict[str, str | tuple[str, ...]] = {}
    for row in rows:
        names: list[str | None] = []
        for size, dim in zip(row.shape, row.sharding, strict=True):
            name = f"{'_'.join(dim)}_{size}" if dim else None
            if name is not None:
                rules[name] = dim[0] if len(dim) == 1 else dim
            names.append(name)
        axes["/".join(_steps(row.name[len(prefix) :]))] = tuple(names)
    listed = "".join(f"    {path!r}: {names!r},\n" for path, names in axes.items())
    ruled = "".join(f"    {pair!r},\n" for pair in sorted(rules.items()))
    return f"""from flax import linen as nn
from jax.tree_util import keystr, tree_map_with_path

# Parameters of {prefix}: names of their dimensions, as in
# nn.with_logical_partitioning(init, LOGICAL_AXES[path]).
LOGICAL_AXES = {{
{listed}}}

# Mesh axes that the names stand for, as in nn.logical_axis_rules(RULES).
RULES = (
{ruled})


def partitioned(params):
    \"\"\"Parameters with the metadata that nn.with_logical_partitioning gives them.\"\"\"

    def box(path, leaf):
        return nn.LogicallyPartitioned(
            leaf, LOGICAL_AXES[keystr(path, simple=True, separator="/")]
        )

    return tree_map_with_path(box, params)


# specs = nn.logical_to_mesh(nn.get_partition_spec(partitioned(params)), RULES)
"""


def _parameters(plan: Plan, argument: str | None) -> tuple[str, Sequence[BoundaryPlan]]:
    """The name of the parameters, and their leaves."""
    if argument is None:
        found = (_until_params(a.name) for a in plan.arguments)
        argument = next((name for name in found if name), None)
        if argument is None:
            argument = _top(plan.arguments[0].name) if plan.arguments else ""
    rows = [a for a in plan.arguments if _is_below(a.name, argument)]
    if not rows:
        tops = dict.fromkeys(_top(a.name) for a in plan.arguments)
        raise InputError(
            f"no argument is called {argument!r}", fix=f"use one of {', '.join(tops) or 'none'}"
        )
    return argument, rows


def _until_params(name: str) -> str:
    """The name up to the step called ``params``; empty if it has none."""
    top = _top(name)
    if top == "params" and name != top:
        inner = name[len(top) :]
        nested = _STEP.match(inner)
        return top + nested[0] if nested and nested[1] == "params" else top
    for match in _STEP.finditer(name, len(top)):
        if "params" in match.groups() and match.end() < len(name):
            return name[: match.end()]
    return ""


def _is_below(name: str, prefix: str) -> bool:
    return name == prefix or (name.startswith(prefix) and name[len(prefix)] in "[.")


def _steps(path: str) -> Iterator[str]:
    for match in _STEP.finditer(path):
        yield next(group for group in match.groups() if group is not None)
