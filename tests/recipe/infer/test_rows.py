"""Prompts packed into a row: their positions and the padding around them."""

from __future__ import annotations

from recipe.infer.generation.rows import ALIGNMENT, lay_out


def test_each_prompt_ends_with_a_tile_and_is_a_document():
    prompts = {3: list(range(1, 131)), 1: [7, 8, 9]}
    row = lay_out(prompts, slots=5, length=1024)
    assert row.starts is not None
    assert row.tokens.shape == row.positions.shape == row.starts.shape == (1, 1024)
    assert row.lengths.tolist() == [0, 3, 0, 130, 0]
    for slot, prompt in prompts.items():
        end = int(row.last[slot]) + 1
        begin = end - len(prompt)
        assert end % ALIGNMENT == 0
        assert row.cu_seqlens[slot + 1] == end
        assert row.tokens[0, begin:end].tolist() == prompt
        assert row.positions[0, begin:end].tolist() == list(range(len(prompt)))
        assert set(row.starts[0, begin:end].tolist()) == {begin}
        assert set(row.starts[0, row.cu_seqlens[slot] : begin].tolist()) == {int(row.cu_seqlens[slot])}


def test_a_prompt_alone_has_a_row_of_its_length():
    row = lay_out({1: [5, 6]}, slots=2, length=0)
    assert row.tokens.tolist() == [[5, 6]]
    assert row.cu_seqlens.tolist() == [0, 0, 2]
    assert row.last.tolist() == [0, 1]
    assert row.starts is None
