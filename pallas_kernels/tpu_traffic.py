"""What a call of the TPU kernel moves and multiplies, counted on the host.

Written from the rules that `tpu_kernel` states, not from its code, so that either can be checked
against the other. A tile of `tile` tokens that starts at position p of a sequence:

    sees pages    max(0, p - window + 1) // T  up to the one of its last token
    fetches       those that hold earlier tokens, or reach behind a chunk's end; the sublane tile
                  of its row, if a decode begins a page
    reads         its queries, and of `new` a row (decode) or a page of rows per page with new ones
    writes        its result, and the pages with new tokens that no later tile sees (a decode: the
                  sublane tile of its row)
    multiplies    all its rows with whole groups of `keys` keys around those pages

The least a kernel could do: read every page with an earlier token that some row sees, every new row
and every query once, and multiply a row with the keys that it sees.
"""

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from pallas_kernels.tpu_tiles import KernelShape, TileSizes, TpuTiles


@dataclasses.dataclass(frozen=True)
class Traffic:
    """Sums over the tiles of both calls, decodes and chunks, which write this step's rows.

    Attributes:
      pages_fetched: pages read from the pool.
      pages_needed: pages with an earlier token that some row sees, once for every tile: keys and
        values are to be read at most once per block of queries.
      pages_distinct: the same, once for every sequence; for decodes there is no difference.
      new_row_bytes: read from `new`.
      bytes_read: pages, scales, new rows and queries. bytes_written: pages and results.
      least_bytes: to be read, with `pages_needed`, and new rows and queries once.
      products: query rows times keys that are multiplied, per KV head, masked ones included.
      least_products: query heads times keys that they see, per KV head.
    """

    pages_fetched: int = 0
    pages_needed: int = 0
    pages_distinct: int = 0
    new_row_bytes: int = 0
    bytes_read: int = 0
    bytes_written: int = 0
    least_bytes: int = 0
    products: int = 0
    least_products: int = 0

    @property
    def read_ratio(self) -> float:
        """Bytes read over the least."""
        return self.bytes_read / self.least_bytes

    @property
    def padding(self) -> float:
        """Products over the least."""
        return self.products / self.least_products

    def __add__(self, other: "Traffic") -> "Traffic":
        pairs = zip(dataclasses.astuple(self), dataclasses.astuple(other), strict=True)
        return Traffic(*map(sum, pairs))


def attention_traffic(
    query_lens: Sequence[int],
    context_lens: Sequence[int],
    *,
    shape: KernelShape,
    tiles: TpuTiles,
    window: int | None,
) -> Traffic:
    """The traffic of a batch; batch-invariant calls are not counted.

    Args:
      query_lens: tokens of this step, per sequence. context_lens: all of them, theirs included.
      shape, tiles: what `tpu_attention` works with.
      window: see `paged_attention`.
    """
    total = Traffic()
    for query, context in zip(query_lens, context_lens, strict=True):
        sequence = _Sequence(int(query), int(context), shape, window)
        total += sequence.of_tiles(tiles.decode if query == 1 else tiles.chunk)
    return total


class _Tile(NamedTuple):
    """Positions of the first token and behind the last, and the pages that some row sees."""

    start: int
    end: int
    pages: range


@dataclasses.dataclass(frozen=True)
class _Sequence:
    query: int
    context: int
    shape: KernelShape
    window: int | None

    @property
    def old(self) -> int:
        return self.context - self.query

    def tiles(self, size: int) -> Iterator[_Tile]:
        for start in range(self.old, self.context, size):
            end = min(start + size, self.context)
            last_page = (end - 1) // self.shape.block_size
            pages = range(self.first_seen(start) // self.shape.block_size, last_page + 1)
            yield _Tile(start, end, pages)

    def first_seen(self, position: int) -> int:
        return 0 if self.window is None else max(0, position - self.window + 1)

    def needed(self, tile: _Tile) -> list[int]:
        """Pages with an earlier token that the tile's first row sees."""
        size, first = self.shape.block_size, self.first_seen(tile.start)
        return [p for p in tile.pages if max(first, p * size) < min((p + 1) * size, self.old)]

    def keeps_more(self, page: int) -> bool:
        """Whether a page must be fetched for what lies behind a chunk's end."""
        return self.query > 1 and (page + 1) * self.shape.block_size > self.context

    def of_tiles(self, sizes: TileSizes) -> Traffic:
        work = list(self.tiles(sizes.tile))
        total = Traffic()
        for tile, then in itertools.zip_longest(work, work[1:]):
            total += self.of_tile(tile, then, sizes)
        distinct = {page for tile in work for page in self.needed(tile)}
        positions = range(self.old, self.context)
        seen = sum(position - self.first_seen(position) + 1 for position in positions)
        shape, once = self.shape, self.query * self.shape.kv_heads
        query_bytes = shape.group * shape.head_dim * shape.compute_dtype.itemsize
        return dataclasses.replace(
            total,
            pages_distinct=len(distinct),
            least_bytes=total.least_bytes + once * (shape.row_bytes + query_bytes),
            least_products=shape.group * seen,
        )

    def of_tile(self, tile: _Tile, then: _Tile | None, sizes: TileSizes) -> Traffic:
        """All but what is counted once for a sequence; `then` is its next tile."""
        shape, size = self.shape, self.shape.block_size
        is_decode = self.query == 1
        page_bytes = shape.kv_heads * size * shape.row_bytes
        scale_bytes = shape.kv_heads * size * shape.scale_bytes
        needed = self.needed(tile)
        fetched = [p for p in tile.pages if p * size < self.old or self.keeps_more(p)]
        touched = [page for page in tile.pages if (page + 1) * size > self.old]
        written = [page for page in touched if then is None or page not in then.pages]
        new_rows = len(touched) * (1 if is_decode else size)
        part_bytes = page_bytes * shape.alignment // size if is_decode else page_bytes
        begins_page = is_decode and self.old % size == 0
        rows = sizes.tile * shape.row_group(is_decode=is_decode)
        k, v = shape.columns
        new_bytes = new_rows * shape.kv_heads * shape.row_bytes
        return Traffic(
            pages_fetched=len(fetched),
            pages_needed=len(needed),
            new_row_bytes=new_bytes,
            bytes_read=len(fetched) * page_bytes
            + begins_page * part_bytes
            + len(tile.pages) * scale_bytes
            + new_bytes
            + rows * shape.kv_heads * k.width * shape.compute_dtype.itemsize,
            bytes_written=len(written) * part_bytes + rows * shape.kv_heads * v.width * 4,
            least_bytes=len(needed) * (page_bytes + scale_bytes),
            products=rows * _multiplied_keys(tile, size, sizes.keys),
        )


def _multiplied_keys(tile: _Tile, block_size: int, keys: int) -> int:
    """Whole products from the tile's first page to its last token."""
    first = tile.pages.start * block_size // keys
    return (-(-tile.end // keys) - first) * keys
