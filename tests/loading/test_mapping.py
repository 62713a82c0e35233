from __future__ import annotations

import pytest
from octavo.errors import CorruptFile
from octavo.loading.mapping import MappedFile


def test_views_show_the_file_and_outlive_the_mapping(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(bytes(range(100)))
    file = MappedFile(path)
    file.prefetch()
    view = file.view(10, 5)
    del file
    path.unlink()
    assert bytes(view) == bytes(range(10, 15))
    assert not view.flags.writeable


@pytest.mark.parametrize(("offset", "num_bytes"), [(-1, 2), (0, -1), (0, 101), (100, 1), (2**63, 1), (1, 2**63)])
def test_views_outside_the_file(tmp_path, offset, num_bytes):
    path = tmp_path / "file"
    path.write_bytes(bytes(100))
    with pytest.raises(CorruptFile, match="outside the file of 100"):
        MappedFile(path).view(offset, num_bytes)


def test_an_empty_file(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(CorruptFile, match="is empty"):
        MappedFile(tmp_path / "file")
