"""The index of the embedding cache: every stored text is found, whatever was lost, killed or stored by others."""

import multiprocessing
import os
import resource
import signal
import time

import numpy as np
import pytest

import eval_incremental as script

BYTES = 4  # of a vector


def random_hashes(generator, count):
    return np.frombuffer(generator.bytes(16 * count), "V16")


def open_cache(folder):
    return script.EmbeddingCache(folder, BYTES // 4, "float32")


def rows_of(hashes):
    """Return rows that say which text they belong to."""
    return np.ascontiguousarray(hashes).view(np.uint8).reshape(-1, 16)[:, :BYTES]


def check_found(cache, hashes, generator):
    """Look texts up in another order and in other chunks than they were stored in."""
    shuffled = hashes[generator.permutation(len(hashes))]
    for part in np.array_split(shuffled, 7):
        rows, found = cache.lookup(part)
        assert found.all() and np.array_equal(rows, rows_of(part))


def test_find_equals_a_dictionary(tmp_path):
    """Blocks of all sizes, some texts in several of them: the latest place counts; also after opening it again."""
    generator = np.random.default_rng(0)
    index = script.TextIndex(tmp_path / "index")
    blocks, places = {}, {}
    for block in range(1, 1100):
        blocks[block] = generator.integers(0, 2**64, int(generator.integers(0, 40)), np.uint64)
        if block > 5:
            known = np.array(list(places), np.uint64)
            blocks[block] = np.append(blocks[block], generator.choice(known, 2, replace=False))  # in two blocks
        index.add(block, blocks[block])
        places |= {value: block * 2**32 + row for row, value in enumerate(blocks[block].tolist())}
    files = sorted(path.name for path in (tmp_path / "index").glob("*.npy"))
    assert files == [f"{number:08}.npy" for number in range(4)]  # of 256 blocks each
    again = script.TextIndex(tmp_path / "index")
    assert again.last == 1024
    for block in range(1025, 1100):
        again.add(block, blocks[block])
    for opened in (index, again):
        assert opened.find(np.array(list(places), np.uint64)).tolist() == list(places.values())
        assert not opened.find(generator.integers(0, 2**64, 1000, np.uint64)).any()


@pytest.mark.slow
def test_a_lost_or_left_over_file(tmp_path):
    """Files of the index can be lost, or left by a kill: they are made again from the blocks, with the same bytes."""
    generator = np.random.default_rng(0)
    folder = tmp_path / "c"
    stored = fill_blocks(folder, generator, 900)
    files = sorted((folder / "index").glob("*.npy"))
    contents = [path.read_bytes() for path in files]
    assert len(files) == 3
    for lost in (0, 1):
        files[lost].unlink()
        files[2].with_suffix(".npy.part").write_bytes(b"cut")
        check_found(open_cache(folder), stored.ravel(), generator)
        assert [path.read_bytes() for path in files] == contents


def fill_blocks(folder, generator, blocks, texts=4):
    """Return the (blocks, texts) hashes that are stored in a new cache, with a saved index."""
    cache = open_cache(folder)
    stored = store(cache, generator, blocks, texts)
    cache.lookup(stored[0][::-1])
    assert cache.index.saved
    cache.close()
    return stored


def store(cache, generator, blocks, texts):
    """Store blocks of random texts; return their (blocks, texts) hashes."""
    stored = random_hashes(generator, blocks * texts).reshape(blocks, texts)
    for hashes in stored:
        cache.store(hashes, rows_of(hashes))
    return stored


def test_few_open_files(tmp_path):
    """A changed corpus of many blocks needs few files at a time."""
    generator = np.random.default_rng(0)
    stored = fill_blocks(tmp_path / "c", generator, 600)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 200, limits[1]))
    try:
        cache = open_cache(tmp_path / "c")
        check_found(cache, stored.ravel(), generator)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    cache.close()


def test_a_lost_database(tmp_path):
    """Block numbers begin again at 1: an index of the lost blocks must not hide the new ones."""
    generator = np.random.default_rng(0)
    fill_blocks(tmp_path / "c", generator, 300)
    for path in (tmp_path / "c").glob("cache.db*"):
        path.unlink()
    cache = open_cache(tmp_path / "c")
    check_found(cache, store(cache, generator, 50, 10).ravel(), generator)


def test_a_checksum_is_computed_once(tmp_path, monkeypatch):
    """A chunk in another order than it was stored in may have texts of all blocks, more than stay mapped."""
    generator = np.random.default_rng(0)
    stored = fill_blocks(tmp_path / "c", generator, 300)
    cache = open_cache(tmp_path / "c")
    digests = []
    digest = script.xxhash.xxh3_64_digest
    monkeypatch.setattr(script.xxhash, "xxh3_64_digest", lambda value: digests.append(1) or digest(value))
    for _ in range(2):
        check_found(cache, stored.ravel(), generator)
    assert len(digests) == 300


@pytest.mark.parametrize("damage", ["cut", "empty", "a wrong bit"])
def test_a_block_that_is_stored_again(tmp_path, damage, capsys):
    """Its texts are found one by one again, also by processes that had indexed the damaged one."""
    generator = np.random.default_rng(0)
    stored = fill_blocks(tmp_path / "c", generator, 300)
    first, second = open_cache(tmp_path / "c"), open_cache(tmp_path / "c")
    ((name,),) = first.sql("SELECT filename FROM Cache WHERE rowid = 7")
    path = tmp_path / "c" / name
    content = path.read_bytes()
    path.write_bytes({"cut": content[:-5], "empty": b"", "a wrong bit": b"\x00\x00" + content[2:]}[damage])
    for cache in (first, second):
        assert not cache.lookup(stored[6][::-1])[1].any()
    assert ("a damaged block" in capsys.readouterr().err) == (damage != "empty")
    second.store(stored[6], rows_of(stored[6]))
    for cache in (first, second, open_cache(tmp_path / "c")):
        check_found(cache, stored.ravel(), generator)


def test_damaged_index(tmp_path):
    """Whatever the files of the index contain, texts are found, or computed again; none is taken for another."""
    generator = np.random.default_rng(0)
    stored = fill_blocks(tmp_path / "c", generator, 300)
    (path,) = (tmp_path / "c/index").glob("*.npy")
    content = path.read_bytes()
    for damaged in (b"", content[:100], content[: len(content) // 2], b"\x00" * len(content)):
        path.write_bytes(damaged)
        check_found(open_cache(tmp_path / "c"), stored.ravel(), generator)
    path.write_bytes(content)
    segment = np.load(path)
    segment[1] = np.roll(segment[1], 1)  # the place of another text
    np.save(path, segment)
    rows, found = open_cache(tmp_path / "c").lookup(stored.ravel()[::-1])
    assert np.array_equal(rows[found], rows_of(stored.ravel()[::-1])[found]) and not found.all()


def test_full_disk_while_the_index_is_saved(tmp_path, monkeypatch):
    """One error; with free space, all texts are found."""

    def write_part(file, segment):
        file.write(b"cut")
        raise OSError(28, "No space left on device")

    generator = np.random.default_rng(0)
    cache = open_cache(tmp_path / "c")
    stored = store(cache, generator, 250, 4)
    with monkeypatch.context() as patch:
        patch.setattr(np, "save", write_part)
        with pytest.raises(script.UserError, match="--cache_dir .*free disk space"):
            store(cache, generator, 50, 4)
    check_found(open_cache(tmp_path / "c"), stored.ravel(), generator)


def fill(folder, seed):
    generator = np.random.default_rng(seed)
    cache = open_cache(folder)
    for _ in range(300):
        hashes = random_hashes(generator, 20)
        if not cache.lookup(hashes)[1].all():
            cache.store(hashes, rows_of(hashes))
    cache.close()
    os._exit(0)


def start(function, *given):
    process = multiprocessing.get_context("fork").Process(target=function, args=given)
    process.start()
    return process


def join(processes):
    for process in processes:
        process.join()
        assert process.exitcode == 0


@pytest.mark.slow
def test_four_processes_store_at_once(tmp_path):
    """Four processes fill one cache; then all texts are found. Killed ones are started again with the same texts."""
    folder = tmp_path / "c"
    processes = [start(fill, folder, seed) for seed in range(4)]
    for seed in range(2):
        while len(list(folder.glob("??/??/*.val"))) < 100 * (seed + 1):
            time.sleep(0.01)
        os.kill(processes[seed].pid, signal.SIGKILL)
        processes[seed].join()
        assert processes[seed].exitcode == -signal.SIGKILL
        processes[seed] = start(fill, folder, seed)
    join(processes)
    cache = open_cache(folder)
    for seed in range(4):
        generator = np.random.default_rng(seed)
        stored = np.concatenate([random_hashes(generator, 20) for _ in range(300)])
        check_found(cache, stored, generator)
    assert len(cache.index.saved) == 4 and len(cache.cache) == 1200


def save_or_clear(folder, clearing):
    """Save or clear an index, again and again."""
    index = script.TextIndex(folder)
    hashes = np.arange(1, dtype=np.uint64)
    end = time.monotonic() + 1
    while time.monotonic() < end:
        if clearing:
            index.clear()
        for block in range(index.last + 1, index.last + 300):
            index.add(block, hashes)
    os._exit(0)


@pytest.mark.slow
def test_saved_and_cleared_at_once(tmp_path):
    """Files of the index may be gone whenever another process merges or removes them."""
    join([start(save_or_clear, tmp_path / "index", number > 1) for number in range(4)])
