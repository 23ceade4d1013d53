"""A layout is a function of who is whose neighbour, never of padding: spans, keys and positions, or a refusal."""

import pytest
import torch

from isobit.errors import ArgumentError, CutError, UnsupportedError
from isobit.integrations.transformers.layout import IGNORED, current_layout, in_force, read_layout
from isobit.ops.share import Share, collecting
from isobit.order.samples import Samples

RIGHT = torch.tensor([[1, 1, 1, 0, 0], [1, 1, 1, 1, 0]])
LEFT = RIGHT.flip(1)


def test_plain_batches_need_no_spans():
    layout = read_layout((2, 5))
    assert (layout.kind, layout.samples, layout.keys, layout.key_rows) == ("plain", None, None, 5)
    assert layout.positions.tolist() == [[0, 1, 2, 3, 4]] * 2
    assert read_layout((2, 5), attention_mask=torch.ones(2, 5)).kind == "plain"


def test_positions_count_from_the_cache():
    layout = read_layout((1, 2), past=3)
    assert layout.positions.tolist() == [[3, 4]]
    assert layout.key_rows == 5


@pytest.mark.parametrize(("mask", "starts"), [(RIGHT, (0, 5)), (LEFT, (2, 6))])
def test_padding_belongs_to_no_sample(mask, starts):
    layout = read_layout((2, 5), attention_mask=mask)
    assert layout.kind == "padded"
    assert layout.samples.spans == ((starts[0], 3), (starts[1], 4))
    assert layout.keys == layout.samples
    real = layout.positions[mask.bool()]
    assert real.tolist() == [0, 1, 2, 0, 1, 2, 3]


def test_a_cached_chunk_of_left_padded_samples():
    layout = read_layout((2, 2), past=2, attention_mask=LEFT[:, :4])
    assert layout.samples.spans == ((0, 2), (2, 2))
    assert layout.keys.spans == ((2, 2), (5, 3))
    assert layout.positions.tolist() == [[0, 1], [1, 2]]


def test_a_sample_may_have_no_row_in_a_chunk():
    layout = read_layout((2, 2), past=0, attention_mask=LEFT[:, :2])
    assert layout.samples.spans == ((0, 0), (3, 1))
    after = read_layout((2, 1), past=4, attention_mask=RIGHT)
    assert [rows for _, rows in after.samples.spans] == [0, 0]
    assert [rows for _, rows in after.keys.spans] == [3, 4]


def test_packed_rows_restart_their_positions():
    positions = torch.tensor([[0, 1, 2, 0, 1], [0, 0, 1, 2, 3]])
    layout = read_layout((2, 5), position_ids=positions)
    assert layout.kind == "packed"
    assert layout.samples.spans == ((0, 3), (3, 2), (5, 1), (6, 4))
    assert layout.positions.tolist() == positions.tolist()


def test_packed_rows_may_be_padded():
    positions = torch.tensor([[0, 1, 0, 1, 9]])
    layout = read_layout(
        (1, 5), position_ids=positions, attention_mask=torch.tensor([[1, 1, 1, 1, 0]])
    )
    assert layout.samples.spans == ((0, 2), (2, 2))
    assert layout.positions.tolist() == [[0, 1, 0, 1, 0]]


def test_positions_as_generate_gives_them():
    positions = (LEFT.cumsum(-1) - 1).masked_fill(LEFT == 0, 0)
    assert read_layout((2, 5), attention_mask=LEFT, position_ids=positions).kind == "padded"


def test_what_follows_in_the_same_sample():
    tokens = torch.tensor([[5, 6, 7, 8, 9]])
    layout = read_layout((1, 5), position_ids=torch.tensor([[0, 1, 0, 1, 2]]))
    assert layout.next_of(tokens).tolist() == [[6, IGNORED, 8, 9, IGNORED]]
    assert read_layout((1, 5)).next_of(tokens).tolist() == [[6, 7, 8, 9, IGNORED]]


@pytest.mark.parametrize(("mask", "kept"), [(RIGHT, ((0, 1), (2, 2))), (LEFT, ((0, 2), (2, 2)))])
def test_the_last_rows_keep_their_samples(mask, kept):
    layout = read_layout((2, 4), attention_mask=mask[:, 1:] if mask is LEFT else mask[:, :4])
    found = layout.last(2)
    assert found.rows == 4
    assert [span for span in found.spans if span[1]] == list(kept)


REFUSED = {
    "a mask of four axes": {"attention_mask": torch.ones(2, 1, 5, 5)},
    "a mask of the new tokens only": {"past": 3, "attention_mask": torch.ones(2, 5)},
    "numbered samples": {"attention_mask": torch.tensor([[1, 1, 2, 2, 2]] * 2)},
    "a hole": {"attention_mask": torch.tensor([[1, 1, 0, 1, 1]] * 2)},
    "constant positions": {"position_ids": torch.zeros(2, 5, dtype=torch.int64)},
    "negative positions": {"position_ids": torch.arange(-1, 4).expand(2, 5)},
    "a jump": {"position_ids": torch.tensor([[0, 1, 5, 6, 7]] * 2)},
    "packing behind a cache": {"past": 1, "position_ids": torch.tensor([[1, 2, 0, 1, 2]] * 2)},
    "positions of another width": {"position_ids": torch.zeros(2, 4)},
}


@pytest.mark.parametrize("inputs", REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_read_is_refused(inputs):
    with pytest.raises(ArgumentError, match="remedy"):
        read_layout((2, 5), **inputs)


def test_a_layout_is_in_force_inside_only():
    with pytest.raises(UnsupportedError, match="call the model"):
        current_layout()
    layout = read_layout((1, 2))
    with in_force(layout):
        assert current_layout() is layout
    with pytest.raises(UnsupportedError):
        current_layout()


def test_a_share_that_is_collected_places_the_samples():
    mask = torch.tensor([[1, 1, 1, 0], [1, 1, 1, 1]])
    with collecting(Share(2, 8, 2)):
        plain, padded = read_layout((2, 5)), read_layout((2, 4), attention_mask=mask)
    assert plain.samples == Samples.packed([5, 5], first=2, total=8)
    assert padded.samples == Samples.padded([3, 4], width=4, first=2, total=8)
    assert read_layout((2, 5)).samples is None
    with collecting(Share(7, 8, 1)), pytest.raises(CutError, match="samples 7 to 9"):
        read_layout((2, 5))
