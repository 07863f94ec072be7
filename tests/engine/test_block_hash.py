"""Block hashes name prefixes: equal for equal ones, different for everything else."""

from pagedjax.block_hash import block_hash, private_root, root_hash

ROOT = "ba09a8ab2b11121e586a0e26c6335aab529c2e37b27e63a37066d7641c60621e"
BLOCK = "0aafcdcd5bc92471de6eb8cbcdbc064f88c482dae6f44a1387b110100157b888"


def chain(root: bytes, tokens: list[int], size: int = 2) -> list[bytes]:
    hashes = []
    for start in range(0, len(tokens), size):
        root = block_hash(root, tokens[start : start + size])
        hashes.append(root)
    return hashes


def test_hashes_are_the_same_in_every_process() -> None:
    root = root_hash(3, adapter_id="a", cache_salt="s")
    assert root.hex() == ROOT
    assert block_hash(root, [1, 2, 262143]).hex() == BLOCK


def test_a_hash_depends_on_all_tokens_before_and_on_none_behind() -> None:
    root = root_hash(0)
    first = chain(root, [1, 2, 3, 4, 5, 6])
    assert chain(root, [1, 2, 3, 4, 9, 9])[:2] == first[:2]
    assert not set(chain(root, [9, 2, 3, 4, 5, 6])) & set(first)
    assert chain(root, [1, 2, 4, 3])[1] != first[1]


def test_tokens_are_not_run_together() -> None:
    root = root_hash(0)
    hashes = {block_hash(root, t) for t in ([1, 23], [12, 3], [123], [1, 2, 3], [0, 1, 23], [])}
    assert len(hashes) == 6


def test_other_weights_adapters_and_salts_have_other_roots() -> None:
    roots = {
        root_hash(0),
        root_hash(1),
        root_hash(0, adapter_id="1"),
        root_hash(0, cache_salt="1"),
        root_hash(0, adapter_id="1", cache_salt="1"),
        root_hash(0, cache_salt=""),
        root_hash(0, adapter_id="null"),
    }
    assert len(roots) == 7


def test_a_salt_cannot_be_made_to_look_like_another_adapter() -> None:
    assert root_hash(0, adapter_id='a", "b') != root_hash(0, adapter_id="a", cache_salt="b")
    assert root_hash(0, cache_salt='null, "x"') != root_hash(0, cache_salt="x")


def test_private_roots_are_those_of_one_request() -> None:
    roots = {private_root(arrival) for arrival in range(100)} | {root_hash(i) for i in range(100)}
    assert len(roots) == 200
    assert private_root(7) == private_root(7)
