"""Records say by keyword what they are made of, and none changes but those that are made to."""

import ast

from support.sources import files, statements, text, tree

PACKAGES = ("engines", "baselines", "repro", "paper_figures")
POSITIONAL = frozenset(
    [
        "CheckSystem",
        "DllmModel",
        "FlashAttnKernel",
        "FlashVarlen",
        "ModelCost",
        "Sdpa",
        "SdpaPadded",
        "Store",
        "StoredRun",
        "TorchVarlenKernel",
    ]
)
FILLED_ELSEWHERE = frozenset({"Local", "Reply"})


def test_records_take_keywords_and_do_not_change():
    """But for ``slots``, which the hot paths make by the thousand. What changes is changed in its own module."""
    found = 0
    for package in PACKAGES:
        for path in files(package):
            if "@dataclass(" not in text(path):
                continue
            nodes = list(ast.walk(tree(path)))
            stored = {
                each.attr for each in nodes if isinstance(each, ast.Attribute) and isinstance(each.ctx, ast.Store)
            }
            for node in (each for each in nodes if isinstance(each, ast.ClassDef)):
                calls = [each for each in node.decorator_list if isinstance(each, ast.Call)]
                marks = {each.arg: ast.unparse(each.value) == "True" for call in calls for each in call.keywords}
                if not any(ast.unparse(call.func) == "dataclass" for call in calls) or marks.get("slots"):
                    continue
                found += 1
                names = {each.target.id for each in node.body if isinstance(each, ast.AnnAssign)}
                if len(names) > 1 and node.name not in POSITIONAL:
                    assert marks.get("kw_only"), f"{path.name}: {node.name} takes its fields by place"
                if not names & stored and node.name not in FILLED_ELSEWHERE:
                    assert marks.get("frozen"), f"{path.name}: nothing changes {node.name}, yet it is not frozen"
    assert found > 300


def test_every_argument_may_be_named():
    functions = [
        (path.name, node)
        for package in PACKAGES
        for path in files(package)
        for node in statements(tree(path))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]
    assert [(name, node.name) for name, node in functions if node.args.posonlyargs] == []
