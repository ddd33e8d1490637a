"""Nobody asks which format it is: a format says of itself what is asked, in `sglang_fp8rl/formats/`."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import sglang_fp8rl
from sglang_fp8rl.formats import FORMATS, scale_suffixes, weight_name_of

PACKAGE = Path(sglang_fp8rl.__file__).parent
CLASSES = {type(one).__name__ for one in FORMATS.values()}
# Values of options, the colours of a table, a checkpoint as its publishers write it, scales of a KV cache.
MAY_NAME_THEM = {
    "config.py",
    "engine/arrival/sent_tensors.py",
    "engine/modules/linear.py",
    "engine/modules/moe.py",
    "lab/plan_table.py",
    "lab/testing/checkpoints.py",
    "wire/sent_names.py",
}


def names_of_formats(source: str) -> Iterator[tuple[int, str]]:
    """Lines that have a format's class or name, or look for its scales by their name."""
    attributes = tuple(f"weight{suffix}" for suffix in scale_suffixes())
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Attribute(attr=name):
                is_one = name in CLASSES or name.endswith(attributes)
            case ast.Name(id=name) | ast.alias(name=name):
                is_one = name in CLASSES
            case ast.Constant(value=str(name)):
                is_one = name in (*FORMATS, *scale_suffixes())
            case _:
                continue
        if is_one:
            yield node.lineno, name


@pytest.mark.parametrize(
    "source",
    [
        "isinstance(held, PerChannel)",
        "scheme.name == 'blockwise'",
        "match held.name:\n    case 'per_channel': pass",
        "FORMATS['blockwise']",
        "name.endswith('_scale_inv')",
        "layer.weight_scale_inv",
        "layer.w13_weight_scale",
    ],
)
def test_a_question_is_found(source):
    assert list(names_of_formats(source))


def test_no_other_module_asks_which_format_it_is():
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        place = path.relative_to(PACKAGE).as_posix()
        if not place.startswith("formats/"):
            lines = list(names_of_formats(path.read_text()))
            found |= {place: lines} if lines else {}
    assert {place: lines for place, lines in found.items() if place not in MAY_NAME_THEM} == {}
    assert found.keys() == MAY_NAME_THEM


def test_options_have_the_names_of_formats():
    from sglang_fp8rl.config import Options

    for name in FORMATS:
        assert Options(granularity=name).granularity == name
    assert set(Options.model_fields["granularity"].annotation.__args__) == set(FORMATS)


def test_a_scale_leads_to_its_weight_under_any_format_s_name():
    for suffix in scale_suffixes():
        assert weight_name_of(f"a.q_proj.weight{suffix}") == "a.q_proj.weight"
    for other in ("a.q_proj.weight", "a.attn.k_scale", "a.input_scale", "a.gate_up_proj_scale_inv"):
        assert weight_name_of(other) == other
