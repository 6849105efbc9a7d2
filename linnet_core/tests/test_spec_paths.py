"""Paths of parameters as generated files write them."""

from linnet.spec.paths import attribute, joins, loops


def test_a_joined_path_is_one_attribute() -> None:
    assert attribute("layers.0.attn.q_proj+k_proj+v_proj.weight") == "layers.0.attn.qkv_proj.weight"
    assert attribute("mlp.gate_proj+up_proj.bias") == "mlp.gate_up_proj.bias"
    assert attribute("a.b_proj+c.weight") == "a.bc.weight"
    assert attribute("norm.weight") == "norm.weight"


def test_alike_paths_are_a_loop() -> None:
    paths = ["embed.weight", "layers.0.w", "layers.1.w", "layers.0.b", "layers.1.b", "odd.3.w"]
    assert list(loops(paths)) == [
        ([], '"embed.weight"', 1),
        (["    for i in range(2):"], 'f"layers.{i}.w"', 2),
        ([], 'f"layers.{i}.b"', 2),
        (["    for i in (3,):"], 'f"odd.{i}.w"', 2),
    ]


def test_joins_name_the_parts() -> None:
    paths = ["layers.0.mlp.gate_proj+up_proj.weight", "layers.1.mlp.gate_proj+up_proj.weight"]
    assert joins(paths) == [
        "    for i in range(2):",
        '        join(flat, f"layers.{i}.mlp", ("gate_proj.weight", "up_proj.weight"), '
        '"gate_up_proj.weight")',
    ]
    assert joins(["decoder.self_attn.q_proj+k_proj+v_proj.weight"]) == [
        "    join(",
        "        flat,",
        '        "decoder.self_attn",',
        '        ("q_proj.weight", "k_proj.weight", "v_proj.weight"),',
        '        "qkv_proj.weight",',
        "    )",
    ]
