"""The scheme of a module: a function of shape and layout only."""

import pytest
from support.plans import plan_schema

from sglang_fp8rl.scheme import HIGH_PRECISION, Cause, decide_scheme, misalignment


def reason(input_size, output_sizes, *, tp_rows=1, tp_columns=1):
    partitions = [size // tp_rows for size in output_sizes]
    return misalignment(
        input_size=input_size,
        input_size_per_partition=input_size // tp_columns,
        output_size=sum(output_sizes),
        output_partition_sizes=partitions,
        block_size=(128, 128),
    )


@pytest.mark.parametrize(
    ("input_size", "output_sizes", "tp_rows", "tp_columns"),
    [
        (4096, [4096, 1024, 1024], 1, 1),
        (4096, [4096, 1024, 1024], 8, 1),
        (4096, [12288, 12288], 4, 1),
        (256, [256, 128, 128], 1, 1),  # misaligned only when sharded, below
        (12288, [4096], 1, 8),
        (7168, [576], 1, 1),  # DeepSeek's kv_a_proj: one output, not sharded, a short last block
        (512, [192], 1, 1),
    ],
)
def test_aligned_shards_are_blockwise(input_size, output_sizes, tp_rows, tp_columns):
    assert not reason(input_size, output_sizes, tp_rows=tp_rows, tp_columns=tp_columns)


@pytest.mark.parametrize(
    ("input_size", "output_sizes", "tp_rows", "tp_columns", "names"),
    [
        (256, [256, 128, 128], 2, 1, "64"),  # 64 KV rows per rank
        (512, [1368, 1368], 1, 1, "1368"),
        (1368, [512], 1, 1, "1368"),
        (576, [512], 1, 1, "576"),
        (768, [512], 1, 8, "96"),  # row-parallel shard of 96 columns
        (512, [1280], 4, 1, "320"),  # column-parallel shard that ends inside a block
        (512, [384], 2, 1, "192"),  # one output, sharded: no short last block, by SGLang's rule
    ],
)
def test_misaligned_shards_name_the_value(input_size, output_sizes, tp_rows, tp_columns, names):
    text = reason(input_size, output_sizes, tp_rows=tp_rows, tp_columns=tp_columns)
    assert names in text
    assert "multiple" in text


def test_the_option_decides_what_becomes_of_it():
    assert decide_scheme("", "per_channel", "blockwise").name == "blockwise"
    assert decide_scheme("x", "per_channel", "blockwise").name == "per_channel"
    assert decide_scheme("x", "bf16", "blockwise").name == HIGH_PRECISION
    assert decide_scheme("x", "bf16", "blockwise").reason == "x"


@pytest.mark.parametrize("misaligned", ["per_channel", "bf16", "error"])
@pytest.mark.parametrize("why", ["", "x"])
def test_per_channel_for_every_module_when_asked_for_whatever_its_shape(why, misaligned):
    scheme = decide_scheme(why, misaligned, "per_channel")
    assert scheme.name == "per_channel"
    assert scheme.reason == "granularity='per_channel'"


def test_the_schema_of_the_plan_has_every_cause():
    rows = plan_schema()["properties"]["modules"]["items"]["properties"]
    assert set(rows["cause"]["enum"]) == {cause.value for cause in Cause}
