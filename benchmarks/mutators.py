"""Small faults, planted one at a time: what `mutants.py` asks the tests to notice.

A mutant is a module with one node of its syntax tree changed. Nothing is changed that the tests
cannot be asked about: annotations, decorators, imports, docstrings and the texts of errors.
"""

import ast
import copy
from collections.abc import Iterator
from dataclasses import dataclass

COMPARISONS: dict[type, tuple[type, ...]] = {
    ast.Lt: (ast.LtE, ast.GtE), ast.LtE: (ast.Lt, ast.Gt),
    ast.Gt: (ast.GtE, ast.LtE), ast.GtE: (ast.Gt, ast.Lt),
    ast.Eq: (ast.NotEq,), ast.NotEq: (ast.Eq,), ast.Is: (ast.IsNot,), ast.IsNot: (ast.Is,),
    ast.In: (ast.NotIn,), ast.NotIn: (ast.In,),
}  # fmt: skip
ARITHMETIC: dict[type, type] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.Pow: ast.Mult,
    ast.FloorDiv: ast.Div, ast.Mod: ast.Mult, ast.MatMult: ast.Mult, ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
}  # fmt: skip
OPPOSITES = {
    "min": "max", "amin": "amax", "argmin": "argmax", "minimum": "maximum", "any": "all",
    "ceil": "floor", "zeros": "ones", "zeros_like": "ones_like", "sum": "mean", "stack": "array",
}  # fmt: skip
NAMES = OPPOSITES | {new: old for old, new in OPPOSITES.items() if old != "stack"}
LEFT_ALONE = {"annotation", "returns", "decorator_list", "op", "ops", "ctx"}


@dataclass(frozen=True)
class Mutant:
    """One fault: where it is, what was there, what is there now, and the whole module with it."""

    file: str
    line: int
    scope: str
    was: str
    now: str
    source: str

    @property
    def key(self) -> tuple[str, str, str, str]:
        """The same after lines have moved."""
        return self.file, self.scope, self.was, self.now


@dataclass
class Place:
    """A node that may change, and where it hangs: a field of its parent, perhaps in a list."""

    parent: ast.AST
    field: str
    index: int | None
    scope: str
    statement: "Place | None" = None  # the one it is part of, if it is none itself

    @property
    def node(self) -> ast.AST:
        value = getattr(self.parent, self.field)
        return value if self.index is None else value[self.index]

    def put(self, node: ast.AST) -> None:
        if self.index is None:
            setattr(self.parent, self.field, node)
        else:
            getattr(self.parent, self.field)[self.index] = node

    @property
    def text(self) -> str:
        """The statement as one line; of one with a body, its head."""
        shown = (self.statement or self).node
        lines = ast.unparse(shown).splitlines()
        return next(line for line in lines if not line.startswith("@"))


def mutants_of(file: str, source: str) -> list[Mutant]:
    tree, found = ast.parse(source), []
    for place in list(_places(tree, "")):
        original, was = place.node, place.text
        line = getattr((place.statement or place).node, "lineno", 0)
        for changed in _changes(original):
            place.put(changed)
            mutated = ast.unparse(ast.fix_missing_locations(tree))
            found.append(Mutant(file, line, place.scope, was, place.text, mutated))
        place.put(original)
    return found


def _places(node: ast.AST, scope: str, statement: Place | None = None) -> Iterator[Place]:
    for field, value in ast.iter_fields(node):
        if field in LEFT_ALONE:
            continue
        children = value if isinstance(value, list) else [value]
        for index, child in enumerate(children):
            if not isinstance(child, ast.AST) or _is_left_alone(child, scope):
                continue
            at = index if isinstance(value, list) else None
            whole = isinstance(child, ast.stmt)
            place = Place(node, field, at, scope, None if whole else statement)
            yield place
            if not isinstance(child, ast.Raise):  # its text is for people
                name = child.name if isinstance(child, _SCOPES) else ""
                inside = f"{scope}.{name}".strip(".") if name else scope
                yield from _places(child, inside, place if whole else statement)


_SCOPES = (ast.FunctionDef, ast.ClassDef)


def _is_left_alone(node: ast.AST, scope: str) -> bool:
    match node:
        case ast.Import() | ast.ImportFrom() | ast.JoinedStr():
            return True
        case ast.Expr(value=ast.Constant()):  # a docstring
            return True
        case ast.Assign(value=ast.Subscript()) if not scope:  # the name of a type
            return True
        case ast.Assign(targets=[ast.Name(id="__all__")]):
            return True
    return False


def _changes(node: ast.AST) -> Iterator[ast.AST]:
    """Every fault of this node alone; the original stays as it is."""
    match node:
        case ast.Compare(ops=ops):
            for at, op in enumerate(ops):
                for other in COMPARISONS[type(op)]:
                    yield _with(node, ops=[*ops[:at], other(), *ops[at + 1 :]])
        case ast.BinOp(op=op) | ast.AugAssign(op=op):
            yield _with(node, op=ARITHMETIC[type(op)]())
        case ast.BoolOp(op=op):
            yield _with(node, op=ast.Or() if isinstance(op, ast.And) else ast.And())
        case ast.UnaryOp(operand=operand):
            yield copy.deepcopy(operand)
        case ast.Constant(value=value):
            yield from (ast.Constant(other) for other in _other_values(value))
        case ast.IfExp(test=test):
            yield _with(node, test=_negated(test))
        case ast.If(test=test):
            yield _with(node, test=_negated(test))
        case ast.comprehension(ifs=[test]):
            yield _with(node, ifs=[_negated(test)])
        case ast.Slice(lower=lower, upper=upper) if lower or upper:
            yield ast.Slice()
        case ast.Call():
            yield from _other_calls(node)
        case ast.Return(value=value) if value is not None:
            yield ast.Return(ast.Constant(None))
        case ast.Expr() | ast.Raise():
            yield ast.Pass()


def _other_values(value: object) -> tuple[object, ...]:
    match value:
        case bool():
            return (not value,)
        case int() | float():
            return value + 1, value - 1
        case str():
            return (f"XX{value}",)
    return ()


def _other_calls(node: ast.Call) -> Iterator[ast.AST]:
    """The opposite function, and each named argument left out."""
    match node.func:
        case ast.Name(id=name) if name in NAMES:
            yield _with(node, func=ast.Name(NAMES[name], ast.Load()))
        case ast.Attribute(attr=name, value=value) if name in NAMES:
            yield _with(node, func=ast.Attribute(copy.deepcopy(value), NAMES[name], ast.Load()))
        case ast.Name(id="abs" | "sorted") | ast.Attribute(attr="abs" | "sqrt" | "sign"):
            yield copy.deepcopy(node.args[0])
    for at in range(len(node.keywords)):
        yield _with(node, keywords=node.keywords[:at] + node.keywords[at + 1 :])


def _negated(test: ast.expr) -> ast.expr:
    return ast.UnaryOp(ast.Not(), copy.deepcopy(test))


def _with(node: ast.AST, **fields: object) -> ast.AST:
    changed = copy.deepcopy(node)
    for name, value in fields.items():
        setattr(changed, name, value)
    return changed
