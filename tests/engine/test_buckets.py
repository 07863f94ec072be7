"""Every step falls into one of few shapes, which are known beforehand."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagedjax.buckets import Buckets


def steps(buckets: Buckets) -> list[tuple[int, int]]:
    """Every `(tokens, sequences)` that a scheduler within these limits can make.

    There are more sequences than tokens where several sample behind one prompt.
    """
    return [
        (tokens, seqs)
        for seqs in range(1, buckets.max_num_seqs + 1)
        for tokens in range(1, buckets.max_num_batched_tokens + 1)
    ]


@st.composite
def limits(draw: st.DrawFn) -> Buckets:
    max_num_seqs = draw(st.integers(1, 20))
    return Buckets(max_num_seqs, draw(st.integers(max_num_seqs, 80)))


@given(limits())
def test_every_pick_holds_the_step_and_is_listed(buckets: Buckets) -> None:
    listed = set(buckets.all())
    for tokens, seqs in steps(buckets):
        bucket = buckets.pick(tokens, seqs)
        assert bucket in listed
        assert tokens <= bucket[0] <= buckets.max_num_batched_tokens
        assert seqs <= bucket[1] <= buckets.max_num_seqs


@given(limits())
def test_nothing_is_listed_that_no_step_needs(buckets: Buckets) -> None:
    assert set(buckets.all()) == {buckets.pick(*step) for step in steps(buckets)}
    assert len(set(buckets.all())) == len(buckets.all())


@given(limits())
def test_a_bucket_is_at_most_twice_the_step(buckets: Buckets) -> None:
    for tokens, seqs in steps(buckets):
        bucket = buckets.pick(tokens, seqs)
        if tokens == seqs:
            assert bucket[0] == bucket[1] < 2 * seqs
        else:
            assert bucket[0] < max(2 * tokens, 17)


def test_the_number_of_programs_grows_with_the_logarithm_of_the_limits() -> None:
    # 1 to 256 decodes, 16 to 8192 tokens with 1 or 256 sequences; (256, 256) is in both.
    assert len(Buckets(256, 8192).all()) == 9 + 2 * 10 - 1
    assert len(Buckets(1, 1).all()) == 1


@pytest.mark.parametrize(
    ("step", "bucket"),
    [
        ((1, 1), (1, 1)),
        ((5, 5), (8, 8)),
        ((33, 33), (48, 48)),  # the limit, though no power of two
        ((2, 1), (16, 1)),  # a short prompt alone
        ((100, 1), (128, 1)),
        ((100, 2), (128, 48)),
        ((600, 3), (1000, 48)),
        ((1, 4), (16, 48)),  # a prompt of one token, and four samples of it
        ((4, 4), (4, 4)),  # a prompt of four tokens with four samples is like four decodes
    ],
)
def test_picks(step: tuple[int, int], bucket: tuple[int, int]) -> None:
    assert Buckets(max_num_seqs=48, max_num_batched_tokens=1000).pick(*step) == bucket
