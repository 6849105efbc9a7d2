"""The operators for few rows against PyTorch's own, in every dtype and at odd sizes."""

import pytest
import torch
import torch.nn.functional as F

from linnet_torch import kernels

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
EPS = {torch.float32: 1e-6, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
"""Rounding of a result; sums are in f32."""


@pytest.fixture(scope="module", autouse=True)
def operators() -> None:
    kernels.load()
    torch.set_num_threads(2)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("n", "k"), [(1, 1), (3, 7), (5, 33), (130, 48), (64, 576), (1031, 100)])
def test_linear(dtype: torch.dtype, bias: bool, n: int, k: int) -> None:
    draw = torch.Generator().manual_seed(n * k)
    w = torch.randn(n, k, generator=draw).to(dtype)
    b = torch.randn(n, generator=draw).to(dtype) if bias else None
    for rows in (1, 2, 3, 5, 8):
        x = torch.randn(rows, 1, k, generator=draw).to(dtype)
        y = torch.ops.linnet.linear(x, w, b)
        exact = F.linear(x.double(), w.double(), None if b is None else b.double())
        assert y.dtype is dtype
        assert y.shape == (rows, 1, n)
        size = F.linear(x.double().abs(), w.double().abs()) + 1
        assert ((y.double() - exact).abs() <= EPS[dtype] * exact.abs() + 1e-6 * size).all()


def test_linear_of_a_row_does_not_depend_on_its_neighbours() -> None:
    w, x = torch.randn(37, 50), torch.randn(7, 50)
    together = torch.ops.linnet.linear(x, w)
    for row in range(7):
        assert torch.equal(torch.ops.linnet.linear(x[row : row + 1], w)[0], together[row])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [None, 1, 7, 100])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim"), [(6, 2, 16), (9, 3, 64), (4, 1, 8), (5, 5, 20), (7, 1, 136)]
)
def test_attend(
    dtype: torch.dtype, window: int | None, heads: int, kv_heads: int, dim: int
) -> None:
    draw = torch.Generator().manual_seed(heads * dim)
    positions = torch.tensor([0, -1, 6, 63, 64, 199], dtype=torch.int32)
    rows = len(positions)
    q = torch.randn(rows, 1, heads, dim, generator=draw).to(dtype)
    k, v = (torch.randn(rows, 201, kv_heads, dim, generator=draw).to(dtype) for _ in "kv")
    for row, position in enumerate(positions):  # what lies beyond a position is not read
        k[row, position + 1 :] = torch.nan
        v[row, position + 1 :] = torch.nan
    y = torch.ops.linnet.attend(q, k, v, positions, dim**-0.5, window)
    assert y.dtype is dtype
    for row, position in enumerate(positions.tolist()):
        if position < 0:
            assert not y[row].any(), "an idle row sees nothing"
            continue
        first = 0 if window is None else max(0, position + 1 - window)
        seen = slice(first, position + 1)
        exact = F.scaled_dot_product_attention(
            q[row].transpose(0, 1).double(),
            k[row, seen].transpose(0, 1).double(),
            v[row, seen].transpose(0, 1).double(),
            scale=dim**-0.5,
            enable_gqa=heads != kv_heads,
        ).transpose(0, 1)
        close = {torch.float32: 2e-6, torch.bfloat16: 1e-2, torch.float16: 2e-3}[dtype]
        assert (y[row].double() - exact).abs().max() < close


def test_attention_to_large_and_equal_scores_is_finite() -> None:
    q = torch.full((1, 1, 2, 16), 100.0)
    k, v = torch.full((1, 130, 2, 16), 100.0), torch.randn(1, 130, 2, 16)
    y = torch.ops.linnet.attend(q, k, v, torch.tensor([128], dtype=torch.int32), 1.0, None)
    torch.testing.assert_close(y[0, 0], v[0, :129].mean(0), atol=1e-5, rtol=0)


def test_what_does_not_fit_is_an_error() -> None:
    linear, attend = torch.ops.linnet.linear, torch.ops.linnet.attend
    with pytest.raises(RuntimeError, match="x has 3 columns, w has 4"):
        linear(torch.zeros(1, 3), torch.zeros(5, 4))
    with pytest.raises(RuntimeError, match="differ in dtype"):
        linear(torch.zeros(1, 4), torch.zeros(5, 4).bfloat16())
    with pytest.raises(RuntimeError, match="not contiguous"):
        linear(torch.zeros(1, 4), torch.zeros(4, 5).T)
    with pytest.raises(RuntimeError, match="not a vector of 5 in w's dtype"):
        linear(torch.zeros(1, 4), torch.zeros(5, 4), torch.zeros(4))
    with pytest.raises(RuntimeError, match="x has 2 axes and w 1"):
        linear(torch.zeros(1, 4), torch.zeros(4))
    cache, first = torch.zeros(1, 9, 2, 16), torch.zeros(1, dtype=torch.int32)
    for q, k, v, message in (
        (torch.zeros(1, 2, 2, 16), cache, cache, "it takes q"),
        (torch.zeros(1, 1, 2, 16), cache.bfloat16(), cache.bfloat16(), "differ in dtype"),
        (torch.zeros(1, 1, 2, 16), cache, cache[..., :8], "differ in axis 3: 16 and 8"),
        (torch.zeros(1, 1, 2, 16), cache, cache[:, :5], "differ in axis 1: 9 and 5"),
        (torch.zeros(1, 1, 1, 16), cache, cache, "do not fit"),
        (torch.zeros(2, 1, 2, 16), cache, cache, "do not fit"),
    ):
        with pytest.raises(RuntimeError, match=message):
            attend(q, k, v, first, 1.0, None)
    with pytest.raises(RuntimeError, match="2 positions for 1 rows"):
        attend(torch.zeros(1, 1, 2, 16), cache, cache, first.repeat(2), 1.0, None)
    with pytest.raises(RuntimeError, match="position 9 is beyond the cache's 9"):
        positions = torch.tensor([9], dtype=torch.int32)
        attend(torch.zeros(1, 1, 2, 16), cache, cache, positions, 1.0, None)
