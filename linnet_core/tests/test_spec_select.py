"""Selecting entries drops what only the others used, and nothing else."""

from linnet.spec.check import check
from linnet.spec.passes.select import select_entries
from linnet.testing.backends import bind


def test_what_only_other_entries_call_is_dropped() -> None:
    program = bind("f0").program
    entries = {name: entry for name, entry in program.entries.items() if "decode" in name}
    selected = select_entries(program, entries)
    check(selected)
    assert set(selected.entries) == {"decode", "decode_greedy", "decode_sample"}
    assert selected.functions
    assert all(name.endswith("_decode") for name in selected.functions)
    assert (selected.parameters, selected.states) == (program.parameters, program.states)
    assert select_entries(program, program.entries) == program
