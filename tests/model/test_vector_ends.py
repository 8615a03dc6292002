import torch

from raymoe.model.vector_ends import fitting_tile


def test_wide_rows_do_with_four():
    rows = torch.randn(4, 24)
    assert fitting_tile(lambda: torch.nn.functional.silu(rows)) == 4
    assert fitting_tile(lambda: rows @ torch.randn(24, 3) + 1) == 4


def test_few_numbers_a_row_ask_for_whole_vectors_of_rows():
    assert fitting_tile(lambda: torch.randn(4, 1).sigmoid()) == 32
    assert fitting_tile(lambda: torch.randn(4, 1).bfloat16().sigmoid()) == 64
    assert fitting_tile(lambda: torch.randn(4, 2).sigmoid_()) == 16
    assert fitting_tile(lambda: (torch.randn(4, 2).exp(), torch.randn(4, 1).tanh())) == 32


def test_what_is_rounded_correctly_asks_for_nothing():
    rows = torch.rand(4, 1)
    assert (
        fitting_tile(lambda: (rows + 1, rows * rows, rows / 3, rows.sqrt(), rows.sum(), rows.softmax(-1)))
        == 4
    )
