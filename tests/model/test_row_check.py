import pytest
import torch

from raymoe.errors import ConfigError
from raymoe.model.row_check import check_rows, random_rows


def test_random_rows_are_the_same_at_each_call():
    assert torch.equal(random_rows(8, torch.bfloat16), random_rows(8, torch.bfloat16))
    assert random_rows(8, torch.bfloat16, 64).shape == (64, 8)


def test_what_computes_each_row_alone_passes():
    weight = torch.randn(32, 24)
    check_rows(lambda rows: rows @ weight, random_rows(32, torch.float32), "a product")


@pytest.mark.parametrize(
    ("run", "how"),
    [
        (lambda rows: rows / len(rows), "differ between 4 and 512 rows"),
        (lambda rows: rows + torch.arange(len(rows))[:, None], "depend on a row's place among 512"),
        (lambda rows: rows - rows[:3].mean(0), "depend on a row's place"),
        (lambda rows: rows.sigmoid()[:, :1] if len(rows) > 200 else rows.double().sigmoid()[:, :1], "differ"),
    ],
)
def test_a_computation_that_knows_its_company_is_refused_by_name(run, how):
    with pytest.raises(ConfigError, match=rf"model\.deterministic can't be kept .* of the thing .*{how}"):
        check_rows(run, random_rows(16, torch.float32), "the thing")
