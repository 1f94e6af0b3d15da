"""No text is made of what a file holds but by the helpers that look at no more than they show.

A pickle of a hundred bytes can spell a tree of 2**64 leaves, lists nested a thousand deep, or an integer that Python
does not print: `repr`, `str`, `json.dumps` and a function that calls itself would never end, or end in an internal
error. `catalogue.shown` is the door for people, `identity` that for comparing, `typed_json` that for JSON.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from test_architecture import modules

DOORS = {"text", "catalogue.shown", "catalogue.typed_json"}


def outside() -> Iterator[tuple[str, ast.Module]]:
    """Yield the modules that are not doors. A worker has no file of a stranger: it watches the user's own program."""
    for name, tree in modules().items():
        watches = f"{name}.".startswith(("resume.worker.", "resume.observe."))
        if name not in DOORS and not watches:
            yield name, tree


def unbounded(tree: ast.AST) -> Iterator[str]:
    """Yield the code that spells a value whatever it is."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FormattedValue) and node.conversion in (ord("r"), ord("a")):
            yield ast.unparse(node)
        elif isinstance(node, ast.Name) and node.id in ("repr", "ascii"):
            yield node.id
        elif isinstance(node, ast.Attribute) and ast.unparse(node) in ("json.dumps", "json.dump"):
            yield "json.dumps"
        elif isinstance(node, ast.Attribute) and node.attr == "__repr__":
            yield "__repr__"
        elif isinstance(node, (ast.Import, ast.ImportFrom)) and {"reprlib", "pprint"} & {a.name for a in node.names}:
            yield "reprlib"
        elif isinstance(node, ast.keyword) and node.arg == "default" and ast.unparse(node.value) in ("str", "repr"):
            yield "default=str"


JSON_OF_OURS = {
    "formats.documents.writer": "after `losses`, which bounds what is shared",
    "formats.safetensors.state_json": "what `typed_json.encode` has made",
    "formats.safetensors.index": "names and files",
    "formats.safetensors.writer": "names and containers of metadata",
    "formats.safetensors.checksums": "names and sums",
    "remote.hub.headers": "addresses, names and sizes",
    "remote.hub.bucket_mark": "names and hashes",
    "operations.export.card": "a name in the header of a card",
    "fleet.log": "paths, sizes and messages, and options that `jsonable` has bounded",
    "storage.log": "lines of a journal of ours",
    "reports.terminal": "a document whose values `jsonable` has bounded",
    "cli.error_messages": "facts that `jsonable` has bounded",
    "reports.page": "numbers and names of a page",
    "analysis.statistics.cached": "results of ours",
    "resume.checks": "a box of numbers",
    "resume.job": "arguments of the processes of a trial",
    "models.architecture": "a config of JSON, of which nothing is shared",
    "models.assets": "the name of a dtype",
    "models.architecture_process": "names, shapes and dtypes",
    "models.matching.decide": "rules of a key map that were made here",
    "operations.match": "rules of a key map that were made here",
    "analysis.result": "documents, whose values `jsonable` has bounded",
    "analysis.describe.document": "values that `jsonable` has bounded",
    "transfer.processes": "messages of our own processes, and facts of errors",
    "serialization.safetensors_header": "names, dtypes, shapes and offsets",
    "serialization.manifest": "names, sizes and sums",
    "remote.cloud.claim": "this process, and names of the files that are sent",
}
"""Modules that write JSON, and of what."""

REPR_OF_OURS = {
    ("training.match", "repr"): "names of tensors",
    ("training.load", "repr"): "names, shapes, and what `_plain` lets through: numbers and text",
    ("resume.steps", "{one!r}"): "numbers that the run of ours has noted",
    ("resume.steps", "{other!r}"): "as above",
    ("resume.checks", "repr"): "a loss",
    ("resume.checks", "{one.steps[i]['loss']!r}"): "a loss",
    ("reports.resumed", "repr"): "a loss",
    ("models.written_names", "repr"): "rules that were made of a model here",
    ("operations.open", "repr"): "the class's own",
    ("operations.open", "{self!r}"): "the class's own",
    ("catalogue.entries", "repr"): "the class's own",
    ("serialization.pickler", "repr"): "numbers and text, by which sets are sorted",
    ("transfer.journal", "repr"): "names, shapes and offsets",
    ("transfer.processes", "default=str"): "paths in the facts of errors",
    ("resume.job", "default=str"): "paths in the facts of errors",
}
"""Code elsewhere that spells values, and why they are bounded."""


def test_values_are_spelt_by_the_bounded_helpers() -> None:
    found = {(name, code) for name, tree in outside() for code in unbounded(tree)}
    allowed = {(name, "json.dumps") for name in JSON_OF_OURS} | REPR_OF_OURS.keys()
    assert not sorted(found - allowed), "use `shown`, `literal`, `identity` or `typed_json`"
    assert not sorted(allowed - found), "no longer there"


# Text of what may be anything -----------------------------------------------------------------------------------------

ANYTHING = {"Any", "object", "Any | None", "dict[str, Any]", "list[Any]", "Sequence[Any]", "Mapping[str, Any]"}
GETTING = {"get", "pop", "items", "values", "keys"}
STATED = {"value", "args", "kwargs", "state"}
NESTED = ("dict", "list", "tuple", "set", "Stub")


class Anything:
    """What of a function's names may be any value of a file: parameters of the type Any, and what is taken out of them.
    A name whose type is asked for with `isinstance` or `type` is what that says, unless it is a container."""

    def __init__(self, function: ast.FunctionDef) -> None:
        arguments = function.args
        parameters = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
        self.names = {p.arg for p in parameters if p.annotation is not None and ast.unparse(p.annotation) in ANYTHING}
        before = None
        while before != len(self.names):
            before = len(self.names)
            for node in ast.walk(function):
                self._assign(node)
        self.names -= {name for node in ast.walk(function) for name in self._known(node)}

    def _assign(self, node: ast.AST) -> None:
        match node:
            case ast.Assign(targets, value):
                pass
            case ast.NamedExpr(target, value) | ast.For(target, value) | ast.comprehension(target, value):
                targets = [target]
            case _:
                return
        if self.has(value):
            self.names |= {part.id for one in targets for part in ast.walk(one) if isinstance(part, ast.Name)}

    @staticmethod
    def _known(node: ast.AST) -> Iterator[str]:
        match node:
            case ast.Call(ast.Name("isinstance"), [ast.Name(name), kinds]):
                if not any(word in ast.unparse(kinds) for word in NESTED):
                    yield name
            case ast.Compare(ast.Call(ast.Name("type"), [ast.Name(name)])):
                yield name

    def has(self, node: ast.expr) -> bool:
        match node:
            case ast.Name(name):
                return name in self.names
            case ast.Subscript(value) | ast.Starred(value) | ast.NamedExpr(_, value):
                return self.has(value)
            case ast.Attribute(value, name):
                return name in STATED and self.has(value)
            case ast.Call(ast.Attribute(value, name)):
                return name in GETTING and self.has(value)
            case ast.BoolOp(_, values) | ast.Tuple(values) | ast.List(values):
                return any(map(self.has, values))
            case ast.IfExp(_, one, other):
                return self.has(one) or self.has(other)
        return False

    def spelt_in(self, function: ast.FunctionDef) -> Iterator[str]:
        for node in ast.walk(function):
            match node:
                case ast.FormattedValue(value) if self.has(value):
                    yield ast.unparse(node)
                case ast.Call(ast.Name("str" | "format"), [value, *_]) if self.has(value):
                    yield ast.unparse(node)
                case ast.Call(ast.Name("map"), [ast.Name("str"), value]) if self.has(value):
                    yield ast.unparse(node)


CONFIG = "JSON, in which nothing is shared"
SPELT = {
    "layout.key_maps": CONFIG,
    "models.adapters": CONFIG,
    "models.architecture_process": "a model of transformers",
    "models.key_maps": "names of ours",
    "reports.templates": "sentences of ours",
    "analysis.saved_state": "keys, which are hashed",
    "producers.foreign.weights": CONFIG,
    "serialization.safetensors_header": "known to be a list of integers",
    "remote.hub.answers": "JSON of a server, in which nothing is shared",
    "training.fill": "keys, which are hashed",
    "transfer.agreement": "arguments of the command line",
    "transfer.processes": "ranks",
}
"""Modules that make text of what could be anything by its type, and what it is."""


def test_what_may_be_anything_is_spelt_by_them_too() -> None:
    found: dict[str, list[str]] = {}
    for name, tree in outside():
        for function in ast.walk(tree):
            if isinstance(function, ast.FunctionDef):
                found.setdefault(name, []).extend(Anything(function).spelt_in(function))
    found = {name: code for name, code in found.items() if code}
    assert not {name: code for name, code in found.items() if name not in SPELT}, "use `shown` or `spelt`"
    assert not SPELT.keys() - found.keys(), "no longer there"


# Functions that call themselves ---------------------------------------------------------------------------------------

CHECKED = "over a value of a file, which `check_levels` has let in; shared containers are counted or seen once"
LEVELS = "to a depth of its own"
SHAPE = "over the dimensions of a tensor, of which there are 64 at most"
FOLDERS = "over directories, to a depth of its own or as deep as a path can be long"
TREE = "over the tree of a result, as deep as names have dots"
RESULT_OF_OURS = "over a result, which `jsonable` bounds"
OWN = "over what ckpttool, or the program that runs, has made"
RECURSIVE = {
    "training.state_notes._classes": OWN,
    "training.sharded_values._to_gather": OWN,
    "training.save._models": OWN,
    "training.load_into._restored": OWN,
    "training.known_objects.restore": OWN,
    "storage.tree.remove": FOLDERS,
    "storage.tree.disk_bytes": FOLDERS,
    "catalogue.protocols.require": OWN,
    "storage.local.open": "the function of Python of that name",
    "remote.hub.blocks.open": "the function of Python of that name",
    "producers.reader.open": FOLDERS,
    "producers.runs._below": FOLDERS,
    "operations.repair._remains": FOLDERS,
    "formats.rankfiles.discover._files_in": FOLDERS,
    "training.load_into._leaves": CHECKED,
    "catalogue.flatten.visit": CHECKED,
    "transfer.read._read": SHAPE,
    "layout.views._within": SHAPE,
    "catalogue.boxes._walk": SHAPE,
    "catalogue.conditions._number": "over a condition of the command line",
    "catalogue.conditions.condition": "over a condition of the command line",
    "catalogue.models._averaged_below": "over names, `_DEPTH` keys deep at most",
    "catalogue.parts._optimizers": LEVELS,
    "catalogue.parts.divide": LEVELS,
    "producers.contents._below": FOLDERS,
    "producers.runs._data_below": FOLDERS,
    "storage.tree.remove_links": FOLDERS,
    "training.sharded_values.gathered": OWN,
    "cli.browser.names._below": TREE,
    "serialization.dcp.planner_data.above": "over a path, of 256 keys at most",
    "flat.fsdp1_optimizer._alike": LEVELS,
    "flat.fsdp1_units.visit": "over modules, as deep as names have dots",
    "layout.assemblies.take": SHAPE,
    "layout.key_maps._indexes": SHAPE,
    "layout.optimizer.map_state._listed": CHECKED,
    "layout.rechunk._is_cut": SHAPE,
    "analysis.differences.compare.between": LEVELS,
    "analysis.describe.format_value.plain": LEVELS,
    "analysis.describe.module_tree._count": TREE,
    "analysis.describe.module_tree._deepest": TREE,
    "analysis.describe.module_tree._walk": TREE,
    "models.matching.constructions._options": SHAPE,
    "models.matching.constructions._stacked": SHAPE,
    "analysis.result.as_json": RESULT_OF_OURS,
    "analysis.audit.uncovered._tensors": LEVELS,
    "analysis.saved_state.leaves": CHECKED,
    "analysis.saved_state._with_lists": CHECKED,
    "producers.foreign.directories.megatron": FOLDERS,
    "serialization.pickler.named": "over the dots of a name, which is written once",
    "serialization.torch_module._named_modules": LEVELS,
    "serialization.torch_module._replace": LEVELS,
    "serialization.torch_module.script_tensors": LEVELS,
    "storage.stores.below": FOLDERS,
    "training.fill._uncast": OWN,
    "training.read._fill": SHAPE,
    "training.save._value": OWN,
    "training.rank_values._fingerprint": OWN,
    "training.rank_values._leaves": OWN,
    "training.rank_values._with": "over a path of a state dict of the script",
    "cli.error_messages._print": "once, on stderr",
    "transfer.agreement._plain": OWN,
    "transfer.plan.tiles": SHAPE,
    "transfer.processes.transfer": OWN,
}


def calls_itself(tree: ast.Module) -> Iterator[str]:
    for function in ast.walk(tree):
        if isinstance(function, ast.FunctionDef):
            for node in ast.walk(function):
                match node:
                    case ast.Call(ast.Name(name)) | ast.Call(ast.Attribute(ast.Name("self" | "cls"), name)):
                        if name == function.name:
                            yield name


def test_functions_that_call_themselves_are_bounded() -> None:
    found = {f"{name}.{function}" for name, tree in outside() for function in calls_itself(tree)}
    assert not sorted(found - RECURSIVE.keys()), "say what bounds the depth, and what is shared, or use a loop"
    assert not sorted(RECURSIVE.keys() - found), "no longer there"
